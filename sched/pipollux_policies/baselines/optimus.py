"""Optimus (Peng et al., EuroSys'18): GPUs go where they reduce remaining time most.

Every job first gets its fewest replicas, the one with the least remaining time first. Then one
replica after another goes to the job whose predicted remaining time falls most, per slot:

    gain_j(R) = (t_j(R) - t_j(R + 1)) / slots_j        t_j(R) = remaining_work_j / speedup_j(R)

See `docs/concepts/policies.md` for the prediction.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from pipollux_policies.allocations.allocation import Allocation
from pipollux_policies.allocations.order import name_order
from pipollux_policies.allocations.rules import Allocations, Jobs, Nodes
from pipollux_policies.jobs.job_info import JobInfo, NodeInfo, ReplicaShape
from pipollux_policies.placement.cluster_state import ClusterState
from pipollux_policies.placement.node_choice import Floats
from pipollux_policies.placement.packing import (
    answer,
    num_nodes_as_is,
    pack,
    place_alone,
    request_of,
    settle,
    speedups,
    unchanged,
    user_shapes,
)

UNKNOWN_REMAINING_SECONDS = 3600.0
"""The least remaining time, on one replica, of a job that does not report it."""


class OptimusPolicy:
    """Sizes by marginal gain in predicted remaining time; jobs keep their users' batch size.

    >>> def job(work): return JobInfo({"slots": 1}, lambda nodes, replicas: replicas ** 0.5,
    ...                               0.0, 1, 4, remaining_work=work)
    >>> node = NodeInfo({"slots": 4})
    >>> OptimusPolicy().optimize({"a": job(900.0), "b": job(100.0)}, {"n": node}, {}, node)[0]
    {'a': ['n', 'n', 'n'], 'b': ['n']}
    """

    adapts_batch_size: ClassVar[bool] = False

    def allocate_job(self, job_info: JobInfo, nodes: Nodes) -> Allocation:
        """Place an arriving job on its fewest replicas if the FREE resources of nodes suffice."""
        return place_alone(job_info, nodes, job_info.least_replicas)

    def optimize(
        self,
        jobs: Jobs,
        nodes: Nodes,
        base_allocations: Allocations,
        node_template: NodeInfo,  # noqa: ARG002  # part of every policy's signature
    ) -> tuple[dict[Any, Allocation], int]:
        """Return every job's allocation (empty: it is queued), and the present number of nodes."""
        settled = _as_they_run(jobs, nodes, base_allocations)
        # A non-preemptible job that has just started is pinned in the next round, and leaves more
        # to others if it got less than its size: at most once per job.
        for _ in range(len(jobs) + 1):
            current, settled = settled, _sized(jobs, nodes, settled, base_allocations)
            if unchanged(jobs, settled, current):
                break
        return answer(jobs, base_allocations, settled), num_nodes_as_is(jobs, nodes)


def _as_they_run(jobs: Jobs, nodes: Nodes, base: Allocations) -> dict[Any, Allocation]:
    state = ClusterState(jobs, nodes, base)
    state.keep_running()
    return answer(jobs, base, state.allocations)


def _sized(
    jobs: Jobs, nodes: Nodes, current: Allocations, running: Allocations
) -> dict[Any, Allocation]:
    sizes = decide_sizes(jobs, nodes, current)

    def place(before: Allocations) -> dict[Any, Allocation]:
        return _place(jobs, nodes, before, sizes, running)

    def misfit(allocations: Allocations) -> float:
        return sum(
            abs(sizes[name] - len(allocations[name])) * job.all_shapes[0].slots
            for name, job in jobs.items()
        )

    return settle(_as_they_run(jobs, nodes, current), place, misfit)


def remaining_seconds(job: JobInfo) -> float:
    """Return the seconds that a job still needs on one replica. If unknown, its past training time,
    and at least an hour: in real clusters, jobs that have run long have long to run.
    """
    if job.remaining_work is not None and np.isfinite(job.remaining_work):
        return job.remaining_work
    done = job.attained_service / job.all_shapes[0].slots
    return max(done, UNKNOWN_REMAINING_SECONDS)


def decide_sizes(jobs: Jobs, nodes: Nodes, current: Allocations) -> dict[Any, int]:
    """Return the number of replicas of each job, 0 for queued jobs; pinned jobs keep theirs."""
    state, empty = ClusterState(jobs, nodes, current), ClusterState(jobs, nodes, {})
    sizes = {name: len(state.allocations.get(name, ())) for name in jobs}
    budget = state.budget()
    plans = {}
    for name, job in jobs.items():
        plan = _Sizing.of(name, job, empty) if name not in state.pinned else None
        if plan is not None:
            plans[name] = plan
    for name in sorted(plans, key=lambda n: (plans[n].times[0], jobs[n].created, name_order(n))):
        plan = plans[name]
        if budget.spend(plan.shape, plan.least):
            sizes[name] = plan.least
    _grow(plans, sizes, budget.spend)
    return sizes


def _grow(
    plans: dict[Any, _Sizing], sizes: dict[Any, int], spend: Callable[[ReplicaShape, int], bool]
) -> None:
    heap = [
        (-plan.gain(sizes[name]), name_order(name), name)
        for name, plan in plans.items()
        if sizes[name]
    ]
    heapq.heapify(heap)
    while heap:
        gain, key, name = heapq.heappop(heap)
        # Room only shrinks, so a replica that does not fit now will not fit later.
        if gain < 0 and spend(plans[name].shape, 1):
            sizes[name] += 1
            heapq.heappush(heap, (-plans[name].gain(sizes[name]), key, name))


class _Sizing:
    """Predicted remaining times of one job in seconds, one per size from its fewest replicas up."""

    def __init__(self, shape: ReplicaShape, least: int, times: Floats) -> None:
        self.shape, self.least, self.times = shape, least, times

    @classmethod
    def of(cls, name: Any, job: JobInfo, state: ClusterState) -> _Sizing | None:
        for shape in user_shapes(job):
            counts = state.counts(name, shape)
            least, most = job.least_replicas, min(job.most_replicas(shape), int(counts.sum()))
            if most < least:
                continue
            replicas = np.arange(least, most + 1)
            fewest = -(-replicas // int(counts.max()))
            values = speedups(shape, fewest, replicas, state.lowest_levels(counts, replicas))
            useful = np.flatnonzero(values > 0)
            if len(useful):
                first = int(useful[0])
                times = np.full(len(values) - first, np.inf)
                useful_times = values[first:] > 0
                np.divide(remaining_seconds(job), values[first:], out=times, where=useful_times)
                return cls(shape, least + first, times)
        return None

    def gain(self, num_replicas: int) -> float:
        """Return the seconds that one more replica saves, per slot; 0 at the largest size."""
        number = num_replicas - self.least
        if number + 1 >= len(self.times):
            return 0.0
        return float(self.times[number] - self.times[number + 1]) / self.shape.slots


def _place(
    jobs: Jobs,
    nodes: Nodes,
    current: Allocations,
    sizes: dict[Any, int],
    running: Allocations,
) -> dict[Any, Allocation]:
    """Place all jobs in their sizes, or the next smaller size that fits. Jobs that already have
    their size move only if a larger job needs the room.
    """
    state = ClusterState(jobs, nodes, current, running)
    state.keep_running(lambda name, held: len(held) == sizes[name])
    order = sorted(
        (name for name in jobs if sizes[name]),
        key=lambda n: (
            -jobs[n].all_shapes[0].slots,
            -sizes[n],
            jobs[n].created,
            name_order(n),
        ),
    )
    wants = {
        name: [
            request_of(jobs[name], size)
            for size in range(sizes[name], jobs[name].least_replicas - 1, -1)
        ]
        for name in order
    }
    pack(state, order, wants)
    return answer(jobs, current, state.allocations)
