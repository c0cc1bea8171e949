"""Pipollux as a whole in the simulator of Pollux's own artifact: its policy, and its jobs' models.

    python benchmarks/jct/told.py ARTIFACT --results DIR --where artifact-pipollux

`in_artifact` puts `ExactPolicy` in Pollux's place and leaves jobs to AdaptDL's agent. Here jobs
have ours, too: they model their step times and choose their batch sizes as in `trace_model`, and
start with the measurements of their family; the policy decides when a job arrives or completes,
which is noticed within `LOOK` seconds, or a minute later. Step times, gradient noise, job lengths
and the passing of time are the artifact's. An elastic resize is as in
`pipollux_simulator.engine.job`: joining replicas take the time of a start, in which the others
continue to train, and then all pause.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import in_artifact
import numpy as np
import pandas
from pipollux_simulator.engine.waiting import place_waiting

from pipollux_perfmodel import GradParams
from pipollux_policies import (
    MEASURED_REACH,
    Allocation,
    ChangeKind,
    JobInfo,
    NodeInfo,
    Policy,
    ReplicaShape,
    change_kind,
    make_policy,
    shape_of,
)
from pipollux_simulator import KnownLength
from pipollux_simulator.applications.base import JobModel, RunningJob, TrueStepTimes
from pipollux_simulator.applications.traces import TraceApplication, read_applications
from pipollux_simulator.engine.experience import Experience
from pipollux_simulator.engine.job_infos import simulated_info
from pipollux_simulator.workload.arrivals import JobArrival, read_workload

LOOK = 5
"""Whole seconds between two checks whether a job has completed."""
INTERVAL = 60
"""Seconds after which the policy decides without an arrival or a completion."""


@dataclass(frozen=True)
class Prices:
    """Costs of changes."""

    start_seconds: float = 30.0
    """Of a start or restart; by default as in the artifact."""
    rescale_seconds: float | None = None
    """Of an elastic resize, for the surviving replicas; None: every change is a restart."""


@dataclass
class Agent:
    """A job of the artifact with the interface of our simulator's `SimulatedJob`."""

    theirs: Any
    """The artifact's `Job`."""
    arrival: JobArrival
    app: TraceApplication
    """The bounds of its batch sizes, and its length."""
    model: JobModel
    prices: Prices
    nodes: tuple[Any, ...] = ()
    members: tuple[Any, ...] = ()
    """Nodes of the training replicas; the others of `nodes` are starting."""
    shape: ReplicaShape | None = None
    num_moves: int = 0
    num_rescales: int = 0

    @property
    def name(self) -> str:
        """Name in the workload."""
        return self.arrival.name

    @property
    def restart_seconds(self) -> float:
        """Cost of a restart."""
        return self.prices.start_seconds

    @property
    def rescale_seconds(self) -> float | None:
        """Cost of an elastic resize."""
        return self.prices.rescale_seconds

    @property
    def clock(self) -> float:
        """The time up to which it has been simulated."""
        return float(self.theirs.current_time)

    @property
    def progress(self) -> float:
        """Iterations that the initial batch size would have taken."""
        return float(self.theirs.progress)

    @property
    def attained_service(self) -> float:
        """Slot-seconds, without those of joining replicas."""
        return float(self.theirs.attained_service)

    @property
    def num_restarts(self) -> int:
        """Number of starts after the first."""
        return self.theirs.num_restarts or 0

    @property
    def started(self) -> float | None:
        """Something, once it has held nodes."""
        return None if self.theirs.num_restarts is None else 0.0

    @property
    def starting(self) -> bool:
        """Whether it holds slots and does not train yet, or replicas are joining."""
        return bool(self.nodes) and (self.theirs.rescale_time > 0 or self.members != self.nodes)

    @property
    def last_epoch(self) -> int:
        """Number of epochs of the whole job."""
        return self.app.max_epochs

    def change(self, info: JobInfo, nodes: Sequence[Any], allocation: Allocation | None) -> None:
        """Record the next allocation, and set whether the artifact's job resizes."""
        shape = allocation.shape if allocation else None
        kind = change_kind(info, Allocation(self.members, self.shape), Allocation(nodes, shape))
        moves = bool(self.nodes and nodes)
        self.nodes = tuple(nodes)
        if kind is ChangeKind.RESTART or not nodes:
            self.num_moves += moves
            self.members, self.shape = self.nodes, shape
            self.theirs.elastic = None
            return
        self.num_rescales += 1
        stay = tuple(sorted((Counter(self.members) & Counter(nodes)).elements()))
        pauses = len(stay) < len(self.members)
        self.members = stay
        self.theirs.elastic = tuple(Counter(stay).values()), pauses

    def join(self) -> tuple[int, ...]:
        """Add the starting replicas to the training ones; return the placement."""
        self.members = self.nodes
        return tuple(Counter(self.nodes).values())


def job_class(base: type[Any]) -> type[Any]:
    """Return the artifact's class of jobs, with our agent in them."""

    class Job(base):
        agent: Agent
        elastic: tuple[tuple[int, ...], bool] | None = None
        """Of an upcoming change: the surviving replicas, and whether they pause."""
        join_at: float = float("inf")

        @property
        def max_profiled_replicas(self) -> int:
            # The artifact allows twice as many.
            return self.agent.model.max_profiled_replicas * MEASURED_REACH // 2

        def get_speedup_fn(self) -> Any:
            return self.agent.model.shapes()[0].speedup_fn

        def update_local_bsz(self, placement: Sequence[int]) -> None:
            model = self.agent.model
            running = model.configure(model.shapes()[0], tuple(filter(None, placement)))
            self.atomic_bsz, self.accum_steps = running.atomic_bsz, running.accum_steps

        def update_params(self, *seen: float) -> None:
            _, _, _, step_time, sync_time, sqr, var = map(float, seen)
            placement = tuple(filter(None, self.placement))
            running = RunningJob(placement, 1, 1, self.atomic_bsz, self.accum_steps)
            times = TrueStepTimes(step_time, step_time - sync_time)
            self.agent.model.observe(running, times, GradParams(sqr, var))

        def step(self, seconds: float, interference: float = 0.0) -> None:
            if self.join_at <= self.current_time + seconds:
                before = self.join_at - self.current_time
                super().step(before, interference)
                self._join()
                seconds -= before
            super().step(seconds, interference)

        def _join(self) -> None:
            self.join_at = float("inf")
            if self.completion_time is None:
                self.placement = self.agent.join()
                self.update_local_bsz(self.placement)
                self.rescale_time += self.agent.rescale_seconds

        def reallocate(self, placement: Sequence[int]) -> None:
            if self.elastic is None:
                self.join_at = float("inf")
                super().reallocate(placement)
                if placement:
                    self.rescale_time = self.agent.prices.start_seconds
                return
            stay, pauses = self.elastic
            if pauses:
                self.placement = stay
                self.update_local_bsz(stay)
                self.rescale_time += self.agent.rescale_seconds
            if sum(stay) == sum(placement):
                self.join_at = float("inf")
            else:
                self.join_at = self.current_time + self.agent.prices.start_seconds

    return Job


@dataclass
class Scheduler:
    """Answers the artifact's simulator as our scheduler would; `agents` are in order of arrival.

    The policy decides when a job arrives or completes, or a minute later.
    """

    policy: Policy
    known_length: KnownLength
    agents: Mapping[str, Agent]
    cluster: Any = None

    def __post_init__(self) -> None:
        self.seconds: list[float] = []
        self._experience = Experience()
        self._warm_starts: set[str] = set()
        self._completed: set[str] = set()
        self._present: set[str] = set()
        self._asked = -float("inf")

    def optimize(self, jobs: Any, nodes: Any, base_allocations: Any, _template: Any) -> Any:
        """Decide, if necessary, in the artifact's terms."""
        now = float(self.cluster.current_time)
        self._learn()
        due = self._present != set(jobs) or now >= self._asked + INTERVAL
        if due:
            self._asked, self._present = now, set(jobs)
            ours = {
                name: NodeInfo({"slots": info.resources["nvidia.com/gpu"]})
                for name, info in nodes.items()
            }
            base_allocations = self._decide(now, list(jobs), ours)
        return base_allocations, len(nodes)

    def _learn(self) -> None:
        """Add the jobs that have completed, in the order of completion."""
        ended = [
            agent
            for agent in self.agents.values()
            if agent.theirs.completion_time is not None and agent.name not in self._completed
        ]
        for agent in sorted(ended, key=lambda agent: agent.theirs.completion_time):
            self._completed.add(agent.name)
            self._experience.add(agent)  # in place of a `SimulatedJob`

    def _decide(
        self, now: float, names: Sequence[str], nodes: Mapping[str, NodeInfo]
    ) -> dict[str, list[Any]]:
        active = {name: self.agents[name] for name in names}
        for name, agent in active.items():
            if agent.started is None and self._experience.bequeath(agent):
                self._warm_starts.add(name)
        infos = {name: self._info(agent, now) for name, agent in active.items()}
        base = {
            name: Allocation(agent.nodes, agent.shape)
            for name, agent in active.items()
            if agent.nodes
        }
        weighed = self._warm_starts | {name for name in active if active[name].started is not None}
        placed = place_waiting(self.policy, infos, nodes, base, weighed)
        for name, held in placed.items():
            base[name] = held
            infos[name] = replace(infos[name], preemptible=False)
        begin = time.perf_counter()
        answer, _ = self.policy.optimize(infos, nodes, base, nodes[0])
        self.seconds.append(time.perf_counter() - begin)
        for name, agent in active.items():
            given = sorted(answer.get(name, ()))
            if given != sorted(agent.nodes):
                shape = shape_of(infos[name], given, nodes) if given else None
                agent.change(infos[name], given, Allocation(given, shape) if given else None)
        return {name: sorted(given) for name, given in answer.items() if given}

    def _info(self, agent: Agent, now: float) -> JobInfo:
        known, lengths = self.known_length, self._experience.lengths
        info = simulated_info(agent, now, known, lengths, fixed=False)
        return replace(info, preemptible=False) if agent.starting else info


def run(
    artifact: Path,
    workload: Path,
    policy: str,
    known_length: KnownLength,
    prices: Prices,
) -> dict[str, Any]:
    """Simulate a workload, a CSV file of the artifact, on 16 nodes of 4 GPUs."""
    simulator = in_artifact.load_simulator(artifact)
    with (
        # This class selects adaptive jobs.
        mock.patch.object(simulator, "PolluxPolicy", Scheduler),
        mock.patch.object(simulator, "Job", job_class(simulator.Job)),
    ):
        apps = read_applications(artifact / "traces")
        agents: dict[str, Agent] = {}
        scheduler = Scheduler(make_policy(policy, seed=0), known_length, agents)
        cluster = scheduler.cluster = simulator.Cluster(pandas.read_csv(workload), scheduler, 16)
        theirs = {job.name: job for job in cluster.jobs}
        for row in read_workload(workload):
            app = apps[row.application]
            agent = Agent(theirs[row.name], row, app, app.new_model(), prices)
            agents[row.name] = theirs[row.name].agent = agent
        arrivals = sorted({math.ceil(agent.arrival.time) for agent in agents.values()})
        while not cluster.all_complete():
            moments = [
                cluster.current_time + LOOK,
                *(t for t in arrivals if t > cluster.current_time),
            ]
            cluster.step(min(moments) - cluster.current_time)
            del cluster.logs[:-1]  # copies of all jobs at all times
        restarts, rescales = (
            float(np.mean([getattr(agent, name) for agent in agents.values()]))
            for name in ("num_restarts", "num_rescales")
        )
        return {
            **in_artifact.outcome(cluster, scheduler.seconds),
            "restarts_per_job": restarts,
            "rescales_per_job": rescales,
        }
