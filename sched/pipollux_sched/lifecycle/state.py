"""The state of a job's life cycle; phases and conditions are those of Kubeflow's TrainJob."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

CANCELLED = "Cancelled"
"""Displayed reason of the phase `FAILED` for a cancelled job."""

PRUNED = "Pruned"
"""The same for a trial of a sweep that was stopped because others are better."""
NO_ROOM = "NoRoom"
"""Reason of the phase `QUEUED` of a job that a decision gave nothing."""
SCHEDULER_STOPPED = "SchedulerStopped"
"""Reason of the phase `SUSPENDED` of a job that waits for the next scheduler."""
SWEEPING = "Sweeping"
"""Reason of the phase `RUNNING` of a sweep, which has no processes of its own."""


class Phase(StrEnum):
    """The phase of a job; also the types of its conditions."""

    CREATED = "Created"
    QUEUED = "Queued"
    RUNNING = "Running"
    SUSPENDED = "Suspended"
    RESTARTING = "Restarting"
    COMPLETE = "Complete"
    FAILED = "Failed"

    @property
    def ended(self) -> bool:
        """Whether a job in this phase has ended."""
        return self in (Phase.COMPLETE, Phase.FAILED)


class Intent(StrEnum):
    """Why a running attempt is being stopped."""

    MOVE = "move"
    SUSPEND = "suspend"
    CANCEL = "cancel"
    SHUTDOWN = "shutdown"
    EXPIRE = "expire"
    REPLACE = "replace"
    """The new scheduler cannot adopt it."""


class Outcome(StrEnum):
    """How the processes of an attempt ended."""

    COMPLETE = "complete"
    """Every replica ended with exit status 0."""
    STOPPED = "stopped"
    """The replicas agreed to stop and left a checkpoint with the marker of this attempt."""
    FAILED = "failed"
    """Anything else."""


class When(StrEnum):
    """How a job has to end for another one that waits for it."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    """It failed, was cancelled, or can never start."""
    ENDED = "ended"


@dataclass(frozen=True)
class Dependency:
    """A job that another one waits for."""

    job: str
    when: When = When.SUCCEEDED

    def met_by(self, phase: Phase) -> bool:
        """Return whether a job that has ended in this phase is what was waited for."""
        wanted = {When.SUCCEEDED: Phase.COMPLETE, When.FAILED: Phase.FAILED}
        return wanted.get(self.when, phase) is phase

    def __str__(self) -> str:
        """Return it as the end of a sentence that begins with "waits for"."""
        verbs = {When.SUCCEEDED: "complete", When.FAILED: "fail", When.ENDED: "end"}
        return f"job {self.job} to {verbs[self.when]}"


@dataclass(frozen=True)
class Condition:
    """One condition of a job, in the form of Kubeflow's TrainJob."""

    type: Phase
    status: bool
    reason: str
    message: str
    time: float
    """Seconds since the epoch of the last change of `status`."""


class ChangeStage(StrEnum):
    """The stage of an elastic resize."""

    STARTING = "starting"
    """Joining replicas start, and run to the position of the others in the script."""
    FORMING = "forming"
    """All replicas of the pending membership form their groups; then the job switches by itself."""


@dataclass(frozen=True)
class PendingResize:
    """An elastic resize: a change of replicas while the surviving ones continue to train."""

    number: int
    replicas: tuple[int, ...]
    """Ids of its replicas, in the order of ranks."""
    nodes: tuple[str, ...]
    stage: ChangeStage
    waiting_to_join: tuple[int, ...] = ()
    """Joining replicas that wait to take part."""


@dataclass(frozen=True)
class Membership:
    """The replicas of the running attempt, and a resize under way.

    Inside an attempt there are memberships 1, 2, …, each a list of replicas. A replica's id is
    never used twice in an attempt; its rank is its place in the list.
    """

    number: int = 0
    """Number of the current membership; 0: none runs."""
    replicas: tuple[int, ...] = ()
    """Ids of its replicas in the order of ranks; `JobState.running_on` has their nodes."""
    num_ids: int = 0
    """Number of ids used so far, from 0."""
    highest: int = 0
    """Highest number of a membership so far, including abandoned ones."""
    why_not: str | None = "its replicas have not reported that they can be resized"
    """Why it cannot be resized, so that it is restarted instead; None: it can."""
    failures: int = 0
    """Consecutive failed resizes and losses of replicas within a short time."""
    failed_at: float = 0.0
    """Time of the last one, in seconds since the epoch."""
    change: PendingResize | None = None
    fixed: int = 0
    """Replicas, from id 0 on, without which the others end: servers run beside them."""
    lost: tuple[int, ...] = ()
    """Ids of lost replicas, without which the others have not continued yet."""

    # Cached because each heartbeat reads these, and a job may have thousands of replicas.
    @cached_property
    def joining(self) -> tuple[tuple[int, str], ...]:
        """Ids and nodes of the joining replicas."""
        if self.change is None:
            return ()
        here = frozenset(self.replicas)
        both = zip(self.change.replicas, self.change.nodes, strict=True)
        return tuple((replica, node) for replica, node in both if replica not in here)

    @cached_property
    def leavers(self) -> tuple[int, ...]:
        """Ids of the replicas that are about to leave."""
        if self.change is None:
            return ()
        staying = frozenset(self.change.replicas)
        return tuple(replica for replica in self.replicas if replica not in staying)


@dataclass(frozen=True)
class JobState:
    """All state of a job's life cycle."""

    phase: Phase = Phase.CREATED
    conditions: tuple[Condition, ...] = ()
    attempt: int = 0
    """Number of the last attempt; 0 before the first."""
    assigned: tuple[str, ...] = ()
    """Node of each replica in the last decision; empty when the job holds nothing."""
    num_stages: int | None = None
    """K of these replicas; while the job holds nothing, the last K. None: K of the submission."""
    running_on: tuple[str, ...] = ()
    """Node of each replica of the attempt that runs or is starting; empty when none."""
    running_stages: int | None = None
    """K of these replicas; None: as for `num_stages`."""
    training: bool = False
    """Whether the running attempt has reported its first step."""
    membership: Membership = Membership()
    intent: Intent | None = None
    """Why the running attempt is being stopped; None while it may continue."""
    suspended: bool = False
    """Whether its user suspended it, so that it gets nothing until it is resumed."""
    failures: int = 0
    """Number of attempts that ended by themselves without completion since one trained for long."""
    interruptions: int = 0
    """Consecutive attempts that the cluster or a person ended before they had trained."""
    max_restarts: int = 3
    """Most such failures that lead to a restart."""
    first_attempt: int = 1
    """First attempt of the present run; checkpoints of earlier runs are left alone."""
    waits_for: tuple[Dependency, ...] = ()
    """Jobs that have not ended yet, and have to before this one may start."""
    ready_at: float | None = None
    """Time at which the last job that it waited for ended; None: it waits, or never did."""

    @property
    def condition(self) -> Condition | None:
        """The condition of the present phase."""
        return next((entry for entry in self.conditions if entry.type is self.phase), None)

    @property
    def nodes_in_use(self) -> tuple[str, ...]:
        """Node of each replica that runs or is starting, including joining replicas."""
        return (*self.running_on, *(node for _, node in self.membership.joining))

    @property
    def reason(self) -> str:
        """One word for why the job is in its phase."""
        return self.condition.reason if self.condition else ""

    @property
    def cancelled(self) -> bool:
        """Whether the job has ended because its user cancelled it, or its sweep pruned it."""
        return self.phase is Phase.FAILED and self.reason in (CANCELLED, PRUNED)

    @property
    def message(self) -> str:
        """A sentence on why the job is in its phase."""
        return self.condition.message if self.condition else ""
