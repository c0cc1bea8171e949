"""The answers, field by field: what the REST interface sends and the command line prints."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self

from pydantic import BaseModel, ConfigDict

from pipollux_sched.lifecycle import CANCELLED, Intent, Phase
from pipollux_sched.report.event_text import told_line
from pipollux_sched.store import JobRecord, ListedPhase, NodeCondition, Point


class View(BaseModel):
    """An answer; it has these fields and no others."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data, as JSON has it."""
        return self.model_dump(mode="json")


class ConditionView(View):
    """One condition of a job; there is one for each phase that it has been in."""

    type: Phase
    status: bool
    reason: str
    message: str
    time: float


class JobView(View):
    """A job; times are seconds since the epoch."""

    name: str
    submitted_at: float
    ended_at: float | None
    deadline_at: float | None
    phase: Phase
    reason: str
    message: str
    conditions: list[ConditionView]
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

    @classmethod
    def of(cls, job: JobRecord, **more: Any) -> Self:
        """Describe a job of the store; `more` are the fields of a longer description."""
        return cls.model_validate({**job.to_json_object(), **more})

    @property
    def listed_phase(self) -> ListedPhase:
        """The phase as people are told it."""
        if self.phase is Phase.FAILED and self.reason == CANCELLED:
            return ListedPhase.CANCELLED
        if self.phase is Phase.RUNNING and self.intent is not None:
            return ListedPhase.STOPPING
        return ListedPhase(self.phase.value)

    @property
    def holds(self) -> tuple[list[str], int]:
        """The node of each replica that the job holds slots for, and K of these replicas."""
        if self.running_on:
            return self.running_on, self.running_stages or int(self.spec.get("num_stages", 1))
        return self.assigned, self.num_stages


class ListedJob(JobView):
    """A job in a list, with how often it was running_on and its latest report."""

    num_generations: int
    progress: Point | None


class GenerationView(View):
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


class ReplicaView(View):
    """A replica of the generation that runs; `heard_seconds` ago it gave its last sign of life."""

    replica: int
    node: str
    address: str | None
    heard_seconds: float | None
    step: int | None


class EventView(View):
    """An event; what else it holds depends on its type."""

    model_config = ConfigDict(extra="allow", frozen=True)

    time: float
    id: int
    type: str
    job: str | None
    generation: int | None


class EventSummary(View):
    """An event as people are told of it."""

    time: float
    id: int
    type: str
    job: str | None
    generation: int | None
    text: str

    @property
    def line(self) -> str:
        """The event as one line for people."""
        return told_line(self.time, self.job, self.text)


class JobDetails(JobView):
    """All that is known of a job but its curves; `number`: its place in the order of jobs.

    Each of the last `events` is an object as `EventView` has it.
    """

    number: int
    num_restarts: int
    generations: list[GenerationView]
    replicas: list[ReplicaView]
    progress: Point | None
    hints: dict[str, Any] | None
    events: list[dict[str, Any]]


class NoiseView(View):
    """A job's gradient as it measured it; `noise_scale` in samples."""

    time: float
    norm: float
    var: float
    noise_scale: float | None


class JobCurves(JobDetails):
    """All that is known of a job, with its curves."""

    points: list[Point]
    noise: list[NoiseView]


class DeletedJobView(View):
    """A job that is gone: how it had ended, and the folders that are left of it."""

    name: str
    phase: Phase
    reason: str
    left: list[str]


class LimitKind(StrEnum):
    """What may keep a job from having more, or other, than it has."""

    SUSPENDED = "suspended"
    STOPPING = "stopping"
    STARTING = "starting"
    WAITS_TO_RETRY = "waits_to_retry"
    NOT_PREEMPTIBLE = "not_preemptible"
    DRAINING = "draining"
    MAX_REPLICAS = "max_replicas"
    PROFILED = "profiled"
    NO_ROOM = "no_room"
    HARMFUL = "harmful"
    NOT_WORTH_IT = "not_worth_it"
    MIN_REPLICAS = "min_replicas"


@dataclass(frozen=True)
class Limit:
    """One thing that keeps a job from having more, or other, than it has."""

    kind: LimitKind
    text: str
    """A sentence for people."""


@dataclass(frozen=True)
class Alternative:
    """What a job would have with one replica more or fewer."""

    nodes: tuple[str, ...]
    """Node of each replica; empty where no node could ever hold them."""
    num_replicas: int
    speedup: float | None
    """Predicted, over one replica; None: nothing is known of it."""
    batch_size: int | None
    fits: bool
    """Whether there is room for it now."""


class ExplanationView(View):
    """The explanation of a job's allocation; speedups are predicted, over one replica."""

    name: str
    phase: Phase
    reason: str
    message: str
    nodes: list[str]
    num_stages: int
    assigned: list[str]
    intent: Intent | None
    speedup: float | None
    batch_size: int | None
    last_decision: dict[str, Any] | None
    more: Alternative | None
    fewer: Alternative | None
    limits: list[Limit]
    waits_for: str | None


@dataclass(frozen=True)
class PlannedChange:
    """What one job has, and what it would have."""

    job: str
    previous: tuple[str, ...]
    """Node of each replica now."""
    previous_num_stages: int | None
    """K now; None where it holds nothing."""
    previous_speedup: float | None
    """Predicted by the job's model; None: nothing is known."""
    nodes: tuple[str, ...]
    """Node of each replica then."""
    num_stages: int | None
    speedup: float | None
    batch_size: int | None
    changes: bool
    """Whether anything of it is other than now."""
    why: str


class PlanView(View):
    """What the scheduler would decide now, by this policy: a line for each job it can decide on."""

    policy: str
    jobs: list[PlannedChange]


class NodeView(View):
    """A node, with the slots of it that each job holds."""

    name: str
    kind: str
    slots: int
    used: int
    free: int
    jobs: dict[str, int]
    condition: NodeCondition
    since: float
    reason: str


class NodeDetails(NodeView):
    """A node with what its cluster file says of it."""

    spec: dict[str, Any]


class JobLine(View):
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


class GenerationLine(View):
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


class ClusterView(View):
    """Everything at a glance, at this time by the scheduler's clock.

    `phases` counts all jobs; `jobs` are those of the page that was asked for, `num_found` how many
    there are on all pages.
    """

    time: float
    policy: str
    nodes: dict[str, NodeView]
    phases: dict[ListedPhase, int]
    goodput: float | None
    oldest_generation: float | None
    jobs: list[JobLine]
    num_found: int
    events: list[EventSummary]
    last_event: int


class UsageView(View):
    """How full the nodes were: the mean number of slots held, in equal parts from `since` on."""

    since: float
    until: float
    nodes: dict[str, list[float]]


class LogTail(View):
    """The last lines of one replica."""

    generation: int
    replica: int
    lines: list[str]
