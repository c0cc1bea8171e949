"""The policy of a scheduler, for simulation; it may run in another process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pipollux_policies import POLICIES, Allocation, JobInfo, NodeInfo, Policy, make_policy
from pipollux_sched.allocator.strategy import SchedulableJob, even_part
from pipollux_sched.errors import SchedulerError
from pipollux_sched.store import Store
from pipollux_sched.views.cluster import serves_evenly, serving_options, serving_policy


class NoForecastError(SchedulerError):
    """There can be no forecasts; the message says why."""


def can_simulate(store: Store) -> bool:
    """Return whether the policy of the present or last scheduler can be simulated."""
    return serving_policy(store) in POLICIES


def serving_policy_maker(store: Store) -> Callable[[], Policy]:
    """Return a function that makes the policy of the present or last scheduler of a store.

    `NoForecastError`: it has another policy than those of `POLICIES`.
    """
    name, options = serving_policy(store), serving_options(store)
    if name not in POLICIES:
        raise NoForecastError(
            f"there are no forecasts under the policy {name or 'of no scheduler'!r}: only "
            f"{', '.join(POLICIES)} can be simulated"
        )
    even = serves_evenly(store)

    def make() -> Policy:
        made = make_policy(name, **options)
        return EvenPolicy(made) if even else made

    return make


class EvenPolicy:
    """A policy with the same number of replicas on each node of a job: see `EvenStrategy`."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    @property
    def adapts_batch_size(self) -> bool:
        """Whether the policy adapts batch sizes."""
        return bool(getattr(self._policy, "adapts_batch_size", True))

    def allocate_job(self, job_info: JobInfo, nodes: Mapping[Any, NodeInfo]) -> Sequence[Any]:
        """Return an even part of the policy's placement."""
        return even_part(SchedulableJob("", job_info), self._policy.allocate_job(job_info, nodes))

    def optimize(
        self,
        jobs: Mapping[Any, JobInfo],
        nodes: Mapping[Any, NodeInfo],
        base_allocations: Mapping[Any, Sequence[Any]],
        node_template: NodeInfo,
    ) -> tuple[Mapping[Any, Sequence[Any]], int]:
        """Return even parts of the policy's allocations; current allocations may stay."""
        found, desired = self._policy.optimize(jobs, nodes, base_allocations, node_template)
        kept = {
            name: given
            if sorted(given) == sorted(base_allocations.get(name, ()))
            else even_part(SchedulableJob(name, jobs[name]), given)
            for name, given in found.items()
        }
        return {name: Allocation(g, getattr(g, "shape", None)) for name, g in kept.items()}, desired
