"""Records of the store: immutable copies of its rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from pipollux_sched.lifecycle import (
    ChangeStage,
    Condition,
    Dependency,
    Intent,
    JobState,
    Membership,
    PendingResize,
    Phase,
    When,
)
from pipollux_sched.spec.variables import hide_values

from .tables import AttemptRow, JobRow, NodeRow


@dataclass(frozen=True)
class JobRecord:
    """A job in the store."""

    name: str
    spec: Mapping[str, Any]
    """The `JobSpec` as JSON."""
    token: str
    """The token that the job's processes send to the scheduler."""
    submitted_at: float
    ended_at: float | None
    deadline_at: float | None
    """Time at which the job is ended, complete or not; None: never."""
    state: JobState
    sweep: str | None = None
    """The sweep that it is a trial of; its own name: it is the sweep. None: it is neither."""
    trial: int | None = None
    """Number of the trial; None: it is none."""
    parameters: Mapping[str, Any] | None = None
    """Parameters of the trial."""

    @property
    def is_sweep(self) -> bool:
        """Whether it is a sweep, which has trials and no processes."""
        return self.sweep is not None and self.trial is None

    @property
    def phase(self) -> Phase:
        """Short for ``state.phase``."""
        return self.state.phase

    @property
    def ready_at(self) -> float:
        """The time from which it could have started: its submission, unless it waited for jobs."""
        return self.submitted_at if self.state.ready_at is None else self.state.ready_at

    def to_json_object(self) -> dict[str, Any]:
        """Return the job as plain JSON data, without its token."""
        state = asdict(self.state)
        conditions = state.pop("conditions")
        membership = state.pop("membership") if self.state.running_on else None
        return {
            "name": self.name,
            "submitted_at": self.submitted_at,
            "ended_at": self.ended_at,
            "deadline_at": self.deadline_at,
            **state,
            "membership": membership,
            "num_stages": self.state.num_stages or self.spec.get("num_stages", 1),
            "reason": self.state.reason,
            "message": self.state.message,
            "conditions": conditions,
            "sweep": self.sweep,
            "trial": self.trial,
            "parameters": None if self.parameters is None else dict(self.parameters),
            "spec": hide_values(self.spec),
        }


@dataclass(frozen=True)
class AttemptRecord:
    """One membership of an attempt of a job; most attempts have one."""

    job: str
    attempt: int
    membership: int
    """Number of the membership; later ones began with an elastic resize."""
    nodes: tuple[str, ...]
    num_stages: int
    created_at: float
    started_at: float | None
    first_step_at: float | None
    first_step: int | None
    restart_seconds: float | None
    """Seconds from the previous attempt's stop to the first step of this one; None: unknown."""
    pause_seconds: float | None
    """Pause of the elastic resize, in seconds; None: the membership began with a start."""
    stopping_at: float | None
    ended_at: float | None
    outcome: str | None
    intent: str | None


class NodeCondition(StrEnum):
    """Whether a node is available to jobs."""

    READY = "ready"
    DRAINING = "draining"
    """No new replicas are placed here, and jobs leave, except non-preemptible ones."""
    DEAD = "dead"
    """The node is lost; its jobs are restarted elsewhere."""


@dataclass(frozen=True)
class NodeRecord:
    """A node in the store."""

    name: str
    slots: int
    kind: str
    spec: Mapping[str, Any]
    """The `NodeSpec` as JSON."""
    condition: NodeCondition
    reason: str
    """The reason for the condition, as given by a user; often empty."""
    since: float
    """Time of the condition, in seconds since the epoch."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """Progress of a job at one optimizer step."""

    time: float
    step: int
    epoch: int
    samples: int
    """Samples trained so far, over all attempts."""
    loss: float | None
    batch_size: int
    atomic_bsz: int
    accum_steps: int
    num_replicas: int
    step_time: float
    predicted_step_time: float | None
    goodput: float | None
    efficiency: float | None
    num_epochs: int | None = None
    """Number of epochs of the job; None: not reported."""


@dataclass(frozen=True)
class Timeline:
    """When each stage worked on each micro-batch during one optimizer step."""

    step: int
    num_stages: int
    num_microbatches: int
    events: tuple[tuple[int, int, str, float, float], ...]
    """(stage, micro-batch, "forward" or "backward", start, end), in seconds."""
    schedule: str = "gpipe"
    """The pipeline schedule."""


_SAME = (
    *("attempt", "num_stages", "running_stages", "training", "suspended"),
    *("failures", "interruptions", "max_restarts", "first_attempt", "ready_at"),
)
"""Fields that a job's state and its row have in the same form."""


def job_state(row: JobRow) -> JobState:
    """Return a job's state from its row."""
    conditions = tuple(
        Condition(
            Phase(entry["type"]), entry["status"], entry["reason"], entry["message"], entry["time"]
        )
        for entry in row.conditions
    )
    return JobState(
        phase=Phase(row.phase),
        conditions=conditions,
        assigned=tuple(row.assigned),
        running_on=tuple(row.running_on),
        intent=Intent(row.intent) if row.intent else None,
        membership=_membership(row),
        waits_for=tuple(Dependency(e["job"], When(e["when"])) for e in row.waits_for or ()),
        **{name: getattr(row, name) for name in _SAME},
    )


def _membership(row: JobRow) -> Membership:
    if not row.running_on or row.membership is None:
        return Membership()
    data = dict(row.membership)
    change = data.pop("change")
    data["replicas"], data["lost"] = tuple(data["replicas"]), tuple(data["lost"])
    if change is not None:
        listed = {name: tuple(change[name]) for name in ("replicas", "nodes", "waiting_to_join")}
        stage = ChangeStage(change["stage"])
        data["change"] = PendingResize(**{**change, **listed, "stage": stage})
    return Membership(**data)


def write_job_state(row: JobRow, state: JobState) -> None:
    """Write a job's state into its row."""
    row.phase = state.phase.value
    row.conditions = [{**asdict(entry), "type": entry.type.value} for entry in state.conditions]
    row.assigned = list(state.assigned)
    row.running_on = list(state.running_on)
    row.intent = state.intent.value if state.intent else None
    for name in _SAME:
        setattr(row, name, getattr(state, name))
    row.membership = asdict(state.membership) if state.running_on else None
    waits = [{"job": entry.job, "when": entry.when.value} for entry in state.waits_for]
    row.waits_for = waits or None


def job_record(row: JobRow) -> JobRecord:
    """Return a copy of a job's row."""
    times = row.submitted_at, row.ended_at, row.deadline_at
    of_sweep = row.sweep, row.trial, row.parameters
    return JobRecord(row.name, row.spec, row.token, *times, job_state(row), *of_sweep)


def node_record(row: NodeRow) -> NodeRecord:
    """Return a copy of a node's row."""
    condition = NodeCondition(row.condition)
    return NodeRecord(row.name, row.slots, row.kind, row.spec, condition, row.reason, row.since)


def attempt_record(row: AttemptRow) -> AttemptRecord:
    """Return a copy of an attempt's row."""
    values = {name: getattr(row, name) for name in AttemptRecord.__dataclass_fields__}
    return AttemptRecord(**{**values, "nodes": tuple(row.nodes)})
