"""Rounds of allocation: read a snapshot, decide, apply; at every interval, and after changes."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from pipollux_sched.lifecycle import Allocate
from pipollux_sched.metrics import SchedulerMetrics
from pipollux_sched.utils.failure_log import FailureLog

from .autoscaler import Autoscaler
from .decide import Decision, place_new, reallocate, why_waiting
from .snapshot import Snapshot, SnapshotReader
from .strategy import Nodes, SchedulableJob, Strategy, jobs_of
from .team_strategy import team_reasons, within_teams

_LOG = logging.getLogger(__name__)
OF_TEAM = "waits: team "
"""Prefix of a reason for waiting that comes from a job's team."""


class Allocator:
    """Decides on all jobs, and applies the decisions of a round together (`carry_out`).

    Args:
        keep_notices: stores the jobs that have to return slots to other teams, and when.
        metrics: counts and times the decisions; None: they are not exposed.
    """

    def __init__(
        self,
        reader: SnapshotReader,
        strategy: Strategy,
        *,
        carry_out: Callable[[Sequence[tuple[str, Allocate]]], object],
        keep_notices: Callable[[Mapping[str, float]], object] = lambda _: None,
        metrics: SchedulerMetrics | None = None,
    ) -> None:
        self._reader = reader
        self._strategy = strategy
        self._carry_out = carry_out
        self._metrics = metrics or SchedulerMetrics()
        self._keep_notices = keep_notices
        self._leaving: Collection[str] = ()
        self.due: float | None = None
        """When the first notice ends and a decision is due; None: there is no notice."""

    def run_once(self) -> list[Decision]:
        """Start the jobs that fit, then decide on all jobs; return the applied decisions.

        If the policy fails, or its result is invalid, nothing changes; the error is logged.
        """
        snapshot = self._read()
        decisions: list[Decision] = []
        for decide in (place_new, reallocate):
            made = self._attempt(decide, snapshot)
            self._let([(d.job, Allocate(d.nodes, d.why, d.details, d.num_stages)) for d in made])
            snapshot = self._read() if made or snapshot.teams else snapshot
            decisions += made
        later = (due for due in snapshot.notices.values() if due > snapshot.time)
        self.due = min(later, default=None)
        self._queue_the_rest(snapshot)
        return decisions

    def adjust(self, autoscaler: Autoscaler) -> bool:
        """Run the autoscaler; return whether another decision is due, because other nodes drain."""
        now = self._read()
        allocations = {job.name: job.held for job in now.candidates if job.allocation}
        before, self._leaving = (
            self._leaving,
            autoscaler.round(jobs_of(now.candidates), now.nodes, allocations, now.busy, now.teams),
        )
        return set(before) != set(self._leaving)

    def _read(self) -> Snapshot:
        return self._reader.read(self._leaving)

    def _attempt(
        self,
        decide: Callable[[Sequence[SchedulableJob], Nodes, Strategy], list[Decision]],
        snapshot: Snapshot,
    ) -> list[Decision]:
        try:
            with self._metrics.deciding():
                strategy, team = within_teams(self._strategy, snapshot)
                decisions = decide(snapshot.candidates, snapshot.nodes, strategy)
        except Exception:  # policies are user code
            self._metrics.policy_failures.inc()
            _LOG.exception("the policy failed, so all allocations stay as they are")
            return []
        self._metrics.decisions.inc(len(decisions))
        if team is not None and team.answer is not None:
            self._keep_notices(team.answer.notices)
        return decisions

    def _queue_the_rest(self, snapshot: Snapshot) -> None:
        of_teams = team_reasons(snapshot)
        waiting = [
            job
            for job in snapshot.candidates
            if not job.allocation
            # The reason may have been its team until now.
            and (job.unexplained or (job.message.startswith(OF_TEAM) and job.name not in of_teams))
        ]
        whys = why_waiting(waiting, snapshot.candidates, snapshot.nodes) if waiting else []
        told = dict(zip((job.name for job in waiting), whys, strict=True))
        told |= {name: f"waits: {why}" for name, why in of_teams.items()}
        before = {job.name: job.message for job in snapshot.candidates}
        # Reasons of teams depend on other jobs, so they are updated in every round.
        self._let(
            [
                (name, Allocate((), why, restates=True))
                for name, why in told.items()
                if snapshot.teams is None or why != before[name]
            ]
        )

    def _let(self, events: Sequence[tuple[str, Allocate]]) -> None:
        if events:
            self._carry_out(events)


class AllocationLoop:
    """Runs the allocator periodically, one decision at a time.

    Args:
        reconsider: set when a job or node has changed, so that a decision is due immediately.
        autoscaler: controls the number of nodes; None: it stays fixed.
    """

    def __init__(
        self,
        allocator: Allocator,
        *,
        interval: float,
        reconsider: threading.Event,
        ending: threading.Event,
        autoscaler: Autoscaler | None = None,
    ) -> None:
        self._allocator = allocator
        self._interval = interval
        self._reconsider = reconsider
        self._ending = ending
        self._autoscaler = autoscaler

    def run(self) -> None:
        """Decide until the scheduler ends; log failures, and retry in the next round."""
        failures = FailureLog(_LOG, "the allocator")
        while not self._ending.is_set():
            self._reconsider.clear()
            began = time.monotonic()
            try:
                self._decide()
            except Exception as error:  # the death of this thread would freeze all allocations
                if self._ending.is_set():
                    return
                failures.failed(error)
            else:
                failures.succeeded()
            # Batch frequent changes, so that decisions take at most half of the time.
            self._ending.wait(min(time.monotonic() - began, self._interval))
            self._reconsider.wait(self._pause())

    def _pause(self) -> float:
        """Return the seconds to the next decision: the interval, or less if a notice ends."""
        due = self._allocator.due
        return self._interval if due is None else min(max(due - time.time(), 0.0), self._interval)

    def _decide(self) -> None:
        self._allocator.run_once()
        if self._autoscaler is not None and self._allocator.adjust(self._autoscaler):
            self._reconsider.set()
