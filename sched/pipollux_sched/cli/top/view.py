"""One moment of a scheduler, as `pipollux top` shows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from pipollux_sched.store import JobQuery
from pipollux_sched.views.models import ClusterView

if TYPE_CHECKING:
    from pipollux_sched.cli.reader import Reader

FIRST_JOBS = 100
"""Jobs that are looked at to begin with: more than most terminals have lines for."""
MOST_EVENTS = 60
USAGE_PARTS = 24
"""Parts of the time for which is told how full a node was."""
USAGE_SECONDS = 3600.0


class Look(NamedTuple):
    """One moment of a scheduler."""

    cluster: ClusterView
    """Everything at a glance, with the jobs that were asked for."""
    query: JobQuery
    """As it was asked."""
    served: bool
    """Whether a scheduler runs."""
    usage: Mapping[str, Sequence[float]]
    """Mean number of slots held of a node in each part of the last hour, where any was."""


def look(reader: Reader, query: JobQuery | None = None) -> Look:
    """Look at what a scheduler knows.

    Args:
        reader: where from.
        query: which jobs are wanted; None: the first, in the usual order.
    """
    query = query or JobQuery(limit=FIRST_JOBS)
    cluster = reader.cluster(query, MOST_EVENTS)
    usage = reader.usage(cluster.time - USAGE_SECONDS, USAGE_PARTS)
    return Look(cluster, query, reader.served, usage.nodes)
