"""Sweeps and their trials.

A sweep is a job without processes: its row has the life cycle, and names itself as its sweep. Each
trial is a row of its own from the beginning, or from the proposal of a search on, and becomes a job
when it may run; that job's row names the sweep and the number of the trial.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from sqlalchemy import func, insert, or_, select, update
from sqlalchemy.orm import Session

from pipollux_sched.lifecycle import PRUNED, JobState, Phase
from pipollux_sched.spec.sweep import SweepSpec, trial_name

from .attempts import ENDED
from .database import Database
from .errors import JobExistsError
from .records import JobRecord, job_record
from .tables import AttemptRow, JobRow, MetricRow, PointRow, TrialRow

_MOST_NAMES = 500
"""Names per query: databases limit the values of one."""


class TrialState(StrEnum):
    """The state of a trial."""

    WAITING = "waiting"
    """It has no job yet."""
    UNFINISHED = "unfinished"
    """Its job is queued or runs."""
    COMPLETE = "complete"
    PRUNED = "pruned"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def ended(self) -> bool:
        """Whether the trial has ended."""
        return self not in (TrialState.WAITING, TrialState.UNFINISHED)


@dataclass(frozen=True)
class TrialRecord:
    """A trial of a sweep."""

    sweep: str
    number: int
    parameters: Mapping[str, Any]
    state: TrialState = TrialState.WAITING
    value: float | None = None
    """Its metric at its end; None: it has none, or has not ended."""
    attributes: Mapping[str, Any] = field(default_factory=dict)
    """Notes of the pruner."""

    @property
    def job(self) -> str:
        """The name of its job."""
        return trial_name(self.sweep, self.number)


@dataclass(frozen=True)
class SweepSummary:
    """The progress of a sweep."""

    submitted_at: float
    metric: str
    num_trials: int
    counts: Mapping[TrialState, int]
    """Trials in each state; those that a search has not proposed yet are missing."""
    best: TrialRecord | None
    """The complete trial with the best value of the metric."""

    @property
    def num_ended(self) -> int:
        """Number of trials that have ended."""
        return sum(number for state, number in self.counts.items() if state.ended)

    @property
    def num_waiting(self) -> int:
        """Number of trials that have no job yet."""
        return self.num_trials - self.num_ended - self.counts.get(TrialState.UNFINISHED, 0)


Curve = Mapping[int, float | None]
"""Values of a metric by step; None: it was not finite."""


class Sweeps:
    """The sweeps of a store."""

    def __init__(self, database: Database, clock: Callable[[], float]) -> None:
        self._database = database
        self._clock = clock

    def active(self) -> list[JobRecord]:
        """Return the sweeps that have not ended, or have a trial that has not."""
        names = select(JobRow.sweep).where(JobRow.sweep.is_not(None), JobRow.phase.not_in(ENDED))
        query = select(JobRow).where(JobRow.name.in_(names), JobRow.sweep == JobRow.name)
        with self._database.read() as session:
            return [job_record(row) for row in session.scalars(query.order_by(JobRow.id))]

    def all(self) -> list[JobRecord]:
        """Return all sweeps, in the order of submission."""
        query = select(JobRow).where(JobRow.sweep == JobRow.name).order_by(JobRow.id)
        with self._database.read() as session:
            return [job_record(row) for row in session.scalars(query)]

    def trials(self, sweep: str) -> list[TrialRecord]:
        """Return the trials of a sweep that there are so far, by number."""
        query = select(TrialRow).where(TrialRow.sweep == sweep).order_by(TrialRow.number)
        with self._database.read() as session:
            return [_record(row) for row in session.scalars(query)]

    def counts(self, sweep: str | None = None) -> dict[str, dict[TrialState, int]]:
        """Return the number of trials in each state, by sweep (None: of all)."""
        columns = TrialRow.sweep, TrialRow.state, func.count()
        query = select(*columns).group_by(TrialRow.sweep, TrialRow.state)
        if sweep is not None:
            query = query.where(TrialRow.sweep == sweep)
        found: dict[str, dict[TrialState, int]] = {}
        with self._database.read() as session:
            for name, state, number in session.execute(query):
                found.setdefault(name, {})[TrialState(state)] = number
        return found

    def best(self, sweep: str, spec: SweepSpec) -> TrialRecord | None:
        """Return the complete trial with the best value; None: there is none yet."""
        mine = (TrialRow.sweep == sweep, TrialRow.state == TrialState.COMPLETE.value)
        order = TrialRow.value.asc() if spec.direction == "minimize" else TrialRow.value.desc()
        query = select(TrialRow).where(*mine, TrialRow.value.is_not(None))
        with self._database.read() as session:
            row = session.scalar(query.order_by(order, TrialRow.number).limit(1))
            return None if row is None else _record(row)

    def summary(
        self,
        sweep: JobRecord,
        counts: Mapping[TrialState, int],
        before: SweepSummary | None = None,
    ) -> SweepSummary:
        """Return the progress of a sweep, given its counts; of an unchanged sweep, `before`."""
        same = before is not None and before.submitted_at == sweep.submitted_at
        if before is not None and same and before.counts == counts:
            return before
        spec = SweepSpec.model_validate(sweep.spec["sweep"])
        best = self.best(sweep.name, spec)
        return SweepSummary(sweep.submitted_at, spec.metric, spec.num_trials, counts, best)

    def propose(self, sweep: str, first: int, proposals: Sequence[Mapping[str, Any]]) -> None:
        """Add trials of a search, from a number on."""
        with self._database.write() as session:
            _insert(session, sweep, proposals, first)

    def keep_attributes(self, sweep: str, number: int, attributes: Mapping[str, Any]) -> None:
        """Store the notes of the pruner about a trial."""
        mine = (TrialRow.sweep == sweep, TrialRow.number == number)
        with self._database.write(durable=False) as session:
            session.execute(update(TrialRow).where(*mine).values(attributes=dict(attributes)))

    def curves(self, sweep: str, metric: str) -> dict[int, Curve]:
        """Return the values of a metric by trial and step."""
        with self._database.read() as session:
            rows = session.execute(_trial_jobs(sweep)).all()
            jobs = {row.name: row.trial for row in rows}
            unfinished = {row.name for row in rows if row.phase not in ENDED}
            found = curves_of(session, list(jobs), metric, unfinished)
        return {jobs[name]: curve for name, curve in found.items()}

    def started_at(self, job: str, since: float) -> float | None:
        """Return when a job, or a trial of a sweep, first held slots since a time; None: never."""
        mine = or_(JobRow.name == job, JobRow.sweep == job)
        query = select(func.min(AttemptRow.created_at)).where(AttemptRow.created_at >= since)
        with self._database.read() as session:
            return session.scalar(query.join(JobRow, JobRow.name == AttemptRow.job).where(mine))

    def unfinished(self, sweep: str) -> list[JobRecord]:
        """Return the jobs of trials that have not ended."""
        mine = (JobRow.sweep == sweep, JobRow.trial.is_not(None), JobRow.phase.not_in(ENDED))
        with self._database.read() as session:
            found = session.scalars(select(JobRow).where(*mine).order_by(JobRow.trial))
            return [job_record(row) for row in found]

    def jobs(self, sweep: str) -> dict[int, JobRecord]:
        """Return the jobs of the trials that have one, by number."""
        query = select(JobRow).where(JobRow.sweep == sweep, JobRow.trial.is_not(None))
        with self._database.read() as session:
            return {row.trial or 0: job_record(row) for row in session.scalars(query)}


def best_of(trials: Iterable[TrialRecord], spec: SweepSpec) -> TrialRecord | None:
    """Return what `Sweeps.best` finds, of the trials of a sweep."""
    sign = 1.0 if spec.direction == "minimize" else -1.0
    known = [one for one in trials if one.state is TrialState.COMPLETE and one.value is not None]
    return min(known, key=lambda one: (sign * (one.value or 0.0), one.number), default=None)


def begin(session: Session, sweep: str, spec: SweepSpec) -> None:
    """Store the trials of a new sweep that are known; a search has none yet."""
    _check_names_free(session, sweep, spec.num_trials)
    _insert(session, sweep, list(spec.fixed_trials()), 0)


def start_trial(session: Session, sweep: str, number: int) -> None:
    """Note that a trial has a job."""
    mine = (TrialRow.sweep == sweep, TrialRow.number == number)
    state = TrialState.UNFINISHED.value
    session.execute(update(TrialRow).where(*mine).values(state=state, value=None))


def has_begun(session: Session, sweep: str) -> bool:
    """Return whether a sweep has a trial with a job."""
    mine = (JobRow.sweep == sweep, JobRow.trial.is_not(None))
    return session.scalar(select(JobRow.id).where(*mine).limit(1)) is not None


def try_again(session: Session, sweep: str) -> bool:
    """Let the trials of a sweep that failed or were cancelled run again; return whether any did."""
    again = (TrialState.FAILED.value, TrialState.CANCELLED.value)
    mine = (TrialRow.sweep == sweep, TrialRow.state.in_(again))
    to_wait = update(TrialRow).where(*mine).values(state=TrialState.WAITING.value)
    return bool(session.scalars(to_wait.returning(TrialRow.number)).all())


def end_trial(session: Session, job: JobRow, state: JobState) -> None:
    """Store how a trial has ended, and its metric."""
    row = session.get(TrialRow, (job.sweep, job.trial))
    sweep = session.scalar(select(JobRow).where(JobRow.name == job.sweep))
    if row is None or sweep is None:
        return
    row.state = _state_of(state).value
    curve = curves_of(session, [job.name], sweep.spec["sweep"]["metric"]).get(job.name, {})
    row.value = curve[max(curve)] if curve else None


def reserved(session: Session, names: Sequence[str]) -> dict[str, str]:
    """Return the sweep that a name is kept for as that of a trial's job, by name."""
    found: dict[str, str] = {}
    parts = {name: _parts(name) for name in names}
    stems = sorted({stem for stem, _ in filter(None, parts.values())})
    for first in range(0, len(stems), _MOST_NAMES):
        some = stems[first : first + _MOST_NAMES]
        query = select(JobRow).where(JobRow.name.in_(some), JobRow.sweep == JobRow.name)
        for row in session.scalars(query):
            most = SweepSpec.model_validate(row.spec["sweep"]).num_trials
            found |= {
                name: row.name
                for name, part in parts.items()
                if part is not None and part[0] == row.name and part[1] < most
            }
    return found


def _parts(name: str) -> tuple[str, int] | None:
    """Return the sweep and the number in a name that has the form of a trial's; None: it has not.

    Example:
        >>> _parts("rates-12"), _parts("rates-012")
        (('rates', 12), None)
    """
    sweep, _, digits = name.rpartition("-")
    good = bool(sweep) and digits.isascii() and digits.isdigit() and str(int(digits)) == digits
    return (sweep, int(digits)) if good else None


def curves_of(
    session: Session, jobs: Sequence[str], metric: str, unfinished: Collection[str] = ()
) -> Mapping[str, Curve]:
    """Return the values of a metric by job and step; jobs without values are left out.

    The mean loss of the current epoch of `unfinished` jobs is not final, and left out, too.
    """
    found: dict[str, dict[int, float | None]] = {}
    for begin_at in range(0, len(jobs), _MOST_NAMES):
        names = jobs[begin_at : begin_at + _MOST_NAMES]
        rows = session.execute(
            select(MetricRow.job, MetricRow.step, MetricRow.value).where(
                MetricRow.job.in_(names), MetricRow.name == metric
            )
        ).all()
        if metric == "loss":
            told = {row.job for row in rows}
            found |= _mean_losses(session, [x for x in names if x not in told], unfinished)
        for job, step, value in rows:
            found.setdefault(job, {})[step] = value
    return found


def _mean_losses(
    session: Session, names: Sequence[str], unfinished: Collection[str]
) -> dict[str, dict[int, float | None]]:
    columns = PointRow.job, PointRow.epoch, func.avg(PointRow.loss)
    mine = (PointRow.job.in_(names), PointRow.loss.is_not(None))
    query = select(*columns).where(*mine).group_by(PointRow.job, PointRow.epoch)
    found: dict[str, dict[int, float | None]] = {}
    for job, epoch, loss in session.execute(query):
        found.setdefault(job, {})[epoch + 1] = loss  # epochs are counted from 0
    for job in found.keys() & set(unfinished):
        del found[job][max(found[job])]
    return {job: curve for job, curve in found.items() if curve}


def _trial_jobs(sweep: str) -> Any:
    mine = (JobRow.sweep == sweep, JobRow.trial.is_not(None))
    return select(JobRow.name, JobRow.trial, JobRow.phase).where(*mine)


def _record(row: TrialRow) -> TrialRecord:
    state, notes = TrialState(row.state), row.attributes or {}
    return TrialRecord(row.sweep, row.number, row.parameters, state, row.value, notes)


def _insert(
    session: Session, sweep: str, parameters: Sequence[Mapping[str, Any]], first: int
) -> None:
    rows = [
        {
            "sweep": sweep,
            "number": first + index,
            "parameters": dict(values),
            "state": TrialState.WAITING.value,
        }
        for index, values in enumerate(parameters)
    ]
    if rows:
        session.execute(insert(TrialRow), rows)


def _check_names_free(session: Session, sweep: str, num_trials: int) -> None:
    like = JobRow.name.startswith(f"{sweep}-", autoescape=True)
    own = or_(JobRow.sweep.is_(None), JobRow.sweep != sweep)
    for name in session.scalars(select(JobRow.name).where(like, own)):
        part = _parts(name)
        if part is not None and part[0] == sweep and part[1] < num_trials:
            raise JobExistsError(
                f"a job named {name!r} already exists, which would be the name of a trial of sweep "
                f"{sweep!r}; give the sweep another name"
            )


def _state_of(state: JobState) -> TrialState:
    if state.phase is Phase.COMPLETE:
        return TrialState.COMPLETE
    if state.reason == PRUNED:
        return TrialState.PRUNED
    return TrialState.CANCELLED if state.cancelled else TrialState.FAILED
