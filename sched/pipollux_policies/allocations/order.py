"""Orders of jobs and nodes that do not depend on the order of mappings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipollux_policies.jobs.job_info import JobInfo, NodeInfo


def name_order(name: Any) -> tuple[str, str]:
    """Return the sort key of a name of any type."""
    return str(name), type(name).__name__


def by_arrival(jobs: Mapping[Any, JobInfo]) -> list[Any]:
    """Return the names of jobs, first submitted first."""
    return sorted(jobs, key=lambda name: (jobs[name].created, name_order(name)))


def by_safety(nodes: Mapping[Any, NodeInfo]) -> list[Any]:
    """Return the names of nodes, sorted, the preemptible ones last."""
    return sorted(nodes, key=lambda name: (nodes[name].preemptible, name_order(name)))
