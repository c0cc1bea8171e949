"""The progress of sweeps: trials become jobs, hopeless ones are pruned, the last one ends a sweep.

Everything is decided from the store, so that the next scheduler goes on where this one ended.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from pipollux_sched.lifecycle import Cancel, Event, Phase, SweepEnded, SweepProgress
from pipollux_sched.report.sweep_text import spell_end, spell_progress
from pipollux_sched.spec.job import JobSpec, SpecError, parse_job
from pipollux_sched.spec.sweep import SweepSpec
from pipollux_sched.store import (
    ConflictError,
    Curve,
    JobEndedError,
    JobRecord,
    NodeCondition,
    Store,
    TeamFullError,
    TrialRecord,
    TrialState,
    UnknownJobError,
)
from pipollux_sched.utils.failure_log import FailureLog

from .search import Search

_LOG = logging.getLogger(__name__)
PAUSE = 0.5
"""Seconds between two passes over the sweeps, if anything has changed."""
REST = 9.0
"""The same in durations of the last pass: tables of thousands of trials take a while to read."""


class SweepLoop:
    """Lets the trials of sweeps run.

    Args:
        submit: submits jobs for trials of a sweep, all or none.
        handle: applies an event to a job.
    """

    def __init__(
        self,
        store: Store,
        submit: Callable[[JobRecord, Sequence[TrialRecord]], object],
        handle: Callable[[str, Event], object],
    ) -> None:
        self._store, self._submit, self._handle = store, submit, handle
        self._curves: dict[str, Mapping[int, Curve]] = {}
        """The curves by which trials were last judged, by sweep."""

    def run(self, ending: threading.Event) -> None:
        """Look at all sweeps whenever the store has changed, until the scheduler ends."""
        failures, seen, rest = FailureLog(_LOG, "the sweeps"), -1, PAUSE
        while not ending.wait(rest):
            version = self._store.version
            if version == seen:
                continue
            began = time.monotonic()
            try:
                self.step()
            except Exception as error:  # the store may be unavailable for a while
                if ending.is_set():
                    return
                failures.failed(error)
            else:
                seen = version
                failures.succeeded()
            rest = max(PAUSE, REST * (time.monotonic() - began))

    def step(self) -> None:
        """Look at all sweeps once."""
        active = self._store.sweeps.active()
        for gone in self._curves.keys() - {sweep.name for sweep in active}:
            del self._curves[gone]
        failed: list[Exception] = []
        for sweep in active:
            try:
                self._look_at(sweep)
            except Exception as error:  # which must not hold up the other sweeps
                failed.append(error)
        if failed:
            raise failed[0]

    def _look_at(self, sweep: JobRecord) -> None:
        if sweep.phase.ended:
            self.end_trials(sweep.name, Cancel())
            return
        if sweep.state.waits_for or sweep.state.suspended:
            return
        spec = parse_job(sweep.spec)
        if spec.sweep is None:
            return
        trials = self._store.sweeps.trials(sweep.name)
        if spec.sweep.pruner != "none":
            self._prune(sweep.name, spec.sweep, trials)
        room = self._room(spec, trials)
        waiting = [trial for trial in trials if trial.state is TrialState.WAITING][:room]
        missing = min(room - len(waiting), spec.sweep.num_trials - len(trials))
        if missing > 0:
            curves = self._store.sweeps.curves(sweep.name, spec.sweep.metric)
            proposals = Search(sweep.name, spec.sweep, trials, curves).propose(missing)
            self._store.sweeps.propose(sweep.name, len(trials), proposals)
            waiting += [
                TrialRecord(sweep.name, len(trials) + index, parameters)
                for index, parameters in enumerate(proposals)
            ]
        try:
            team_full = not self._start(sweep, waiting)
        except (SpecError, ConflictError) as error:
            # Of the trials that cannot start, the first one speaks for all.
            why = f"A trial cannot start: {error}"
            self._handle(sweep.name, SweepEnded(complete=False, message=why))
            return
        self._tell(sweep, spec.sweep, team_full=team_full)

    def _start(self, sweep: JobRecord, trials: Sequence[TrialRecord]) -> bool:
        """Submit jobs for trials; return whether the sweep's team may have all of them."""
        if not trials:
            return True
        try:
            self._submit(sweep, trials)
        except TeamFullError:
            with suppress(TeamFullError):
                for trial in trials if len(trials) > 1 else ():
                    self._submit(sweep, [trial])
            return False
        return True

    def end_trials(self, sweep: str, event: Event) -> None:
        """Apply an event to the jobs of a sweep's trials that have not ended."""
        for job in self._store.sweeps.unfinished(sweep):
            if job.state.intent is None or not isinstance(event, Cancel):
                with suppress(JobEndedError, UnknownJobError):  # it has ended meanwhile
                    self._handle(job.name, event)

    def _prune(self, sweep: str, spec: SweepSpec, trials: Sequence[TrialRecord]) -> None:
        curves, before = self._store.sweeps.curves(sweep, spec.metric), self._curves.get(sweep, {})
        unfinished = {trial.number: trial for trial in trials if not trial.state.ended}
        news = [number for number in unfinished if curves.get(number) != before.get(number)]
        self._curves[sweep] = curves
        if not news:
            return
        pruned, notes = Search(sweep, spec, trials, curves).hopeless(news)
        for number, kept in notes.items():
            if kept != dict(unfinished[number].attributes):
                self._store.sweeps.keep_attributes(sweep, number, kept)
        for number in pruned:
            steps = curves[number]
            last = max(steps)
            value = steps[last]
            said = "no number" if value is None else f"{value:.4g}"
            why = f"The trial was pruned: its {spec.metric} was {said} at step {last}."
            with suppress(JobEndedError, UnknownJobError):
                self._handle(unfinished[number].job, Cancel(pruned=why))

    def _room(self, spec: JobSpec, trials: Sequence[TrialRecord]) -> int:
        """Return how many more trials may have a job."""
        sweep = spec.sweep
        if sweep is None:
            return 0
        nodes = self._store.nodes().values()
        slots = sum(node.slots for node in nodes if node.condition is not NodeCondition.DEAD)
        most = sweep.most_unfinished(slots, spec.num_stages, spec.min_replicas)
        return max(most - sum(t.state is TrialState.UNFINISHED for t in trials), 0)

    def _tell(self, sweep: JobRecord, spec: SweepSpec, *, team_full: bool) -> None:
        """Store the progress of a sweep as its message, or its end."""
        states = self._store.sweeps.counts(sweep.name).get(sweep.name, {})
        ended = sum(number for state, number in states.items() if state.ended)
        best = self._store.sweeps.best(sweep.name, spec)
        if ended < spec.num_trials:
            message = spell_progress(states, best, spec, team_full=team_full)
            if message != sweep.state.message or sweep.phase is not Phase.RUNNING:
                self._handle(sweep.name, SweepProgress(message))
            return
        complete = states.get(TrialState.COMPLETE, 0) + states.get(TrialState.PRUNED, 0) > 0
        failed = None if complete else self._first_failed(sweep.name)
        message = spell_end(states, best, spec, failed)
        self._handle(sweep.name, SweepEnded(complete=complete, message=message))

    def _first_failed(self, sweep: str) -> JobRecord | None:
        """Return the job of the first trial that failed by itself."""
        trials = self._store.sweeps.trials(sweep)
        first = next((trial.job for trial in trials if trial.state is TrialState.FAILED), None)
        return None if first is None else self._store.job(first)
