"""A replica that joins a running job: it waits at the beginning of a loop for the others."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from pipollux_hybrid.checkpoint.state import States
from pipollux_hybrid.errors import ConfigurationError, PeerLostError
from pipollux_hybrid.job import signals
from pipollux_hybrid.job.agreement import differences_of_joining
from pipollux_hybrid.job.context import JobContext
from pipollux_hybrid.job.membership import JobPlace

from .alignment import Alignment, compare, in_common, position
from .eligibility import why_not_elastic
from .log import say
from .pending_membership import PendingMembership
from .published_totals import PublishedTotals
from .switch import entering, go_on, switch
from .transfer import RefusedError, take
from .watch import INTERVAL, MembershipWatch

ALIGNMENT_PATIENCE = 10.0
"""Seconds that the others wait for a joining replica at the boundary of the resize."""
TOTALS_PATIENCE = 60.0
"""Seconds that a joining replica waits for totals: shared storage may show a file that late."""
POLL_INTERVAL = 0.005


class Joining:
    """The procedure of a joining replica."""

    def __init__(self, ctx: JobContext, watch: MembershipWatch, published: PublishedTotals) -> None:
        self._context = ctx
        self._watch = watch
        self._published = published
        self._arrived = False
        self._common: dict[str, str | None] = {}

    def join(self, place: JobPlace, description: str) -> bool:
        """Wait at the beginning of a loop until this replica is a member; return False if the job
        is beyond this loop, which is then skipped.

        Raises:
            SystemExit: This replica was asked to stop, or the job has ended.
            ConfigurationError: It runs another script than the job, or nobody can join.
            PeerLostError: Another process of this replica has ended.
        """
        why_not = why_not_elastic(self._context)
        if why_not is not None:
            raise ConfigurationError(f"this replica cannot join the job: {why_not}")
        watch, mesh = self._watch, self._context.mesh
        if mesh is not None and not self._arrived:
            mesh.gather_from_stages(b"")  # no process of the replica is on its way any more
        self._arrived = True
        watch.place, watch.waiting_to_join = place, True
        self._common = in_common(self._context, description)
        here = position(place, self._common)
        while True:
            self._check_waiting()
            pending = watch.pending
            if pending is not None and pending.formed and pending.control is not None:
                found = self._meet(pending, here)
                if found is Alignment.TOGETHER:
                    return True
                if found is Alignment.BEHIND:
                    break
            announcement = watch.rendezvous.announcement()
            if announcement is not None and announcement.place > place:
                break
            time.sleep(INTERVAL)
        watch.waiting_to_join = False
        return False

    def totals(self, accumulator: str, phase: str, number: int) -> bytes:
        """Return the totals of a synchronized block in the job, which is beyond it: by accumulator,
        phase of the script and index in the phase. Errors are those of :meth:`join`; a
        ConfigurationError if the job's script has no such block.
        """
        deadline = time.monotonic() + TOTALS_PATIENCE
        while (found := self._published.find(accumulator, phase, number)) is None:
            self._check_waiting()
            if time.monotonic() > deadline:
                raise ConfigurationError(
                    f"this replica cannot join the job: block {number + 1} of `with "
                    f"accumulator.synchronized()` ({accumulator}, in {phase}) was not read by the "
                    "job; start it with the same script and arguments"
                )
            time.sleep(POLL_INTERVAL)
        return found

    def _meet(self, pending: PendingMembership, here: torch.Tensor) -> Alignment:
        """Meet the current replicas at the boundary of the resize.

        Returns TOGETHER: this replica is a member now; BEHIND: the job waits at a later loop; or
        ELSEWHERE: the resize has failed.
        """
        control = pending.control
        assert control is not None  # noqa: S101  # checked by the caller
        while True:
            found = self._await(pending, lambda: control.start_all_gather(here))
            if found is None:
                return Alignment.ELSEWHERE
            state = compare(found, found[0])
            if state is Alignment.ELSEWHERE:
                theirs = pending.common()
                self._watch.give_up(pending)
                if found[0].tolist()[:2] == here.tolist()[:2] and not torch.equal(found[0], here):
                    differences = differences_of_joining(theirs, self._common)
                    raise ConfigurationError(
                        f"this replica cannot join the job: {differences}; start it with the same "
                        "script, arguments and environment"
                    )
                return state
            if found[0].tolist()[:2] > here.tolist()[:2]:
                return Alignment.BEHIND
            if state is Alignment.TOGETHER:
                break
        return self._take_over(pending)

    def _take_over(self, pending: PendingMembership) -> Alignment:
        ctx, control, rank = self._context, pending.control, pending.rank
        peers = pending.peers
        assert control and peers and rank is not None  # noqa: S101, PT018  # it has formed
        try:
            taken = take(peers, rank, ctx.component(States), spare=pending.spare)
            pending.connect(ALIGNMENT_PATIENCE)
        except RefusedError as refusal:
            self._watch.give_up(pending)
            raise ConfigurationError(f"this replica cannot join the job: {refusal}") from None
        except RuntimeError:
            self._watch.give_up(pending)
            return Alignment.ELSEWHERE
        if self._await(pending, lambda: control.start_all_gather(torch.tensor([1]))) is None:
            return Alignment.ELSEWHERE  # they have voted against it
        with entering():
            switch(ctx, self._watch, pending)
        taken.adopt(ctx.component(States))
        ctx.joins = None
        self._watch.enter(pending)
        go_on(ctx, pending, joined=True)
        self._watch.tell_entered(pending.membership, 0.0)
        return Alignment.TOGETHER

    def _await(
        self, pending: PendingMembership, start: Callable[[], tuple[Any, list[torch.Tensor]]]
    ) -> list[torch.Tensor] | None:
        """Wait for a collective while the membership is pending; None: it failed."""
        deadline = math.inf
        try:
            work, result = start()
            while not work.is_completed():
                self._check_waiting()
                if self._watch.pending is not pending:
                    # The others may have agreed on it before the next one was proposed.
                    deadline = min(deadline, time.monotonic() + ALIGNMENT_PATIENCE)
                if time.monotonic() > deadline:
                    pending.drop()
                    return None
                time.sleep(POLL_INTERVAL)
            work.wait()
        except RuntimeError:
            self._watch.give_up(pending)
            return None
        return result

    def _check_waiting(self) -> None:
        if signals.stop_requested():
            sys.exit(signals.exit_code())
        ctx = self._context
        if self._watch.rendezvous.job_is_silent():
            if ctx.mesh is not None:
                ctx.mesh.gather_from_stages(b"")  # all exit with 0, or none
            if self._watch.speaks:
                say("the job that this replica was to join has ended")
            sys.exit(0)
        if ctx.watch is not None and ctx.watch.gone():
            raise PeerLostError(
                f"this replica cannot join the job without all of its processes: "
                f"{ctx.watch.explain()}"
            )
