"""Tiresias (Gu et al., NSDI'19): two-dimensional least attained service, in discrete queues.

A job's service is its GPUs times the time that it held them. Jobs start in the first queue and drop
by one queue at every threshold that their service reaches. Queues are served strictly one after
another, each in order of arrival. See `docs/concepts/policies.md` for the rules.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, ClassVar

from pipollux_policies.allocations.allocation import Allocation
from pipollux_policies.allocations.order import by_arrival
from pipollux_policies.allocations.rules import Allocations, Jobs, Nodes
from pipollux_policies.jobs.job_info import JobInfo, NodeInfo
from pipollux_policies.placement.cluster_state import ClusterState
from pipollux_policies.placement.packing import (
    answer,
    fixed_request,
    num_nodes_as_is,
    pack,
    place_alone,
)

QUEUE_THRESHOLDS = (16 * 3600.0,)
"""Slot-seconds at which a job falls to the next queue: 16 GPU-hours, as in Pollux's artifact."""


class TiresiasPolicy:
    """Fixed sizes; jobs with little attained service go first.

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

    def allocate_job(self, job_info: JobInfo, nodes: Nodes) -> Allocation:
        """Place an arriving job on its requested replicas if the FREE resources suffice."""
        return place_alone(job_info, nodes, fixed_request(job_info).num_replicas)

    def optimize(
        self,
        jobs: Jobs,
        nodes: Nodes,
        base_allocations: Allocations,
        node_template: NodeInfo,  # noqa: ARG002  # part of every policy's signature
    ) -> tuple[dict[Any, Allocation], int]:
        """Return every job's allocation (empty: it is queued), and the present number of nodes."""
        requests = {name: fixed_request(job) for name, job in jobs.items()}
        state = ClusterState(jobs, nodes, base_allocations)
        state.keep_running(lambda name, held: len(held) == requests[name].num_replicas)
        running = {name for name in jobs if base_allocations.get(name)}
        queues = {name: self.queue(job, name in running) for name, job in jobs.items()}
        order = sorted(by_arrival(jobs), key=lambda name: queues[name])
        pack(state, order, {name: [request] for name, request in requests.items()})
        return answer(jobs, base_allocations, state.allocations), num_nodes_as_is(jobs, nodes)

    def queue(self, job: JobInfo, running: bool) -> int:
        """Return the index of a job's queue; 0 is served first.

        A running job keeps a promotion until its waiting time is half of the time that earned it;
        otherwise it would be preempted as soon as it starts.
        """
        if self._promotion is not None:
            request = fixed_request(job)
            slots = job.all_shapes[0].slots * request.num_replicas
            executed = job.attained_service / slots
            waited = job.age - executed
            if waited >= executed * self._promotion * (0.5 if running else 1.0):
                return 0
        return bisect_right(self._thresholds, job.attained_service)
