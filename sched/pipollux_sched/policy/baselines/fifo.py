"""First in, first out: fixed sizes, strict order of arrival, nothing is ever preempted.

The order of every batch system before there was a better one, and the yardstick below which no
policy should fall. `docs/policy-fifo.md` says what it does and does not do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from pipollux_sched.policy.allocation import Allocation
from pipollux_sched.policy.job_info import JobInfo, NodeInfo
from pipollux_sched.policy.placement.free_space import FreeSpace, by_arrival
from pipollux_sched.policy.placement.packing import (
    answer,
    fixed_request,
    num_nodes_as_is,
    place_alone,
)
from pipollux_sched.policy.rules import Allocations, Jobs, Nodes


class FifoPolicy:
    """Starts jobs in the order of their submission, on as many replicas as they ask for.

    Args:
        backfill: whether a job may start before an older one for which there is no room; without,
            the oldest job that waits holds up all others.

    Example:
        >>> job = JobInfo({"slots": 1}, lambda nodes, replicas: replicas, 0.0, 1, 4,
        ...               requested_replicas=2)
        >>> node = NodeInfo({"slots": 4})
        >>> FifoPolicy().optimize({"a": job}, {"n": node}, {}, node)[0]
        {'a': ['n', 'n']}
    """

    adapts_batch_size: ClassVar[bool] = False
    """Jobs keep the batch size that their user chose."""

    def __init__(self, *, backfill: bool = False) -> None:
        self._backfill = backfill

    def allocate_job(self, job_info: JobInfo, nodes: Nodes) -> list[Any]:
        """Place one arriving job without moving any other.

        Args:
            job_info: the job.
            nodes: nodes with what is FREE on them.

        Returns:
            Its replicas' nodes. Nothing without `backfill`: whether an older job waits is not to be
            seen from here, so that the job starts with the next `optimize`.
        """
        if not self._backfill:
            return []
        return place_alone(job_info, nodes, fixed_request(job_info).num_replicas)

    def optimize(
        self,
        jobs: Jobs,
        nodes: Nodes,
        base_allocations: Allocations,
        node_template: NodeInfo,  # noqa: ARG002  # part of every policy's signature
    ) -> tuple[dict[Any, Allocation], int]:
        """Let all jobs run on that run, and start those that come next.

        Returns:
            The allocation of every job (empty: it waits), and the number of nodes as it is.
        """
        space = FreeSpace(jobs, nodes, base_allocations)
        space.keep_running()
        waiting = [name for name in by_arrival(jobs) if name not in space.allocations]
        self._start(waiting, jobs, space, FreeSpace(jobs, nodes, {}))
        return answer(jobs, base_allocations, space.allocations), num_nodes_as_is(jobs, nodes)

    def _start(
        self, waiting: Sequence[Any], jobs: Jobs, space: FreeSpace, empty: FreeSpace
    ) -> None:
        for name in waiting:
            request = fixed_request(jobs[name])
            found = space.find(name, request)
            if found is not None:
                space.put(name, found)
            # A job that fits no empty cluster must not hold up the others for ever.
            elif not self._backfill and empty.find(name, request) is not None:
                return
