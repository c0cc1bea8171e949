"""The state of a store, as far as a forecast depends on it."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from pipollux_perfmodel import HintsError, SchedHints
from pipollux_policies import Allocation, JobInfo, family_of
from pipollux_sched.allocator.inherited_hints import without_rows
from pipollux_sched.allocator.job_infos import hints_worth, job_info, linear_speedup
from pipollux_sched.allocator.learned_lengths import completed_job, family_name
from pipollux_sched.allocator.snapshot import Snapshot, SnapshotReader
from pipollux_sched.allocator.strategy import SchedulableJob
from pipollux_sched.lifecycle import Dependency, When
from pipollux_sched.spec.job import JobSpec, SpecError, parse_job
from pipollux_sched.spec.sweep import SweepSpec
from pipollux_sched.store import CompletedRecord, JobRecord, Store, TrialState
from pipollux_simulator import (
    Estimate,
    ForecastJob,
    ForecastState,
    ForecastSweep,
    JobKind,
    PastError,
)
from pipollux_simulator.forecasting.errors import START_ERROR, running_error, score
from pipollux_simulator.forecasting.state import ARRIVAL_SECONDS, spell

MOST_KINDS = 100
"""Number of last jobs that future jobs may resemble."""
MOST_ERRORS = 500
"""Number of last records that correct new forecasts."""
PRUNING = "pruning is not foreseen; it may end the sweep earlier"
LONGEST_SPELL = 30 * 86400.0
"""Seconds for which arrivals are looked back at."""
SOON = 1.0
"""Seconds until a job trains that should have started by now."""


@dataclass(frozen=True)
class _Later:
    """Jobs and sweeps that are no candidates, as they wait for others or have no processes."""

    specs: Mapping[str, JobSpec]
    """In the order of submission."""
    waits: Mapping[str, Sequence[Dependency]]
    """Of those that wait."""
    trials: Mapping[str, Sequence[str]]
    """Names of the jobs of unfinished trials, by sweep."""


class StateReader:
    """Reads states of a store; parses only what has changed since the last one.

    Args:
        store: of the scheduler.
        restart_seconds: assumed cost of a restart until a job's own is measured.
        interval: seconds between two decisions.
    """

    def __init__(self, store: Store, *, restart_seconds: float, interval: float) -> None:
        self._store = store
        self._interval = interval
        self._snapshots = SnapshotReader(
            store, restart_seconds=restart_seconds, clock=time.time, latest_gradients=True
        )
        self._completed: dict[tuple[str, float], JobKind | None] = {}
        self.notes: Mapping[str, str] = {}
        """By job: why there is no forecast in the last state, or what its forecast leaves out."""

    def read(self, new: Sequence[JobSpec] = ()) -> ForecastState:
        """Return the current state, as if `new` jobs were submitted now."""
        snapshot = self._snapshots.read()
        attempts = self._store.num_attempts(unfinished=True)
        records = self._store.jobs(unfinished=True)
        families = {job.name: _family(job.spec) for job in records}
        families |= {spec.name: family_name(spec) for spec in new}
        later = _later(records, new)
        names = {job.name for job in snapshot.candidates}
        names |= {spec.name for spec in new} | later.specs.keys()
        without = _without_forecast(later.waits, names)
        specs = [spec for name, spec in later.specs.items() if name not in without]
        held = [spec for spec in specs if spec.sweep is None]
        starting = [spec for spec in new if spec.name not in later.specs]
        jobs = [*snapshot.candidates, *self._snapshots.new_jobs([*starting, *held])]
        waits = {n: tuple(entry.job for entry in entries) for n, entries in later.waits.items()}
        sweeps = [spec for spec in specs if spec.sweep is not None]
        self.notes = without | {
            spec.name: PRUNING for spec in sweeps if spec.sweep and spec.sweep.pruner != "none"
        }
        return ForecastState(
            now=snapshot.time,
            nodes=snapshot.nodes,
            jobs=tuple(
                replace(
                    self._job(job, snapshot, attempts.get(job.name, 0), families),
                    after=waits.get(job.name, ()),
                )
                for job in jobs
            ),
            sweeps=tuple(self._sweeps(sweeps, later, waits, snapshot, attempts)),
            kinds=tuple(self._kinds(snapshot)),
            num_arrivals=self._num_arrivals(snapshot),
            arrival_seconds=ARRIVAL_SECONDS,
            spell_seconds=spell(self._arrivals(snapshot.time), snapshot.time),
            interval=self._interval,
            # Without a new job, the next decision is as likely in any part of the interval.
            decides_in=0.0 if new else self._interval / 2,
            teams=snapshot.teams,
            notices=snapshot.notices,
            errors=self._errors(),
        )

    def _job(
        self,
        job: SchedulableJob,
        snapshot: Snapshot,
        num_attempts: int,
        families: Mapping[str, str],
    ) -> ForecastJob:
        held = job.held
        if any(node not in snapshot.nodes for node in held):
            held = Allocation()
        return ForecastJob(
            name=job.name,
            info=job.info,
            allocation=held,
            starts_in=self._starts_in(job, snapshot.time) if job.pinned and held else 0.0,
            is_new=not num_attempts,
            is_measured=_is_measured(job.info),
            inherits=job.warm_start is not None,
            family=families.get(job.name, ""),
        )

    def _sweeps(
        self,
        specs: Sequence[JobSpec],
        later: _Later,
        waits: Mapping[str, tuple[str, ...]],
        snapshot: Snapshot,
        attempts: Mapping[str, int],
    ) -> Iterator[ForecastSweep]:
        """Yield the sweeps; their trials to come are all as the last one."""
        slots = sum(node.resources["slots"] for node in snapshot.nodes.values())
        counts = self._store.sweeps.counts() if specs else {}
        candidates = {job.name for job in snapshot.candidates}
        trials = [_a_trial(spec, slots) for spec in specs]
        for spec, trial, job in zip(specs, trials, self._snapshots.new_jobs(trials), strict=True):
            assert spec.sweep is not None  # noqa: S101  # by the caller
            states = counts.get(spec.name, {}) if spec.name in later.trials else {}
            begun = [name for name in later.trials.get(spec.name, ()) if name in candidates]
            num_ended = sum(number for state, number in states.items() if state.ended)
            num_jobs = num_ended + states.get(TrialState.UNFINISHED, 0)
            yield ForecastSweep(
                name=spec.name,
                trial=self._job(job, snapshot, 0, {trial.name: family_name(trial)}),
                num_planned=max(spec.sweep.num_trials - num_jobs, 0),
                most_unfinished=_most_unfinished(spec, spec.sweep, slots),
                trials=tuple(begun),
                after=waits.get(spec.name, ()),
                is_new=not num_ended and not any(attempts.get(name) for name in begun),
            )

    def _starts_in(self, job: SchedulableJob, now: float) -> float:
        """Return the seconds until a starting job trains: a restart, less what has passed of it."""
        began = [attempt.created_at for attempt in self._store.attempts(job.name)]
        passed = now - began[-1] if began else 0.0
        return max(job.info.restart_seconds - passed, SOON)

    def _errors(self) -> tuple[PastError, ...]:
        found = []
        for one in self._store.forecasts.past(MOST_ERRORS):
            made, start = one.forecast, None
            if made.uncorrected_start is not None and one.started_at > made.made_at:
                raw = _estimate(made.uncorrected_start)
                start = score(raw, made.made_at, one.started_at, START_ERROR)
            end = score(_estimate(made.uncorrected_end), made.made_at, one.ended_at)
            running = running_error(made.running_seconds, one.ended_at - one.started_at)
            found.append(PastError(_family(one.spec), end, start, running))
        return tuple(found)

    def _num_arrivals(self, snapshot: Snapshot) -> int:
        since = snapshot.time - ARRIVAL_SECONDS
        present = [job.info.created for job in snapshot.candidates]
        ended = [submitted for submitted, _ in self._store.overview.ended_since(since)]
        return sum(moment > since for moment in (*present, *ended))

    def _arrivals(self, now: float) -> Iterator[float]:
        since = now - LONGEST_SPELL
        return chain(*self._store.overview.arrivals_since(since, ARRIVAL_SECONDS))

    def _kinds(self, snapshot: Snapshot) -> list[JobKind]:
        records = self._store.overview.completed(0.0, MOST_KINDS)
        keys = [(record.name, record.ended_at) for record in records]
        self._completed = {
            key: self._completed[key] if key in self._completed else _kind_of(record)
            for key, record in zip(keys, records, strict=True)
        }
        kinds = [kind for kind in self._completed.values() if kind is not None]
        kinds += [
            _kind_of_unfinished(job.info)
            for job in snapshot.candidates
            if job.info.likely_work and _is_measured(job.info)
        ]
        return kinds[-MOST_KINDS:]


def _later(records: Sequence[JobRecord], new: Sequence[JobSpec]) -> _Later:
    """Return what is no candidate yet; jobs that their users suspended have no forecast."""
    specs: dict[str, JobSpec] = {}
    waits: dict[str, Sequence[Dependency]] = {}
    trials: dict[str, list[str]] = {}
    for job in records:
        if job.trial is not None:
            trials.setdefault(job.sweep or "", []).append(job.name)
        elif (job.is_sweep or job.state.waits_for) and not job.state.suspended:
            specs[job.name], waits[job.name] = parse_job(job.spec), job.state.waits_for
            if job.is_sweep:
                trials.setdefault(job.name, [])
    unended = {job.name for job in records} | {spec.name for spec in new}
    for spec in new:
        # That the others have ended as they must was checked before.
        left = [Dependency(entry.job, When(entry.when)) for entry in spec.after]
        left = [entry for entry in left if entry.job in unended]
        if left or spec.sweep is not None:
            specs[spec.name], waits[spec.name] = spec, left
    return _Later(specs, waits, trials)


def _without_forecast(
    waits: Mapping[str, Sequence[Dependency]], known: Collection[str]
) -> dict[str, str]:
    """Return why there is no forecast of some jobs that wait for others."""
    found: dict[str, str] = {}
    size = -1
    while len(found) > size:
        size = len(found)
        for name, entries in waits.items():
            for entry in entries:
                if name in found:
                    break
                if entry.when is When.FAILED:
                    found[name] = f"it waits for {entry}, and forecasts assume that jobs succeed"
                elif entry.job not in known or entry.job in found:
                    found[name] = f"it waits for {entry}, which has no forecast"
    return found


def _most_unfinished(spec: JobSpec, sweep: SweepSpec, slots: int) -> int:
    return sweep.most_unfinished(slots, spec.num_stages, spec.min_replicas)


def _a_trial(spec: JobSpec, slots: int) -> JobSpec:
    """Return the last trial of a sweep, with its share of the sweep's replicas."""
    sweep = spec.sweep
    assert sweep is not None  # noqa: S101  # by the caller
    trial = spec.of_trial(sweep.num_trials - 1, dict.fromkeys(sweep.names, ""))
    if sweep.max_replicas is None:
        return trial
    share = sweep.max_replicas // _most_unfinished(spec, sweep, slots)
    most = max(min(spec.max_replicas, share), spec.min_replicas)
    return trial.model_copy(update={"max_replicas": most, "requested_replicas": None})


def _estimate(stored: Mapping[str, float | None]) -> Estimate:
    moments = (stored[name] for name in Estimate._fields)
    return Estimate(*(math.inf if moment is None else moment for moment in moments))


def _family(spec: Mapping[str, Any]) -> str:
    """Return the family of a job as `family_name` does, of a specification of any version."""
    family = spec.get("family")
    return family_of(str(spec["name"])) if family is None else str(family or spec["name"])


def _is_measured(info: JobInfo) -> bool:
    return info.speedup_fn is not linear_speedup


def _kind_of(record: CompletedRecord) -> JobKind | None:
    """Return a completed job as a kind; None: it is of another version, or was not measured."""
    done = completed_job(record)
    if done is None:
        return None
    try:
        spec = parse_job(record.spec)
        hints = without_rows(SchedHints.from_json_object(record.hints))
    except (HintsError, SpecError):
        return None
    if hints_worth(spec, hints).doubt:
        return None
    info = job_info(spec, hints, age=0.0)
    declares = hints.remaining_samples is not None
    new = replace(
        info,
        work_done=0.0,
        remaining_work=done.work if declares else None,
        work_left=() if declares else (done.work,),
    )
    return JobKind(new, (done.work,), inherits=True)


def _kind_of_unfinished(info: JobInfo) -> JobKind:
    whole = tuple(info.work_done + left for left in info.likely_work)
    new = replace(
        info,
        age=0.0,
        num_restarts=0,
        num_rescales=0,
        attained_service=0.0,
        mean_jobs=None,
        work_done=0.0,
        remaining_work=whole[0] if info.remaining_work is not None else None,
        work_left=() if info.remaining_work is not None else whole,
    )
    return JobKind(new, whole, inherits=True)
