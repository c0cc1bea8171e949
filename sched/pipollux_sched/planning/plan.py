"""Plans from specs: the allocation of every job, and the reason, without acting."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import islice, repeat
from typing import Any

from pipollux_policies import (
    DEFAULT_POLICY,
    Allocation,
    AutoscalingRules,
    AutoscalingState,
    JobInfo,
    NodeInfo,
    Policy,
    autoscale,
    make_policy,
    missing_nodes,
    shape_of,
)
from pipollux_policies.allocations.allocation import network_level
from pipollux_sched.allocator.job_infos import (
    free_resources,
    job_info,
    node_info,
    node_template,
)
from pipollux_sched.allocator.reasons import explain, misfit
from pipollux_sched.errors import PipolluxError
from pipollux_sched.lifecycle import Dependency, When
from pipollux_sched.spec.cluster import ClusterSpec
from pipollux_sched.spec.job import JobSpec, SpecError

PLAN_AGE = 3600.0
"""Assumed age of a job in seconds, which files do not give: a restart then costs 1 %."""


class PlanError(PipolluxError):
    """Jobs and cluster are each valid, but do not match; the message is one sentence."""


@dataclass(frozen=True)
class PlannedJob:
    """The allocation of one job, and the reason."""

    job: str
    num_stages: int
    """K; the job's own without an allocation."""
    num_replicas: int
    num_microbatches: int
    nodes: tuple[str, ...]
    previous: tuple[str, ...]
    """The same, before the plan."""
    atomic_bsz: int | None
    """Samples per replica in one forward and backward; None: unknown, the job chooses."""
    accum_steps: int | None
    batch_size: int | None
    speedup: float | None
    """Predicted goodput over that of one replica; None: unknown."""
    goodput: float | None
    """Predicted, in samples per second; None: unknown."""
    why: str
    allocation: Allocation = field(default_factory=Allocation, repr=False)
    """`nodes`, with the shape of a replica."""


@dataclass(frozen=True)
class NodeUse:
    """How much of a node a plan uses."""

    node: str
    slots: int
    used: int


@dataclass(frozen=True)
class PlannedSweep:
    """A sweep, whose first trials are planned as jobs; the next ones follow as these end."""

    sweep: str
    num_planned: int
    num_trials: int


@dataclass(frozen=True)
class Plan:
    """The allocations of all jobs."""

    assignments: tuple[PlannedJob, ...]
    nodes: tuple[NodeUse, ...]
    desired_nodes: int
    """Number of nodes by the utility band (`autoscale`), at most twice the present one, and no more
    than these jobs could use."""
    sweeps: tuple[PlannedSweep, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain lists and mappings, for JSON or YAML."""
        return {
            "assignments": [_plain(assignment) for assignment in self.assignments],
            "nodes": [asdict(node) for node in self.nodes],
            "desired_nodes": self.desired_nodes,
            "sweeps": [asdict(sweep) for sweep in self.sweeps],
        }


def _plain(assignment: PlannedJob) -> dict[str, Any]:
    told = [entry.name for entry in fields(assignment) if entry.name != "allocation"]
    values = {name: getattr(assignment, name) for name in told}
    return {key: list(v) if isinstance(v, tuple) else v for key, v in values.items()}


def plan(
    cluster: ClusterSpec, jobs: Sequence[JobSpec], *, policy: Policy | None = None, seed: int = 0
) -> Plan:
    """Decide on all jobs, from the specs alone; `policy` None: the default one, with this seed.

    Of a sweep, the trials are planned that are submitted first.

    Raises:
        SpecError: a current allocation names an unknown node or exceeds a node.
        PlanError: a job could not run even on the empty cluster.
    """
    nodes = {node.name: node_info(node) for node in cluster.placed_nodes}
    slots = sum(node.slots for node in cluster.placed_nodes)
    waits = {job.name: _waits(job) for job in jobs}
    sweeps = []
    given, jobs = jobs, []
    for job in given:
        trials = list(_first_trials(job, slots))
        if job.sweep is not None:
            sweeps.append(PlannedSweep(job.name, len(trials), job.sweep.num_trials))
        waits |= {trial.name: waits[job.name] for trial in trials}
        jobs += trials
    infos = {
        job.name: job_info(job, job.hints, age=PLAN_AGE, created=float(number), nodes=nodes)
        for number, job in enumerate(jobs)
    }
    for name, info in infos.items():
        reason = misfit(name, info, nodes)
        if reason:
            raise PlanError(reason)
    current = {
        job.name: Allocation(job.allocation, infos[job.name].all_shapes[0])
        for job in jobs
        if job.allocation
    }
    _check_current(current, infos, nodes)
    policy = policy or make_policy(DEFAULT_POLICY, seed=seed)
    allocations, _ = policy.optimize(infos, nodes, current, node_template(nodes))
    free = free_resources(nodes, infos, allocations)
    return Plan(
        assignments=tuple(
            _assignment(
                job, infos[job.name], allocations.get(job.name, ()), nodes, free, waits[job.name]
            )
            for job in jobs
        ),
        sweeps=tuple(sweeps),
        nodes=tuple(
            NodeUse(node.name, node.slots, node.slots - free[node.name]["slots"])
            for node in cluster.placed_nodes
        ),
        desired_nodes=_advised_nodes(policy, infos, nodes, allocations),
    )


def _first_trials(job: JobSpec, slots: int) -> Iterator[JobSpec]:
    """Yield the trials of a sweep that are submitted first; other jobs as they are."""
    sweep = job.sweep
    if sweep is None:
        yield job
        return
    # A search proposes the values later; a plan does not depend on them.
    unknown = repeat(dict.fromkeys(sweep.names, ""), sweep.num_trials)
    parameters = unknown if sweep.search else sweep.fixed_trials()
    most = sweep.most_unfinished(slots, job.num_stages, job.min_replicas)
    number = min(most, sweep.num_trials)
    changes: dict[str, Any] = {}
    if sweep.max_replicas is not None:
        share = max(min(job.max_replicas, sweep.max_replicas // number), job.min_replicas)
        changes = {"max_replicas": share, "requested_replicas": None}
    for index, values in enumerate(islice(parameters, number)):
        yield job.of_trial(index, values).model_copy(update=changes)


def _waits(job: JobSpec) -> str:
    return " and for ".join(str(Dependency(one.job, When(one.when))) for one in job.after)


def _advised_nodes(
    policy: Policy,
    jobs: Mapping[str, JobInfo],
    nodes: Mapping[str, NodeInfo],
    allocations: Mapping[str, Sequence[str]],
) -> int:
    rules = AutoscalingRules(min_nodes=1, max_nodes=2 * len(nodes), window=1)
    template = node_template(nodes)
    state = AutoscalingState()
    advised = autoscale(rules, state, policy, jobs, nodes, allocations, template)[1]
    # The band leaves room for jobs to come; this is about the given ones.
    used = len({node for held in allocations.values() for node in held})
    return min(advised, max(len(nodes) + missing_nodes(jobs, nodes, template), used, 1))


def _assignment(
    job: JobSpec,
    info: JobInfo,
    allocation: Sequence[str],
    nodes: Mapping[str, NodeInfo],
    free: Mapping[str, Mapping[str, int]],
    waits: str,
) -> PlannedJob:
    shape = shape_of(info, allocation, nodes)
    given = Allocation(allocation, shape, network_level(allocation, nodes))
    config = given.configuration
    why = explain(info, job.allocation, allocation, nodes, free)
    return PlannedJob(
        job=job.name,
        num_stages=given.num_stages or job.num_stages,
        num_replicas=len(allocation),
        num_microbatches=config.num_microbatches if config else job.num_microbatches,
        nodes=tuple(allocation),
        previous=job.allocation,
        atomic_bsz=config.atomic_bsz if config else None,
        accum_steps=config.accum_steps if config else None,
        batch_size=config.batch_size if config else None,
        speedup=config.speedup if config else None,
        goodput=config.goodput if config else None,
        why=f"waits for {waits}; then: {why}" if waits else why,
        allocation=given,
    )


def _check_current(
    current: Mapping[str, Sequence[str]], jobs: Mapping[str, JobInfo], nodes: Mapping[str, NodeInfo]
) -> None:
    for job, allocation in current.items():
        for name in allocation:
            if name not in nodes:
                raise SpecError(
                    f"job '{job}': allocation names the node '{name}', which the cluster does not "
                    f"have; its nodes are {', '.join(nodes)}"
                )
    for name, left in free_resources(nodes, jobs, current).items():
        for kind, amount in left.items():
            if amount < 0:
                has = nodes[name].resources[kind]
                holders = [job for job, allocation in current.items() if name in allocation]
                raise SpecError(
                    f"jobs {', '.join(holders)}: allocation puts {has - amount} {kind} on the node "
                    f"'{name}', which has {has}; remove some"
                )
