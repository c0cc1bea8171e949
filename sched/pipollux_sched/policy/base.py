"""What the scheduler asks of an allocation policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from .job_info import JobInfo, NodeInfo


class Policy(Protocol):
    """Decides who gets what: see docs/policies.md."""

    def allocate_job(self, job_info: JobInfo, nodes: Mapping[Any, NodeInfo]) -> Sequence[Any]:
        """Place one job that has just come on what is free."""

    def optimize(
        self,
        jobs: Mapping[Any, JobInfo],
        nodes: Mapping[Any, NodeInfo],
        base_allocations: Mapping[Any, Sequence[Any]],
        node_template: NodeInfo,
    ) -> tuple[Mapping[Any, Sequence[Any]], int]:
        """Allocate all jobs anew; the number is how many nodes there should be."""
