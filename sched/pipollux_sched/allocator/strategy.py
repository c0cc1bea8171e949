"""Allocation strategies: ask a policy, or keep to an allocation that is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias

from pipollux_sched.policy import Allocation, JobInfo, NodeInfo, Policy, shape_of

from .job_infos import free_resources, including, node_template, preferring, shape_with

__all__ = [
    "Candidate",
    "FixedStrategy",
    "Nodes",
    "PolicyStrategy",
    "Strategy",
    "free_of",
    "jobs_of",
]

Nodes: TypeAlias = Mapping[str, NodeInfo]


@dataclass(frozen=True)
class Candidate:
    """A job that has not ended, as the allocator sees it."""

    name: str
    info: JobInfo
    allocation: tuple[str, ...] = ()
    """Node of each replica that it holds or was promised."""
    pinned: bool = False
    """Whether it is to be left where it is for now."""
    suspended: bool = False
    """Whether the policy took everything from it, and so alone may give it something again."""
    num_stages: int | None = None
    """K of these replicas, or of the last that it held; None: the job's own."""
    is_new: bool = False
    """Whether it has just come, and nobody has said yet why it waits."""

    @property
    def held(self) -> Allocation:
        """The same as policies have it."""
        if not self.allocation:
            return Allocation()
        return Allocation(self.allocation, shape_with(self.info, self.num_stages))

    def given(self, answer: Sequence[str], nodes: Nodes) -> Candidate:
        """Return the job with what a strategy gives it.

        An answer that does not tell its number of stages leaves it as it is on the same nodes, and
        else is of the job's own.
        """
        told = getattr(answer, "num_stages", None)
        if told is None and sorted(answer) == sorted(self.allocation):
            return self
        if not answer:
            return replace(self, allocation=())
        shape = shape_with(self.info, told) if told else shape_of(self.info, answer, nodes)
        info = including(self.info, shape)
        return replace(self, info=info, allocation=tuple(answer), num_stages=shape.num_stages)


class Strategy(Protocol):
    """An allocation strategy; answers are `Allocation` where K is not the job's own."""

    def place(self, candidate: Candidate, free: Nodes) -> Sequence[str]:
        """Give a job that holds nothing a start on what is free, or nothing."""

    def optimize(
        self, candidates: Sequence[Candidate], nodes: Nodes
    ) -> Mapping[str, Sequence[str]]:
        """Give every job its share of all nodes."""


@dataclass(frozen=True)
class PolicyStrategy:
    """Asks an allocation policy."""

    policy: Policy

    def place(self, candidate: Candidate, free: Nodes) -> Sequence[str]:
        """Ask the policy for a start, in as many stages as the job ran with last if it can be."""
        info = preferring(candidate.info, candidate.num_stages)
        answer = self.policy.allocate_job(info, free)
        if not answer or isinstance(answer, Allocation):
            return answer
        return Allocation(answer, shape_of(info, answer, free))

    def optimize(
        self, candidates: Sequence[Candidate], nodes: Nodes
    ) -> Mapping[str, Sequence[str]]:
        """Ask the policy for all; what is to be left where it is, it is told not to preempt."""
        base = {job.name: job.held for job in candidates if job.allocation}
        return self.policy.optimize(jobs_of(candidates), nodes, base, node_template(nodes))[0]


@dataclass(frozen=True)
class FixedStrategy:
    """Gives each job exactly what was decided beforehand, as soon as it is free."""

    allocations: Mapping[str, Sequence[str]]
    """By job; `Allocation` where K is not the job's own."""

    def place(self, candidate: Candidate, free: Nodes) -> Sequence[str]:
        """Give a job its allocation if all of it is free."""
        fixed = self.allocations.get(candidate.name, ())
        return fixed if _fits(free, [candidate.given(fixed, free)]) else ()

    def optimize(
        self,
        candidates: Sequence[Candidate],
        nodes: Nodes,  # noqa: ARG002  # the protocol's
    ) -> Mapping[str, Sequence[str]]:
        """Leave everything as it is."""
        return {job.name: job.held for job in candidates}


def jobs_of(candidates: Sequence[Candidate]) -> dict[str, JobInfo]:
    """Return the jobs as policies are to see them: what is left alone is not preempted."""
    return {
        job.name: replace(job.info, preemptible=False) if job.pinned else job.info
        for job in candidates
    }


def free_of(nodes: Nodes, candidates: Sequence[Candidate]) -> dict[str, dict[str, int]]:
    """Return what the jobs leave of every node; negative where they hold more than there is."""
    infos = {job.name: job.info for job in candidates}
    return free_resources(nodes, infos, {job.name: job.held for job in candidates})


def _fits(nodes: Nodes, candidates: Sequence[Candidate]) -> bool:
    left = free_of(nodes, candidates)
    return all(amount >= 0 for resources in left.values() for amount in resources.values())
