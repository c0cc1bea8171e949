"""A snapshot of a scheduler, as `pipollux top` shows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from pipollux_sched.store import JobQuery
from pipollux_sched.views.models import ClusterView

if TYPE_CHECKING:
    from pipollux_sched.cli.reader import Reader
    from pipollux_sched.views.teams import TeamsView

FIRST_JOBS = 100
"""Number of jobs read at first, more than the lines of most terminals."""
MOST_EVENTS = 60
USAGE_PARTS = 24
"""Number of intervals in the usage of a node."""
USAGE_SECONDS = 3600.0


class Look(NamedTuple):
    """A snapshot of a scheduler."""

    cluster: ClusterView
    query: JobQuery
    served: bool
    """Whether a scheduler runs."""
    usage: Mapping[str, Sequence[float]]
    """Mean slots held of each node in each interval of the last hour, where known."""
    teams: TeamsView | None
    """The teams and their usage; None: there are no teams."""


def look(reader: Reader, query: JobQuery | None = None) -> Look:
    """Read a snapshot of a scheduler, with the first jobs unless a query selects others."""
    query = query or JobQuery(limit=FIRST_JOBS)
    cluster = reader.cluster(query, MOST_EVENTS)
    usage = reader.usage(cluster.time - USAGE_SECONDS, USAGE_PARTS)
    teams = reader.teams() if cluster.has_teams else None
    return Look(cluster, query, reader.served, usage.nodes, teams)
