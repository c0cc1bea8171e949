"""Tiresias (Gu et al., NSDI'19): two-dimensional least attained service, in discrete queues.

A job's service is its GPUs times the time that it held them. Jobs start in the first queue and
fall by one queue with every threshold that their service reaches; queues are served strictly one
after another, each in the order of arrival. `docs/policy-tiresias.md` has the rules.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, ClassVar

from pipollux_sched.policy.allocation import Allocation
from pipollux_sched.policy.job_info import JobInfo, NodeInfo
from pipollux_sched.policy.placement.free_space import FreeSpace, by_arrival, slots_of
from pipollux_sched.policy.placement.packing import (
    answer,
    fixed_request,
    num_nodes_as_is,
    pack,
    place_alone,
)
from pipollux_sched.policy.rules import Allocations, Jobs, Nodes

QUEUE_THRESHOLDS = (16 * 3600.0,)
"""Slot-seconds after which a job falls to the next queue: 16 GPU-hours, as in Pollux's artifact."""


class TiresiasPolicy:
    """Fixed sizes; jobs that have had little service go before those that have had much.

    Args:
        queue_thresholds: slot-seconds of service at which a job falls to the next queue.
        promotion: a job that has waited this many times as long as it has run goes back to the
            first queue (the paper's PROMOTEKNOB); None: never.

    Raises:
        ValueError: thresholds do not rise, or a number is out of range; the message names it.

    Example:
        >>> def job(service): return JobInfo({"slots": 1}, lambda nodes, replicas: replicas, 0.0,
        ...                                  1, 1, attained_service=service)
        >>> node = NodeInfo({"slots": 1})
        >>> TiresiasPolicy().optimize({"a": job(60000.0), "b": job(0.0)}, {"n": node},
        ...                           {"a": ["n"]}, node)[0]
        {'a': [], 'b': ['n']}
    """

    adapts_batch_size: ClassVar[bool] = False
    """Jobs keep the batch size that their user chose."""

    def __init__(
        self,
        *,
        queue_thresholds: Sequence[float] = QUEUE_THRESHOLDS,
        promotion: float | None = None,
    ) -> None:
        thresholds = list(queue_thresholds)
        if sorted(set(thresholds)) != thresholds or not all(
            0 < threshold < math.inf for threshold in thresholds
        ):
            raise ValueError(
                f"queue_thresholds: {thresholds} must be finite numbers above 0 that rise"
            )
        if promotion is not None and not promotion > 0:
            raise ValueError(f"promotion: {promotion} must be above 0, or None for no promotion")
        self._thresholds = thresholds
        self._promotion = promotion

    def allocate_job(self, job_info: JobInfo, nodes: Nodes) -> list[Any]:
        """Place one arriving job on as many replicas as it asks for, without moving any other.

        Args:
            job_info: the job.
            nodes: nodes with what is FREE on them.

        Returns:
            Its replicas' nodes, or nothing if there is no room.
        """
        return place_alone(job_info, nodes, fixed_request(job_info).num_replicas)

    def optimize(
        self,
        jobs: Jobs,
        nodes: Nodes,
        base_allocations: Allocations,
        node_template: NodeInfo,  # noqa: ARG002  # part of every policy's signature
    ) -> tuple[dict[Any, Allocation], int]:
        """Give the nodes to the jobs of the first queues, and preempt whoever is in their way.

        Returns:
            The allocation of every job (empty: it waits), and the number of nodes as it is.
        """
        requests = {name: fixed_request(job) for name, job in jobs.items()}
        space = FreeSpace(jobs, nodes, base_allocations)
        space.keep_running(lambda name, held: len(held) == requests[name].num_replicas)
        running = {name for name in jobs if base_allocations.get(name)}
        queues = {name: self.queue(job, name in running) for name, job in jobs.items()}
        order = sorted(by_arrival(jobs), key=lambda name: queues[name])
        pack(space, order, {name: [request] for name, request in requests.items()})
        return answer(jobs, base_allocations, space.allocations), num_nodes_as_is(jobs, nodes)

    def queue(self, job: JobInfo, running: bool) -> int:
        """Return the number of a job's queue, 0 for the one that is served first.

        Args:
            job: the job.
            running: whether it runs now. One that runs keeps a promotion until its waiting is half
                of what earned it; it would else be preempted as soon as it has started.
        """
        if self._promotion is not None:
            request = fixed_request(job)
            slots = slots_of(job.all_shapes[0]) * request.num_replicas
            executed = job.attained_service / slots
            waited = job.age - executed
            if waited >= executed * self._promotion * (0.5 if running else 1.0):
                return 0
        return bisect_right(self._thresholds, job.attained_service)
