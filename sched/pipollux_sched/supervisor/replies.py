"""What is answered, field by field: for the OpenAPI document, and for tests to hold it to."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from pipollux_sched.lifecycle import Intent, Phase
from pipollux_sched.store import NodeCondition, Point


class _Reply(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Refusal(_Reply):
    """Why a request was refused, in one sentence."""

    detail: str


class Health(_Reply):
    """The scheduler is there."""

    status: Literal["ok"]


class Deciding(_Reply):
    """A decision is being made."""

    status: Literal["deciding"]


class ConditionReply(_Reply):
    """One condition of a job; there is one for each phase that it has been in."""

    type: Phase
    status: bool
    reason: str
    message: str
    time: float


class JobReply(_Reply):
    """A job; times are seconds since the epoch."""

    name: str
    submitted_at: float
    ended_at: float | None
    deadline_at: float | None
    phase: Phase
    reason: str
    message: str
    conditions: list[ConditionReply]
    generation: int
    allocation: list[str]
    num_stages: int
    launched: list[str]
    launched_stages: int | None
    settled: bool
    intent: Intent | None
    held: bool
    failures: int
    max_restarts: int
    spec: dict[str, Any]


class GenerationReply(_Reply):
    """One launch of a job."""

    job: str
    generation: int
    nodes: list[str]
    num_stages: int
    launched_at: float
    started_at: float | None
    port: int | None
    first_step_at: float | None
    first_step: int | None
    restart_seconds: float | None
    stopping_at: float | None
    ended_at: float | None
    outcome: str | None
    intent: str | None


class ReplicaReply(_Reply):
    """A replica of the generation that runs."""

    replica: int
    node: str
    address: str | None
    heard_seconds: float | None
    step: int | None


class NoiseReply(_Reply):
    """A job's gradient as it measured it; `noise_scale` in samples."""

    time: float
    norm: float
    var: float
    noise_scale: float | None


class JobPageReply(JobReply):
    """A job with all that is known of it."""

    hints: dict[str, Any] | None
    generations: list[GenerationReply]
    num_restarts: int
    replicas: list[ReplicaReply]
    points: list[Point]
    noise: list[NoiseReply]


class LogReply(_Reply):
    """The last lines of one replica."""

    generation: int
    replica: int
    lines: list[str]


class ClusterNodeReply(_Reply):
    """A node's slots and condition."""

    slots: int
    kind: str
    free: int
    condition: NodeCondition
    reason: str
    since: float


class NodeReply(ClusterNodeReply):
    """A node, with how many replicas of each job are there."""

    name: str
    replicas: dict[str, int]


class ClusterReply(_Reply):
    """The nodes by name, and the policy."""

    nodes: dict[str, ClusterNodeReply]
    policy: str


class EventReply(BaseModel):
    """An event; what else it holds depends on its type."""

    model_config = ConfigDict(extra="allow")

    id: int
    time: float
    type: str
    job: str | None
    generation: int | None


class ReplicaPlace(_Reply):
    """One replica that has said where it is."""

    replica: int
    address: str


class DiscoveryReply(_Reply):
    """The replicas of a generation that have said where they are, in order."""

    generation: int
    num_replicas: int
    complete: bool
    replicas: list[ReplicaPlace]
