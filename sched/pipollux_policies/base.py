"""The interface of an allocation policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from .jobs.job_info import JobInfo, NodeInfo


class Policy(Protocol):
    """Allocates the cluster to jobs; see docs/concepts/policies.md."""

    def allocate_job(self, job_info: JobInfo, nodes: Mapping[Any, NodeInfo]) -> Sequence[Any]:
        """Place an arriving job on free resources, without moving other jobs."""

    def optimize(
        self,
        jobs: Mapping[Any, JobInfo],
        nodes: Mapping[Any, NodeInfo],
        base_allocations: Mapping[Any, Sequence[Any]],
        node_template: NodeInfo,
    ) -> tuple[Mapping[Any, Sequence[Any]], int]:
        """Allocate all jobs; return the allocations and the desired number of nodes."""
