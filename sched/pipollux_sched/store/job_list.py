"""Lists of jobs: filtered, sorted, counted and paged by the database."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from sqlalchemy import ColumnElement, Select, String, and_, case, cast, func, or_, select
from sqlalchemy.orm import Session

from pipollux_sched.lifecycle import CANCELLED, PRUNED, Intent, Phase

from . import journal
from .attempts import ENDED, has_reason
from .records import Point
from .tables import JobRow, PointRow


class ListedPhase(StrEnum):
    """The phase of a job as shown in lists, in their order."""

    RUNNING = "Running"
    STOPPING = "Stopping"
    """It runs, and was asked to stop."""
    RESTARTING = "Restarting"
    CREATED = "Created"
    QUEUED = "Queued"
    SUSPENDED = "Suspended"
    FAILED = "Failed"
    CANCELLED = "Cancelled"
    """It failed because its user cancelled it."""
    COMPLETE = "Complete"

    @classmethod
    def _missing_(cls, value: object) -> ListedPhase | None:
        asked = str(value).lower()
        return next((phase for phase in cls if phase.value.lower() == asked), None)


class JobOrder(StrEnum):
    """Sort keys for lists of jobs."""

    USUAL = "usual"
    """Jobs that hold slots first, ended jobs last; within each group, the latest first."""
    SUBMITTED = "submitted"
    NAME = "name"
    PHASE = "phase"
    SLOTS = "slots"
    NODES = "nodes"
    EPOCH = "epoch"
    STEP = "step"
    LOSS = "loss"
    GOODPUT = "goodput"
    RESTARTS = "restarts"
    AGE = "age"


@dataclass(frozen=True)
class JobQuery:
    """Filter, order and page of a list of jobs."""

    phases: Collection[ListedPhase] = ()
    """Only jobs in one of these phases; empty: all phases."""
    name: str = ""
    """Only jobs whose name contains this text, ignoring case."""
    order: JobOrder = JobOrder.USUAL
    descending: bool = False
    offset: int = 0
    limit: int | None = None
    """Largest number of jobs; None: all."""
    trials: bool = True
    """Whether the jobs of trials are in the list, besides their sweep."""


@dataclass(frozen=True)
class JobSummary:
    """A job as shown in lists."""

    number: int
    """Its place in the order of submission, from 1; determines its colour."""
    name: str
    phase: ListedPhase
    reason: str
    message: str
    submitted_at: float
    ended_at: float | None
    nodes: tuple[str, ...]
    """Node of each replica that holds slots."""
    num_stages: int
    """K of these replicas; if there are none, the K planned for the job."""
    attempt: int
    intent: Intent | None
    suspended: bool
    point: Point | None

    @property
    def num_restarts(self) -> int:
        """Attempts after the first."""
        return max(self.attempt - 1, 0)


@dataclass(frozen=True)
class JobPage:
    """A page of a list of jobs."""

    jobs: tuple[JobSummary, ...]
    num_found: int
    """Number of jobs that match the filter, on all pages."""


@dataclass(frozen=True)
class Holder:
    """A job that holds slots, or was assigned slots."""

    job: str
    number: int
    nodes: tuple[str, ...]
    """Node of each replica, including replicas that are about to join."""
    num_stages: int


_HELD = func.json_array_length(JobRow.running_on)
_GIVEN = func.json_array_length(JobRow.assigned)
_OWN_STAGES = func.coalesce(JobRow.spec["num_stages"].as_integer(), 1)
_STAGES = case(
    (_HELD > 0, func.coalesce(JobRow.running_stages, _OWN_STAGES)),
    else_=func.coalesce(JobRow.num_stages, _OWN_STAGES),
)
_REPLICAS = case((_HELD > 0, _HELD), else_=_GIVEN)
_CANCELLED = or_(has_reason(JobRow.conditions, CANCELLED), has_reason(JobRow.conditions, PRUNED))
_PHASE = case(
    (and_(JobRow.phase == Phase.FAILED.value, _CANCELLED), ListedPhase.CANCELLED.value),
    (
        and_(JobRow.phase == Phase.RUNNING.value, JobRow.intent.is_not(None)),
        ListedPhase.STOPPING.value,
    ),
    else_=JobRow.phase,
)
_RANK = case(
    {phase.value: rank for rank, phase in enumerate(ListedPhase)}, value=_PHASE, else_=len(Phase)
)
_IS_UNFINISHED = JobRow.phase.not_in(ENDED)


def count(session: Session, query: JobQuery) -> int:
    """Return the number of jobs that match the filter of a query, on all pages."""
    matching = select(func.count()).select_from(JobRow).where(_filter(query))
    return session.scalar(matching) or 0


def page_of(columns: Select[Any], query: JobQuery, now: float) -> Select[Any]:
    """Return a selection of columns of `JobRow`, reduced to the page of a query."""
    with_points = columns.where(_filter(query)).outerjoin(
        PointRow, PointRow.event == journal.newest_point()
    )
    ordered = with_points.order_by(*_order(query, now))
    return ordered.offset(query.offset).limit(query.limit)


def page(session: Session, query: JobQuery, now: float) -> JobPage:
    """Return the jobs of a query; the ages of jobs that have not ended extend to `now`."""
    wanted, num_found = _filter(query), count(session, query)
    found = list(session.scalars(page_of(select(JobRow.id), query, now)))
    lines = _lines(session, found if query.limit is not None else None, wanted)
    return JobPage(tuple(lines[number] for number in found if number in lines), num_found)


def count_by_phase(session: Session, *, trials: bool = True) -> dict[ListedPhase, int]:
    """Return the number of jobs in each phase that has any, in the order of lists."""
    query = select(_PHASE, func.count()).where(_filter(JobQuery(trials=trials))).group_by(_PHASE)
    counts = {row[0]: row[1] for row in session.execute(query)}
    return {phase: counts[phase.value] for phase in ListedPhase if phase.value in counts}


def holders(session: Session) -> list[Holder]:
    """Return the jobs that hold slots or were assigned slots: at most one per slot."""
    columns = (
        JobRow.id,
        JobRow.name,
        JobRow.running_on,
        JobRow.membership,
        JobRow.assigned,
        _STAGES,
    )
    rows = session.execute(
        select(*columns).where(_IS_UNFINISHED, _REPLICAS > 0).order_by(JobRow.id)
    )
    return [
        Holder(name, number, (*(running_on or assigned), *_joining(membership)), num_stages)
        for number, name, running_on, membership, assigned, num_stages in rows
    ]


def _joining(membership: Mapping[str, Any] | None) -> Iterator[str]:
    change = None if membership is None else membership["change"]
    if membership is None or change is None:
        return
    for replica, node in zip(change["replicas"], change["nodes"], strict=True):
        if replica not in membership["replicas"]:
            yield node


def goodput(session: Session) -> tuple[float, int]:
    """Return the total goodput of the running jobs, in samples/s, and the number that report it."""
    query = _of_running(func.sum(PointRow.goodput), func.count(PointRow.goodput))
    total, told = session.execute(query).one()
    return float(total or 0.0), int(told)


def goodputs(session: Session) -> dict[str, float]:
    """Return the last reported goodput of running jobs, in samples/s; others are left out."""
    query = _of_running(JobRow.name, PointRow.goodput).order_by(JobRow.id)
    return {name: told for name, told in session.execute(query) if told is not None}


def _of_running(*columns: Any) -> Select[Any]:
    query = (
        select(*columns)
        .select_from(JobRow)
        .join(PointRow, PointRow.event == journal.newest_point())
    )
    return query.where(JobRow.phase == Phase.RUNNING.value)


def _filter(query: JobQuery) -> ColumnElement[bool]:
    conditions: list[ColumnElement[bool]] = []
    if query.phases:
        conditions.append(_PHASE.in_([phase.value for phase in query.phases]))
    if query.name:
        conditions.append(JobRow.name.icontains(query.name, autoescape=True))
    if not query.trials:
        conditions.append(JobRow.trial.is_(None))
    return and_(True, *conditions)


def _order(query: JobQuery, now: float) -> tuple[Any, ...]:
    """Return the sort keys; unknown values come last in either direction."""
    if query.order is JobOrder.USUAL:
        rank = case((_IS_UNFINISHED, _RANK), else_=len(ListedPhase))
        return rank, JobRow.ended_at.desc(), JobRow.submitted_at, JobRow.id
    if query.order is JobOrder.SUBMITTED:
        return (JobRow.id.desc() if query.descending else JobRow.id.asc(),)
    holds = _REPLICAS > 0
    values: dict[JobOrder, ColumnElement[Any]] = {
        JobOrder.NAME: JobRow.name.expression,
        JobOrder.PHASE: _RANK,
        JobOrder.SLOTS: _REPLICAS * _STAGES,
        JobOrder.NODES: case((holds, cast(JobRow.running_on, String))),
        JobOrder.EPOCH: PointRow.epoch.expression,
        JobOrder.STEP: PointRow.step.expression,
        JobOrder.LOSS: PointRow.loss.expression,
        JobOrder.GOODPUT: case((holds, PointRow.goodput)),
        JobOrder.RESTARTS: JobRow.attempt.expression,
        JobOrder.AGE: func.coalesce(JobRow.ended_at, now) - JobRow.submitted_at,
    }
    value = values[query.order]
    return (value.desc() if query.descending else value.asc()).nulls_last(), JobRow.id.asc()


def _lines(
    session: Session, ids: Collection[int] | None, wanted: ColumnElement[bool]
) -> dict[int, JobSummary]:
    """Return the summaries of jobs by number; None: of all matching jobs."""
    query = (
        select(JobRow, _PHASE, _STAGES, PointRow)
        .outerjoin(PointRow, PointRow.event == journal.newest_point())
        .where(wanted if ids is None else or_(False, JobRow.id.in_(ids)))
    )
    return {
        row.id: _line(row, ListedPhase(phase), num_stages, point)
        for row, phase, num_stages, point in session.execute(query)
    }


def _line(row: JobRow, phase: ListedPhase, num_stages: int, point: PointRow | None) -> JobSummary:
    present = next((one for one in row.conditions if one["type"] == row.phase), None)
    return JobSummary(
        number=row.id,
        name=row.name,
        phase=phase,
        reason="" if present is None else present["reason"],
        message="" if present is None else present["message"],
        submitted_at=row.submitted_at,
        ended_at=row.ended_at,
        nodes=tuple(row.running_on or row.assigned),
        num_stages=num_stages,
        attempt=row.attempt,
        intent=Intent(row.intent) if row.intent else None,
        suspended=row.suspended,
        point=None if point is None else journal.point_of(point),
    )
