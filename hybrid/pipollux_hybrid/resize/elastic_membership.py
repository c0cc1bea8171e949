"""Elastic resizes at step boundaries.

A joining replica is a restart whose checkpoint comes from a peer: it runs the script, waits at the
beginning of the current loop of the job, and receives the states at a step boundary on which all
have agreed. The surviving replicas end up with the same states, random numbers and positions, bit
for bit, as after a stop and a restart.

1. A joining replica applies at the rendezvous, and runs to the current loop of the job.
2. Replica 0 proposes a membership. All of its replicas form its groups in the background.
3. The control message of each step carries the number of the membership that a replica has formed.
   Once all have formed the same one, they resize at this boundary.
4. All meet over the new groups, and the surviving replicas send the joining replicas their states.
   If anything fails so far, the old replicas continue.
5. The old replicas vote over the old groups, notify the joining replicas, vote again, as one may be
   gone, and switch to the new groups; replicas that left end.
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
from pipollux_hybrid.job.device_groups import abort_all
from pipollux_hybrid.job.env import JobEnvironment
from pipollux_hybrid.job.membership import Announcement, JobPlace, Membership
from pipollux_hybrid.telemetry.metrics import Metrics
from pipollux_utils.text import count

from .alignment import Alignment, compare, in_common, position
from .joining_replica import ALIGNMENT_PATIENCE, Joining
from .log import say
from .pending_membership import PendingMembership
from .recovery import Recovery
from .rendezvous import Rendezvous
from .rendezvous_folder import RendezvousFolder
from .switch import entering, go_on, switch
from .transfer import RefusedError, Route, Sent, pack, send
from .watch import INTERVAL, MembershipWatch

TELLS_AFTER = 3.0
"""Seconds after which a waiting attempt is logged."""
BEGIN_PATIENCE = 60.0
"""Seconds that an attempt which has claimed a folder has to create its model."""


class ElasticMembership:
    """Changes the membership at step boundaries."""

    def __init__(self, ctx: JobContext, watch: MembershipWatch) -> None:
        self._context = ctx
        self._watch = watch
        self._announced: PendingMembership | None = None
        self.totals = watch.totals
        self.joining = Joining(ctx, watch, self.totals)
        self.recovery = Recovery(ctx, watch)

    def job_place(self) -> JobPlace | None:
        """Return the position of the job that this replica is about to join; None: unknown yet."""
        announcement = self._watch.rendezvous.announcement()
        return None if announcement is None else announcement.place

    def arrive(self, place: JobPlace, description: str) -> bool:
        """Record the beginning of a loop; a joining replica joins here. Returns False for a joining
        replica if the job is beyond this loop, which is then skipped.

        Raises:
            SystemExit: A joining replica was asked to stop, or the job has ended.
            ConfigurationError: Another job trains in this one's place.
        """
        self._check_refused()
        if self._context.joins is not None and not self.joining.join(place, description):
            return False
        self._watch.place, self._watch.loop = place, description
        return True

    def announce(self, message: ControlMessage) -> ControlMessage:
        """Add to a message the membership that this replica has formed, and its pending amounts."""
        self._check_refused()
        message = replace(message, **self.recovery.told())
        pending = self._watch.pending
        self._announced = pending if pending is not None and pending.formed else None
        if self._context.env.leads:
            message = replace(message, proposed=self._watch.newest)
        if self._announced is None:
            return message
        number = self._announced.membership.number
        return replace(message, formed=number, formed_sqr=number**2)

    def is_due(self, agreed: ControlMessage | None) -> bool:
        """Return whether all replicas have formed the same membership, by the agreed message."""
        if agreed is not None and agreed.proposed > self._watch.newest:
            self._watch.rendezvous.refresh()
        if agreed is None or self._announced is None:
            return False
        number, size = self._announced.membership.number, self._context.env.world_size
        return agreed.formed == size * number and agreed.formed_sqr == size * number**2

    def change(self, place: JobPlace, description: str) -> bool:
        """Resize to the membership that all have formed; return whether it was entered, else
        nothing has changed. All replicas call it at the same boundary, in loops of equal
        descriptions.

        Raises:
            SystemExit: This replica leaves.
            SynchronizationError: A replica was lost during the resize.
        """
        pending, ctx, self._announced = self._announced, self._context, None
        assert pending is not None  # noqa: S101  # else it was not due
        self._watch.changing = True
        try:
            return self._change(pending, position(place, in_common(ctx, description)))
        finally:
            self._watch.changing = False

    def _check_refused(self) -> None:
        if self._watch.refused is not None:
            raise self._watch.refused

    def _change(self, pending: PendingMembership, here: torch.Tensor) -> bool:
        ctx = self._context
        began_at, joining = time.perf_counter(), self._joining(pending)
        try:
            agreed = self._agree(pending, joining, here)
        except PeerLostError as error:
            if not ctx.control.losses.note(error, voids=False):
                raise
            self.recovery.recover()
            return True
        if not agreed:
            self._watch.give_up(pending)
            return False
        with entering():
            switch(ctx, self._watch, pending)
        self._watch.enter(pending)
        go_on(ctx, pending, joined=bool(joining))
        seconds = time.perf_counter() - began_at
        self._watch.tell_entered(pending.membership, seconds)
        if ctx.env.leads:
            now = f"{ctx.env.num_replicas} replicas train"
            now = "1 replica trains" if ctx.env.num_replicas == 1 else now
            say(f"{now} from step {ctx.step} on, after a pause of {seconds:.2f} s")
        return True

    def _agree(self, pending: PendingMembership, joining: range, here: torch.Tensor) -> bool:
        """Return whether all agree to resize; nothing has changed until then."""
        ctx = self._context
        metrics = ctx.component(Metrics)
        metrics.flush()
        for state in ctx.component(States).values():
            state.spread()
        if pending.rank is None:
            # Replica 0 may still write a checkpoint, and another replica writes the next one.
            ctx.component(CheckpointManager).saver.wait()
        ok = self._hand_over(pending, joining, here)
        agreed = self._vote(ok)
        if agreed and joining:
            agreed = self._vote(self._announce_to_joining(pending))
        metrics.interrupt_steps()
        if agreed and pending.rank is None:
            self._leave()
        return agreed

    def _joining(self, pending: PendingMembership) -> range:
        """Return the ranks of the joining replicas, which follow the surviving replicas."""
        before = self._watch.membership
        assert before is not None  # noqa: S101  # every member has one
        replicas = pending.membership.replicas
        return range(len(set(replicas) & set(before.replicas)), len(replicas))

    def _hand_over(self, pending: PendingMembership, joining: range, here: torch.Tensor) -> bool:
        """Return whether all replicas of the new membership are here, and have the states."""
        if pending.rank is None or not joining:
            return self._meet(pending, here) and self._connect(pending)
        try:
            sent = self._pack(pending.rank)
            if sent is None or not self._meet(pending, here):
                return False
            assert pending.peers is not None  # noqa: S101  # there are joining replicas
            route = Route(tuple(range(joining.start)), tuple(joining))
            send(pending.peers, pending.rank, sent, route)
            pending.connect(ALIGNMENT_PATIENCE)
        except RefusedError as refusal:
            if pending.process == 0:
                say(f"no replica joins: {refusal}")
            return False
        except RuntimeError:  # a joining replica is gone, or hangs
            return False
        return True

    def _connect(self, pending: PendingMembership) -> bool:
        try:
            pending.connect(ALIGNMENT_PATIENCE)
        except RuntimeError:  # a replica is gone, or hangs
            return False
        return True

    def _vote(self, ok: bool) -> bool:
        votes = self._context.control.gather(torch.tensor([int(ok)]))
        return all(int(vote) for vote in votes)

    def _announce_to_joining(self, pending: PendingMembership) -> bool:
        """Notify joining replicas of the agreement; return whether they are still there."""
        if pending.control is None:  # this replica leaves
            return True
        try:
            pending.control.all_gather(torch.tensor([1]), ALIGNMENT_PATIENCE)
        except RuntimeError:  # one of them died with the states
            return False
        return True

    def _pack(self, rank: int) -> Sent | None:
        try:
            return pack(self._context.component(States), leads=rank == 0)
        except CheckpointError as error:
            say(f"no replica joins: {error}")
            return None

    def _meet(self, pending: PendingMembership, here: torch.Tensor) -> bool:
        if pending.control is None:
            return True
        while True:
            try:
                found = pending.control.all_gather(here, ALIGNMENT_PATIENCE)
            except RuntimeError:  # a joining replica is gone, or cannot come here
                return False
            state = compare(found, here)
            if state is not Alignment.BEHIND:
                return state is Alignment.TOGETHER

    def _leave(self) -> NoReturn:
        self._watch.leave()
        abort_all()  # as the others do, which do not wait for this replica at its end
        self._context.component(Metrics).finish_progress()
        if self._watch.speaks:
            say(f"this replica has left at step {self._context.step or 0}, as asked")
        sys.exit(0)


def elastic_membership(ctx: JobContext) -> ElasticMembership | None:
    """Return the elastic membership of this job; None: the job is not elastic."""
    return ctx.component(_Holder).membership


class _Holder:
    def __init__(self, ctx: JobContext) -> None:
        del ctx
        self.membership: ElasticMembership | None = None


def start_elastic_membership(
    ctx: JobContext, rendezvous: Rendezvous, timeout: float
) -> ElasticMembership:
    """Make a job elastic; all replicas of a job that begins call it."""
    replica = secrets.token_hex(4) if rendezvous.self_governed else str(ctx.env.replica)
    if ctx.mesh is not None:  # the processes of a replica join and leave together
        replica = ctx.mesh.gather_from_stages(replica.encode())[0].decode()
    membership = None
    if ctx.joins is None:
        ids = [name.decode() for name in ctx.control.gather_bytes(replica.encode())]
        membership = Membership(1, tuple(ids[:: ctx.env.processes_per_replica]))
    watch = MembershipWatch(ctx, rendezvous, membership, replica, timeout)
    ctx.closers.append(watch.close)
    elastic = ctx.component(_Holder).membership = ElasticMembership(ctx, watch)
    return elastic


def find_job(rendezvous: RendezvousFolder, env: JobEnvironment) -> Announcement | None:
    """Return the announcement of the job in a folder; None: this attempt begins one. Raises a
    ConfigurationError if it cannot join the job, or begins one with several replicas.
    """
    began_at, logged = time.monotonic(), False
    while True:
        claim, announcement = rendezvous.last_claim(), rendezvous.announcement()
        # Until the job has a model its announcement is incomplete.
        if announcement is not None and rendezvous.job_speaks() and announcement.balance:
            _check_joins(rendezvous, announcement, env)
            rendezvous.follow()
            return announcement
        starts = (
            announcement is None
            and claim is not None
            and time.monotonic() < began_at + BEGIN_PATIENCE
        )
        if not starts and rendezvous.job_is_silent() and rendezvous.claim(claim):
            return None
        if not logged and time.monotonic() > began_at + TELLS_AFTER:
            say(f"waits to see whether the job in {rendezvous.folder} is alive, and has its model")
            logged = True
        time.sleep(INTERVAL)


def _check_joins(
    rendezvous: RendezvousFolder, announcement: Announcement, env: JobEnvironment
) -> None:
    where = f"PIPOLLUX_RENDEZVOUS={str(rendezvous.folder)!r}"
    theirs, ours = announcement.processes, env.processes_per_replica
    if ours != theirs:
        has = f"{theirs} processes, one for each stage" if theirs > 1 else "one process"
        raise ConfigurationError(
            f"{where}: each replica of the job that runs there has {has}, and this one has "
            f"{ours}: start it with processes_per_replica={theirs} and torchrun "
            f"--nproc-per-node={theirs}, or choose another folder"
        )
    if env.num_replicas > 1:
        replicas = count(len(announcement.membership.replicas), "replica")
        raise ConfigurationError(
            f"{where}: a job of {replicas} runs there "
            f"already; start joining replicas one by one (torchrun --nproc-per-node={theirs}), "
            "or choose another folder"
        )
