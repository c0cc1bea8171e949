"""What can happen to a job (`Event`), and what is then to be done about it (`Action`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from .state import Outcome


@dataclass(frozen=True)
class Submit:
    """A user submits the job; a failed or cancelled one goes on."""

    max_restarts: int = 3


@dataclass(frozen=True)
class Rerun:
    """A user wants a job that has ended to run again."""

    max_restarts: int = 3
    from_scratch: bool = False
    """Whether it starts from the beginning; else it goes on from its last checkpoint."""


@dataclass(frozen=True)
class Allocate:
    """The allocator decided; an empty `nodes` means that the job gets nothing for now."""

    nodes: Sequence[str]
    why: str
    details: Mapping[str, Any] = field(default_factory=dict)
    """More for the event log: num_microbatches, batch_size, speedup, …"""
    num_stages: int | None = None
    """K of each replica; None: the one that the job was submitted with."""
    restates: bool = False
    """Whether a job that is queued already is told the reason anew."""


@dataclass(frozen=True)
class Started:
    """The processes of an attempt are there."""

    attempt: int
    replicas: tuple[str, ...]
    """What the cluster's own tools know each replica by: a process id, a step, a pod."""


@dataclass(frozen=True)
class FirstStep:
    """An attempt reported its first optimizer step."""

    attempt: int
    step: int
    restart_seconds: float | None = None


@dataclass(frozen=True)
class LiveReady:
    """The replicas of an attempt say whether others can join and leave while they train."""

    attempt: int
    why_not: str | None = None
    """Why they cannot; None: they can."""


@dataclass(frozen=True)
class WaitingToJoin:
    """Joining replicas wait at the loop that the others are in."""

    attempt: int
    replicas: tuple[int, ...]


@dataclass(frozen=True)
class Switched:
    """The replicas of an attempt train in another membership."""

    attempt: int
    number: int
    """Of the membership."""
    step: int | None = None
    """Optimizer step after which they changed."""
    seconds: float | None = None
    """How long nobody trained."""


@dataclass(frozen=True)
class Survived:
    """Replicas of an attempt were lost, and the others go on training in another membership."""

    attempt: int
    number: int
    """Of the membership."""
    replicas: tuple[int, ...]
    """Those that go on, in the order of ranks."""
    step: int | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class ChangeRefused:
    """A replica has given up a membership that was to be formed: it does not come about."""

    attempt: int
    number: int
    why: str
    for_good: bool = False
    """Whether no other would come about either, so that the job is restarted instead."""


@dataclass(frozen=True)
class JoiningReplicaLost:
    """A replica has ended, or was not heard of, before it took part."""

    attempt: int
    replica: int
    why: str


@dataclass(frozen=True)
class ChangeOverdue:
    """The joining replicas of a membership are not all there, and should have been."""

    attempt: int
    number: int
    why: str


@dataclass(frozen=True)
class Exited:
    """The last process of an attempt has ended."""

    attempt: int
    outcome: Outcome
    step: int | None = None
    """The step at which it ended, and saved; None: it did not save, or nobody knows."""
    epoch: int | None = None
    message: str = ""
    cannot_start: bool = False
    """Whether its script failed so that no other try would end otherwise."""
    checkpoint: int | None = None
    """The step of its newest checkpoint, where it did not save at its end; None: nobody knows."""


@dataclass(frozen=True)
class Retry:
    """The wait after the failure of `attempt` is over."""

    attempt: int


@dataclass(frozen=True)
class Cancel:
    """A user cancels the job."""


@dataclass(frozen=True)
class Suspend:
    """A request to suspend the job: to checkpoint and release its slots."""


@dataclass(frozen=True)
class Resume:
    """A user resumes a suspended job."""


@dataclass(frozen=True)
class Expire:
    """The job's deadline has passed."""

    why: str


@dataclass(frozen=True)
class HeartbeatLost:
    """A replica that takes part in an attempt has not been heard of for too long."""

    attempt: int
    why: str
    replica: int | None = None
    """Which one; None: all of them are to end."""


@dataclass(frozen=True)
class Stalled:
    """The replicas of an attempt give signs of life, but its step has not grown for too long."""

    attempt: int
    why: str


@dataclass(frozen=True)
class StartOverdue:
    """The processes of an attempt have run for too long without a first step."""

    attempt: int
    why: str


@dataclass(frozen=True)
class NodeLost:
    """A node that holds replicas of an attempt is dead; the job is not to blame."""

    attempt: int
    why: str
    node: str | None = None
    """Which one; None: all of them are to end."""


@dataclass(frozen=True)
class Shutdown:
    """The scheduler is about to end, and its jobs with it, to go on when it is back."""


@dataclass(frozen=True)
class Adopt:
    """A new scheduler has found an attempt that runs, or has ended, and looks after it now."""

    attempt: int


@dataclass(frozen=True)
class NotAdopted:
    """A new scheduler has found an attempt that it cannot look after, and is about to end it."""

    attempt: int
    why: str


@dataclass(frozen=True)
class Recover:
    """A new scheduler has found the job in the store, and no process of it runs any more."""

    step: int | None = None
    """The step at which its replicas have saved and stopped; None: they have not."""
    checkpoint: int | None = None
    """The step of its newest checkpoint, where they have not; None: nobody knows."""


Event: TypeAlias = (
    Submit
    | Rerun
    | Allocate
    | Started
    | FirstStep
    | LiveReady
    | WaitingToJoin
    | Switched
    | Survived
    | ChangeRefused
    | JoiningReplicaLost
    | ChangeOverdue
    | Exited
    | Retry
    | Cancel
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
    """Ask the processes of an attempt to stop, and see to it that they do."""

    attempt: int
    why: str
    graceful: bool = True
    """False: nothing was trained yet, so there is no checkpoint worth waiting for."""


@dataclass(frozen=True)
class StartReplicas:
    """Start replicas that join those of an attempt which train."""

    attempt: int
    replicas: tuple[tuple[int, str], ...]
    """Id and node of each."""


@dataclass(frozen=True)
class EndReplicas:
    """See to it that replicas of an attempt end while the others train."""

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
    """End the processes of an attempt that cannot be asked any more."""

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
