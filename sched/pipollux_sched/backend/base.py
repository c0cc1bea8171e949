"""What an engine must be able to do so that Pipollux can run jobs on it.

The unit is one replica of one attempt of a job, known by its `ReplicaKey`. An engine admits a
spec (`check`), lists its nodes (`nodes`), starts a replica (`start`), signals it (`signal`), lists
what there is of ours (`listing`), brings a replica's output into the scheduler's log (`fetch_log`),
and ends what nobody looks after (`recover`). What concerns a whole attempt is written once, for
all engines, in `attempts`: all replicas or none, the grace period, the wait for slots, the
outcome.

Messages to a cluster get lost, are delayed, and arrive twice. So `start` and `signal` may be
repeated, and a listing says how old it is. `attempts` repeats a signal until the replica has
ended, and a start that failed with `ClusterUnavailableError` until it succeeds or its time is over.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple, Self

from pipollux_protocol.environment import SCHEDULER_URL
from pipollux_sched.errors import SchedulerError
from pipollux_sched.spec.job import JobSpec, NodeSpec
from pipollux_sched.store import StateDir

from .job_actions import JobActions
from .result import ReplicaResult

POLL_INTERVAL = 0.05
"""Seconds between two calls of `ReplicaGroupManager.poll`."""


class BackendError(SchedulerError):
    """A backend cannot do what was asked; the text is one sentence for the user."""


class ClusterUnavailableError(BackendError):
    """The cluster does not answer now; the same request may succeed later."""


class NodesGoneError(BackendError):
    """Nodes that a job was to run on are not in the cluster any more; it is not to blame."""


@dataclass(frozen=True, kw_only=True)
class ReplicaProgram:
    """What every pipeline replica of a job runs, independent of the allocation."""

    job: str
    """Name of the job."""
    script: Path | None
    """None: the image's entry point."""
    image: str | None = None
    """The container image that it runs in; None: it runs as a process of the node."""
    args: tuple[str, ...] = ()
    num_stages: int = 1
    """K, the devices that one replica needs on its node."""
    process_per_stage: bool = False
    """Whether each of them has a process of its own; else one process drives all of a replica."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Added to the environment of the processes."""
    directory: Path | None = None
    """Working directory; None: that of the scheduler, or of the image."""
    checkpoints: Path | None = None
    """Where it saves checkpoints; None: where the engine says."""
    first_attempt: int = 1
    """The attempt that the present run began with: each run has a folder of its own to save in,
    so that what is run from the start finds nothing to go on from."""
    run_as: str | None = None
    """User of the machine as which it runs; None: the scheduler's own."""
    cpus: int = 0
    """CPUs that one replica holds on its node besides those of its stages."""
    memory: int = 0
    """Bytes of main memory that one replica holds on its node besides those of its stages."""
    cpus_per_stage: int = 0
    memory_per_stage: int = 0

    @property
    def scheduler_url(self) -> str:
        """The URL that the job reports to; empty if to none."""
        return self.environment.get(SCHEDULER_URL.name, "")

    @property
    def can_grow(self) -> bool:
        """Whether replicas may join and leave while others train."""
        return self.script is not None

    def checkpoints_in(self, state_dir: StateDir) -> str:
        """Return where it saves: its own folder, else one in a directory that its nodes share."""
        return str(self.checkpoints or state_dir.checkpoints(self.job, self.first_attempt))


class ReplicaKey(NamedTuple):
    """Which replica: of which attempt of which job."""

    job: str
    attempt: int
    replica: int


@dataclass(frozen=True)
class SlotAssignment:
    """Where one replica runs."""

    node: str
    slots: tuple[int, ...]
    """Slots that it holds of its node."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """The replicas of an attempt; stored before the first of them is started.

    Replicas may join and leave while others train: a changed launch is stored before that is acted
    on.
    """

    job: str
    attempt: int
    assignments: Mapping[int, SlotAssignment]
    """Where each replica runs, by its id."""
    num_first: int
    """Replicas that the attempt began with; those with higher ids have joined it."""
    scheduler_url: str
    """The URL that its replicas report to."""
    checkpoints: str
    """The folder that they save in, as they see it."""
    live: bool = False
    """Whether its replicas are told that others may join or leave."""

    @cached_property
    def keys(self) -> tuple[ReplicaKey, ...]:
        """The replicas, in the order of their ids."""
        return tuple(map(self.key, sorted(self.assignments)))

    @cached_property
    def nodes(self) -> tuple[str, ...]:
        """Node of each replica, in the order of their ids."""
        return tuple(self.assignments[replica].node for replica in sorted(self.assignments))

    @property
    def num_stages(self) -> int:
        """K, the slots of one replica."""
        return len(next(iter(self.assignments.values())).slots)

    def key(self, replica: int) -> ReplicaKey:
        """Return the key of a replica."""
        return ReplicaKey(self.job, self.attempt, replica)

    def joins(self, replica: int) -> bool:
        """Return whether a replica joins others that train."""
        return replica >= self.num_first

    def having(self, assignments: Mapping[int, SlotAssignment]) -> Self:
        """Return the launch with further replicas."""
        return replace(self, assignments={**self.assignments, **assignments})

    def without(self, replicas: Collection[int]) -> Self:
        """Return the launch without some replicas."""
        left = {
            replica: assignment
            for replica, assignment in self.assignments.items()
            if replica not in replicas
        }
        return replace(self, assignments=left)

    def to_json_object(self) -> dict[str, Any]:
        """Return it as the store keeps it."""
        assignments = {
            str(replica): {"node": assignment.node, "slots": list(assignment.slots)}
            for replica, assignment in self.assignments.items()
        }
        return {
            "assignments": assignments,
            "num_first": self.num_first,
            "scheduler_url": self.scheduler_url,
            "checkpoints": self.checkpoints,
            "live": self.live,
        }

    @classmethod
    def from_json_object(cls, job: str, attempt: int, data: Mapping[str, Any]) -> Self:
        """Return what `to_json_object` has returned.

        Raises:
            KeyError: something is missing; also TypeError and ValueError.
        """
        assignments = {
            int(replica): SlotAssignment(
                str(assignment["node"]), tuple(map(int, assignment["slots"]))
            )
            for replica, assignment in data["assignments"].items()
        }
        return cls(
            job=job,
            attempt=attempt,
            assignments=assignments,
            num_first=int(data["num_first"]),
            scheduler_url=str(data["scheduler_url"]),
            checkpoints=str(data["checkpoints"]),
            live=bool(data["live"]),
        )


class Signal(Enum):
    """What a replica is told."""

    STOP = "stop"
    """To save and end: SIGTERM for its agent, which passes it on once, however often it comes."""
    KILL = "kill"
    """To end at once, with all its processes."""


class Ended(NamedTuple):
    """How a replica ended."""

    status: int | None = None
    """Exit status, negative for a signal; None where nobody knows."""
    result: ReplicaResult = ReplicaResult()
    """What its agent has left."""
    lost: str = ""
    """Why the cluster ended it, in one sentence ("Node n2 is down."): that is no failure of the
    job's. Empty: it ended by itself, or as it was told."""


class ReplicaState(NamedTuple):
    """A replica as its engine sees it."""

    handle: str
    """What the cluster's own tools know it by, for people: a process id, a step, a pod. Nobody but
    the engine may read anything from it."""
    waiting: str = ""
    """Why it does not run yet, in one sentence; empty: its processes run."""
    ended: Ended | None = None


class Listing(NamedTuple):
    """All replicas of ours that an engine knows: that wait, run, or have ended and are not yet
    forgotten.

    It shows every replica whose start has returned before the listing was asked for.
    """

    version: int
    """Grows from one listing to the next; a smaller one is older, and is ignored."""
    replicas: Mapping[ReplicaKey, ReplicaState]


@dataclass(frozen=True)
class Node:
    """A node that replicas can be started on, as the cluster has it now."""

    spec: NodeSpec
    """What it is when nobody else is on it."""
    taken: int = 0
    """Slots that others hold, whom this scheduler does not know."""
    ready: bool = True
    """False: it is down, or does not answer; what runs there is lost."""
    draining: bool = False
    """True: the cluster's admin lets nothing new start there."""
    reason: str = ""
    """Why it is not ready, or drains, in the cluster's words."""

    @property
    def slots(self) -> int:
        """Number of devices that replicas may have."""
        return max(self.spec.slots - self.taken, 0)


class Engine(ABC):
    """Starts, signals and lists single replicas on one kind of cluster.

    One thread at a time calls it, except `fetch_log`. No call waits for a replica; a call that asks
    a cluster has a timeout of its own, and raises `ClusterUnavailableError` when that is over.
    """

    name: str = "engine"
    even: bool = False
    """Whether a job must have as many replicas on each of its nodes."""
    grows: bool = False
    """Whether replicas can be started, and can end, while others of their attempt go on."""

    @property
    def lost(self) -> str | None:
        """Why no replica can ever be started here again, in one sentence; None: one can.

        May be asked by any thread.
        """
        return None

    @abstractmethod
    def check(self, spec: JobSpec) -> None:
        """Refuse a job that this engine can never run, judging by its spec alone.

        Raises:
            SpecError: one sentence: the field, its value, what is allowed and the fix.
        """

    @abstractmethod
    def nodes(self) -> Mapping[str, Node]:
        """Return the nodes that there are now, by name; they come and go.

        Raises:
            ClusterUnavailableError: the cluster does not answer.
        """

    @abstractmethod
    def checkpoints(self, program: ReplicaProgram) -> str:
        """Return the folder that a job's replicas save in, as they see it.

        Raises:
            BackendError: there is none that all of them would share.
        """

    @abstractmethod
    def start(self, program: ReplicaProgram, launch: Launch, replica: int) -> None:
        """Start one replica; if it is there already, do nothing.

        Args:
            program: what it runs.
            launch: its attempt; one that `joins` it was not in an earlier launch of it.
            replica: its id.

        Raises:
            ClusterUnavailableError: the cluster did not answer; it may have been started or not.
            BackendError: it was not started, and would not be the next time; also OSError,
                and ValueError for what the system does not accept as an argument.
        """

    @abstractmethod
    def signal(self, key: ReplicaKey, signal: Signal) -> None:
        """Send a signal to a replica, if it is there. A repeated STOP does nothing more.

        Raises:
            ClusterUnavailableError: the cluster did not answer; it may have arrived or not.
        """

    @abstractmethod
    def listing(self) -> Listing:
        """Return all replicas of ours.

        Raises:
            ClusterUnavailableError: the cluster does not answer.
        """

    @abstractmethod
    def forget(self, job: str, attempt: int) -> None:
        """Remove what is left of an attempt that has ended, except its logs.

        A failure to do so is not reported: the listing goes on showing what is left, and the next
        attempt of the job, or `recover`, removes it.
        """

    def forget_replica(self, key: ReplicaKey) -> None:  # noqa: B027  # most keep a few bytes of it
        """Remove what is left of a replica that has left its attempt and ended, except its log.

        An attempt may live for weeks while replicas come and go. It is asked once; what is left
        all the same goes with the attempt.
        """

    def holds(self, launch: Launch) -> bool:  # noqa: ARG002  # most have nothing to check
        """Return whether an attempt's slots still stand for the devices that it runs on.

        It is asked before an attempt is adopted. Where the cluster itself gives out devices,
        they do.
        """
        return True

    def fetch_log(self, key: ReplicaKey) -> None:  # noqa: B027  # most have nothing to do
        """Bring the output of a replica so far into its log in the state directory.

        It is called when somebody reads the log, by any thread, and before the end of an attempt
        is reported. Engines whose replicas write there themselves have nothing to do.

        Raises:
            ClusterUnavailableError: the cluster does not answer.
        """

    @abstractmethod
    def recover(self, adopted: Collection[tuple[str, int]], grace: float) -> list[str]:
        """End what an earlier scheduler left running, except the adopted attempts.

        Args:
            adopted: jobs and attempts that are looked after.
            grace: seconds that the others have to save.

        Returns:
            One line for each replica or process found.

        Raises:
            BackendError: something is left that cannot be ended.
        """

    def keep_records(self, jobs: JobActions, ending: Event) -> None:  # noqa: ARG002  # most have none
        """Keep the cluster's own records of jobs in step with the scheduler's until the end.

        It runs in a thread of its own while jobs are scheduled. An engine without such records
        has nothing to do.

        Args:
            jobs: the jobs, and what can be done with them.
            ending: set when to return.
        """
        ending.wait()

    def close(self) -> None:  # noqa: B027  # most have nothing to do
        """Let go of connections, threads and temporary files; replicas are left as they are."""
