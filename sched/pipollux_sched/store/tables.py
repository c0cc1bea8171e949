"""The tables of the store; times are seconds since the epoch.

Progress points are by far the most numerous events, so they have a table with their own columns:
`points` has the values of the row in `events` with the same id. A change of a table needs a
revision in `migrations/versions`, which is named in `schema.py`.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Double,
    ForeignKey,
    Index,
    Integer,
    UniqueConstraint,
    text,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column


class Base(DeclarativeBase):
    """Common base of all tables."""

    type_annotation_map = {  # noqa: RUF012  # SQLAlchemy's
        dict[str, Any]: JSON,
        list[str]: JSON,
        list[dict[str, Any]]: JSON,
        float: Double(),
        # Ids of events and counts of samples exceed 32 bits, a limit that SQLite does not have.
        int: BigInteger().with_variant(Integer(), "sqlite"),
    }


class MetaRow(Base):
    """Facts about the store itself, such as the version of its schema."""

    __tablename__ = "meta"

    key: Mapped[str] = mapped_column(primary_key=True)
    value: Mapped[str]


class JobRow(Base):
    """A job: its spec and its current state."""

    __tablename__ = "jobs"
    __table_args__ = (
        # So that the jobs that wait for another one are found without reading all.
        Index(
            "jobs_that_wait",
            "id",
            sqlite_where=text("waits_for IS NOT NULL"),
            postgresql_where=text("waits_for IS NOT NULL"),
        ),
        Index(
            "jobs_of_sweeps",
            "sweep",
            "trial",
            sqlite_where=text("sweep IS NOT NULL"),
            postgresql_where=text("sweep IS NOT NULL"),
        ),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(unique=True)
    spec: Mapped[dict[str, Any]]
    token: Mapped[str]
    submitted_at: Mapped[float]
    ended_at: Mapped[float | None]
    deadline_at: Mapped[float | None]
    phase: Mapped[str]
    conditions: Mapped[list[dict[str, Any]]]
    attempt: Mapped[int]
    assigned: Mapped[list[str]]
    num_stages: Mapped[int | None]
    running_on: Mapped[list[str]]
    running_stages: Mapped[int | None]
    training: Mapped[bool]
    intent: Mapped[str | None]
    suspended: Mapped[bool]
    failures: Mapped[int]
    interruptions: Mapped[int] = mapped_column(server_default="0")
    max_restarts: Mapped[int]
    first_attempt: Mapped[int]
    membership: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    waits_for: Mapped[list[dict[str, Any]] | None] = mapped_column(JSON(none_as_null=True))
    ready_at: Mapped[float | None]
    sweep: Mapped[str | None]
    trial: Mapped[int | None]
    parameters: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))


class TrialRow(Base):
    """A trial of a sweep, whether or not it has a job yet."""

    __tablename__ = "trials"

    sweep: Mapped[str] = mapped_column(ForeignKey("jobs.name"), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True)
    parameters: Mapped[dict[str, Any]]
    state: Mapped[str]
    value: Mapped[float | None]
    attributes: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))


class MetricRow(Base):
    """A value of a metric that a job has reported."""

    __tablename__ = "metrics"

    job: Mapped[str] = mapped_column(ForeignKey("jobs.name"), primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True)
    value: Mapped[float | None]
    time: Mapped[float]


class HintsRow(Base):
    """The latest hints of a job."""

    __tablename__ = "hints"

    job: Mapped[str] = mapped_column(ForeignKey("jobs.name"), primary_key=True)
    attempt: Mapped[int]
    time: Mapped[float]
    hints: Mapped[dict[str, Any]]
    first_gradients: Mapped[dict[str, Any] | None]
    """`gradParams` of its first hints that had any."""


class AttemptRow(Base):
    """One membership of an attempt of a job; an elastic resize ends it, and begins the next."""

    __tablename__ = "attempts"
    __table_args__ = (UniqueConstraint("job", "attempt", "membership"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    job: Mapped[str] = mapped_column(ForeignKey("jobs.name"))
    attempt: Mapped[int]
    membership: Mapped[int] = mapped_column(server_default="1")
    nodes: Mapped[list[str]]
    num_replicas: Mapped[int]
    num_stages: Mapped[int]
    created_at: Mapped[float]
    started_at: Mapped[float | None]
    first_step_at: Mapped[float | None]
    first_step: Mapped[int | None]
    restart_seconds: Mapped[float | None]
    pause_seconds: Mapped[float | None]
    stopping_at: Mapped[float | None]
    ended_at: Mapped[float | None]
    outcome: Mapped[str | None]
    intent: Mapped[str | None]
    launch: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    stopped_step: Mapped[int | None]


class EventRow(Base):
    """One entry of the event log, in the order of ids."""

    __tablename__ = "events"
    __table_args__ = (Index("events_by_job", "job", "type", "id"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    time: Mapped[float]
    type: Mapped[str]
    job: Mapped[str | None]
    attempt: Mapped[int | None]
    data: Mapped[dict[str, Any]]


class PointRow(Base):
    """The progress of the event with the same id."""

    __tablename__ = "points"
    __table_args__ = (Index("points_by_job", "job", "event"),)

    event: Mapped[int] = mapped_column(ForeignKey("events.id"), primary_key=True)
    job: Mapped[str]
    time: Mapped[float]
    step: Mapped[int]
    epoch: Mapped[int]
    samples: Mapped[int]
    loss: Mapped[float | None]
    batch_size: Mapped[int]
    atomic_bsz: Mapped[int]
    accum_steps: Mapped[int]
    num_replicas: Mapped[int]
    step_time: Mapped[float]
    predicted_step_time: Mapped[float | None]
    goodput: Mapped[float | None]
    efficiency: Mapped[float | None]
    num_epochs: Mapped[int | None]


class NodeRow(Base):
    """A node of the cluster that the scheduler serves."""

    __tablename__ = "nodes"

    name: Mapped[str] = mapped_column(primary_key=True)
    slots: Mapped[int]
    kind: Mapped[str]
    spec: Mapped[dict[str, Any]]
    condition: Mapped[str]
    reason: Mapped[str]
    since: Mapped[float]


class ReplicaRow(Base):
    """Address of a replica of a job's current attempt."""

    __tablename__ = "replicas"

    job: Mapped[str] = mapped_column(ForeignKey("jobs.name"), primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True)
    replica: Mapped[int] = mapped_column(primary_key=True)
    address: Mapped[str]
    time: Mapped[float]


class HeartbeatRow(Base):
    """The last heartbeat of a replica of a job's running attempt."""

    __tablename__ = "heartbeats"

    job: Mapped[str] = mapped_column(ForeignKey("jobs.name"), primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True)
    replica: Mapped[int] = mapped_column(primary_key=True)
    time: Mapped[float]
    step: Mapped[int | None]
    finished: Mapped[bool]


class NotifyRuleRow(Base):
    """A destination of notifications: a channel of a user, or an entry of a job."""

    __tablename__ = "notify_rules"
    __table_args__ = (UniqueConstraint("owner", "name"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    owner: Mapped[str]
    name: Mapped[str]
    spec: Mapped[dict[str, Any]]
    created_at: Mapped[float]


class NotificationRow(Base):
    """A notification. Those of deleted jobs stay, so `job` is no foreign key."""

    __tablename__ = "notifications"
    __table_args__ = (
        Index("notifications_by_state", "state", "due_at"),
        Index("notifications_by_channel", "channel", "created_at"),
        Index("notifications_by_job", "job"),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    message: Mapped[str] = mapped_column(unique=True)
    channel: Mapped[str]
    label: Mapped[str]
    target: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    kind: Mapped[str]
    job: Mapped[str | None]
    items: Mapped[list[dict[str, Any]]]
    num_items: Mapped[int]
    created_at: Mapped[float]
    due_at: Mapped[float]
    attempts: Mapped[int]
    state: Mapped[str]
    finished_at: Mapped[float | None]
    error: Mapped[str | None]
