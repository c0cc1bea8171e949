"""The interface of an engine, which runs the replicas of jobs on one kind of cluster.

The unit is one replica of one attempt of a job. Logic about whole attempts is implemented once, for
all engines, in `replica_groups`: all replicas or none, the grace period, the wait for slots.

Messages to a cluster can be lost, delayed, or duplicated. So `start` and `signal` are idempotent,
and a listing has a version. A signal is repeated until the replica has ended, and a start that
failed with `ClusterUnavailableError` until it succeeds or times out.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple, Protocol, Self

from pipollux_policies import NodeInfo
from pipollux_policies.jobs.topology import build_topology
from pipollux_protocol.environment import SCHEDULER_URL
from pipollux_sched.errors import SchedulerError
from pipollux_sched.spec.cluster import NodeSpec
from pipollux_sched.spec.job import JobSpec
from pipollux_sched.store import JobRecord, StateDir, SweepSummary

from .result import ReplicaResult

POLL_INTERVAL = 0.05
SIGNAL_INTERVAL = 2.0
"""Seconds after which a signal is repeated, because it may have been lost."""
KILL_PATIENCE = 30.0
"""Seconds that replicas without a scheduler have to end after a kill."""


class BackendError(SchedulerError):
    """A backend cannot carry out a request; the message is one sentence for the user."""


class ClusterUnavailableError(BackendError):
    """The cluster does not answer; the same request may succeed later."""


class NodesGoneError(BackendError):
    """Nodes that a job should run on have left the cluster; the job is not to blame."""


@dataclass(frozen=True, kw_only=True)
class ReplicaProgram:
    """The program of every pipeline replica of a job, independent of the allocation."""

    job: str
    script: Path | None = None
    module: str | None = None
    """A module to run in place of a script."""
    command: str | None = None
    """A command for the shell in place of a script."""
    python: str | None = None
    """Path of the interpreter; None: the engine's."""
    image: str | None = None
    args: tuple[str, ...] = ()
    num_stages: int = 1
    """K, the number of devices of one replica on its node."""
    process_per_stage: bool = False
    """Whether each stage has a separate process; else one process drives the whole replica."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Added to the environment of the processes."""
    directory: Path | None = None
    """Working directory; None: that of the scheduler, or of the image."""
    checkpoints: Path | None = None
    """The checkpoint folder; None: the engine chooses it."""
    first_attempt: int = 1
    """First attempt of the present run; each run has its own checkpoint folder."""
    run_as: str | None = None
    """User of the machine as which it runs; None: the scheduler's own."""
    servers: int = 0
    """Servers for push and pull, beside the first replicas; 0: replicas average gradients."""
    cpus: int = 0
    """CPUs of one replica on its node, besides those of its stages."""
    memory: int = 0
    """Bytes of main memory of one replica on its node, besides those of its stages."""
    cpus_per_stage: int = 0
    memory_per_stage: int = 0
    memory_limit: int | None = None
    """Bytes of main memory that a replica may use; None: unlimited."""
    sweep: str | None = None
    """The sweep that the job is a trial of; None: it is none."""

    @property
    def scheduler_url(self) -> str:
        """The URL that the job reports to; empty: none."""
        return self.environment.get(SCHEDULER_URL.name, "")

    @property
    def can_grow(self) -> bool:
        """Whether replicas may join and leave while others train."""
        return self.has_program

    @property
    def has_program(self) -> bool:
        """Whether the agent runs a script, module or command; else it is an image's own."""
        return any(one is not None for one in (self.script, self.module, self.command))

    @property
    def words(self) -> list[str]:
        """The arguments of `pipollux_agent.script_main`, without those of the user."""
        if self.command is not None:
            return ["-c", self.command]
        return [str(self.script)] if self.module is None else ["-m", self.module]

    def cpus_of(self, num_stages: int) -> int:
        """Return the CPUs of a replica with those of its stages; 0: not asked for."""
        return self.cpus + self.cpus_per_stage * num_stages

    def memory_of(self, num_stages: int) -> int:
        """Return the bytes of main memory of a replica with its stages; 0: not asked for."""
        return self.memory + self.memory_per_stage * num_stages

    def checkpoints_in(self, state_dir: StateDir) -> str:
        """Return the checkpoint folder: the job's own, or one in a shared directory."""
        return str(self.checkpoints or state_dir.checkpoints(self.job, self.first_attempt))


class ReplicaKey(NamedTuple):
    """Identifies a replica of an attempt of a job."""

    job: str
    attempt: int
    replica: int


@dataclass(frozen=True)
class SlotAssignment:
    """The node and slots of one replica."""

    node: str
    slots: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Launch:
    """The replicas of an attempt; it is stored before any of them is started or ended."""

    job: str
    attempt: int
    assignments: Mapping[int, SlotAssignment]
    num_first: int
    """Replicas at the start of the attempt; those with higher ids have joined it."""
    scheduler_url: str
    checkpoints: str
    """The checkpoint folder, as its replicas see it."""
    elastic: bool = False
    num_servers: int = 0
    """Servers for push and pull beside replicas 0, 1, …; each replica is then a job of its own
    group, and all meet at the servers."""
    network_level: int = 1
    """The level of the network at which its nodes meet (`Topology`)."""

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

    def alone(self, replica: int) -> bool:
        """Return whether a replica starts without meeting the others."""
        return self.num_servers > 0 or self.joins(replica)

    def joins(self, replica: int) -> bool:
        """Return whether a replica joins others that train."""
        return replica >= self.num_first

    def having(self, assignments: Mapping[int, SlotAssignment]) -> Self:
        """Return the launch with further replicas."""
        return replace(self, assignments={**self.assignments, **assignments})

    def at_level(self, nodes: Mapping[str, Node]) -> Self:
        """Return the launch with the network level of its nodes by their present labels."""
        return replace(self, network_level=network_level(nodes, self.nodes))

    def without(self, replicas: Collection[int]) -> Self:
        """Return the launch without some replicas."""
        left = {
            replica: assignment
            for replica, assignment in self.assignments.items()
            if replica not in replicas
        }
        return replace(self, assignments=left)

    def to_json_object(self) -> dict[str, Any]:
        """Return the launch as JSON for the store."""
        assignments = {
            str(replica): {"node": assignment.node, "slots": list(assignment.slots)}
            for replica, assignment in self.assignments.items()
        }
        return {
            "assignments": assignments,
            "num_first": self.num_first,
            "scheduler_url": self.scheduler_url,
            "checkpoints": self.checkpoints,
            "elastic": self.elastic,
            "num_servers": self.num_servers,
            "network_level": self.network_level,
        }

    @classmethod
    def from_json_object(cls, job: str, attempt: int, data: Mapping[str, Any]) -> Self:
        """Return the launch in JSON, or raise KeyError, TypeError or ValueError."""
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
            elastic=bool(data["elastic"]),
            num_servers=int(data.get("num_servers", 0)),  # earlier versions had none
            network_level=int(data.get("network_level", 1)),
        )


class Signal(Enum):
    """A signal to a replica."""

    STOP = "stop"
    """Save and end: SIGTERM for its agent, which passes it on once, however often it is sent."""
    KILL = "kill"
    """End at once, with all its processes."""


class Ended(NamedTuple):
    """How a replica ended."""

    status: int | None = None
    """Exit status, negative for a signal; None: unknown."""
    result: ReplicaResult = ReplicaResult()
    """The result file of its agent."""
    lost: str = ""
    """Why the cluster ended it ("Node n2 is down."), which is no failure of the job."""


class ReplicaState(NamedTuple):
    """A replica as its engine sees it."""

    handle: str
    """Its identifier for people in the cluster's own tools: a process id, a step, a pod."""
    waiting: str = ""
    """Why it does not run yet, in one sentence; empty: its processes run."""
    ended: Ended | None = None


class Listing(NamedTuple):
    """All replicas of this scheduler that wait, run, or have ended and are not forgotten yet.

    It contains every replica whose start returned before the listing was requested.
    """

    version: int
    """Grows from one listing to the next; older listings are ignored."""
    replicas: Mapping[ReplicaKey, ReplicaState]


@dataclass(frozen=True)
class Node:
    """A node that replicas can be started on, in its present state."""

    spec: NodeSpec
    """The whole node, without any use."""
    taken: int = 0
    """How many slots others use, where the cluster does not tell which: never one of those that a
    replica of this scheduler holds, whoever has started it."""
    ready: bool = True
    """False: it is down, or does not answer; its replicas are lost."""
    draining: bool = False
    """True: an admin has closed it for new replicas."""
    reason: str = ""
    """Why it is not ready, or drains, in the cluster's words."""
    left_out: Mapping[int, str] = field(default_factory=dict)
    """Slots on which nothing new must be started, and why: their devices are broken, or the engine
    knows that others use them."""
    kept: frozenset[int] = frozenset()
    """Those of them that a job holds, which may stay."""

    @property
    def slots(self) -> int:
        """Number of devices for replicas."""
        return max(self.spec.slots - self.taken - len(self.left_out.keys() - self.kept), 0)


@dataclass(frozen=True, kw_only=True)
class SlotDevice:
    """The device of a slot; None: unknown."""

    slot: int
    id: str
    """Its UUID."""
    index: int | None = None
    """Of its GPU, in the order of PCI bus ids."""
    name: str = ""
    """Its type."""
    utilization: float | None = None
    """Share of the time in which it computes, from 0 to 1."""
    memory_used: int | None = None
    memory_total: int | None = None
    problem: str = ""
    """Why nothing must be started on it; empty: it is healthy and unused by others."""


def network_level(nodes: Mapping[str, Node], names: Iterable[str]) -> int:
    """Return the level at which some nodes meet, 1 for one node; missing nodes do not count."""
    there = [nodes[name].spec for name in dict.fromkeys(names) if name in nodes]
    infos = [NodeInfo({}, topology=tuple(spec.topology.values())) for spec in there]
    return build_topology(infos).level(range(len(infos)))


class JobActions(Protocol):
    """The commands of users on jobs; each method may raise `SchedulerError`."""

    def version(self) -> int:
        """Return a number that grows whenever a job has changed."""

    def jobs(self) -> Sequence[JobRecord]:
        """Return all jobs, sweeps and trials included."""

    def sweeps(self) -> Mapping[str, SweepSummary]:
        """Return the progress of all sweeps, by name."""

    def steps(self) -> Mapping[str, int]:
        """Return the known optimizer steps of jobs so far."""

    def submit(self, spec: JobSpec) -> object:
        """Submit a job."""

    def suspend(self, name: str) -> object:
        """Suspend a job."""

    def resume(self, name: str) -> object:
        """Resume a job."""

    def cancel(self, name: str) -> object:
        """Cancel a job."""

    def delete(self, name: str) -> object:
        """Delete a job that has ended."""


class Engine(ABC):
    """Starts, signals and lists single replicas on one kind of cluster.

    One thread at a time calls it, except `fetch_log`. No call waits for a replica; a call that
    contacts a cluster has a timeout, after which it raises `ClusterUnavailableError`.
    """

    name: str = "engine"
    even: bool = False
    grows: bool = False
    """Whether replicas can start and end while others of their attempt continue."""

    @property
    def lost(self) -> str | None:
        """Why no replica can ever be started here again, in one sentence; safe for any thread."""
        return None

    @abstractmethod
    def check(self, spec: JobSpec) -> None:
        """Reject a job that this engine can never run, by its spec alone, with `SpecError`."""

    @abstractmethod
    def nodes(self) -> Mapping[str, Node]:
        """Return the present nodes, by name; they come and go."""

    def devices(self) -> Mapping[str, Sequence[SlotDevice]]:
        """Return the devices of nodes whose state is known, by node; safe for any thread."""
        return {}

    @abstractmethod
    def checkpoints(self, program: ReplicaProgram) -> str:
        """Return the checkpoint folder of a job as its replicas see it, or raise `BackendError`."""

    @abstractmethod
    def start(self, program: ReplicaProgram, launch: Launch, replica: int) -> None:
        """Start one replica, unless it exists already.

        A replica that `joins` the launch was not in an earlier launch of the attempt.

        Raises:
            ClusterUnavailableError: the cluster did not answer; it may have been started or not.
            BackendError: a retry would fail; also OSError, and ValueError for impossible arguments.
        """

    @abstractmethod
    def signal(self, key: ReplicaKey, signal: Signal) -> None:
        """Send a signal to a replica, if it exists. A repeated STOP has no further effect.

        After a `ClusterUnavailableError`, it may have arrived or not.
        """

    @abstractmethod
    def listing(self) -> Listing:
        """Return all replicas of this scheduler."""

    @abstractmethod
    def forget(self, job: str, attempt: int) -> None:
        """Remove an ended attempt except its logs; what remains is removed with a later one."""

    def forget_replica(self, key: ReplicaKey) -> None:  # noqa: B027  # most keep a few bytes of it
        """Remove everything of a replica that has left its attempt and ended, except its log."""

    def holds(self, launch: Launch) -> bool:  # noqa: ARG002  # most have nothing to check
        """Return whether the slots of an attempt to adopt still refer to its devices.

        How many slots of its nodes others use does not matter: it has its own.
        """
        return True

    def fetch_log(self, key: ReplicaKey) -> None:  # noqa: B027  # most have nothing to do
        """Copy the output of a replica so far into its log in the state directory.

        Called by any thread when the log is read, and before the end of an attempt is reported.
        Engines whose replicas write there directly have nothing to do.
        """

    def recover(self, adopted: Collection[tuple[str, int]], grace: float) -> list[str]:
        """End what an earlier scheduler left running, except the adopted jobs and attempts.

        The others have `grace` seconds to save. Return one line for each replica or process found.
        `BackendError`: one cannot be ended.
        """
        others = [key for key in self.listing().replicas if key[:2] not in adopted]
        found = left = self.left_behind(adopted)
        for signal, patience in ((Signal.STOP, grace), (Signal.KILL, KILL_PATIENCE)):
            left = self._end_within(patience, left, signal, adopted)
        if why := self.why_not_ended(left):
            raise BackendError(why)
        for key in others:
            with suppress(BackendError):
                self.fetch_log(key)
        for job, attempt in sorted({key[:2] for key in others}):
            self.forget(job, attempt)
        return list(found.values())

    def left_behind(self, adopted: Collection[tuple[str, int]]) -> Mapping[Any, str]:
        """Return what runs of attempts that were not adopted, with descriptions: replicas by key.

        An engine that finds something else returns it by keys that its `end_left` knows.
        """
        return {
            key: f"{state.handle} of job {key.job}"
            for key, state in self.listing().replicas.items()
            if state.ended is None and key[:2] not in adopted
        }

    def end_left(self, left: Collection[Any], signal: Signal) -> None:
        """Send a signal to some of what is `left_behind`; it is repeated from time to time."""
        for key in left:
            with suppress(ClusterUnavailableError):
                self.signal(key, signal)

    def why_not_ended(self, left: Mapping[Any, str]) -> str:
        """Return why no scheduler can run beside what a kill has not ended; empty: one can."""
        if not left:
            return ""
        return f"what an earlier scheduler left behind cannot be ended: {', '.join(left.values())}"

    def _end_within(
        self,
        seconds: float,
        left: Mapping[Any, str],
        signal: Signal,
        adopted: Collection[tuple[str, int]],
    ) -> Mapping[Any, str]:
        """Send a signal repeatedly to what is left behind; return what is left at the end."""
        deadline = time.monotonic() + seconds
        due: dict[Any, float] = {}
        while left and (now := time.monotonic()) < deadline:
            if signalled := [one for one in left if due.get(one, now) <= now]:
                due |= dict.fromkeys(signalled, now + SIGNAL_INTERVAL)
                self.end_left(signalled, signal)
            time.sleep(POLL_INTERVAL)
            with suppress(ClusterUnavailableError):
                left = self.left_behind(adopted)
        return left

    def keep_records(self, jobs: JobActions, ending: Event) -> None:  # noqa: ARG002  # most have none
        """Keep the cluster's own records of jobs in step, in a separate thread, until the end."""
        ending.wait()

    def close(self) -> None:  # noqa: B027  # most have nothing to do
        """Close connections, threads and temporary files; replicas keep running."""
