"""The simulated cluster: jobs arrive, a policy allocates in every round, nodes come and go.

Between two decisions every job trains independently, exactly (`job`). The policy has the same input
as in a real cluster: `JobInfo` from measurements of jobs, `NodeInfo`, and the current allocations.
`policy.violations` checks its answer; a broken rule ends the simulation.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

from pipollux_perfmodel.errors import PipolluxError
from pipollux_policies import (
    Allocation,
    Contention,
    JobInfo,
    NodeInfo,
    Policy,
    shape_of,
    violations,
)
from pipollux_policies.allocations.allocation import as_allocation
from pipollux_policies.jobs.topology import build_topology
from pipollux_policies.placement.new_jobs import place_in_order
from pipollux_policies.teams.membership import TeamMembership
from pipollux_policies.teams.subcluster import without
from pipollux_policies.teams.team_policy import TeamPolicy
from pipollux_simulator.applications.base import Application, JobModel
from pipollux_simulator.applications.network import SlowerNetwork
from pipollux_simulator.known_length import EXACT_LENGTHS, KnownLength
from pipollux_simulator.workload.arrivals import JobArrival

from .experience import Experience
from .failures import NodeEvent
from .job import SimulatedJob
from .job_infos import declared_lengths, simulated_info

Watch: TypeAlias = Callable[[float, int], None]
"""Called after every round with the time in the simulation and the number of completed jobs."""
DecidesAt: TypeAlias = Literal["rounds", "arrivals", "changes"]

_MOMENT = 1e-6


class SimulationError(PipolluxError):
    """A policy broke a rule, or a job cannot run; with rule, time and remedy."""


@dataclass(frozen=True)
class Options:
    """Behaviour of the cluster; the defaults are those of the Pollux artifact."""

    interval: float = 60.0
    """Seconds between rounds of the policy."""
    restart_seconds: float = 30.0
    """Start time of a replica; a job does not train during a start or restart."""
    rescale_seconds: float | None = None
    """Pause of the surviving replicas in an elastic resize; None: every change is a restart."""
    interference: float = 0.0
    """The slowdown of distributed jobs that share a node, 0 to 1; with 0, sharing is forbidden
    (rule 4 of docs/concepts/policies.md)."""
    checkpoint_seconds: float = 600.0
    """Training time between checkpoints; matters if nodes are lost."""
    node_events: tuple[NodeEvent, ...] = ()
    known_length: KnownLength = EXACT_LENGTHS
    inherit_models: bool = False
    """Whether a new job uses measurements of related jobs (`Experience`)."""
    decides_at: DecidesAt = "rounds"
    """When the policy runs: in every round; in rounds and at "arrivals"; or at "changes", as in a
    scheduler: whenever a job arrives or completes or a node comes or goes, or an interval later,
    where starting jobs keep their allocation until they train."""
    teams: TeamMembership | None = None
    slowdowns: tuple[float, ...] = ()
    """How many times slower gradients are synchronized at network level 2, 3, … than at level 1
    (`NodeInfo.topology`); higher levels are as the last one. Empty: all levels are equally fast."""
    most_days: float = 60.0
    """Limit of simulated days: beyond it some job will never run."""

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
        if not all(1 <= slower < math.inf for slower in self.slowdowns):
            raise ValueError(f"slowdowns: {self.slowdowns} must be finite numbers from 1 on")
        if not 0 <= self.interference < 1:
            raise ValueError(f"interference: {self.interference} must be at least 0 and below 1")


@dataclass(frozen=True)
class Result:
    """The result of a simulation."""

    jobs: tuple[SimulatedJob, ...]
    nodes: Mapping[str, NodeInfo]
    policy_seconds: tuple[float, ...]
    active: tuple[tuple[float, int], ...]
    """(seconds, number of unfinished jobs) at each change of that number."""

    @property
    def makespan(self) -> float:
        """Seconds from the first arrival to the last completion."""
        return max(j.completed or 0.0 for j in self.jobs) - min(j.arrival.time for j in self.jobs)


@dataclass
class Cluster:
    """A cluster under simulation, with the true applications of its workload by name.

    Under a policy with `adapts_batch_size = False` jobs keep their user's batch size. `experience`
    is of previously completed jobs; completed jobs are added. Raises SimulationError for an
    application that is not given.
    """

    workload: Sequence[JobArrival]
    applications: Mapping[str, Application]
    nodes: dict[str, NodeInfo]
    policy: Policy
    options: Options = field(default_factory=Options)
    experience: Experience = field(default_factory=Experience)
    begun: Sequence[SimulatedJob] = ()
    """Jobs that have arrived by the beginning, with their allocations."""
    begin: float = 0.0

    def __post_init__(self) -> None:
        unknown = sorted({row.application for row in self.workload} - self.applications.keys())
        if unknown:
            raise SimulationError(
                f"the workload's application {unknown[0]!r} is not known; choose from "
                f"{', '.join(sorted(self.applications))}"
            )
        if not (self.workload or self.begun) or not self.nodes:
            raise SimulationError("there is nothing to simulate; give jobs and nodes")
        if self.options.slowdowns:
            slower = self.options.slowdowns
            self.applications = {n: SlowerNetwork(a, slower) for n, a in self.applications.items()}
        self._topology = build_topology([*self.nodes.values()])
        self._place = {name: number for number, name in enumerate(self.nodes)}
        self._warm_starts: set[str] = set()
        self._at_changes = self.options.decides_at == "changes"
        self._fixed = not getattr(self.policy, "adapts_batch_size", True)
        self._all_nodes, self.nodes = dict(self.nodes), dict(self.nodes)
        self._now = self.begin
        self._waiting = sorted(self.workload, key=lambda row: (row.time, row.name))
        self._active = {job.name: job for job in self.begun}
        self._done: list[SimulatedJob] = []
        self._events = sorted(self.options.node_events, key=lambda event: event.time)
        self._policy_seconds: list[float] = []
        self._teams = None if self.options.teams is None else self.options.teams.for_policy()
        self._notices: Mapping[str, float] = {}
        self._declared: Mapping[str, Sequence[float]] = {}

    def run(self, watch: Watch | None = None) -> Result:
        """Simulate until all jobs are done, calling `watch` after every round. Raises
        SimulationError if the policy broke a rule, or some job never runs.
        """
        while self._waiting or self._active:
            self._skip_idle_rounds()
            self._advance_to_round()
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

    def known_jobs(self) -> list[SimulatedJob]:
        """Return the jobs that have arrived so far."""
        return [*self._done, *self._active.values()]

    def _skip_idle_rounds(self) -> None:
        if self._active or not self._waiting:
            return
        if self._at_changes:
            self._now = max(self._now, self._waiting[0].time)
            return
        # The first round at or after the next arrival.
        rounds = math.ceil(self._waiting[0].time / self.options.interval) - 1
        self._now = max(self._now, rounds * self.options.interval)

    def _interval(self) -> float:
        """Return the seconds between two decisions without a change."""
        return self.options.interval

    def _advance_to_round(self) -> None:
        interval = self._interval()
        end = self._now + interval
        if not self._at_changes:
            if self.options.decides_at == "arrivals":
                end = (math.floor(self._now / interval + 1e-9) + 1) * interval
                end = min([end, *(max(row.time, self._now) for row in self._waiting[:1])])
            self._advance_to(end)
            return
        moments = [queue[0].time for queue in (self._waiting, self._events) if queue]
        moments += [due for due in self._notices.values() if due > self._now]
        end = max(min([end, *moments]), self._now)
        num_done = len(self._done)
        while self._now < end and len(self._done) == num_done:
            # Time must advance even if a job's next change is immediate.
            self._advance_to(min(end, max(self._next_change(), self._now + _MOMENT)))
        self._advance_to(self._now)

    def _next_change(self) -> float:
        slowed = self._slowed()
        return min(
            (
                job.next_change(self._pace(job, slowed), self._gpu_type(job))
                for job in self._active.values()
            ),
            default=math.inf,
        )

    def _advance_to(self, until: float) -> None:
        while self._events and self._events[0].time <= until:
            event = self._events.pop(0)
            self._train(max(event.time, self._now))
            self._node_event(event)
        self._train(until)

    def _train(self, until: float) -> None:
        slowed = self._slowed()
        for job in self._active.values():
            job.advance(until, self._pace(job, slowed), self._gpu_type(job))
        for name in [name for name, job in self._active.items() if job.completed is not None]:
            self._done.append(done := self._active.pop(name))
            self.experience.add(done)
        self._now = until

    def _slowed(self) -> set[str]:
        if not self.options.interference:
            return set()
        members = {job.name: set(job.members) for job in self._active.values()}
        distributed = {name: nodes for name, nodes in members.items() if len(nodes) > 1}
        count = Counter(node for nodes in distributed.values() for node in nodes)
        return {name for name, nodes in distributed.items() if any(count[n] > 1 for n in nodes)}

    def _pace(self, job: SimulatedJob, slowed: Collection[str]) -> float:
        return 1.0 - self.options.interference * (job.name in slowed)

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
            try:
                model = self._new_model(row, app)
            except ValueError as error:
                raise SimulationError(f"job {row.name!r} of the workload: {error}") from error
            self._active[row.name] = self._job(row, app, model)

    def _new_model(self, row: JobArrival, app: Application) -> JobModel:
        return app.new_model(row.batch_size if self._fixed else None)

    def _bequeath(self) -> None:
        if self.options.inherit_models:
            for name, job in self._active.items():
                if self._is_new(name) and self.experience.bequeath(job):
                    self._warm_starts.add(name)

    def _job(self, row: JobArrival, app: Application, model: JobModel) -> SimulatedJob:
        options, terms = self.options, row.terms
        restart, rescale = terms.restart_seconds, terms.rescale_seconds
        return SimulatedJob(
            row,
            app,
            model,
            options.restart_seconds if restart is None else restart,
            options.rescale_seconds if rescale is None else rescale,
            options.checkpoint_seconds if options.node_events else math.inf,
            clock=self._now,
            start_seconds=terms.start_seconds,
            level_of=self._level_of,
        )

    def _level_of(self, nodes: Sequence[Any]) -> int:
        return self._topology.level(self._place[node] for node in dict.fromkeys(nodes))

    def _round(self) -> None:
        self._arrive()
        if not self._active or not self.nodes:
            return
        self._bequeath()
        mean_jobs = self._mean_jobs()
        self._declared = declared_lengths(self._active.values())
        infos = {name: self._info(job, mean_jobs.get(name)) for name, job in self._active.items()}
        base = {
            name: Allocation(job.nodes, job.shape)
            for name, job in self._active.items()
            if job.nodes
        }
        if self._at_changes and self._teams is None:
            weighed = {
                name for name in infos if name in self._warm_starts or not self._is_new(name)
            }
            for name, held in self._place_new(infos, base, weighed).items():
                self._carry_out(self._active[name], infos[name], held)
                base[name] = held
                infos[name] = self._info(self._active[name], mean_jobs.get(name))
        begin = time.perf_counter()
        answer = self._ask(infos, base)
        self._policy_seconds.append(time.perf_counter() - begin)
        broken = self._broken_rules(infos, base, answer)
        if broken:
            raise SimulationError(f"at {self._now:g} s the policy broke a rule: {broken[0]}")
        for name, job in self._active.items():
            self._carry_out(job, infos[name], answer.get(name, ()))

    def _broken_rules(
        self,
        infos: Mapping[str, JobInfo],
        base: Mapping[str, Allocation],
        answer: Mapping[str, Sequence[str]],
    ) -> list[str]:
        # If sharing a node only slows jobs down, the policy may choose it.
        crowding = self.options.interference > 0
        return violations(infos, self.nodes, base, answer, crowding=crowding)

    def _info(self, job: SimulatedJob, mean_jobs: float | None) -> JobInfo:
        info = simulated_info(
            job,
            self._now,
            self.options.known_length,
            self.experience.lengths,
            fixed=self._fixed,
            teams=self.options.teams,
            mean_jobs=mean_jobs,
            relatives=self._declared.get(job.arrival.family, ()),
        )
        if self._at_changes and job.starting:
            return replace(info, preemptible=False)
        return info

    def _ask(
        self, infos: Mapping[str, JobInfo], base: Mapping[str, Allocation]
    ) -> Mapping[str, Sequence[str]]:
        template = self.nodes[min(self.nodes)]
        if self._teams is None:
            return self.policy.optimize(infos, self.nodes, base, template)[0]
        asked = TeamPolicy(self.policy, self._teams, self._now, self._notices)
        answer = asked.solve(infos, self.nodes, base, template)
        self._notices = answer.notices
        return answer.allocations

    def _place_new(
        self,
        infos: Mapping[str, JobInfo],
        base: Mapping[str, Allocation],
        weighed: Collection[str],
    ) -> dict[str, Allocation]:
        return place_in_order(
            [name for name in infos if name not in base],
            without(infos, self.nodes, base),
            lambda name, free: as_allocation(
                infos[name], self.policy.allocate_job(infos[name], free), self.nodes
            ),
            weighed,
        )

    def _is_new(self, name: str) -> bool:
        return self._active[name].started is None

    def _mean_jobs(self) -> dict[str, float]:
        ends = [(job.arrival.time, job.completed or self._now) for job in self._done]
        ends += [(job.arrival.time, self._now) for job in self._active.values()]
        arrivals = {name: job.arrival.time for name, job in self._active.items()}
        return Contention(ends).means(arrivals, self._now)

    def _carry_out(self, job: SimulatedJob, info: JobInfo, nodes: Sequence[str]) -> None:
        shape = shape_of(info, nodes, self.nodes) if nodes else None
        stages = shape.num_stages if shape else None
        now_stages = job.shape.num_stages if job.shape else None
        if Counter(nodes) != Counter(job.nodes) or stages != now_stages:
            job.reallocate(self._now, sorted(nodes), shape, info)


def _activity(jobs: Sequence[SimulatedJob]) -> tuple[tuple[float, int], ...]:
    changes = [(job.arrival.time, 1) for job in jobs]
    changes += [(job.completed, -1) for job in jobs if job.completed is not None]
    return tuple(_running_total(sorted(changes)))


def _running_total(changes: Sequence[tuple[float, int]]) -> Iterator[tuple[float, int]]:
    total = 0
    for moment, change in changes:
        total += change
        yield moment, total
