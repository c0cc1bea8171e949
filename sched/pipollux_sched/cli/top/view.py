"""One moment of a scheduler, as `pipollux top` shows it: read from the store, no server needed."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipollux_sched.report.event_text import TELLING_TYPES
from pipollux_sched.store import (
    Holder,
    JobPage,
    JobQuery,
    ListedPhase,
    NodeRecord,
    StateDir,
    Store,
)

FIRST_JOBS = 100
"""Jobs that are looked at to begin with: more than most terminals have lines for."""
MOST_EVENTS = 60
USAGE_PARTS = 24
"""Parts of the time for which is told how full a node was."""
USAGE_SECONDS = 3600.0


@dataclass(frozen=True)
class NodeView:
    """One node."""

    record: NodeRecord
    holders: Mapping[str, int]
    """Slots held, by job."""
    usage: Sequence[float]
    """Mean number of slots held in each part of the last hour; empty where none was."""

    @property
    def used(self) -> int:
        """Slots that jobs hold."""
        return sum(self.holders.values())


@dataclass(frozen=True)
class ClusterView:
    """One moment of a scheduler."""

    time: float
    served: bool
    """Whether a scheduler runs."""
    policy: str
    nodes: tuple[NodeView, ...]
    jobs: JobPage
    """The jobs that were asked for."""
    query: JobQuery
    """As it was asked."""
    phases: Mapping[ListedPhase, int]
    """How many of all jobs are in each phase that has any."""
    goodput: float | None
    """Samples per second of all jobs that run, as far as they told; None: none did."""
    events: Sequence[Mapping[str, Any]] = field(default_factory=list)
    """The last ones, oldest first."""


def look(store: Store, directory: StateDir, query: JobQuery | None = None) -> ClusterView:
    """Look at what a scheduler keeps.

    Args:
        store: the store.
        directory: whose it is.
        query: which jobs are wanted; None: the first, in the usual order.
    """
    query = query or JobQuery(limit=FIRST_JOBS)
    now, overview = time.time(), store.overview
    glance, served_by = overview.glance(), store.latest_events(1, types=["cluster"])
    usage = overview.node_usage(now - USAGE_SECONDS, now, USAGE_PARTS)
    return ClusterView(
        time=now,
        served=directory.is_served(),
        policy=_policy_name(served_by[-1]["policy"]) if served_by else "",
        nodes=tuple(
            NodeView(record, _held(name, glance.holders), usage.get(name, ()))
            for name, record in store.nodes().items()
        ),
        jobs=overview.jobs(query, now),
        query=query,
        phases=glance.phases,
        goodput=glance.goodput,
        events=store.latest_events(MOST_EVENTS, types=TELLING_TYPES),
    )


def _held(node: str, holders: Sequence[Holder]) -> dict[str, int]:
    return {
        holder.job: holder.nodes.count(node) * holder.num_stages
        for holder in holders
        if node in holder.nodes
    }


def _policy_name(class_name: str) -> str:
    return class_name.removesuffix("Policy").lower()
