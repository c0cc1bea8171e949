"""What is answered, field by field; nothing else is let out."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from pipollux_sched.lifecycle import Intent, Phase
from pipollux_sched.store import ListedPhase, NodeCondition, Point


class _Reply(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Refusal(_Reply):
    """Why a request was refused, in one sentence."""

    detail: str


_REFUSALS = {
    401: "The token is missing or wrong.",
    404: "There is nothing of this name.",
    409: "It does not fit the job's present state: another generation, or a name that is taken.",
    413: "The body is larger than 1 MiB.",
    422: "The request makes no sense; the sentence names the field and what is allowed.",
    429: "Too many requests; Retry-After says when to ask again.",
    503: "The scheduler is being stopped, or as many wait already as can.",
}


def refusals(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Describe when requests are refused: those that bear a token always may be, and as named."""
    return {
        status: {"model": Refusal, "description": _REFUSALS[status]}
        for status in sorted((401, 422, 429, 503, *statuses))
    }


def text_reply(media_type: str) -> dict[int | str, dict[str, Any]]:
    """Describe an answer that is text of a type, and no JSON."""
    return {200: {"content": {media_type: {"schema": {"type": "string"}}}}}


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
    assigned: list[str]
    num_stages: int
    running_on: list[str]
    running_stages: int | None
    training: bool
    intent: Intent | None
    suspended: bool
    failures: int
    max_restarts: int
    first_generation: int
    spec: dict[str, Any]


class DeletedReply(_Reply):
    """A job that is gone: how it had ended, and the folders that are left of it."""

    name: str
    phase: Phase
    reason: str
    left: list[str]


class GenerationReply(_Reply):
    """One generation of a job."""

    job: str
    generation: int
    nodes: list[str]
    num_stages: int
    created_at: float
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
    """A job with all that is known of it; `number`: its place in the order in which jobs came."""

    number: int
    hints: dict[str, Any] | None
    generations: list[GenerationReply]
    num_restarts: int
    replicas: list[ReplicaReply]
    points: list[Point]
    noise: list[NoiseReply]


class AlternativeReply(_Reply):
    """What a job would have with one replica more or fewer."""

    nodes: list[str]
    num_replicas: int
    speedup: float | None
    batch_size: int | None
    fits: bool


class LimitReply(_Reply):
    """One thing that keeps a job from having more, or other, than it has."""

    kind: str
    text: str


class ExplanationReply(_Reply):
    """The explanation of a job's allocation; speedups are predicted, over one replica."""

    name: str
    phase: Phase
    reason: str
    message: str
    nodes: list[str]
    num_stages: int
    speedup: float | None
    batch_size: int | None
    last_decision: dict[str, Any] | None
    more: AlternativeReply | None
    fewer: AlternativeReply | None
    limits: list[LimitReply]
    waits_for: str | None


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


class JobLine(_Reply):
    """A job at a glance; the last eight fields are of its latest report."""

    number: int
    name: str
    phase: ListedPhase
    reason: str
    message: str
    submitted_at: float
    ended_at: float | None
    nodes: list[str]
    num_stages: int
    generation: int
    intent: Intent | None
    suspended: bool
    num_restarts: int
    step: int | None
    epoch: int | None
    num_epochs: int | None
    loss: float | None
    batch_size: int | None
    step_time: float | None
    goodput: float | None
    efficiency: float | None


class GenerationLine(_Reply):
    """A generation at a glance; `number` is that of its job."""

    job: str
    number: int
    generation: int
    nodes: list[str]
    num_stages: int
    created_at: float
    first_step_at: float | None
    stopping_at: float | None
    ended_at: float | None
    outcome: str | None
    intent: str | None


class ToldEvent(_Reply):
    """An event as people are told of it."""

    id: int
    time: float
    type: str
    job: str | None
    generation: int | None
    text: str


class OverviewNode(ClusterNodeReply):
    """A node at a glance: so many of its slots are held, by so many jobs."""

    used: int
    num_jobs: int


class OverviewReply(_Reply):
    """Everything at a glance, at this time by the scheduler's clock.

    `phases` counts all jobs; `jobs` are those of the page that was asked for, `num_found` how many
    there are on all pages.
    """

    time: float
    policy: str
    nodes: dict[str, OverviewNode]
    phases: dict[ListedPhase, int]
    goodput: float | None
    oldest_generation: float | None
    jobs: list[JobLine]
    num_found: int
    events: list[ToldEvent]
    last_event: int


class UsageReply(_Reply):
    """How full the nodes were: the mean number of slots held, in equal parts from `since` on."""

    since: float
    until: float
    nodes: dict[str, list[float]]


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
