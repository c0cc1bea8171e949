"""The free resources of nodes while replicas are placed on them, and the choice of nodes.

A replica lies whole on one node. A job's replicas go to the tightest single node that holds them
all, else to as few nodes as possible, in the tightest domain of the lowest network level with one
that holds them (`topology`). A job on several nodes is *distributed*, and a node carries at most
one distributed job. Every policy places by these rules.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush
from typing import NamedTuple, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from pipollux_policies.jobs.job_info import NodeInfo, ReplicaShape
from pipollux_policies.jobs.topology import FLAT, Topology

Ints: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]
Bools: TypeAlias = NDArray[np.bool_]
A = TypeVar("A", bound=np.generic)
NodeCounts: TypeAlias = tuple[tuple[int, int], ...]
"""(node, number of replicas) for every node of a job."""


def amounts(infos: Iterable[ReplicaShape | NodeInfo], kinds: Sequence[str]) -> Ints:
    """Return the resources of shapes or nodes by kind: (len(infos), T)."""
    rows = [[info.resources.get(kind, 0) for kind in kinds] for info in infos]
    return np.array(rows, dtype=np.int64).reshape(len(rows), len(kinds))


def frozen(values: NDArray[A]) -> NDArray[A]:
    """Make an array read-only and return it."""
    values.flags.writeable = False
    return values


def num_fitting(need: Ints, free: Ints) -> Ints:
    """Return how many replicas fit: need (T,), free (..., T) -> (...,)."""
    first, *others = np.flatnonzero(need)
    counts: Ints = free[..., first] // need[first]
    for kind in others:
        counts = np.minimum(counts, free[..., kind] // need[kind])
    return np.maximum(counts, 0)


def find_nodes(
    counts: Ints,
    closed: Bools,
    num_replicas: int,
    *,
    preferred: Bools | None = None,
    avoided: Bools | None = None,
    claimed: Ints | None = None,
    max_nodes: int | None = None,
    topology: Topology = FLAT,
) -> NodeCounts | None:
    """Find nodes for all replicas of a job, at least 1; None if they do not fit in `max_nodes`.

    Arrays have shape (N,): `counts` is how many of the replicas fit on each node; `closed` nodes
    accept no further distributed job; of equally tight nodes for a whole job, `preferred` ones come
    first; `avoided` ones come last, however tight; of equal nodes, the least `claimed` go first.

    Returns the nodes in the order in which they are filled: the roomiest, then the tightest that
    holds the rest. More room on any node never makes the result None.

    >>> closed = np.array([False, False, False])
    >>> find_nodes(np.array([4, 2, 3]), closed, 2)
    ((1, 2),)
    >>> find_nodes(np.array([4, 2, 3]), closed, 6)
    ((0, 4), (1, 2))
    """
    node = _tightest(counts, num_replicas, preferred, avoided, claimed)
    if node is not None:
        return ((node, num_replicas),)
    counts = np.where(closed, 0, counts)
    for inside in _domains(counts, num_replicas, topology):
        within = find_nodes(
            *(counts[inside], closed[inside], num_replicas),
            avoided=None if avoided is None else avoided[inside],
            claimed=None if claimed is None else claimed[inside],
            max_nodes=max_nodes,
        )
        if within is not None:
            return _outside(within, inside)
    found: list[tuple[int, int]] = []
    left = num_replicas
    keys = [np.zeros_like(closed) if claimed is None else claimed, -counts]
    if not topology.is_flat:
        # Of equal nodes, those of the roomiest domains, so that the job touches few.
        keys.insert(1, -topology.room(counts, 1)[topology.domains[0]])
    roomiest = np.lexsort(keys)
    for node in roomiest.tolist():
        count = int(counts[node])
        if count == 0:
            return None
        if count >= left:
            if max_nodes is not None and len(found) >= max_nodes:
                return None
            last = _tightest(counts, left, None, avoided, claimed)
            assert last is not None  # noqa: S101  # this node holds the rest
            return (*found, (last, left))
        found.append((node, count))
        counts[node] = 0
        left -= count
    return None


def _outside(found: NodeCounts, inside: Ints) -> NodeCounts:
    """Return nodes that were found among these, by their indices among all."""
    return tuple((int(inside[node]), count) for node, count in found)


def _domains(counts: Ints, num_replicas: int, topology: Topology) -> Iterator[Ints]:
    """Return the nodes of the tightest domain of each network level with one that holds all
    replicas.
    """
    for level in range(1, topology.num_levels):
        room = topology.room(counts, level)
        room[room < num_replicas] = np.iinfo(np.int64).max
        tightest = int(room.argmin())
        if room[tightest] < np.iinfo(np.int64).max:
            yield topology.members(level, tightest)


def find_keeping(
    counts: Ints,
    closed: Bools,
    num_replicas: int,
    survivors: Ints,
    *,
    claimed: Ints | None = None,
    max_nodes: int | None = None,
) -> NodeCounts | None:
    """Find the fewest nodes for all replicas of a job of which at least one keeps a replica.

    Many survivors are preferred; `survivors`, (N,), is how many could stay on each node. Other
    arguments as of `find_nodes`. None if there are no such nodes within `max_nodes`.

    >>> open_nodes, survivors = np.array([False, False, False]), np.array([0, 1, 0])
    >>> find_keeping(np.array([4, 3, 3]), open_nodes, 3, survivors)
    ((1, 3),)
    >>> find_keeping(np.array([4, 2, 3]), open_nodes, 5, survivors)
    ((1, 2), (2, 3))
    """
    stays = np.minimum(counts, survivors)
    homes = np.flatnonzero(stays)
    if not homes.size:
        return None
    alone = homes[counts[homes] >= num_replicas]
    if alone.size:
        kept = np.minimum(stays[alone], num_replicas)
        best = alone[np.lexsort((counts[alone], -kept))][0]
        return ((int(best), num_replicas),)
    homes = homes[~closed[homes]]
    if not homes.size:
        return None
    homes = homes[np.lexsort((-counts[homes], -stays[homes]))]
    enough = int(np.searchsorted(np.cumsum(counts[homes]), num_replicas)) + 1
    # The roomiest node needs the fewest others.
    roomiest = homes[[counts[homes].argmax()]]
    open_counts = np.where(closed, 0, counts)
    tried = [
        _spread(open_counts, chosen, num_replicas, stays, claimed)
        for chosen in (homes, homes[:enough], homes[:1], roomiest)
    ]
    found = [nodes for nodes in tried if nodes is not None]
    found = [nodes for nodes in found if max_nodes is None or len(nodes) <= max_nodes]
    return min(
        found,
        key=lambda nodes: (len(nodes), -sum(min(n, int(stays[node])) for node, n in nodes)),
        default=None,
    )


def _spread(
    counts: Ints, homes: Ints, num_replicas: int, stays: Ints, claimed: Ints | None
) -> NodeCounts | None:
    """Place replicas on these current nodes of the job first, then on others."""
    placed: dict[int, int] = {}
    left = num_replicas
    for most in (stays, counts):
        for node in homes.tolist():
            more = min(int(most[node]) - placed.get(node, 0), left)
            placed[node] = placed.get(node, 0) + more
            left -= more
    if left:
        others = counts.copy()
        others[homes] = 0
        none_closed = np.zeros(len(counts), dtype=bool)
        rest = find_nodes(others, none_closed, left, preferred=stays > 0, claimed=claimed)
        if rest is None:
            return None
        placed.update(rest)
    return tuple((node, count) for node, count in placed.items() if count)


def _tightest(
    counts: Ints,
    num_replicas: int,
    preferred: Bools | None,
    avoided: Bools | None,
    claimed: Ints | None,
) -> int | None:
    """Return the node with the least room among those that hold all replicas, if any."""
    enough = np.flatnonzero(counts >= num_replicas)
    if not enough.size:
        return None
    if avoided is not None:
        enough = _narrow(enough, ~avoided)
    tightest = enough[counts[enough] == counts[enough].min()]
    if preferred is not None:
        tightest = _narrow(tightest, preferred)
    if claimed is not None:
        tightest = tightest[[claimed[tightest].argmin()]]
    return int(tightest[0])


def _narrow(nodes: Ints, wanted: Bools) -> Ints:
    chosen: Ints = nodes[wanted[nodes]]
    return chosen if chosen.size else nodes


class _Counts(NamedTuple):
    """How many replicas fit on each node, after the first changes of a `NodeCapacity`."""

    need: Ints
    allowed: Bools
    counts: Ints
    wants: list[tuple[int, int]]
    by_room: dict[int, list[int]]
    """Heaps of nodes by how many replicas fit; they may contain outdated entries."""

    def change(self, node: int, free: Sequence[int]) -> None:
        if self.allowed[node]:
            count = max(min([free[kind] // amount for kind, amount in self.wants]), 0)
            self.counts[node] = count
            heappush(self.by_room.setdefault(count, []), node)

    def tightest(self, num_replicas: int, claims: Ints) -> int | None:
        for room in sorted(room for room in self.by_room if room >= num_replicas):
            nodes = self.by_room[room]
            while nodes:
                if self.counts[nodes[0]] == room:
                    return self._least_claimed(nodes[0], claims)
                heappop(nodes)
        return None

    def _least_claimed(self, node: int, claims: Ints) -> int:
        """Return the first, least claimed node among those with as much room as this one."""
        if not claims[node]:
            return node
        alike = np.flatnonzero(self.counts == self.counts[node])
        return int(alike[claims[alike].argmin()])


class NodeCapacity:
    """The (N, T) free resources of N nodes, and how many distributed jobs each carries."""

    def __init__(self, free: Ints, topology: Topology = FLAT) -> None:
        self.topology = topology
        self.free: Ints = free.copy()
        self.num_distributed: Ints = np.zeros(len(free), dtype=np.int64)
        self.claims: Ints = np.zeros(len(free), dtype=np.int64)
        """(N,): current replicas on each node of jobs that are not placed yet. Of nodes with equal
        room, those with the fewest claims are found first."""
        self._kept: dict[tuple[int, int], _Counts] = {}
        """Cached results of `counts`, by the ids of the arguments, which the entries keep alive."""

    def counts(self, need: Ints, allowed: Bools) -> Ints:
        """Return how many replicas, of (T,) resources, fit on each of the allowed nodes: (N,). For
        `frozen` arrays, later changes of capacity update the cached result on the next call.
        """
        key = id(need), id(allowed)
        if key not in self._kept:
            found = np.where(allowed, num_fitting(need, self.free), 0)
            if need.flags.writeable or allowed.flags.writeable:
                return found
            wants = [(kind, amount) for kind, amount in enumerate(need.tolist()) if amount]
            by_room: dict[int, list[int]] = {}
            for node, count in enumerate(found.tolist()):
                by_room.setdefault(count, []).append(node)  # ascending order, which is a heap
            self._kept[key] = _Counts(need, allowed, found, wants, by_room)
        return self._kept[key].counts

    def forget(self) -> None:
        """Drop the cached results of `counts`."""
        self._kept.clear()

    def put_all(self, owners: Ints, nodes: Ints, counts: Ints, needs: Ints) -> bool:
        """Allocate the room of many jobs if there is enough for all; return whether there was.
        Entries have a job, by index, its node, and the number and (T,) resources of replicas there.
        """
        free, distributed = self.free.copy(), self.num_distributed.copy()
        np.subtract.at(free, nodes, counts[:, None] * needs)
        spread = nodes[np.bincount(owners)[owners] > 1]
        np.add.at(distributed, spread, 1)
        if (free < np.minimum(self.free, 0)).any() or (distributed[spread] > 1).any():
            return False
        self.free, self.num_distributed = free, distributed
        self.forget()
        return True

    def find(self, need: Ints, allowed: Bools, num_replicas: int) -> NodeCounts | None:
        """Find nodes for a job (`find_nodes`), in ascending order."""
        counts = self.counts(need, allowed)
        kept = self._kept.get((id(need), id(allowed)))
        node = None if kept is None else kept.tightest(num_replicas, self.claims)
        if node is not None:
            return ((node, num_replicas),)
        closed = self.num_distributed > 0
        found = find_nodes(
            counts, closed, num_replicas, claimed=self.claims, topology=self.topology
        )
        return None if found is None else tuple(sorted(found))

    def find_keeping(
        self, need: Ints, allowed: Bools, num_replicas: int, survivors: NodeCounts
    ) -> NodeCounts | None:
        """Find nodes that keep replicas of a job in place (`find_keeping`), in ascending order."""
        found = self.all_keeping(need, allowed, num_replicas, survivors)
        return found[0] if found else None

    def all_keeping(
        self, need: Ints, allowed: Bools, num_replicas: int, survivors: NodeCounts
    ) -> list[NodeCounts]:
        """Return such nodes within the domain of each network level that keeps most replicas, if
        they fit there, and on all nodes: the lowest level first.
        """
        stays = np.zeros(len(self.free), dtype=np.int64)
        for node, count in survivors:
            stays[node] = count
        counts = self.counts(need, allowed)
        closed = self.num_distributed > 0
        found = []
        for inside in self._homes(counts, closed, num_replicas, stays):
            nodes = find_keeping(
                *(counts[inside], closed[inside], num_replicas, stays[inside]),
                claimed=self.claims[inside],
            )
            if nodes is not None:
                found.append(tuple(sorted(_outside(nodes, inside))))
                if len(nodes) == 1:
                    break
        else:
            nodes = find_keeping(counts, closed, num_replicas, stays, claimed=self.claims)
            if nodes is not None:
                found.append(tuple(sorted(nodes)))
        return list(dict.fromkeys(found))

    def _homes(self, counts: Ints, closed: Bools, num_replicas: int, stays: Ints) -> Iterator[Ints]:
        """Return the nodes of the domain of each level that keeps most replicas and has room for
        all.
        """
        open_counts = np.where(closed, 0, counts)
        for level in range(1, self.topology.num_levels):
            kept = self.topology.room(np.minimum(counts, stays), level)
            kept[self.topology.room(open_counts, level) < num_replicas] = 0
            if kept.any():
                yield self.topology.members(level, int(kept.argmax()))

    def most(self, need: Ints, allowed: Bools) -> int:
        """Return the most replicas for which `find` finds nodes."""
        counts = self.counts(need, allowed)
        spread = counts.sum(where=self.num_distributed == 0)
        return max(int(counts.max(initial=0)), int(spread))

    def rooms(self, need: Ints, allowed: Bools) -> Ints:
        """Return the most replicas on several nodes that meet at each network level, (L,)."""
        counts = np.where(self.num_distributed > 0, 0, self.counts(need, allowed))
        return self.topology.largest_rooms(counts)

    def accepts(self, placed: NodeCounts, need: Ints) -> bool:
        """Return whether a job fits on these nodes."""
        nodes = [node for node, _ in placed]
        if len(placed) > 1 and self.num_distributed[nodes].any():
            return False
        fits = num_fitting(need, self.free[nodes]) >= [count for _, count in placed]
        return bool(fits.all())

    def put(self, placed: NodeCounts, need: Ints) -> None:
        """Allocate the room of a job's replicas."""
        self._change(placed, need, 1)

    def take(self, placed: NodeCounts, need: Ints) -> None:
        """Free the room of a job's replicas."""
        self._change(placed, need, -1)

    def _change(self, placed: NodeCounts, need: Ints, sign: int) -> None:
        for node, count in placed:
            row = self.free[node]
            row -= sign * count * need
            if len(placed) > 1:
                self.num_distributed[node] += sign
            if self._kept:
                free = row.tolist()
                for kept in self._kept.values():
                    kept.change(node, free)
