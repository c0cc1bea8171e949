"""Continues with the surviving replicas when others have died.

1. A collective fails. The iteration is void on replicas whose gradients are incomplete; each
   continues to its next step boundary.
2. There it reports at the rendezvous, and the first surviving replica decides on the next
   membership, as soon as each replica has either reported or ended.
3. They form its groups. If another one dies meanwhile, they try again without it.
4. If an all-reduce has succeeded on some replicas only, those are ahead, and the others receive
   their states. Else all restore the state before the void iteration.
5. If some state cannot be restored, all end with an error that names it.

In a multi-process pipeline a replica is lost with any of its processes, and its other processes
end. The processes of each surviving replica agree on the outcome of the last exchange, so they
recover together: the first one reports for them, and each receives states from processes of its
stage.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from pipollux_hybrid.checkpoint.rng_state import random_state
from pipollux_hybrid.checkpoint.state import States
from pipollux_hybrid.errors import CheckpointError, PeerLostError, ReplicaBrokenError
from pipollux_hybrid.job.context import JobContext
from pipollux_hybrid.job.control_plane import ControlMessage
from pipollux_hybrid.job.device_groups import abort_all, find_broken_device
from pipollux_hybrid.job.groups import held_groups, leave_default
from pipollux_hybrid.job.membership import Membership
from pipollux_hybrid.telemetry.metrics import Metrics
from pipollux_perfmodel.errors import PipolluxError

from .arbiter import Arbiter
from .eligibility import why_not_elastic
from .log import say
from .pending_membership import PendingMembership
from .switch import switch
from .transfer import RefusedError, Route, pack, send, take
from .undo import Undo
from .watch import MembershipWatch

ATTEMPTS = 4
"""Memberships to try one after the other, as more replicas may die."""
PATIENCE = 10.0
"""Seconds to wait while nothing indicates that another replica is alive."""
GRACE = 0.05
"""Seconds for reports of replicas that have apparently ended."""
CUT_OFF_GRACE = 2.0
"""The same if a host does not answer: its replicas may be alive, and see the others as lost."""
POLL_INTERVAL = 0.01


@dataclass(frozen=True)
class Recovered:
    """The outcome for one replica."""

    behind: bool
    """Whether others were ahead of this replica: its pending step is already done."""
    last: ControlMessage | None
    """The last exchange of the replicas that were ahead."""


class Recovery:
    """Recovers a replica from the loss of others."""

    def __init__(self, ctx: JobContext, watch: MembershipWatch) -> None:
        self._context = ctx
        self._watch = watch
        self._losses = ctx.control.losses
        self._undo: Undo | None = None
        self._arbiter = watch.rendezvous.arbiter
        self._losses.expected = self._arbiter is not None
        self._losses.recoverable = self._can_go_on
        self._losses.hang_up = self._hang_up

    def remember(self) -> None:
        """Snapshot every state at a step boundary, in case the iteration becomes void."""
        if not self._can_go_on(False):
            return
        if self._undo is None:
            self._undo = Undo(self._context)
        self._undo.remember()

    def forget(self) -> None:
        """Drop the snapshot at the end of a loop."""
        if self._undo is not None:
            self._undo.forget()

    def told(self) -> dict[str, Any]:
        """Return fields of a control message that all need if this replica dies."""
        if self._undo is None or not self._can_go_on(True):
            return {}
        marks = self._undo.marks()
        return {
            "pending": self._num_pending(),
            "generators": marks,
            "generators_sqr": tuple(mark * mark for mark in marks),
        }

    def recover(self) -> Recovered:
        """Continue with the surviving replicas at a step boundary, or raise a PeerLostError."""
        ctx, lost, step = self._context, self._watch.membership, self._context.step
        assert lost is not None  # noqa: S101  # every member has one
        self._watch.suspend()
        if ctx.mesh is not None:
            ctx.mesh.gather_from_stages(b"")  # all processes are here before the first one reports
        # Collectives may still wait for the lost replicas, and closing the groups for those.
        self._watch.retire([*held_groups(), ctx.control.group])
        ctx.control.abandon()
        abort_all()
        broken = find_broken_device()
        me = self._about_me(broken)
        if not broken:  # else this process ends, and torch would use the device
            leave_default()
        try:
            pending, everyone = self._form(lost, me)
        except OSError as error:
            self._give_up(f"the rendezvous cannot be reached ({error})")
        reason = next((x["reason"] for x in everyone if x["reason"]), "")
        everyone = everyone[ctx.env.stage :: ctx.env.processes_per_replica]
        furthest = max(x["exchanges"] for x in everyone)
        behind = [rank for rank, x in enumerate(everyone) if x["exchanges"] < furthest]
        if not reason and any(everyone[rank]["holds"] for rank in behind):
            reason = PENDING
        if not reason and behind:
            reason = self._bound()
        if reason:
            self._give_up(reason)
        ahead = next(x for x in everyone if x["exchanges"] == furthest)
        try:
            switch(ctx, self._watch, pending)
            self._take_over([x for x in range(len(everyone)) if x not in behind], behind)
            self._go_on(ahead["equal"])
        except PipolluxError:
            raise
        except RuntimeError as error:  # of the communication library
            self._give_up("another one was lost before all were at one step", error)
        seconds = time.monotonic() - self._losses.noted_at
        self._watch.resume(pending)
        self._losses.clear()
        self._tell(lost, pending.membership, step, seconds)
        last = None if ahead["last"] is None else ControlMessage.of(ahead["last"])
        return Recovered(behind=ctx.env.rank in behind, last=last)

    # --- before ------------------------------------------------------------------------------

    def _can_go_on(self, voids: bool) -> bool:
        ctx = self._context
        here = self._arbiter is not None and ctx.watch is not None
        ready = self._undo is not None and self._undo.ready
        return here and ctx.env.num_replicas > 1 and (ready or not voids)

    def _hang_up(self) -> None:
        if self._context.watch is not None:
            self._context.watch.hang_up()

    def _num_pending(self) -> int:
        return sum(state.is_pending() for state in self._context.component(States).values())

    def _about_me(self, broken: str) -> dict[str, Any]:
        """Return this replica's progress for the others, after undoing a void iteration; its states
        are not touched if they are on a ``broken`` device.
        """
        control, last = self._context.control, self._context.control.last
        holds = self._num_pending() > 0
        return {
            "exchanges": control.exchanges,
            "holds": holds,
            "reason": broken or self._undone() or "",
            "equal": _are_equal(last, self._context.env.world_size),
            "last": None if last is None else last.numbers(),
        }

    def _undone(self) -> str | None:
        """Undo a void iteration; return why this replica cannot continue."""
        last = self._context.control.last
        if self._losses.void:
            assert self._undo is not None  # noqa: S101  # else it was not noted
            reason = self._undo.put_back()
            self._context.component(Metrics).drop_losses()
            if reason:
                return reason
        if self._num_pending() or (last is not None and last.pending):
            return PENDING
        states = self._context.component(States).values()
        reason = next(filter(None, (state.lost() for state in states)), "")
        return reason or why_not_elastic(self._context, joins=False)

    def _give_up(self, reason: str, cause: Exception | None = None) -> NoReturn:
        error = self._losses.error
        raise PeerLostError(
            f"{error} The surviving replicas cannot continue without a restart: {reason}"
        ) from (cause or error)

    def _leave(self, why: str) -> NoReturn:
        """End this replica alone, which the others have given up."""
        self._watch.leave()
        error = self._losses.error
        raise PeerLostError(
            f"{error} This replica ends: the others have continued without this one, {why}"
        ) from error

    # --- the next membership -----------------------------------------------------------------

    def _form(
        self, lost: Membership, me: dict[str, Any]
    ) -> tuple[PendingMembership, list[dict[str, Any]]]:
        arbiter = self._arbiter
        assert arbiter is not None  # noqa: S101  # else the loss was not noted
        newest = self._watch.newest
        for attempt in range(ATTEMPTS):
            successor = self._decided(arbiter, lost, attempt, newest)
            newest = max(newest, successor.number)
            if successor.rank(self._watch.replica) is None:
                self._leave("which they saw as lost")
            rendezvous, timeout = self._watch.rendezvous, self._watch.timeout
            mesh = self._context.mesh
            pending = PendingMembership(successor, self._watch.replica, rendezvous, timeout, mesh)
            everyone = self._meet(pending, me, lost)
            if arbiter.conclude(successor, enters=everyone is not None):
                if everyone is None:
                    self._leave("which was too slow")
                return pending, everyone
            self._watch.abandon(pending)
        return self._give_up(f"they did not find each other in {ATTEMPTS} attempts")

    def _decided(self, arbiter: Arbiter, lost: Membership, attempt: int, newest: int) -> Membership:
        """Report that this replica is alive; return the next membership."""
        me, began_at = self._watch.replica, time.monotonic()
        if self._watch.speaks:
            arbiter.report(lost, attempt, me, newest)
        while (decision := arbiter.decision(lost, attempt)) is None:
            if self._watch.rendezvous.is_over():
                self._leave("and the job has ended")
            waited = time.monotonic() - began_at
            gone, unreachable = self._gone(lost), self._unreachable(lost)
            patience = self._watch.timeout if gone else PATIENCE
            reports = arbiter.reports(lost, attempt)
            alive = [x for x in lost.replicas if x in reports and x not in gone]
            missing = set(lost.replicas) - gone - set(alive)
            complete = waited > (CUT_OFF_GRACE if unreachable else GRACE) and not missing
            leads = (
                alive[:1] == [me]
                and self._watch.speaks
                and not _yields(
                    alive, [x for x in lost.replicas if x in reports and x in unreachable], lost
                )
            )
            if arbiter.survivors_decide and leads and (complete or waited > patience):
                successor = Membership(self._next_number(reports), tuple(alive))
                arbiter.decide(lost, attempt, successor)
            announcement = self._watch.rendezvous.announcement()
            newer = announcement is not None and announcement.membership.number > lost.number
            if newer and announcement is not None and announcement.membership.rank(me) is None:
                return announcement.membership
            if waited > patience + PATIENCE:
                self._give_up("the other replicas did not report")
            time.sleep(POLL_INTERVAL)
        return decision

    def _next_number(self, reports: Mapping[str, int]) -> int:
        proposal = self._watch.rendezvous.proposal()
        return 1 + max(0 if proposal is None else proposal.number, *reports.values())

    def _gone(self, lost: Membership) -> set[str]:
        """Return the replicas that have lost a process; ReplicaBrokenError if this one has."""
        watch = self._context.watch
        gone = _replicas_of(watch.gone(), lost, self._context) if watch is not None else set()
        if watch is not None and self._watch.replica in gone:
            raise ReplicaBrokenError(
                f"this replica has lost another of its processes, and ends: {watch.explain()}"
            )
        return gone

    def _unreachable(self, lost: Membership) -> set[str]:
        watch = self._context.watch
        return _replicas_of(watch.lost(), lost, self._context) if watch is not None else set()

    def _meet(
        self, pending: PendingMembership, me: dict[str, Any], lost: Membership
    ) -> list[dict[str, Any]] | None:
        """Return the progress of each process of a membership; None: not all have met."""
        members = set(pending.membership.replicas)
        reason = me["reason"] or self._watch.refusal(len(pending.membership.replicas))
        me = {**me, "reason": reason}
        while not pending.formed:
            if pending.failed or members & self._gone(lost):
                return None
            time.sleep(POLL_INTERVAL)
        if pending.control is None:
            return [me]
        try:
            contents = pending.control.all_gather_bytes(json.dumps(me).encode(), PATIENCE)
            found = [json.loads(content) for content in contents]
            if not any(x["reason"] for x in found):  # else all give up, some without a device
                pending.connect(PATIENCE, lambda: bool(members & self._gone(lost)))
                # Whoever enters closes connections, and so is gone for those still connecting.
                pending.control.all_gather(torch.tensor([1]), PATIENCE)
        except RuntimeError:
            return None
        return found

    # --- after -------------------------------------------------------------------------------

    def _take_over(self, ahead: list[int], behind: list[int]) -> None:
        if not behind:
            return
        ctx = self._context
        rank, group = ctx.env.rank, ctx.control.group if ctx.mesh is None else ctx.mesh.column
        assert group is not None  # noqa: S101  # one is behind another
        states = {n: x for n, x in ctx.component(States).items() if x.takes_over}
        try:
            if rank in behind:
                take(group, rank, states, ahead[0]).adopt(states)
            else:
                sent = pack(states, leads=rank == ahead[0])
                send(group, rank, sent, Route(tuple(ahead), tuple(behind)))
        except (RefusedError, CheckpointError) as refusal:
            self._give_up(str(refusal))

    def _bound(self) -> str:
        """Return why replicas that are behind cannot receive the states; empty: they can."""
        for name, state in self._context.component(States).items():
            if state.takes_over and not state.elastic:
                return f"the state {name} cannot be taken over from another replica"
        return ""

    def _go_on(self, equal: list[bool]) -> None:
        """Bring everything outside of states to where a restart would bring it."""
        ctx = self._context
        ctx.component(Metrics).rejoin()
        ctx.batch.proposed_microbatches = 0
        for state in ctx.component(States).values():
            state.regrouped()
        random_state(ctx).regroup(equal)
        for call in (*ctx.rejoined, *ctx.joined):
            call()
        ctx.component(Metrics).interrupt_steps()

    def _tell(self, lost: Membership, now: Membership, step: int | None, seconds: float) -> None:
        ctx, place = self._context, self._watch.rendezvous
        self._watch.tell_entered(now, seconds)
        if not ctx.env.leads:
            return
        dead = [replica for replica in lost.replicas if now.rank(replica) is None]
        for replica in dead:
            place.withdraw(replica)
        if place.arbiter is not None:
            place.arbiter.clear(now)
        names = "replica " + dead[0] if len(dead) == 1 else "replicas " + " and ".join(dead)
        count = len(now.replicas)
        say(
            f"{names} {'was' if len(dead) == 1 else 'were'} lost at step {step or 0}; "
            f"{count} replica{'s go' if count > 1 else ' goes'} on from step {ctx.step or 0}, "
            f"after {seconds:.1f} s"
        )


PENDING = (
    "an Accumulator holds amounts that were not synchronized, and those of the lost replica are "
    "lost (call synchronized() in every step, or pipollux.report(loss=...) instead)"
)


def _replicas_of(ranks: set[int], lost: Membership, ctx: JobContext) -> set[str]:
    return {lost.replicas[rank // ctx.env.processes_per_replica] for rank in ranks}


def _yields(alive: list[str], cut_off: list[str], lost: Membership) -> bool:
    """Return whether the unreachable side decides: in a network partition, the larger side does."""
    first = next((replica for replica in lost.replicas if replica in (*alive, *cut_off)), None)
    return len(cut_off) > len(alive) or (len(cut_off) == len(alive) and first in cut_off)


def _are_equal(last: ControlMessage | None, num_replicas: int) -> list[bool]:
    """Return which generators were the same on all replicas at the last boundary."""
    if last is None:
        return [True] * 3
    pairs = zip(last.generators, last.generators_sqr, strict=True)
    return [num_replicas * square == mark * mark for mark, square in pairs]
