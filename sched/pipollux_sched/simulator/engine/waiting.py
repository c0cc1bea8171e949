"""Jobs that hold nothing are placed on free slots before all jobs are weighed, as by a scheduler.

It is `allocator.decide.place_new`, for simulated jobs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from pipollux_sched.policy import Allocation, JobInfo, NodeInfo, Policy
from pipollux_sched.policy.allocation import as_allocation
from pipollux_sched.policy.teams.subcluster import without


def place_waiting(
    policy: Policy,
    jobs: Mapping[str, JobInfo],
    nodes: Mapping[str, NodeInfo],
    base: Mapping[str, Allocation],
    weighed: Collection[str],
) -> dict[str, Allocation]:
    """Return the allocations of jobs that can start at once; the first that cannot ends the queue.

    Args:
        policy: places one job at a time.
        jobs: all jobs by name, in the order of their arrivals.
        nodes: all nodes by name.
        base: what jobs hold.
        weighed: jobs that wait for the policy to weigh them all, and those after them: ones that it
            suspended, and new ones that are known from earlier ones, which may get more than the
            least.
    """
    held = dict(base)
    for name in (name for name in jobs if name not in base):
        if name in weighed:
            break
        found = policy.allocate_job(jobs[name], without(jobs, nodes, held))
        if not found:
            break
        held[name] = as_allocation(jobs[name], found, nodes)
    return {name: allocation for name, allocation in held.items() if name not in base}
