"""The nodes while jobs are put on them: what is free, and where distributed jobs lie.

A replica lies whole on one node. A job on several nodes is distributed, and a node carries at most
one such; so a node with room may still be closed to a distributed job.
"""

from __future__ import annotations

import numpy as np

from pipollux_sched.policy.pollux.arrays import room

from .configurations import Bools, Ints, Nodes, Row

_NONE = np.iinfo(np.int64).max


class Floor:
    """What is left of the nodes while jobs are put on them.

    Args:
        nodes: the nodes.
    """

    def __init__(self, nodes: Nodes) -> None:
        self.free: Ints = nodes.free.copy()
        """(N, T)."""
        self._distributed = np.zeros(len(nodes.names), dtype=np.int64)

    def put(self, row: Row, need: Ints) -> None:
        """Put a job's replicas on their nodes."""
        self._change(row, need, 1)

    def take(self, row: Row, need: Ints) -> None:
        """Take a job's replicas off their nodes."""
        self._change(row, need, -1)

    def find(self, need: Ints, allowed: Bools, num_replicas: int) -> Row | None:
        """Find nodes for replicas: one node, the tightest, else as few as possible.

        Args:
            need: of one replica, (T,).
            allowed: nodes whose GPUs are of the right type, (N,).
            num_replicas: how many.

        Returns:
            The row, or None where they do not fit.
        """
        counts = np.where(allowed, room(need, self.free), 0)
        tightest = _tightest(counts, num_replicas)
        if tightest is not None:
            return ((tightest, num_replicas),)
        counts[self._distributed > 0] = 0
        if counts.sum() < num_replicas:
            return None
        return _spread(counts, num_replicas)

    def most(self, need: Ints, allowed: Bools) -> int:
        """Return the most replicas for which `find` would find nodes."""
        counts = np.where(allowed, room(need, self.free), 0)
        spread = counts.sum(where=self._distributed == 0)
        return max(int(counts.max(initial=0)), int(spread))

    def accepts(self, row: Row, need: Ints) -> bool:
        """Tell whether a job could be put on these nodes."""
        nodes = [node for node, _ in row]
        if len(row) > 1 and self._distributed[nodes].any():
            return False
        return bool((room(need, self.free[nodes]) >= [count for _, count in row]).all())

    def _change(self, row: Row, need: Ints, sign: int) -> None:
        for node, count in row:
            self.free[node] -= sign * count * need
            self._distributed[node] += sign * (len(row) > 1)


def _tightest(counts: Ints, num_replicas: int) -> int | None:
    """Return the first of the nodes with just enough room, if one has enough."""
    enough = np.where(counts >= num_replicas, counts, _NONE)
    node = int(enough.argmin())
    return node if enough[node] < _NONE else None


def _spread(counts: Ints, num_replicas: int) -> Row:
    """Fill the roomiest nodes, and put what is left on the tightest node that holds it."""
    row, left = [], num_replicas
    for node in np.argsort(-counts, kind="stable").tolist():
        if counts[node] >= left:
            break
        row.append((node, int(counts[node])))
        left -= int(counts[node])
        counts[node] = 0
    last = _tightest(counts, left)
    assert last is not None  # noqa: S101  # the caller has counted
    return tuple(sorted([*row, (last, left)]))
