"""The network levels at which nodes meet, such as racks and zones.

    level 3 (the cluster)   ┌───────────────┬──────────────────────────┐
    level 2 (zone)          │  zone a       │          zone b          │
    level 1 (rack)          │  r1     r2    │   r1     r2   unlabelled │
    nodes                   │ n0 n1  n2 n3  │  n4 n5   n6      n7      │

The level of an allocation is the lowest one with a domain that contains all its nodes: 1 for n0 and
n1, 2 for n0 and n2, 3 for n1 and n4. A domain is named by its whole path, so the racks r1 of both
zones differ. A node without a label at a level shares no domain of that level, except one that it
already shares below: n7 meets n6 at level 2. Without labels there is one level, the cluster, as in
Pollux's model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .job_info import NodeInfo

Ints: TypeAlias = NDArray[np.int64]
_NO_DOMAINS = np.zeros((0, 0), dtype=np.int64)


@dataclass(frozen=True)
class Topology:
    """The domains of N nodes at every level but the highest, which contains all nodes."""

    domains: Ints
    """(L - 1, N): index of the domain of each node at levels 1, 2, …; each level refines the next.
    """

    @property
    def num_levels(self) -> int:
        """L, the number of levels above the node at which nodes can meet."""
        return len(self.domains) + 1

    @property
    def is_flat(self) -> bool:
        """Whether all nodes meet at one level, as without labels."""
        return not len(self.domains)

    def level(self, nodes: Iterable[int]) -> int:
        """Return the lowest level with a domain that contains all these nodes; 1 for one node."""
        if self.is_flat:
            return 1
        first, *others = [*nodes] or [0]
        for level, domains in enumerate(self._by_node, 1):
            here = domains[first]
            if all(domains[node] == here for node in others):
                return level
        return self.num_levels

    def levels(self, cells: Ints) -> Ints:
        """Return the level of the nodes that are not 0: (..., N) -> (...,); 1 without any."""
        found = np.ones(cells.shape[:-1], dtype=np.int64)
        used = cells > 0
        for domain in self.domains:
            most = np.where(used, domain, -1).max(axis=-1)
            least = np.where(used, domain, len(domain)).min(axis=-1)
            found += least < most
        return found

    def room(self, counts: Ints, level: int) -> Ints:
        """Return how many replicas fit in each domain of a level below the highest."""
        return np.bincount(self.domains[level - 1], counts).astype(np.int64)

    def largest_rooms(self, counts: Ints) -> Ints:
        """Return how many replicas fit in the roomiest domain of every level, (L,), ascending."""
        below = [self.room(counts, level).max(initial=0) for level in range(1, self.num_levels)]
        return np.array([*below, counts.sum()], dtype=np.int64)

    def members(self, level: int, domain: int) -> Ints:
        """Return the nodes of a domain, ascending."""
        return self._members[level - 1][domain]

    @cached_property
    def _by_node(self) -> list[list[int]]:
        """`domains` as lists, from which single entries are read faster."""
        found: list[list[int]] = self.domains.tolist()
        return found

    @cached_property
    def _members(self) -> list[list[Ints]]:
        """The nodes of every domain, by level."""
        return [
            np.split(np.argsort(row, kind="stable"), np.cumsum(np.bincount(row))[:-1])
            for row in self.domains
        ]


FLAT = Topology(_NO_DOMAINS)
"""All nodes meet at one level."""


def build_topology(infos: Sequence[NodeInfo]) -> Topology:
    """Return the topology of nodes by their labels (`NodeInfo.topology`)."""
    most = max((len(info.topology) for info in infos), default=0)
    below: list[Any] = [(number,) for number in range(len(infos))]
    rows = []
    for level in range(1, most + 1):
        names: list[Any] = []
        for info, own in zip(infos, below, strict=True):
            path = (*info.topology, *[""] * (most - len(info.topology)))[: most - level + 1]
            # Whole paths, of a different length at every level, so that no two names are equal.
            names.append(("", *path) if path[-1] else own)
        below = names
        rows.append(_numbered(names))
    while rows and rows[-1].max(initial=0) == 0:
        rows.pop()  # all nodes meet here already
    return Topology(np.array(rows, dtype=np.int64)) if rows else FLAT


def _numbered(names: Sequence[Any]) -> Ints:
    numbers: dict[Any, int] = {}
    return np.array([numbers.setdefault(name, len(numbers)) for name in names], dtype=np.int64)
