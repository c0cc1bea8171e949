"""What a job's life depends on: its phase, its conditions, what runs and what is meant to run.

The names of phases and the shape of conditions are those of Kubeflow's TrainJob, so that a backend
on Kubernetes need not translate.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

CANCELLED = "Cancelled"
"""Reason of the phase `FAILED` where users are told that the job was cancelled."""


class Phase(StrEnum):
    """Where a job stands; also the types of its conditions."""

    CREATED = "Created"
    QUEUED = "Queued"
    RUNNING = "Running"
    SUSPENDED = "Suspended"
    RESTARTING = "Restarting"
    COMPLETE = "Complete"
    FAILED = "Failed"

    @property
    def ended(self) -> bool:
        """Whether a job in this phase will do nothing more by itself."""
        return self in (Phase.COMPLETE, Phase.FAILED)


class Intent(StrEnum):
    """What a running attempt is being stopped for."""

    MOVE = "move"
    SUSPEND = "suspend"
    CANCEL = "cancel"
    SHUTDOWN = "shutdown"
    EXPIRE = "expire"
    REPLACE = "replace"
    """The scheduler that has taken over cannot look after it."""


class Outcome(StrEnum):
    """How the processes of an attempt ended."""

    COMPLETE = "complete"
    """Every replica ended with exit status 0."""
    STOPPED = "stopped"
    """The replicas agreed to stop and left a checkpoint with the marker of this attempt."""
    FAILED = "failed"
    """Anything else."""


@dataclass(frozen=True)
class Condition:
    """One condition of a job, as Kubeflow's TrainJob has them."""

    type: Phase
    status: bool
    reason: str
    message: str
    time: float
    """Seconds since the epoch of the last change of `status`."""


class ChangeStage(StrEnum):
    """How far an elastic resize has come."""

    STARTING = "starting"
    """Joining replicas are started, and go to where the others are in the script."""
    FORMING = "forming"
    """All replicas that are to take part form their groups; then the job changes by itself."""


@dataclass(frozen=True)
class LiveChange:
    """A change of replicas while the surviving replicas go on training."""

    number: int
    """Of the membership that it leads to."""
    replicas: tuple[int, ...]
    """Ids of those that are to take part, in the order of ranks."""
    nodes: tuple[str, ...]
    """Node of each."""
    stage: ChangeStage
    waiting_to_join: tuple[int, ...] = ()
    """Joining replicas that wait to take part."""


@dataclass(frozen=True)
class LiveState:
    """Who takes part in the running attempt, and what of that is being changed.

    Inside an attempt there are memberships 1, 2, …, each a list of replicas. A replica's id is
    never used twice in an attempt; its rank is its place in the list.
    """

    number: int = 0
    """Of the membership that trains; 0: none runs."""
    replicas: tuple[int, ...] = ()
    """Ids of its replicas in the order of ranks; `JobState.running_on` has their nodes."""
    num_ids: int = 0
    """Ids given out so far, from 0."""
    highest: int = 0
    """Highest number of a membership so far, whether it came about or not."""
    why_not: str | None = "its replicas have not said that they can join and leave"
    """Why it cannot be resized, so that it is restarted instead; None: it can."""
    failures: int = 0
    """Elastic resizes that failed, and times that replicas were lost, one soon after the other."""
    failed_at: float = 0.0
    """When the last of them was, in seconds since the epoch."""
    change: LiveChange | None = None
    """The one under way."""
    lost: tuple[int, ...] = ()
    """Ids of replicas that were ended, and without which the others have yet to go on."""

    # Each heartbeat asks for these, and a job may have thousands of replicas.
    @cached_property
    def joining(self) -> tuple[tuple[int, str], ...]:
        """Ids and nodes of the replicas that are about to join."""
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
    """Everything about a job that its life depends on."""

    phase: Phase = Phase.CREATED
    conditions: tuple[Condition, ...] = ()
    attempt: int = 0
    """Number of the last one; 0 before the first."""
    assigned: tuple[str, ...] = ()
    """Node of each replica as decided last; empty when the job holds nothing."""
    num_stages: int | None = None
    """K of these replicas; while the job holds nothing, of the last that it held. None: it never
    held any, or K is the one that it was submitted with."""
    running_on: tuple[str, ...] = ()
    """Node of each replica of the attempt that runs (or is being started); empty when none."""
    running_stages: int | None = None
    """K of these replicas; None: as for `num_stages`."""
    training: bool = False
    """Whether the running attempt has reported its first step."""
    live: LiveState = LiveState()
    """Which replicas take part in the running attempt."""
    intent: Intent | None = None
    """What the running attempt is being stopped for; None while it may run on."""
    suspended: bool = False
    """Whether its user suspended it, so that it gets nothing until it is resumed."""
    failures: int = 0
    """How often an attempt ended by itself without being complete, since one trained for long."""
    interruptions: int = 0
    """How often in a row an attempt was taken away, by the cluster or a person, before it had
    trained."""
    max_restarts: int = 3
    """How many such failures lead to a restart."""
    first_attempt: int = 1
    """Number of the attempt that the present run begins with: what was saved before it is left
    alone."""

    @property
    def condition(self) -> Condition | None:
        """The condition that belongs to the present phase."""
        return next((entry for entry in self.conditions if entry.type is self.phase), None)

    @property
    def nodes_in_use(self) -> tuple[str, ...]:
        """Node of each replica that runs or is being started, joining replicas too."""
        return (*self.running_on, *(node for _, node in self.live.joining))

    @property
    def reason(self) -> str:
        """One word for why the job is in its phase."""
        return self.condition.reason if self.condition else ""

    @property
    def cancelled(self) -> bool:
        """Whether the job has ended because its user cancelled it."""
        return self.phase is Phase.FAILED and self.reason == CANCELLED

    @property
    def message(self) -> str:
        """A sentence on why the job is in its phase."""
        return self.condition.message if self.condition else ""
