"""The events of a job's life cycle (`Event`), and the resulting actions (`Action`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from .state import Dependency, Outcome, Phase


@dataclass(frozen=True)
class Submit:
    """A user submits the job; a failed or cancelled one continues."""

    max_restarts: int = 3
    waits_for: tuple[Dependency, ...] = ()
    """Unfinished jobs that have to end first."""


@dataclass(frozen=True)
class Rerun:
    """A user reruns a job that has ended."""

    max_restarts: int = 3
    from_scratch: bool = False
    """Whether it starts from scratch; else it continues from its last checkpoint."""
    waits_for: tuple[Dependency, ...] = ()
    more_trials: bool = False
    """Whether it is a sweep with trials that have failed or not run, although it is complete."""


@dataclass(frozen=True)
class DependencyEnded:
    """A job that others may wait for has ended."""

    job: str
    phase: Phase
    how: str
    """How it ended, as the end of a sentence: "failed", "was cancelled", …"""


@dataclass(frozen=True)
class Allocate:
    """A decision of the allocator; an empty `nodes` means that the job gets nothing for now."""

    nodes: Sequence[str]
    why: str
    details: Mapping[str, Any] = field(default_factory=dict)
    """Further data for the event log: num_microbatches, batch_size, speedup, …"""
    num_stages: int | None = None
    """K of each replica; None: K of the submission."""
    restates: bool = False
    """Whether the reason of a job that is already queued is updated."""


@dataclass(frozen=True)
class Started:
    """The processes of an attempt run."""

    attempt: int
    replicas: tuple[str, ...]
    """Identifier of each replica in the cluster's own tools: a process id, a step, a pod."""


@dataclass(frozen=True)
class FirstStep:
    """An attempt reported its first optimizer step."""

    attempt: int
    step: int
    restart_seconds: float | None = None


@dataclass(frozen=True)
class ElasticReady:
    """The replicas of an attempt report whether they support elastic resizes."""

    attempt: int
    why_not: str | None = None
    """Why they do not; None: they do."""
    fixed: int = 0
    """Replicas, from id 0 on, without which the others end."""


@dataclass(frozen=True)
class WaitingToJoin:
    """Joining replicas have reached the loop that the others are in."""

    attempt: int
    replicas: tuple[int, ...]


@dataclass(frozen=True)
class Switched:
    """The replicas of an attempt have switched to another membership."""

    attempt: int
    number: int
    step: int | None = None
    """Optimizer step after which they switched."""
    seconds: float | None = None
    """Seconds without training."""


@dataclass(frozen=True)
class Survived:
    """Replicas of an attempt were lost, and the others continue in another membership."""

    attempt: int
    number: int
    replicas: tuple[int, ...]
    """The surviving replicas, in the order of ranks."""
    step: int | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class ChangeRefused:
    """A replica has refused a pending membership, which is abandoned."""

    attempt: int
    number: int
    why: str
    for_good: bool = False
    """Whether every resize would be refused, so that the job is restarted instead."""


@dataclass(frozen=True)
class JoiningReplicaLost:
    """A joining replica has ended, or sends no heartbeats, before it took part."""

    attempt: int
    replica: int
    why: str


@dataclass(frozen=True)
class ChangeOverdue:
    """The joining replicas of a membership are not ready in time."""

    attempt: int
    number: int
    why: str


@dataclass(frozen=True)
class Exited:
    """The last process of an attempt has ended."""

    attempt: int
    outcome: Outcome
    step: int | None = None
    """The step at which it saved and ended; None: it did not save, or the step is unknown."""
    epoch: int | None = None
    message: str = ""
    cannot_start: bool = False
    """Whether its script is broken, so that a restart would fail too."""
    checkpoint: int | None = None
    """The step of its newest checkpoint, if it did not save at its end; None: unknown."""
    status: int | None = None
    """Exit status of the replica that failed first; None: unknown, or none failed."""
    rule: Literal["retry", "fail", "ignore"] = "retry"
    """What the status means for a restart: see `ExitCodesSpec`."""


@dataclass(frozen=True)
class Retry:
    """The backoff after the failure of `attempt` is over."""

    attempt: int


@dataclass(frozen=True)
class Cancel:
    """A user cancels the job, or its sweep does."""

    pruned: str | None = None
    """Why a sweep prunes it: its processes end at once, without saving. None: it is cancelled."""


@dataclass(frozen=True)
class SweepProgress:
    """The trials of a sweep have come further."""

    message: str


@dataclass(frozen=True)
class SweepEnded:
    """All trials of a sweep have ended, or no more can start."""

    complete: bool
    message: str


@dataclass(frozen=True)
class Suspend:
    """A request to suspend the job: to checkpoint and release its slots."""


@dataclass(frozen=True)
class Resume:
    """A user resumes a suspended job."""


@dataclass(frozen=True)
class Expire:
    """The job's deadline has passed, or its processes have run for as long as they may."""

    why: str
    run_time: bool = False
    """Whether it is the running time."""


@dataclass(frozen=True)
class HeartbeatLost:
    """A replica that takes part in an attempt has sent no heartbeat for too long."""

    attempt: int
    why: str
    replica: int | None = None
    """The replica; None: all of them have to end."""


@dataclass(frozen=True)
class Stalled:
    """The replicas of an attempt send heartbeats, but its step has not grown for too long."""

    attempt: int
    why: str


@dataclass(frozen=True)
class StartOverdue:
    """The processes of an attempt have run for too long without a first step."""

    attempt: int
    why: str


@dataclass(frozen=True)
class NodeLost:
    """A node with replicas of an attempt is dead; the job is not to blame."""

    attempt: int
    why: str
    node: str | None = None
    """The node; None: all replicas have to end."""


@dataclass(frozen=True)
class Shutdown:
    """The scheduler and its jobs are about to end; the jobs continue when it is back."""


@dataclass(frozen=True)
class Adopt:
    """A new scheduler has adopted an attempt, which runs or has ended."""

    attempt: int


@dataclass(frozen=True)
class NotAdopted:
    """A new scheduler cannot adopt an attempt, and is about to end it."""

    attempt: int
    why: str


@dataclass(frozen=True)
class Recover:
    """A new scheduler has found the job in the store, without any process."""

    step: int | None = None
    """The step at which its replicas have saved and stopped; None: they have not."""
    checkpoint: int | None = None
    """The step of its newest checkpoint, if they have not; None: unknown."""


Event: TypeAlias = (
    Submit
    | Rerun
    | DependencyEnded
    | Allocate
    | Started
    | FirstStep
    | ElasticReady
    | WaitingToJoin
    | Switched
    | Survived
    | ChangeRefused
    | JoiningReplicaLost
    | ChangeOverdue
    | Exited
    | Retry
    | Cancel
    | SweepProgress
    | SweepEnded
    | Suspend
    | Resume
    | Expire
    | HeartbeatLost
    | Stalled
    | StartOverdue
    | NodeLost
    | Shutdown
    | Adopt
    | NotAdopted
    | Recover
)


@dataclass(frozen=True)
class Start:
    """Start an attempt, one replica per entry of `nodes`."""

    attempt: int
    nodes: tuple[str, ...]
    num_stages: int | None = None
    """K of each replica, as in `Allocate`."""


@dataclass(frozen=True)
class Stop:
    """Ask the processes of an attempt to stop, and enforce it."""

    attempt: int
    why: str
    graceful: bool = True
    """False: nothing was trained yet, so no checkpoint is worth waiting for."""


@dataclass(frozen=True)
class StartReplicas:
    """Start replicas that join the training ones of an attempt."""

    attempt: int
    replicas: tuple[tuple[int, str], ...]
    """Id and node of each."""


@dataclass(frozen=True)
class EndReplicas:
    """End replicas of an attempt while the others train."""

    attempt: int
    replicas: tuple[int, ...]
    at_once: bool
    """False: they have left, and end by themselves."""


@dataclass(frozen=True)
class GiveUpAfter:
    """Send a `ChangeOverdue` of this membership when `seconds` have passed."""

    attempt: int
    number: int
    seconds: float


@dataclass(frozen=True)
class Kill:
    """End the processes of an attempt that no longer respond."""

    attempt: int
    why: str


@dataclass(frozen=True)
class RetryAfter:
    """Send a `Retry` of this attempt when `seconds` have passed."""

    attempt: int
    seconds: float


@dataclass(frozen=True)
class Record:
    """Write an event into the log, in the transaction that changes the state."""

    type: str
    attempt: int | None
    data: Mapping[str, Any] = field(default_factory=dict)


Action: TypeAlias = (
    Start | Stop | StartReplicas | EndReplicas | GiveUpAfter | Kill | RetryAfter | Record
)
