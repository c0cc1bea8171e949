"""Queries over many rows: figures for monitoring, usage of nodes, thinned curves for plots."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from itertools import accumulate
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Integer, Select, String, cast, false, func, or_, select
from sqlalchemy.orm import Session

from pipollux_sched.lifecycle import Phase

from . import attempts, deletion, job_list, journal
from .attempts import AttemptCounts
from .database import Database
from .job_list import JobQuery, ListedPhase
from .records import AttemptRecord, Point, attempt_record
from .tables import AttemptRow, EventRow, HintsRow, JobRow, PointRow


class Glance(NamedTuple):
    """Figures over all jobs."""

    phases: Mapping[ListedPhase, int]
    """Number of jobs in each phase that has any, in the order of lists."""
    holders: tuple[job_list.Holder, ...]
    goodput: float | None
    """Total of the running jobs that report it, in samples per second; None: none does."""
    oldest_attempt: float | None
    """First start of an attempt of the jobs that hold slots or, if none does, of any job."""


class NoisePoint(NamedTuple):
    """Gradient statistics that a job measured."""

    time: float
    norm: float
    var: float
    """Variance of the gradient at the initial batch size."""
    noise_scale: float | None
    """Noise scale, in samples; None if the initial batch size or the norm is unknown."""


class CompletedRecord(NamedTuple):
    """A job that completed, with its last hints."""

    name: str
    ended_at: float
    spec: Mapping[str, Any]
    hints: Mapping[str, Any]
    time: float


class Overview:
    """Queries for figures and curves."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def jobs_by_phase(self) -> dict[str, int]:
        """Return the number of jobs in each phase that has any."""
        query = select(JobRow.phase, func.count()).group_by(JobRow.phase)
        with self._database.read() as session:
            return {row[0]: row[1] for row in session.execute(query)}

    def has_unfinished(self) -> bool:
        """Return whether any job has not ended."""
        query = select(JobRow.id).where(JobRow.phase.not_in(attempts.ENDED)).limit(1)
        with self._database.read() as session:
            return session.scalar(query) is not None

    def completed(self, since: float, most: int = 2000) -> list[CompletedRecord]:
        """Return the last `most` jobs that completed since a time and sent hints, oldest first."""
        columns = JobRow.name, JobRow.ended_at, JobRow.spec, HintsRow.hints, HintsRow.time
        query = (
            select(*columns)
            .join(HintsRow, HintsRow.job == JobRow.name)
            .where(JobRow.phase == Phase.COMPLETE.value, JobRow.ended_at >= since)
            .order_by(JobRow.ended_at.desc())
            .limit(most)
        )
        with self._database.read() as session:
            return [CompletedRecord(*row) for row in session.execute(query)][::-1]

    def hint_times(self) -> dict[str, float]:
        """Return the time of each job's last hints, in seconds since the epoch."""
        with self._database.read() as session:
            return {
                row.job: row.time for row in session.execute(select(HintsRow.job, HintsRow.time))
            }

    def ended_since(self, moment: float) -> list[tuple[float, float]]:
        """Return when the jobs that ended after a time could have started, and ended."""
        ready = func.coalesce(JobRow.ready_at, JobRow.submitted_at)
        processes = or_(JobRow.sweep.is_(None), JobRow.trial.is_not(None))
        query = select(ready, JobRow.ended_at).where(JobRow.ended_at > moment, processes)
        with self._database.read() as session:
            return [(row[0], row[1] or moment) for row in session.execute(query)]

    def arrivals_since(self, moment: float, seconds: float) -> list[tuple[float, float]]:
        """Return the first and the last arrival in each part of `seconds` that has any."""
        ready = func.coalesce(JobRow.ready_at, JobRow.submitted_at)
        processes = or_(JobRow.sweep.is_(None), JobRow.trial.is_not(None))
        part = cast((ready - moment) / seconds, Integer)
        query = select(func.min(ready), func.max(ready)).where(ready > moment, processes)
        with self._database.read() as session:
            return [(row[0], row[1]) for row in session.execute(query.group_by(part))]

    def attempt_counts(self) -> AttemptCounts:
        """Return the counts of all jobs, including deleted ones."""
        with self._database.read() as session:
            there, gone = attempts.totals(session), deletion.counted(session)
        return AttemptCounts(*map(sum, zip(there, gone, strict=True)))

    def jobs(self, query: JobQuery, now: float) -> job_list.JobPage:
        """Return a page of the list of jobs; ages of jobs that have not ended extend to `now`."""
        with self._database.read() as session:
            return job_list.page(session, query, now)

    def glance(self, *, trials: bool = True) -> Glance:
        """Return figures over all jobs; without `trials`, phases count those of sweeps once."""
        with self._database.read() as session:
            goodput, num_told = job_list.goodput(session)
            counts = job_list.count_by_phase(session, trials=trials)
            holders = job_list.holders(session)
            oldest = _oldest_attempt(session)
            return Glance(counts, tuple(holders), goodput if num_told else None, oldest)

    def job_number(self, name: str) -> int:
        """Return a job's place in the order of submission, from 1; 0: unknown job."""
        with self._database.read() as session:
            return session.scalar(select(JobRow.id).where(JobRow.name == name)) or 0

    def attempts_since(
        self, since: float, most: int, nodes: Collection[str] | None = None
    ) -> list[tuple[AttemptRecord, int]]:
        """Return the newest attempts since a time, oldest first, with the numbers of their jobs."""
        query = select(AttemptRow, JobRow.id).join(JobRow, JobRow.name == AttemptRow.job)
        query = query.where(_held_after(since))
        if nodes is not None:
            query = query.where(or_(false(), *map(_lies_on, nodes)))
        with self._database.read() as session:
            rows = session.execute(query.order_by(AttemptRow.id.desc()).limit(most)).all()
            return [(attempt_record(row), number) for row, number in reversed(rows)]

    def node_usage(self, begin: float, end: float, num_parts: int) -> dict[str, list[float]]:
        """Return the mean number of slots held on each used node, in equal intervals of a span."""
        row = AttemptRow
        query = select(row.nodes, row.num_stages, row.created_at, row.ended_at)
        query = query.where(_held_after(begin), row.created_at < end)
        found: dict[str, _Usage] = {}
        with self._database.read() as session:
            for nodes, num_stages, created_at, ended_at in session.execute(query):
                for node in nodes:
                    parts = found.setdefault(node, _Usage(begin, end, num_parts))
                    parts.add(num_stages, created_at, end if ended_at is None else ended_at)
        return {name: [round(n, 2) for n in parts.means()] for name, parts in found.items()}

    def goodputs(self) -> dict[str, float]:
        """Return the last reported goodput of each running job, in samples per second."""
        with self._database.read() as session:
            return job_list.goodputs(session)

    def points(self, job: str, most: int) -> list[Point]:
        """Return at most `most` points of a job's progress, evenly thinned, with the newest."""
        if most < 1:
            return []
        ids = select(PointRow.event).where(PointRow.job == job)
        query = select(PointRow).where(PointRow.event.in_(_thinned(ids, most)))
        with self._database.read() as session:
            rows = session.scalars(query.order_by(PointRow.event))
            return [journal.point_of(row) for row in rows]

    def progress_events(
        self, most: int, jobs: Collection[str] = (), since: float | None = None
    ) -> list[dict[str, Any]]:
        """Return the progress of many jobs as events, at most `most` per job: see `points`."""
        ids = select(PointRow.event, PointRow.job)
        if jobs:
            ids = ids.where(PointRow.job.in_(jobs))
        if since is not None:
            ids = ids.join(EventRow, EventRow.id == PointRow.event).where(EventRow.time >= since)
        head = (EventRow.id, EventRow.type, EventRow.job, EventRow.attempt)
        told = (getattr(PointRow, name) for name in Point.__dataclass_fields__)
        query = select(*head, *told).join(PointRow, PointRow.event == EventRow.id)
        wanted = query.where(EventRow.id.in_(_thinned(ids, most, each=True)))
        with self._database.read() as session:
            return [dict(row._mapping) for row in session.execute(wanted)]

    def last_timelines(self, jobs: Collection[str] = ()) -> list[dict[str, Any]]:
        """Return the newest timeline of each of some jobs, or of all jobs, as events."""
        newest = select(func.max(EventRow.id)).where(EventRow.type == "timeline")
        if jobs:
            newest = newest.where(EventRow.job.in_(jobs))
        query = select(EventRow).where(EventRow.id.in_(newest.group_by(EventRow.job)))
        with self._database.read() as session:
            return [journal.event_object(row, None) for row in session.scalars(query)]

    def noise(self, job: str, most: int) -> list[NoisePoint]:
        """Return at most `most` of a job's gradient statistics, thinned as in `points`."""
        if most < 1:
            return []
        ids = select(EventRow.id).where(EventRow.job == job, EventRow.type == "hints")
        query = select(EventRow).where(EventRow.id.in_(_thinned(ids, most)))
        with self._database.read() as session:
            rows = session.scalars(query.order_by(EventRow.id)).all()
            found = [_noise_point(row) for row in rows]
            return [point for point in found if point is not None]


def _thinned(ids: Select[*tuple[Any, ...]], most: int, *, each: bool = False) -> Select[Any]:
    """Return at most `most` of the ids of a query, evenly spread, with the first and last.

    With `each`, the limit is per job, whose name is the second column. Of n ids, the one at
    position p is kept if p (most - 1) / (n - 1) passes a whole number.
    """
    inner = ids.subquery()
    found = inner.c[0].label("id")
    of_one = [inner.c[1]] if each else None
    place = func.row_number().over(partition_by=of_one, order_by=inner.c[0]) - 1
    total_of = func.count().over(partition_by=of_one)
    numbered = select(found, place.label("position"), total_of.label("total")).subquery()
    position, total = numbered.c.position, numbered.c.total
    if most == 1:
        return select(numbered.c.id).where(position == total - 1)
    passes = (position * (most - 1)) % func.nullif(total - 1, 0) < most - 1
    return select(numbered.c.id).where(or_(total <= most, passes))


def _noise_point(row: EventRow) -> NoisePoint | None:
    hints = row.data.get("hints", {})
    gradient = hints.get("gradParams")
    if not gradient:
        return None
    norm, var, size = gradient["norm"], gradient["var"], hints.get("initBatchSize")
    scale = size * var / norm if size and norm > 0 else math.inf
    return NoisePoint(row.time, norm, var, scale if math.isfinite(scale) else None)


def _oldest_attempt(session: Session) -> float | None:
    """Return the first start of an attempt of the running jobs; if none runs, of any job."""
    row = AttemptRow
    running = select(row.job).where(row.ended_at.is_(None))
    first = select(func.min(row.created_at))
    return session.scalar(first.where(row.job.in_(running))) or session.scalar(first)


def _held_after(moment: float) -> ColumnElement[bool]:
    ended = AttemptRow.ended_at
    return or_(ended.is_(None), ended > moment)


def _lies_on(node: str) -> ColumnElement[bool]:
    # The list has quoted names in JSON, so no other name contains this one.
    return cast(AttemptRow.nodes, String).contains(json.dumps(node), autoescape=True)


class _Usage:
    """Slot-seconds in equal intervals of a span; `add` takes constant time."""

    def __init__(self, begin: float, end: float, num_parts: int) -> None:
        self._begin, self._end = begin, end
        self._width = (end - begin) / num_parts
        self._partial = [0.0] * num_parts
        self._change = [0] * (num_parts + 1)
        """Increase of the slots held throughout an interval over the previous interval."""

    def add(self, slots: int, begin: float, end: float) -> None:
        begin, end = max(begin, self._begin), min(end, self._end)
        if begin >= end:
            return
        first, last = self._part_of(begin), self._part_of(end)
        if first == last:
            self._partial[first] += slots * (end - begin)
            return
        self._partial[first] += slots * (self._begin + (first + 1) * self._width - begin)
        self._partial[last] += slots * (end - self._begin - last * self._width)
        self._change[first + 1] += slots
        self._change[last] -= slots

    def means(self) -> list[float]:
        whole = accumulate(self._change[:-1])
        return [
            slots + seconds / self._width
            for slots, seconds in zip(whole, self._partial, strict=True)
        ]

    def _part_of(self, moment: float) -> int:
        return min(int((moment - self._begin) / self._width), len(self._partial) - 1)
