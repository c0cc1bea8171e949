"""First in, first out: fixed sizes, strict order of arrival, no preemption."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field

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
    place_requested,
)


class FifoPolicy:
    """Starts jobs in the order of submission, on their requested number of replicas.

    Example:
        >>> job = JobInfo({"slots": 1}, lambda nodes, replicas: replicas, 0.0, 1, 4,
        ...               requested_replicas=2)
        >>> node = NodeInfo({"slots": 4})
        >>> FifoPolicy().optimize({"a": job}, {"n": node}, {}, node)[0]
        {'a': ['n', 'n']}
    """

    adapts_batch_size: ClassVar[bool] = False

    @checked
    def __init__(
        self,
        *,
        backfill: Annotated[
            bool,
            Field(
                description="Whether a job may start before an older one that does not fit; "
                "otherwise the oldest queued job blocks all others.",
                examples=[True],
            ),
        ] = False,
    ) -> None:
        self._backfill = backfill

    def allocate_job(self, job_info: JobInfo, nodes: Nodes) -> Allocation:
        """Place an arriving job if the FREE resources of nodes suffice. Without `backfill`, it
        starts with the next `optimize`: older queued jobs are not visible here.
        """
        return place_requested(job_info, nodes) if self._backfill else Allocation()

    def optimize(
        self,
        jobs: Jobs,
        nodes: Nodes,
        base_allocations: Allocations,
        node_template: NodeInfo,  # noqa: ARG002  # part of every policy's signature
    ) -> tuple[dict[Any, Allocation], int]:
        """Return every job's allocation (empty: it is queued), and the present number of nodes."""
        state = ClusterState(jobs, nodes, base_allocations)
        state.keep_running()
        waiting = [name for name in by_arrival(jobs) if name not in state.allocations]
        self._start(waiting, jobs, state, ClusterState(jobs, nodes, {}))
        return answer(jobs, base_allocations, state.allocations), num_nodes_as_is(jobs, nodes)

    def _start(
        self, waiting: Sequence[Any], jobs: Jobs, state: ClusterState, empty: ClusterState
    ) -> None:
        for name in waiting:
            request = fixed_request(jobs[name])
            found = state.find(name, request)
            if found is not None:
                state.put(name, found)
            # A job that does not even fit the empty cluster must not block the others forever.
            elif not self._backfill and empty.find(name, request) is not None:
                return
