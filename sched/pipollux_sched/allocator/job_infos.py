"""Jobs and nodes in the form of allocation policies, from specs and hints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from pipollux_perfmodel import SchedHints, SpeedupFunction
from pipollux_policies import (
    DEFAULT_RESTART_SECONDS,
    MEASURED_REACH,
    JobInfo,
    LengthHistory,
    NodeInfo,
    ReplicaShape,
    SpeedupCallable,
    shape_of,
)
from pipollux_sched.spec.cluster import NodeSpec
from pipollux_sched.spec.job import JobSpec
from pipollux_sched.spec.teams import TeamsSpec

from .hints import HintsWorth, worth
from .learned_lengths import length_of

UNSTATED = 2**50
"""CPUs or memory of a node whose spec has no value: more than any job requests."""


DEVICE_SLOTS: Mapping[str, str] = {"gpu": "gpu_slots", "cpu": "cpu_slots"}
"""By kind of device: the resource that a node has as many of as slots, if these are of that kind.
Only jobs that need a certain kind ask for it."""
SIDE_SLOTS = "side_slots"
"""The resource of nodes with CPU slots beside GPUs; no job asks for it."""
WIDE_SLOTS = "wide_slots"
"""The resource of nodes whose slots hold replicas with several stages."""


def linear_speedup(num_nodes: Any, num_replicas: Any) -> Any:  # noqa: ARG001  # as every speedup function
    """Return the speedup of a job without hints: linear in its replicas."""
    return np.asarray(num_replicas, dtype=float)


def node_info(spec: NodeSpec, slots: int | None = None) -> NodeInfo:
    """Convert a node to the policy's form; `slots`: those that may be used, None: all."""
    usable = spec.slots if slots is None else slots
    amounts = {"slots": usable, "cpus": spec.cpus, "memory": spec.memory}
    amounts[DEVICE_SLOTS[spec.kind]] = usable
    if spec.beside is not None:
        amounts[SIDE_SLOTS] = usable
    if not spec.single_stage:
        amounts[WIDE_SLOTS] = usable
    return NodeInfo(
        {kind: UNSTATED if amount is None else amount for kind, amount in amounts.items()},
        spec.preemptible,
        spec.gpu_type or "",
        spec.draining,
        topology=tuple(spec.topology.values()),
    )


def replica_resources(
    spec: JobSpec, num_stages: int | None = None, nodes: Mapping[str, NodeInfo] | None = None
) -> dict[str, int]:
    """Return the resources of one replica of a job: K slots and its other requests.

    `nodes`: those of its cluster, which determine the device of jobs that name none.
    """
    stages = num_stages or spec.num_stages
    device = spec.device
    kinds = [node.resources for node in (nodes or {}).values()]
    if device is None and any(SIDE_SLOTS in kind for kind in kinds):
        device = "gpu"
    restricted = [] if device is None else [DEVICE_SLOTS[device]]
    if stages > 1 and not all(WIDE_SLOTS in kind for kind in kinds):
        restricted.append(WIDE_SLOTS)
    whole, each = spec.resources, spec.resources_per_stage
    asked = {"cpus": whole.cpus + stages * each.cpus, "memory": whole.memory + stages * each.memory}
    others = {kind: amount for kind, amount in asked.items() if amount}
    return {"slots": stages, **dict.fromkeys(restricted, stages), **others}


def one_of_each(nodes: Mapping[str, NodeInfo]) -> dict[str, NodeInfo]:
    """Return one node with each set of resources, which determine the device of jobs as all nodes
    do: `job_info` looks at every node that it is given.
    """
    return {" ".join(sorted(node.resources)): node for node in nodes.values()}


def replica_cap(spec: JobSpec, hints: SchedHints | None) -> int:
    """Return the most replicas of a job: `MEASURED_REACH` times those it was measured on.

    Predictions for unmeasured allocations are optimistic, so the cap bounds the risk; a job that
    was never measured starts small. Explicit requests of the user are not capped.
    """
    profiled = hints.max_profiled_replicas if hints else 0
    vouched_for = max(spec.min_replicas, spec.requested_replicas or 1)
    return min(spec.max_replicas, max(MEASURED_REACH * profiled, vouched_for))


def job_info(
    spec: JobSpec,
    hints: SchedHints | None,
    *,
    age: float,
    created: float = 0.0,
    num_restarts: int = 0,
    restart_seconds: float = DEFAULT_RESTART_SECONDS,
    rescale_seconds: float | None = None,
    num_rescales: int = 0,
    attained_service: float = 0.0,
    num_stages: int | None = None,
    trained_on: Sequence[str] = (),
    trained_seconds: float = 0.0,
    teams: TeamsSpec | None = None,
    history: LengthHistory | None = None,
    has_trained: bool = True,
    relatives: Sequence[float] = (),
    mean_jobs: float | None = None,
    nodes: Mapping[str, NodeInfo] | None = None,
) -> JobInfo:
    """Convert a job to the policy's form.

    Args:
        spec: the job file.
        hints: the latest hints of the job; None, incomplete or implausible hints (`hints_worth`)
            mean linear speedup.
        age: seconds since submission.
        created: time of submission, in seconds since any fixed origin.
        num_restarts: number of changes of its allocation so far.
        restart_seconds: the cost of one restart.
        rescale_seconds: the cost of one elastic resize; None: it cannot be resized.
        num_rescales: number of elastic resizes so far.
        attained_service: slot-seconds it has used.
        num_stages: its current K, which is always one of its shapes; None: it does not run.
        trained_on: the nodes of the replicas that have trained since the hints.
        trained_seconds: for how long they have.
        teams: determine its team and priority; None: there are no teams.
        history: completed jobs, for an estimate of its length; None: no estimate.
        has_trained: whether the hints are its own, not inherited.
        relatives: declared numbers of samples of other jobs of its family.
        mean_jobs: number of unfinished jobs, averaged over its life; None: unknown.
        nodes: see `replica_resources`.
    """
    said = hints_worth(spec, hints)
    hints = None if said.doubt else hints
    priority, preempts = (0, True) if teams is None else teams.priority_of(spec)
    own: SpeedupCallable = said.speedups.get(spec.num_stages, linear_speedup)
    rate = _rate(said.speedups.get(num_stages or spec.num_stages), trained_on)
    return JobInfo(
        resources=replica_resources(spec, nodes=nodes),
        speedup_fn=own,
        creation_timestamp=created,
        min_replicas=spec.min_replicas,
        max_replicas=replica_cap(spec, hints),
        preemptible=spec.preemptible,
        num_stages=spec.num_stages,
        age=age,
        num_restarts=num_restarts,
        restart_seconds=restart_seconds,
        rescale_seconds=rescale_seconds,
        num_rescales=num_rescales,
        gpu_type=spec.gpu_type,
        shapes=tuple(_further_shapes(spec, hints, said.speedups, num_stages, nodes)),
        attained_service=attained_service,
        mean_jobs=mean_jobs,
        allowed_replicas=spec.max_replicas,
        **length_of(
            spec,
            hints,
            own,
            history,
            has_trained=has_trained,
            relatives=relatives,
            work_since=trained_seconds * rate,
        ),
        requested_replicas=spec.requested_replicas,
        team="" if teams is None else teams.team_of(spec),
        priority=priority,
        preempts=preempts,
    )


def _rate(speedup_fn: SpeedupFunction | None, allocation: Sequence[str]) -> float:
    """Return the speedup of an allocation; 0: unknown."""
    if speedup_fn is None or not allocation:
        return 0.0
    return _cached_rate(speedup_fn, len(set(allocation)), len(allocation))


@lru_cache(maxsize=8192)
def _cached_rate(speedup_fn: SpeedupFunction, num_nodes: int, num_replicas: int) -> float:
    return float(speedup_fn(num_nodes, num_replicas))


def hints_worth(
    spec: JobSpec, hints: SchedHints | None, choices: Sequence[int] | None = None
) -> HintsWorth:
    """Return the predictions of hints for a job's own number of stages, and its choices."""
    if hints is None:
        return HintsWorth({})
    stages = tuple(spec.stage_choices if choices is None else choices)
    return worth(hints, spec.num_stages, stages, replica_cap(spec, hints))


def _further_shapes(
    spec: JobSpec,
    hints: SchedHints | None,
    speedups: Mapping[int, SpeedupFunction],
    running: int | None,
    nodes: Mapping[str, NodeInfo] | None,
) -> Iterator[ReplicaShape]:
    known: dict[int, SpeedupCallable] = {**speedups}
    if running is not None and running not in known:
        # The current shape is included even if it could not be chosen again.
        found = hints_worth(spec, hints, (running,)).speedups
        known[running] = found.get(running, linear_speedup)
    for num_stages in sorted(known.keys() - {spec.num_stages}):
        resources = replica_resources(spec, num_stages, nodes)
        yield ReplicaShape(num_stages, resources, known[num_stages], spec.gpu_type)


def shape_with(info: JobInfo, num_stages: int | None) -> ReplicaShape:
    """Return the shape of a job with K stages (None: its own); an unmeasured one if it has none."""
    for shape in info.all_shapes:
        if num_stages in (None, shape.num_stages):
            return shape
    stages = num_stages or info.num_stages
    resources = {**info.resources, "slots": stages}
    for kind in (*DEVICE_SLOTS.values(), WIDE_SLOTS):
        if kind in resources:
            resources[kind] = stages
    return ReplicaShape(stages, resources, linear_speedup, info.gpu_type)


def including(info: JobInfo, shape: ReplicaShape) -> JobInfo:
    """Return the same job with a shape added, unless it has one with the same number of stages."""
    if any(shape.num_stages == known.num_stages for known in info.all_shapes):
        return info
    return replace(info, shapes=(*info.shapes, shape))


def preferring(info: JobInfo, num_stages: int | None) -> JobInfo:
    """Return the same job with its shape of K stages, if it has one, as its own shape."""
    first = next((s for s in info.all_shapes if s.num_stages == num_stages), None)
    if first is None:
        return info
    return replace(
        info,
        resources=first.resources,
        speedup_fn=first.speedup_fn,
        num_stages=first.num_stages,
        shapes=tuple(s for s in info.all_shapes if s.num_stages != first.num_stages),
    )


def count_fitting(resources: Mapping[str, int], free: Mapping[str, int]) -> int:
    """Return how many replicas with these `resources` fit into the free resources of a node."""
    counts = [max(free.get(kind, 0), 0) // need for kind, need in resources.items() if need > 0]
    return min(counts)


def free_resources(
    nodes: Mapping[str, NodeInfo],
    jobs: Mapping[str, JobInfo],
    allocations: Mapping[str, Sequence[str]],
) -> dict[str, dict[str, int]]:
    """Return the resources that allocations leave free on every node, by kind."""
    free = {name: dict(node.resources) for name, node in nodes.items()}
    for job, allocation in allocations.items():
        resources = shape_of(jobs[job], allocation, nodes).resources if allocation else {}
        for name in allocation:
            if name in free:
                for kind, amount in resources.items():
                    free[name][kind] = free[name].get(kind, 0) - amount
    return free


def node_template(nodes: Mapping[str, NodeInfo]) -> NodeInfo:
    """Return a node that could be rented: the maximum of each resource over all nodes."""
    kinds = {kind for node in nodes.values() for kind in node.resources}
    most = {kind: max(node.resources.get(kind, 0) for node in nodes.values()) for kind in kinds}
    return NodeInfo(most, preemptible=True)
