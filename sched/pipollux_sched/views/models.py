"""Response models of the REST interface, which the command line also prints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from pydantic import BaseModel, ConfigDict

from pipollux_sched.lifecycle import CANCELLED, PRUNED, ChangeStage, Intent, Phase, When
from pipollux_sched.report.event_text import told_line
from pipollux_sched.spec.tokens import Role
from pipollux_sched.store import (
    DeliveryState,
    JobRecord,
    ListedPhase,
    NodeCondition,
    Point,
    TrialState,
)


class View(BaseModel):
    """Base of all response models; extra fields are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def to_dict(self) -> dict[str, Any]:
        """Return the answer as plain JSON data."""
        return self.model_dump(mode="json")


class ConditionView(View):
    """One condition of a job; there is one for each phase that the job has been in."""

    type: Phase
    status: bool
    reason: str
    message: str
    time: float


class ChangeView(View):
    """An elastic resize in progress: the new membership has `replicas` on `nodes`."""

    number: int
    replicas: list[int]
    nodes: list[str]
    stage: ChangeStage
    waiting_to_join: list[int]


class MembershipView(View):
    """The membership of the running attempt: `replicas` are ids in the order of ranks.

    `why_not`: the reason that the job cannot be resized elastically; null if it can. `fixed`:
    replicas, from id 0 on, that cannot leave without a restart, as servers run beside them.
    """

    number: int
    replicas: list[int]
    num_ids: int
    highest: int
    why_not: str | None
    failures: int
    failed_at: float
    lost: list[int]
    fixed: int = 0
    change: ChangeView | None


class DependencyView(View):
    """A job that another one waits for, and how it has to end."""

    job: str
    when: When


class JobView(View):
    """A job; times are seconds since the epoch.

    `waits_for`: the jobs that have to end before it may start; `ready_at`: when the last one ended.
    `sweep`: the sweep that the job is a trial of, with its number and parameters; of a sweep, which
    has no processes itself, its own name.
    """

    name: str
    submitted_at: float
    ended_at: float | None
    deadline_at: float | None
    phase: Phase
    reason: str
    message: str
    conditions: list[ConditionView]
    attempt: int
    assigned: list[str]
    num_stages: int
    running_on: list[str]
    running_stages: int | None
    training: bool
    membership: MembershipView | None
    intent: Intent | None
    suspended: bool
    failures: int
    interruptions: int
    max_restarts: int
    first_attempt: int
    waits_for: list[DependencyView]
    ready_at: float | None
    sweep: str | None
    trial: int | None
    parameters: dict[str, Any] | None
    spec: dict[str, Any]

    @classmethod
    def of(cls, job: JobRecord, **more: Any) -> Self:
        """Return the view of a job record; `more` are the fields of a subclass."""
        return cls.model_validate({**job.to_json_object(), **more})

    @property
    def listed_phase(self) -> ListedPhase:
        """The phase as shown in lists."""
        if self.phase is Phase.FAILED and self.reason in (CANCELLED, PRUNED):
            return ListedPhase.CANCELLED
        if self.phase is Phase.RUNNING and self.intent is not None:
            return ListedPhase.STOPPING
        return ListedPhase(self.phase.value)

    @property
    def holds(self) -> tuple[list[str], int]:
        """The node of each replica that the job holds slots for, and K, its stages."""
        if self.running_on:
            return self.running_on, self.running_stages or int(self.spec.get("num_stages", 1))
        return self.assigned, self.num_stages


class TrialView(View):
    """A trial of a sweep; `phase` is that of its `job`, null if it has none yet.

    `value`: the metric at its end, or the latest one; null: it has reported none.
    """

    number: int
    job: str
    parameters: dict[str, Any]
    state: TrialState
    phase: ListedPhase | None
    value: float | None


class SweepView(View):
    """A sweep, with the number of trials in each state, and the best complete trial."""

    name: str
    phase: ListedPhase
    message: str
    submitted_at: float
    ended_at: float | None
    user: str | None
    metric: str
    direction: str
    num_trials: int
    trial_states: dict[TrialState, int]
    best: TrialView | None


class SweepDetails(SweepView):
    """A sweep with its trials, by number; those that a search will propose are missing."""

    trials: list[TrialView]


class EstimateView(View):
    """An estimated moment: an 80 % interval with its median, in seconds since the epoch.

    Null: unknown, or more than 30 days ahead.
    """

    low: float | None
    median: float | None
    high: float | None


class ForecastView(View):
    """When a job starts (null: it has) and ends, by the forecast of `made_at`.

    `note`: what it leaves out, or why nothing is known.
    """

    made_at: float
    start: EstimateView | None
    end: EstimateView
    note: str | None = None


class JobForecastView(ForecastView):
    """The forecast of one job."""

    job: str


class PastForecastView(JobForecastView):
    """A recorded forecast of a job that has completed.

    `covered`: its end was in the interval; null: the forecast had no known end.
    """

    started_at: float
    ended_at: float
    covered: bool | None


class ForecastAccuracyView(View):
    """How the recorded forecasts of completed jobs turned out; shares are null without any.

    `num_ends` forecasts of an end are compared, and `num_starts` of a start that was still ahead;
    intervals without any known bound are not.
    `median_error` is that of the predicted end, relative to the time that was left.
    """

    num_ends: int
    ends_covered: float | None
    num_starts: int
    starts_covered: float | None
    median_error: float | None


class ForecastsView(View):
    """The forecasts of unfinished jobs, the accuracy of past ones, and the last 50 of these."""

    jobs: list[JobForecastView]
    accuracy: ForecastAccuracyView
    past: list[PastForecastView]


class ListedJob(JobView):
    """A job in a list, with its number of attempts, its latest report, and its forecast."""

    num_attempts: int
    progress: Point | None
    forecast: ForecastView | None = None


class AttemptView(View):
    """One membership of an attempt of a job; later memberships began with an elastic resize."""

    job: str
    attempt: int
    membership: int
    nodes: list[str]
    num_stages: int
    created_at: float
    started_at: float | None
    first_step_at: float | None
    first_step: int | None
    restart_seconds: float | None
    pause_seconds: float | None
    stopping_at: float | None
    ended_at: float | None
    outcome: str | None
    intent: str | None


class ReplicaView(View):
    """A replica of the running attempt; its last heartbeat was `heard_seconds` ago.

    `finished`: its script has ended, while other replicas still run.
    """

    replica: int
    node: str
    address: str | None
    heard_seconds: float | None
    step: int | None
    finished: bool


class EventView(View):
    """An event; its further fields depend on its type."""

    model_config = ConfigDict(extra="allow", frozen=True)

    time: float
    id: int
    type: str
    job: str | None
    attempt: int | None


class EventSummary(View):
    """An event with its summary sentence."""

    time: float
    id: int
    type: str
    job: str | None
    attempt: int | None
    text: str

    @property
    def line(self) -> str:
        """The event as one line of text."""
        return told_line(self.time, self.job, self.text)


class NotificationView(View):
    """A notification about `count` events, the last of them in words.

    `to`: its destination without what may be secret. `due_at`: the next attempt, null if it is
    delivered or was given up; `error`: why the last attempt failed.
    """

    message: str
    job: str | None
    kind: str
    count: int
    to: str
    text: str
    state: DeliveryState
    created_at: float
    attempts: int
    due_at: float | None
    finished_at: float | None
    error: str | None


class JobDetails(JobView):
    """The details of a job without its curves; `number`: its place in the order of jobs.

    The last `events` have the form of `EventView`. `changing`: an elastic resize in progress, in
    words; null: there is none. `devices`: those that it holds, where known. `planned_by`: the job
    whose hints are used until this job has sent its own; null: there is none, or it has sent its
    own. `notifications`: the last ones about it. `synchronization`: what pushes and pulls cost;
    null: not known, or replicas average gradients in every step.
    """

    number: int
    num_restarts: int
    num_resizes: int
    changing: str | None
    attempts: list[AttemptView]
    replicas: list[ReplicaView]
    progress: Point | None
    hints: dict[str, Any] | None
    planned_by: str | None
    forecast: ForecastView | None = None
    synchronization: str | None = None
    devices: list[JobDeviceView] = []
    events: list[dict[str, Any]]
    notifications: list[NotificationView] = []


class NoiseView(View):
    """A job's measured gradient statistics; `noise_scale` in samples."""

    time: float
    norm: float
    var: float
    noise_scale: float | None


class JobCurves(JobDetails):
    """The details of a job with its curves."""

    points: list[Point]
    noise: list[NoiseView]


class DeletedJobView(View):
    """A deleted job: its last phase, and the folders that remain."""

    name: str
    phase: Phase
    reason: str
    left: list[str]


@dataclass(frozen=True)
class PlannedChange:
    """The current and the planned allocation of one job."""

    job: str
    previous: tuple[str, ...]
    """Node of each current replica."""
    previous_num_stages: int | None
    """Current K; None if the job holds no slots."""
    previous_speedup: float | None
    """Predicted by the job's model; None: unknown."""
    nodes: tuple[str, ...]
    """Node of each planned replica."""
    num_stages: int | None
    speedup: float | None
    batch_size: int | None
    changes: bool
    """Whether the plan differs from the current allocation."""
    why: str
    forecast: ForecastView | None = None
    """Under the scheduler's own policy."""


class PlanView(View):
    """The scheduler's decision now under this policy, with an entry for each eligible job."""

    policy: str
    jobs: list[PlannedChange]


class DeviceView(View):
    """The GPU or MIG slice of a slot; null: unknown.

    `id`: its UUID; `index`: that of its GPU, by PCI bus id; `name`: its type; `job`: the job that
    holds the slot. `utilization`: share of the time in which it computes, from 0 to 1; memory is in
    bytes. `problem`: why nothing new starts there; empty: nothing speaks against it.
    """

    slot: int
    id: str
    index: int | None
    name: str
    job: str | None
    utilization: float | None
    memory_used: int | None
    memory_total: int | None
    problem: str

    @property
    def title(self) -> str:
        """The device as people call it: `GPU 3 (GPU-0123abcd)`."""
        kind, _, number = self.id.partition("-")
        index = "" if self.index is None else f" {self.index}"
        of = "MIG slice of GPU" if kind == "MIG" else "GPU"
        return f"{of}{index} ({kind}-{number[:8]})"


class JobDeviceView(DeviceView):
    """A device that a job holds, and its node."""

    node: str


class DeviceUseView(View):
    """The use of all devices that a job holds: mean utilization, total memory; null: unknown."""

    num_devices: int
    utilization: float | None
    memory_used: int | None
    memory_total: int | None


class NodeView(View):
    """A node, with the slots that each job holds on it.

    `devices`: those of its slots, where their state is known; slots with a problem that no job
    holds do not count.
    """

    name: str
    kind: str
    slots: int
    used: int
    free: int
    jobs: dict[str, int]
    condition: NodeCondition
    since: float
    reason: str
    devices: list[DeviceView] = []

    @property
    def full_reason(self) -> str:
        """The reason of its condition, and of each slot that is left out."""
        out = [f"{one.title}: {one.problem}" for one in self.devices if one.problem]
        return "; ".join([*filter(None, [self.reason]), *out])


class NodeDetails(NodeView):
    """A node with its entry in the cluster file."""

    spec: dict[str, Any]


class JobLine(View):
    """Summary of a job; from `step` to `efficiency`, fields are from its latest report."""

    number: int
    name: str
    phase: ListedPhase
    reason: str
    message: str
    submitted_at: float
    ended_at: float | None
    nodes: list[str]
    num_stages: int
    attempt: int
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
    forecast: ForecastView | None = None
    device_use: DeviceUseView | None = None


class AttemptLine(View):
    """Summary of a membership of an attempt; `number` is the number of its job."""

    job: str
    number: int
    attempt: int
    membership: int
    nodes: list[str]
    num_stages: int
    created_at: float
    first_step_at: float | None
    pause_seconds: float | None
    stopping_at: float | None
    ended_at: float | None
    outcome: str | None
    intent: str | None


class CallerView(View):
    """The sender of a request; `team`: the only team that it may submit jobs for, null: any."""

    name: str
    role: Role
    team: str | None


class ClusterView(View):
    """Overview of the cluster, at this time by the scheduler's clock.

    `phases` counts all jobs; `jobs` is the requested page, `num_found` the number of jobs on all
    pages. `has_teams`: whether there are teams, which `TeamsView` lists. `caller`: the sender of
    the request; null if no token was needed.
    """

    time: float
    policy: str
    nodes: dict[str, NodeView]
    phases: dict[ListedPhase, int]
    goodput: float | None
    oldest_attempt: float | None
    has_teams: bool
    jobs: list[JobLine]
    num_found: int
    events: list[EventSummary]
    last_event: int
    caller: CallerView | None = None


class UsageView(View):
    """Slot usage of the nodes: the mean number of slots held, in equal intervals from `since`."""

    since: float
    until: float
    nodes: dict[str, list[float]]


class LogTail(View):
    """The last lines of one replica."""

    attempt: int
    replica: int
    lines: list[str]
