"""Tiresias (Gu et al., NSDI'19): two-dimensional least attained service, in discrete queues.

A job's service is its GPUs times the time that it held them. Jobs start in the first queue and drop
by one queue at every threshold that their service reaches. Queues are served strictly one after
another, each in order of arrival. See `docs/concepts/policies.md` for the rules.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, Field

from pipollux_policies.allocations.allocation import Allocation
from pipollux_policies.allocations.order import by_arrival
from pipollux_policies.allocations.rules import Allocations, Jobs, Nodes
from pipollux_policies.jobs.job_info import JobInfo, NodeInfo
from pipollux_policies.options import checked
from pipollux_policies.placement.cluster_state import ClusterState
from pipollux_policies.placement.packing import (
    answer,
    fixed_request,
    num_nodes_as_is,
    pack,
    place_requested,
)

QUEUE_THRESHOLDS = (16 * 3600.0,)
"""Slot-seconds at which a job falls to the next queue: 16 GPU-hours, as in Pollux's artifact."""


def _rising(thresholds: tuple[float, ...]) -> tuple[float, ...]:
    if sorted(set(thresholds)) != [*thresholds]:
        raise ValueError("they must rise")
    return thresholds


class TiresiasPolicy:
    """Fixed sizes; jobs with little attained service go first.

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

    @checked
    def __init__(
        self,
        *,
        queue_thresholds: Annotated[
            tuple[Annotated[float, Field(gt=0)], ...],
            AfterValidator(_rising),
            Field(
                title="rising numbers above 0, separated by /",
                description="Slot-seconds of service at which a job falls to the next queue.",
            ),
        ] = QUEUE_THRESHOLDS,
        promotion: Annotated[
            float | None,
            Field(
                gt=0,
                description="A job that has waited this many times as long as it has run goes "
                "back to the first queue (the paper's PROMOTEKNOB); none: never.",
                examples=[8.0],
            ),
        ] = None,
    ) -> None:
        self._thresholds = queue_thresholds
        self._promotion = promotion

    allocate_job = staticmethod(place_requested)

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
