"""The state of a store, as far as a forecast depends on it."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pipollux_perfmodel import HintsError, SchedHints
from pipollux_policies import Allocation, JobInfo, family_of
from pipollux_sched.allocator.inherited_hints import without_rows
from pipollux_sched.allocator.job_infos import hints_worth, job_info, linear_speedup
from pipollux_sched.allocator.learned_lengths import completed_job, family_name
from pipollux_sched.allocator.snapshot import Snapshot, SnapshotReader
from pipollux_sched.allocator.strategy import SchedulableJob
from pipollux_sched.spec.job import JobSpec, SpecError, parse_job
from pipollux_sched.store import CompletedRecord, Store
from pipollux_simulator import Estimate, ForecastJob, ForecastState, JobKind, PastError
from pipollux_simulator.forecasting.errors import score

ARRIVAL_SECONDS = 3600.0
"""The rate of arrivals is that of the last hour."""
MOST_KINDS = 100
"""Number of last jobs that future jobs may resemble."""
MOST_ERRORS = 500
"""Number of last records that correct new forecasts."""
SOON = 1.0
"""Seconds until a job trains that should have started by now."""


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
        self._snapshots = SnapshotReader(store, restart_seconds=restart_seconds, clock=time.time)
        self._completed: dict[tuple[str, float], JobKind | None] = {}

    def read(self, new: Sequence[JobSpec] = ()) -> ForecastState:
        """Return the current state, as if `new` jobs were submitted now; or raise `SpecError`."""
        for spec in new:
            _check_can_start(spec)
        snapshot = self._snapshots.read()
        attempts = self._store.num_attempts(unfinished=True)
        families = {job.name: _family(job.spec) for job in self._store.jobs(unfinished=True)}
        families |= {spec.name: family_name(spec) for spec in new}
        jobs = [*snapshot.candidates, *map(self._snapshots.new_job, new)]
        return ForecastState(
            now=snapshot.time,
            nodes=snapshot.nodes,
            jobs=tuple(
                self._job(job, snapshot, attempts.get(job.name, 0), families) for job in jobs
            ),
            kinds=tuple(self._kinds(snapshot)),
            num_arrivals=self._num_arrivals(snapshot),
            arrival_seconds=ARRIVAL_SECONDS,
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

    def _starts_in(self, job: SchedulableJob, now: float) -> float:
        """Return the seconds until a starting job trains: a restart, less what has passed of it."""
        began = [attempt.created_at for attempt in self._store.attempts(job.name)]
        passed = now - began[-1] if began else 0.0
        return max(job.info.restart_seconds - passed, SOON)

    def _errors(self) -> tuple[PastError, ...]:
        found = []
        for one in self._store.forecasts.past(MOST_ERRORS):
            forecast = one.forecast
            value = score(_estimate(forecast.uncorrected_end), forecast.made_at, one.ended_at)
            if value is not None:
                found.append(PastError(_family(one.spec), value))
        return tuple(found)

    def _num_arrivals(self, snapshot: Snapshot) -> int:
        since = snapshot.time - ARRIVAL_SECONDS
        present = [job.info.created for job in snapshot.candidates]
        ended = [submitted for submitted, _ in self._store.overview.ended_since(since)]
        return sum(moment > since for moment in (*present, *ended))

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


def _check_can_start(spec: JobSpec) -> None:
    """Raise `SpecError` for what a forecast of a single job that starts now would not describe."""
    if spec.sweep is not None:
        raise SpecError(
            f"job '{spec.name}': sweep: a forecast is of a single job; leave the sweep out"
        )
    if spec.after:
        raise SpecError(
            f"job '{spec.name}': after: a forecast is of a job that can start at once; leave the "
            "dependencies out"
        )


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
