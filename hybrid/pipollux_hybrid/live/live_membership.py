"""Replicas that join and leave while the others train.

A newcomer is a restart whose checkpoint comes from a peer: it runs the script, waits at the
beginning of the loop that the others are in, and takes over their states at a step boundary that
all have agreed on. For those who stay a change is what a stop and a restart would be, without
either: the same states, random numbers and positions, to the last bit.

1. A newcomer asks to join in the folder of the rendezvous, and goes on to the loop that the job is
   in.
2. Replica 0 proposes a membership. All of its replicas form its groups in the background.
3. With the control message of each step every replica tells what it has formed. Once all have
   formed the same, they change at this very boundary.
4. All meet once more, over the new groups, and those that stay send the newcomers their states.
   Whatever goes wrong so far, the old ones go on.
5. They vote over the old groups, tell newcomers and vote once more, as one may be gone, and go over
   to the new groups; those that left end.
"""

from __future__ import annotations

import secrets
import sys
import time
from dataclasses import replace
from typing import NoReturn

import torch

from pipollux_hybrid.checkpoint.manager import CheckpointManager
from pipollux_hybrid.checkpoint.state import States
from pipollux_hybrid.errors import CheckpointError, ConfigurationError, PeerLostError
from pipollux_hybrid.job.context import JobContext
from pipollux_hybrid.job.control_plane import ControlMessage
from pipollux_hybrid.job.env import JobEnvironment
from pipollux_hybrid.job.membership import Bulletin, JobPlace, Membership
from pipollux_hybrid.telemetry.metrics import Metrics

from .forming import Forming
from .log import say
from .meeting import Meeting, compare, in_common, position
from .meeting_folder import MeetingFolder
from .meeting_place import MeetingPlace
from .newcomer import MEETING_PATIENCE, Joining
from .recovery import Recovery
from .switch import go_on, switch
from .transfer import RefusedError, Route, Sent, pack, send
from .watch import INTERVAL, MembershipWatch

__all__ = ["LiveMembership", "find_job", "live_membership", "start_live_membership"]

TELLS_AFTER = 3.0
"""Seconds after which it is told that a run waits."""
BEGIN_PATIENCE = 60.0
"""Seconds that a run which has begun in a folder has to make its model."""


class LiveMembership:
    """Changes who takes part, at step boundaries.

    Args:
        ctx: The job's context.
        watch: What this replica knows of who takes part.
    """

    def __init__(self, ctx: JobContext, watch: MembershipWatch) -> None:
        self._context = ctx
        self._watch = watch
        self._announced: Forming | None = None
        self.totals = watch.totals
        """Of accumulators, for joining replicas."""
        self.joining = Joining(ctx, watch, self.totals)
        """How this replica comes to take part, where it joins others."""
        self.recovery = Recovery(ctx, watch)
        """Goes on with those that are left when others have died."""

    def job_place(self) -> JobPlace | None:
        """Return where the job is that this replica is about to join; None: not yet known."""
        bulletin = self._watch.rendezvous.bulletin()
        return None if bulletin is None else bulletin.place

    def arrive(self, place: JobPlace, description: str) -> bool:
        """Note the beginning of a loop; a newcomer joins here.

        Args:
            place: Where in the script this is.
            description: Of the loop.

        Returns:
            False for a newcomer where the job is beyond this loop, which is then to be left out.

        Raises:
            SystemExit: A newcomer was asked to stop, or the job has ended.
            ConfigurationError: Another job trains in this one's place.
        """
        self._check_refused()
        if self._context.joins is not None and not self.joining.join(place, description):
            return False
        self._watch.place, self._watch.loop = place, description
        return True

    def announce(self, message: ControlMessage) -> ControlMessage:
        """Add to a control message what this replica has formed, and would leave behind."""
        self._check_refused()
        message = replace(message, **self.recovery.told())
        forming = self._watch.forming
        self._announced = forming if forming is not None and forming.formed else None
        if self._context.env.leads:
            message = replace(message, proposed=self._watch.newest)
        if self._announced is None:
            return message
        number = self._announced.membership.number
        return replace(message, formed=number, formed_sqr=number**2)

    def is_due(self, agreed: ControlMessage | None) -> bool:
        """Return whether all replicas have formed the same membership, as all of them know."""
        if agreed is not None and agreed.proposed > self._watch.newest:
            self._watch.rendezvous.refresh()
        if agreed is None or self._announced is None:
            return False
        number, size = self._announced.membership.number, self._context.env.world_size
        return agreed.formed == size * number and agreed.formed_sqr == size * number**2

    def change(self, place: JobPlace, description: str) -> bool:
        """Change to the membership that all have formed; all replicas call it at the same boundary.

        Args:
            place: Where in the script this is.
            description: Of the loop, which newcomers must be in, too.

        Returns:
            Whether it came about; else everything is as before.

        Raises:
            SystemExit: This replica leaves.
            SynchronizationError: A replica was lost on the way.
        """
        forming, ctx, self._announced = self._announced, self._context, None
        assert forming is not None  # noqa: S101  # else it was not due
        self._watch.changing = True
        try:
            return self._change(forming, position(place, in_common(ctx, description)))
        finally:
            self._watch.changing = False

    def _check_refused(self) -> None:
        if self._watch.refused is not None:
            raise self._watch.refused

    def _change(self, forming: Forming, here: torch.Tensor) -> bool:
        """Change to a membership, if all agree."""
        ctx = self._context
        began_at, newcomers = time.perf_counter(), self._newcomers(forming)
        try:
            agreed = self._agree(forming, newcomers, here)
        except PeerLostError as error:
            if not ctx.control.losses.note(error, voids=False):
                raise
            self.recovery.recover()
            return True
        if not agreed:
            self._watch.give_up(forming)
            return False
        switch(ctx, self._watch, forming)
        self._watch.enter(forming)
        go_on(ctx, forming, joined=bool(newcomers))
        seconds = time.perf_counter() - began_at
        self._watch.tell_entered(forming.membership, seconds)
        if ctx.env.leads:
            now = f"{ctx.env.num_replicas} replicas train"
            now = "1 replica trains" if ctx.env.num_replicas == 1 else now
            say(f"{now} from step {ctx.step} on, after a pause of {seconds:.2f} s")
        return True

    def _agree(self, forming: Forming, newcomers: range, here: torch.Tensor) -> bool:
        """Return whether the change comes about; until then everything is as before."""
        ctx = self._context
        metrics = ctx.component(Metrics)
        metrics.flush()
        for state in ctx.component(States).values():
            state.spread()
        if forming.rank is None:
            # Replica 0 may still write a checkpoint, and another one is to write the next.
            ctx.component(CheckpointManager).saver.wait()
        ok = self._hand_over(forming, newcomers, here)
        agreed = self._vote(ok)
        if agreed and newcomers:
            agreed = self._vote(self._announce_to_newcomers(forming))
        metrics.interrupt_steps()
        if agreed and forming.rank is None:
            self._leave()
        return agreed

    def _newcomers(self, forming: Forming) -> range:
        """Return the ranks of the newcomers, which come after those who stay."""
        before = self._watch.membership
        assert before is not None  # noqa: S101  # who takes part has one
        replicas = forming.membership.replicas
        return range(len(set(replicas) & set(before.replicas)), len(replicas))

    def _hand_over(self, forming: Forming, newcomers: range, here: torch.Tensor) -> bool:
        """Return whether all replicas of the new membership are here, and have the states."""
        if forming.rank is None or not newcomers:
            return self._meet(forming, here)
        try:
            sent = self._pack(forming.rank)
            if sent is None or not self._meet(forming, here):
                return False
            assert forming.peers is not None  # noqa: S101  # there are newcomers
            route = Route(tuple(range(newcomers.start)), tuple(newcomers))
            send(forming.peers, forming.rank, sent, route)
        except RefusedError as refusal:
            if forming.process == 0:
                say(f"no replica joins: {refusal}")
            return False
        except RuntimeError:  # a newcomer is gone, or hangs
            return False
        return True

    def _vote(self, ok: bool) -> bool:
        """Return whether all that train agree, those who leave, too."""
        votes = self._context.control.gather(torch.tensor([int(ok)]))
        return all(int(vote) for vote in votes)

    def _announce_to_newcomers(self, forming: Forming) -> bool:
        """Tell those that join that it comes about; return whether they are still there."""
        if forming.control is None:  # this replica leaves
            return True
        try:
            forming.control.all_gather(torch.tensor([1]), MEETING_PATIENCE)
        except RuntimeError:  # one of them died with the states
            return False
        return True

    def _pack(self, rank: int) -> Sent | None:
        try:
            return pack(self._context.component(States), leads=rank == 0)
        except CheckpointError as error:
            say(f"no replica joins: {error}")
            return None

    def _meet(self, forming: Forming, here: torch.Tensor) -> bool:
        """Return whether all replicas of the new membership are at this place."""
        if forming.control is None:
            return True
        while True:
            try:
                found = forming.control.all_gather(here, MEETING_PATIENCE)
            except RuntimeError:  # a newcomer is gone, or cannot come here
                return False
            state = compare(found, here)
            if state is not Meeting.BEHIND:
                return state is Meeting.TOGETHER

    def _leave(self) -> NoReturn:
        self._watch.leave()
        self._context.component(Metrics).finish_progress()
        if self._watch.speaks:
            say(f"this replica has left at step {self._context.step or 0}, as asked")
        sys.exit(0)


def live_membership(ctx: JobContext) -> LiveMembership | None:
    """Return what changes who takes part in this job; None where nothing does."""
    return ctx.component(_Holder).live


class _Holder:
    """Holds the one object of a job."""

    def __init__(self, ctx: JobContext) -> None:
        del ctx
        self.live: LiveMembership | None = None


def start_live_membership(
    ctx: JobContext, rendezvous: MeetingPlace, timeout: float
) -> LiveMembership:
    """Begin to let replicas join and leave; all replicas of a job that begins call it."""
    replica = secrets.token_hex(4) if rendezvous.self_governed else str(ctx.env.replica)
    if ctx.mesh is not None:  # the processes of a replica come and go together
        replica = ctx.mesh.gather_from_stages(replica.encode())[0].decode()
    membership = None
    if ctx.joins is None:
        ids = [name.decode() for name in ctx.control.gather_bytes(replica.encode())]
        membership = Membership(1, tuple(ids[:: ctx.env.processes_per_replica]))
    watch = MembershipWatch(ctx, rendezvous, membership, replica, timeout)
    ctx.closers.append(watch.close)
    live = ctx.component(_Holder).live = LiveMembership(ctx, watch)
    return live


def find_job(rendezvous: MeetingFolder, env: JobEnvironment) -> Bulletin | None:
    """Return what the job in a folder tells; None: there is none, and this run begins one.

    Raises:
        ConfigurationError: This run has several replicas, or others than those of a job that is
            there already.
    """
    began_at, told = time.monotonic(), False
    while True:
        claim, bulletin = rendezvous.last_claim(), rendezvous.bulletin()
        # A job that has not yet made its model is not yet known.
        if bulletin is not None and rendezvous.job_speaks() and bulletin.balance:
            _check_joins(rendezvous, bulletin, env)
            return bulletin
        starts = (
            bulletin is None and claim is not None and time.monotonic() < began_at + BEGIN_PATIENCE
        )
        if not starts and rendezvous.job_is_silent() and rendezvous.claim(claim):
            return None
        if not told and time.monotonic() > began_at + TELLS_AFTER:
            say(f"waits to see whether the job in {rendezvous.folder} is alive, and has its model")
            told = True
        time.sleep(INTERVAL)


def _check_joins(rendezvous: MeetingFolder, bulletin: Bulletin, env: JobEnvironment) -> None:
    """Refuse a run that cannot be a replica of the job that meets in a folder."""
    where = f"PIPOLLUX_RENDEZVOUS={str(rendezvous.folder)!r}"
    theirs, ours = bulletin.processes, env.processes_per_replica
    if ours != theirs:
        count = f"{theirs} processes, one for each stage" if theirs > 1 else "one process"
        raise ConfigurationError(
            f"{where}: each replica of the job that runs there has {count}, and this one has "
            f"{ours}: start it with processes_per_replica={theirs} and torchrun "
            f"--nproc-per-node={theirs}, or choose another folder"
        )
    if env.num_replicas > 1:
        raise ConfigurationError(
            f"{where}: a job of {len(bulletin.membership.replicas)} replicas runs there already; "
            f"replicas that join it are started one by one (torchrun --nproc-per-node={theirs}), "
            "or choose another folder"
        )
