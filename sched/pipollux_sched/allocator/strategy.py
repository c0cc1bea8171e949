"""Allocation strategies: a policy, or a fixed allocation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias

from pipollux_policies import Allocation, JobInfo, NodeInfo, Policy, shape_of
from pipollux_policies.allocations.allocation import network_level

from .inherited_hints import WarmStart
from .job_infos import free_resources, including, node_template, preferring, shape_with

Nodes: TypeAlias = Mapping[str, NodeInfo]


@dataclass(frozen=True)
class SchedulableJob:
    """A job that has not ended, as the allocator sees it."""

    name: str
    info: JobInfo
    allocation: tuple[str, ...] = ()
    """Node of each replica that it holds or was assigned."""
    pinned: bool = False
    """Whether it keeps its allocation for now."""
    suspended: bool = False
    """Whether the policy preempted it, so that only the policy may allocate it again."""
    num_stages: int | None = None
    """K of these replicas, or of its previous ones; None: the job's own."""
    is_new: bool = False
    """Whether it is new."""
    unexplained: bool = False
    """Whether no decision has yet given it a reason for being queued."""
    warm_start: WarmStart | None = None
    """Inherited hints, if it has measured nothing itself."""
    message: str = ""
    network_level: int = 1
    """Level of the network at which the nodes of its allocation meet."""

    @property
    def held(self) -> Allocation:
        """The current allocation in the form for policies."""
        if not self.allocation:
            return Allocation()
        shape = shape_with(self.info, self.num_stages)
        return Allocation(self.allocation, shape, self.network_level)

    def given(self, answer: Sequence[str], nodes: Nodes) -> SchedulableJob:
        """Return the job with the allocation that a strategy decided.

        Without a number of stages, the present one stays on the same nodes; otherwise it is the
        job's own.
        """
        told = getattr(answer, "num_stages", None)
        if told is None and sorted(answer) == sorted(self.allocation):
            return self
        if not answer:
            return replace(self, allocation=())
        shape = shape_with(self.info, told) if told else shape_of(self.info, answer, nodes)
        info = including(self.info, shape)
        return replace(
            self,
            info=info,
            allocation=tuple(answer),
            num_stages=shape.num_stages,
            network_level=network_level(answer, nodes),
        )


class Strategy(Protocol):
    """An allocation strategy; results are `Allocation` if K is not the job's own."""

    def place(self, candidate: SchedulableJob, free: Nodes) -> Sequence[str]:
        """Return an allocation on free slots for a job that holds none, or an empty one."""

    def optimize(
        self, candidates: Sequence[SchedulableJob], nodes: Nodes
    ) -> Mapping[str, Sequence[str]]:
        """Return the allocations of all jobs on all nodes."""


@dataclass(frozen=True)
class PolicyStrategy:
    """Delegates to an allocation policy."""

    policy: Policy

    def place(self, candidate: SchedulableJob, free: Nodes) -> Sequence[str]:
        """Call the policy for one job, with the previous number of stages if possible."""
        info = preferring(candidate.info, candidate.num_stages)
        answer = self.policy.allocate_job(info, free)
        if not answer or isinstance(answer, Allocation):
            return answer
        return Allocation(answer, shape_of(info, answer, free), network_level(answer, free))

    def optimize(
        self, candidates: Sequence[SchedulableJob], nodes: Nodes
    ) -> Mapping[str, Sequence[str]]:
        """Call the policy for all jobs; pinned jobs count as not preemptible."""
        base = {job.name: job.held for job in candidates if job.allocation}
        return self.policy.optimize(jobs_of(candidates), nodes, base, node_template(nodes))[0]


@dataclass(frozen=True)
class FixedStrategy:
    """Gives each job exactly its fixed allocation, as soon as that is free."""

    allocations: Mapping[str, Sequence[str]]
    """By job; `Allocation` if K is not the job's own."""

    def place(self, candidate: SchedulableJob, free: Nodes) -> Sequence[str]:
        """Return a job's fixed allocation if all of it is free."""
        fixed = self.allocations.get(candidate.name, ())
        return fixed if _fits(free, [candidate.given(fixed, free)]) else ()

    def optimize(
        self,
        candidates: Sequence[SchedulableJob],
        nodes: Nodes,  # noqa: ARG002  # required by the protocol
    ) -> Mapping[str, Sequence[str]]:
        """Change nothing."""
        return {job.name: job.held for job in candidates}


@dataclass(frozen=True)
class EvenStrategy:
    """Restricts another strategy to the same number of replicas on each node of a job.

    From an uneven allocation it keeps the largest even part on the fewest nodes; the rest stays
    free until the next round.
    """

    strategy: Strategy

    def place(self, candidate: SchedulableJob, free: Nodes) -> Sequence[str]:
        """Return an even part of the other strategy's allocation."""
        return even_part(candidate, self.strategy.place(candidate, free))

    def optimize(
        self, candidates: Sequence[SchedulableJob], nodes: Nodes
    ) -> Mapping[str, Sequence[str]]:
        """Return even parts of the other strategy's allocations; current allocations may stay."""
        result = self.strategy.optimize(candidates, nodes)
        by_name = {job.name: job for job in candidates}
        return {
            name: given
            if sorted(given) == sorted(by_name[name].allocation)
            else even_part(by_name[name], given)
            for name, given in result.items()
        }


def even_part(job: SchedulableJob, given: Sequence[str]) -> Sequence[str]:
    """Return the largest part of an allocation with equally many replicas on each node."""
    counts = Counter(given)
    if len(set(counts.values())) < 2:
        return given
    each = max(set(counts.values()), key=lambda n: (n * sum(c >= n for c in counts.values()), n))
    kept: Counter[str] = Counter()
    nodes = []
    for node in given:
        kept[node] += 1
        if counts[node] >= each and kept[node] <= each:
            nodes.append(node)
    if len(nodes) < job.info.least_replicas:
        return ()
    return Allocation(nodes, given.shape, given.level) if isinstance(given, Allocation) else nodes


def jobs_of(candidates: Sequence[SchedulableJob]) -> dict[str, JobInfo]:
    """Return the jobs as policies see them: pinned ones are not preemptible."""
    return {
        job.name: replace(job.info, preemptible=False) if job.pinned else job.info
        for job in candidates
    }


def free_of(nodes: Nodes, candidates: Sequence[SchedulableJob]) -> dict[str, dict[str, int]]:
    """Return the free resources of every node; negative if jobs hold more than it has."""
    infos = {job.name: job.info for job in candidates}
    return free_resources(nodes, infos, {job.name: job.held for job in candidates})


def _fits(nodes: Nodes, candidates: Sequence[SchedulableJob]) -> bool:
    left = free_of(nodes, candidates)
    return all(amount >= 0 for resources in left.values() for amount in resources.values())
