"""The simulated cluster: jobs arrive, a policy decides in every round, nodes come and go.

Between two decisions, every job trains by itself, exactly (`job`). The policy sees what it would
see in a real cluster: `JobInfo` from what jobs measured, `NodeInfo`, the current allocations. Its
answer is checked by `policy.violations`; a broken rule ends the simulation, so that no policy can
win by cheating.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from pipollux_sched.errors import PipolluxError
from pipollux_sched.policy import (
    Allocation,
    JobInfo,
    NodeInfo,
    Policy,
    shape_of,
    violations,
)
from pipollux_sched.simulator.applications.base import Application
from pipollux_sched.simulator.known_length import EXACT_LENGTHS, KnownLength
from pipollux_sched.simulator.workload.arrivals import JobArrival

from .experience import Experience
from .failures import NodeEvent
from .job import SimulatedJob, job_info

Watch: TypeAlias = Callable[[float, int], None]
"""Called after every round with the time in the simulation and the number of completed jobs."""


class SimulationError(PipolluxError):
    """A policy broke a rule, or a job cannot run; the text says which, when, and what to do."""


@dataclass(frozen=True)
class Options:
    """How the cluster behaves; the defaults are the artifact's."""

    interval: float = 60.0
    """Seconds between two rounds of the policy."""
    restart_seconds: float = 30.0
    """Time that a replica takes to start; a job does not train in that of a start or restart."""
    rescale_seconds: float | None = None
    """Time for which the replicas that stay pause in a live change; None: every change of a job's
    allocation is a restart."""
    interference: float = 0.0
    """The slowdown of distributed jobs that share a node, 0 to 1; with 0, sharing is forbidden
    (rule 4 of docs/policies.md)."""
    checkpoint_seconds: float = 600.0
    """Training time after which jobs save; it matters where nodes are lost."""
    node_events: tuple[NodeEvent, ...] = ()
    """Nodes that drain, are lost and come back."""
    known_length: KnownLength = EXACT_LENGTHS
    """What the policy knows of the remaining work of jobs."""
    inherit_models: bool = False
    """Whether a job is planned for by what earlier ones of its family measured (`Experience`)."""
    most_days: float = 60.0
    """A simulation that takes longer is stopped: some job will never run."""

    def __post_init__(self) -> None:
        for name in ("interval", "checkpoint_seconds", "most_days"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}: {getattr(self, name)} must be above 0")
        if not self.restart_seconds >= 0:
            raise ValueError(f"restart_seconds: {self.restart_seconds} must be at least 0")
        rescale = self.rescale_seconds
        if rescale is not None and not 0 <= rescale <= self.restart_seconds:
            raise ValueError(
                f"rescale_seconds: {rescale} must be between 0 and "
                f"restart_seconds = {self.restart_seconds}, or left out"
            )
        if not 0 <= self.interference < 1:
            raise ValueError(f"interference: {self.interference} must be at least 0 and below 1")


@dataclass(frozen=True)
class Result:
    """The result of a simulation."""

    jobs: tuple[SimulatedJob, ...]
    nodes: Mapping[str, NodeInfo]
    policy_seconds: tuple[float, ...]
    """Wall-clock seconds of every call of the policy."""
    active: tuple[tuple[float, int], ...]
    """(seconds, number of unfinished jobs) whenever that number changed."""

    @property
    def makespan(self) -> float:
        """Seconds from the first arrival to the last completion."""
        return max(j.completed or 0.0 for j in self.jobs) - min(j.arrival.time for j in self.jobs)


@dataclass
class Cluster:
    """A cluster under simulation.

    Args:
        workload: what arrives when.
        applications: by name, the truth of every application of the workload.
        nodes: by name.
        policy: decides; with `adapts_batch_size = False` jobs keep their user's batch size.
        options: how the cluster behaves.
        experience: from jobs that completed before; those that complete are added.

    Raises:
        SimulationError: the workload names an application that is not there.
    """

    workload: Sequence[JobArrival]
    applications: Mapping[str, Application]
    nodes: dict[str, NodeInfo]
    policy: Policy
    options: Options = field(default_factory=Options)
    experience: Experience = field(default_factory=Experience)

    def __post_init__(self) -> None:
        unknown = sorted({row.application for row in self.workload} - self.applications.keys())
        if unknown:
            raise SimulationError(
                f"the workload's application {unknown[0]!r} is not known; known are "
                f"{', '.join(sorted(self.applications))}"
            )
        if not self.workload or not self.nodes:
            raise SimulationError("there is nothing to simulate; give jobs and nodes")
        self._fixed = not getattr(self.policy, "adapts_batch_size", True)
        self._all_nodes, self.nodes = dict(self.nodes), dict(self.nodes)
        self._now = 0.0
        self._waiting = sorted(self.workload, key=lambda row: (row.time, row.name))
        self._active: dict[str, SimulatedJob] = {}
        self._done: list[SimulatedJob] = []
        self._events = sorted(self.options.node_events, key=lambda event: event.time)
        self._policy_seconds: list[float] = []

    def run(self, watch: Watch | None = None) -> Result:
        """Simulate until all jobs are done.

        Args:
            watch: called after every round.

        Raises:
            SimulationError: the policy broke a rule, or some job never runs.
        """
        while self._waiting or self._active:
            self._skip_idle_rounds()
            self._advance_to(self._now + self.options.interval)
            self._round()
            if watch is not None:
                watch(self._now, len(self._done))
            if self._now > self.options.most_days * 86400:
                names = ", ".join([*self._active][:5])
                raise SimulationError(
                    f"after {self.options.most_days:g} days {len(self._active)} jobs are not done "
                    f"({names}); give nodes that hold their requests, or fewer jobs"
                )
        jobs = tuple(sorted(self._done, key=lambda job: (job.arrival.time, job.name)))
        return Result(jobs, self._all_nodes, tuple(self._policy_seconds), _activity(jobs))

    def _skip_idle_rounds(self) -> None:
        if self._active or not self._waiting:
            return
        # The round that takes the next arrival in is the first at or after it.
        rounds = math.ceil(self._waiting[0].time / self.options.interval) - 1
        self._now = max(self._now, rounds * self.options.interval)

    def _advance_to(self, until: float) -> None:
        """Let time pass; nodes come and go at their exact times."""
        while self._events and self._events[0].time <= until:
            event = self._events.pop(0)
            self._train(max(event.time, self._now))
            self._node_event(event)
        self._train(until)

    def _train(self, until: float) -> None:
        slowed = self._slowed()
        for job in self._active.values():
            pace = 1.0 - self.options.interference * (job.name in slowed)
            job.advance(until, pace, self._gpu_type(job))
        for name in [name for name, job in self._active.items() if job.completed is not None]:
            self._done.append(done := self._active.pop(name))
            self.experience.add(done)
        self._now = until

    def _slowed(self) -> set[str]:
        """Return the distributed jobs that share a node with another one."""
        if not self.options.interference:
            return set()
        members = {job.name: set(job.members) for job in self._active.values()}
        distributed = {name: nodes for name, nodes in members.items() if len(nodes) > 1}
        count = Counter(node for nodes in distributed.values() for node in nodes)
        return {name for name, nodes in distributed.items() if any(count[n] > 1 for n in nodes)}

    def _gpu_type(self, job: SimulatedJob) -> str:
        return self._all_nodes[job.members[0]].gpu_type if job.members else ""

    def _node_event(self, event: NodeEvent) -> None:
        if event.kind == "back":
            self.nodes[event.node] = self._all_nodes[event.node]
        elif event.kind == "drain" and event.node in self.nodes:
            self.nodes[event.node] = replace(self.nodes[event.node], draining=True)
        elif event.kind == "lost":
            self.nodes.pop(event.node, None)
            for job in self._active.values():
                job.lose_node(self._now, event.node)

    def _arrive(self) -> None:
        while self._waiting and self._waiting[0].time <= self._now:
            row = self._waiting.pop(0)
            app = self.applications[row.application]
            model = app.new_model(row.batch_size if self._fixed else None)
            if self.options.inherit_models:
                self.experience.bequeath(row.name, model)
            self._active[row.name] = SimulatedJob(
                row,
                app,
                model,
                self.options.restart_seconds,
                self.options.rescale_seconds,
                self.options.checkpoint_seconds if self.options.node_events else math.inf,
                clock=self._now,
            )

    def _round(self) -> None:
        self._arrive()
        if not self._active or not self.nodes:
            return
        infos = {
            name: job_info(
                job,
                self._now,
                self.options.known_length,
                self.experience.lengths,
                fixed=self._fixed,
            )
            for name, job in self._active.items()
        }
        base = {
            name: Allocation(job.nodes, job.shape)
            for name, job in self._active.items()
            if job.nodes
        }
        template = self.nodes[min(self.nodes)]
        begin = time.perf_counter()
        answer, _ = self.policy.optimize(infos, self.nodes, base, template)
        self._policy_seconds.append(time.perf_counter() - begin)
        # Where sharing a node has a price, the policy may choose to pay it.
        crowding = self.options.interference > 0
        broken = violations(infos, self.nodes, base, answer, crowding=crowding)
        if broken:
            raise SimulationError(f"at {self._now:g} s the policy broke a rule: {broken[0]}")
        for name, job in self._active.items():
            self._carry_out(job, infos[name], answer.get(name, ()))

    def _carry_out(self, job: SimulatedJob, info: JobInfo, nodes: Sequence[str]) -> None:
        shape = shape_of(info, nodes, self.nodes) if nodes else None
        stages = shape.num_stages if shape else None
        now_stages = job.shape.num_stages if job.shape else None
        if Counter(nodes) != Counter(job.nodes) or stages != now_stages:
            job.reallocate(self._now, sorted(nodes), shape, info)


def _activity(jobs: Sequence[SimulatedJob]) -> tuple[tuple[float, int], ...]:
    """Return how many jobs were unfinished, and since when."""
    changes = [(job.arrival.time, 1) for job in jobs]
    changes += [(job.completed, -1) for job in jobs if job.completed is not None]
    return tuple(_running_total(sorted(changes)))


def _running_total(changes: Sequence[tuple[float, int]]) -> Iterator[tuple[float, int]]:
    total = 0
    for moment, change in changes:
        total += change
        yield moment, total
