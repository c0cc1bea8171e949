"""Good states to start the genetic algorithm from.

A population that starts from the current allocation alone, and mutates at random over twice the
nodes that there are, hardly ever meets a state that fits the real nodes: it freezes under load. So
the search starts from states that a careful person would think of: what is there now, what is there
now with one job changed, and greedy fills of the cluster at several sizes.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

import numpy as np

from .problem import AllocationProblem, Bools, Ints, room


class Room:
    """What is left of the nodes while jobs are placed on them one by one.

    Args:
        problem: the problem.
        state: (J, N), a feasible state.
        num_nodes: only the first so many nodes may be used for more.
    """

    def __init__(self, problem: AllocationProblem, state: Ints, num_nodes: int) -> None:
        self._problem = problem
        self._movable = ~problem.cluster.pinned
        self.state = state.copy()
        movable = state[self._movable]
        held = np.einsum("jn,jt->nt", movable, problem.cluster.needs[self._movable])
        self._free: Ints = problem.free - held
        self._free[num_nodes:] = 0
        spread = np.count_nonzero(movable, axis=1) > 1
        self._num_distributed: Ints = np.count_nonzero(movable[spread], axis=0)

    def remove(self, job: int) -> None:
        """Take everything from a job."""
        self.set_row(job, np.zeros_like(self.state[job]))

    def set_row(self, job: int, row: Ints) -> None:
        """Give a job another row, which must fit."""
        old = self.state[job]
        self._free += (old - row)[:, None] * self._problem.cluster.needs[job]
        for change, cells in ((-1, old), (1, row)):
            if np.count_nonzero(cells) > 1:
                self._num_distributed += change * (cells > 0)
        self.state[job] = row

    def place(self, job: int, num_replicas: int) -> Ints | None:
        """Find nodes for all replicas of a job, as if it held none; None if they do not fit.

        One node if one has room, the tightest such; else as few nodes as possible, none of which
        carries another distributed job.
        """
        need, old = self._problem.cluster.needs[job], self.state[job]
        free = self._free + old[:, None] * need
        counts = room(need, free)
        row: Ints = np.zeros_like(old)
        tight = np.where(counts >= num_replicas, counts, np.iinfo(np.int64).max)
        if tight.min() < np.iinfo(np.int64).max:
            row[_prefer(tight == tight.min(), self._problem.cluster.base[job])] = num_replicas
            return row
        counts[self._foreign(old)] = 0
        for node in np.argsort(-counts, kind="stable"):
            left = num_replicas - int(row.sum())
            if left <= counts[node]:
                last = np.where((counts >= left) & (row == 0), counts, np.iinfo(np.int64).max)
                row[int(last.argmin())] = left
                return row
            if counts[node] == 0:
                return None
            row[node] = counts[node]
        return None

    def accepts(self, job: int, row: Ints) -> bool:
        """Tell whether a job could have this row."""
        old = self.state[job]
        free = self._free + old[:, None] * self._problem.cluster.needs[job]
        fits = bool((row <= room(self._problem.cluster.needs[job], free)).all())
        shares = np.count_nonzero(row) > 1 and bool((self._foreign(old) & (row > 0)).any())
        return fits and not shares

    def _foreign(self, old: Ints) -> Bools:
        """Tell which nodes carry a distributed job other than the one that holds `old`."""
        own = (old > 0) & (np.count_nonzero(old) > 1)
        foreign: Bools = self._num_distributed - own > 0
        return foreign


def _prefer(allowed: Bools, current: Ints) -> int:
    """Choose an allowed node: one that the job is on now, else the first."""
    both = allowed & (current > 0)
    return int((both if both.any() else allowed).argmax())


def ladder(now: int, least: int, most: int, per_node: int) -> list[int]:
    """Return numbers of replicas worth trying above `now`: one more, whole nodes, doublings."""
    steps = {now + 1, now + 2, 2 * now, 4 * now, most, least}
    steps |= {(now // per_node + 1) * per_node} if per_node else set()
    return sorted(step for step in steps if max(now + 1, least) <= step <= most)


def fill(
    problem: AllocationProblem, state: Ints, num_nodes: int, *, per_share: bool, skip: int = -1
) -> Ints:
    """Give jobs more, always the step that gains most, until nothing gains anything.

    Args:
        problem: the problem.
        state: (J, N), feasible; where to start.
        num_nodes: only the first so many nodes may be used.
        per_share: gain is divided by the share of the cluster that it takes.
        skip: a job that gets nothing more, by number.
    """
    space = Room(problem, state, num_nodes)
    heap: list[tuple[float, int]] = []
    for job in np.flatnonzero(~problem.cluster.pinned).tolist():
        if job != skip:
            gain, row = _best_step(problem, space, job, per_share)
            if row is not None:
                heapq.heappush(heap, (-gain, job))
    while heap:
        _, job = heapq.heappop(heap)
        # Others have taken room since this gain was computed, so it can only have fallen.
        gain, row = _best_step(problem, space, job, per_share)
        if row is None:
            continue
        if heap and gain < -heap[0][0]:
            heapq.heappush(heap, (-gain, job))
            continue
        space.set_row(job, row)
        heapq.heappush(heap, (-gain, job))
    return space.state


def _best_step(
    problem: AllocationProblem, space: Room, job: int, per_share: bool
) -> tuple[float, Ints | None]:
    now = int(space.state[job].sum())
    least, most = int(problem.min_replicas[job]), int(problem.max_replicas[job])
    steps = ladder(now, least, most, int(problem.fits[job].max()))
    rows = [row for step in steps if (row := space.place(job, step)) is not None]
    if not rows:
        return 0.0, None
    stacked = np.stack([space.state[job], *rows])
    losses = problem.losses(problem.job_values(job, stacked))
    gains = losses[0] - losses[1:]
    if per_share:
        gains = gains / (problem.shares[job] * (stacked[1:].sum(axis=1) - now))
    best = int(gains.argmax())
    if gains[best] <= 1e-12 * abs(losses[0]):
        return 0.0, None
    return float(gains[best]), rows[best]


def starting_states(problem: AllocationProblem, current: Ints) -> Ints:
    """Return feasible states worth starting from; the first is `current`.

    Args:
        problem: the problem.
        current: (J, N), the current allocations, feasible and on real nodes.

    Returns:
        (P, J, N), without duplicates.
    """
    states = [current, *_fills(problem, current), *_single_changes(problem, current)]
    unique = {state.tobytes(): state for state in states}
    return np.stack(list(unique.values()))


def _fills(problem: AllocationProblem, current: Ints) -> Iterator[Ints]:
    num_real, num_all = problem.cluster.num_real, problem.shape[1]
    empty = np.where(problem.cluster.pinned[:, None], problem.cluster.base, 0)
    for per_share in (True, False):
        yield fill(problem, current, num_real, per_share=per_share)
        yield fill(problem, empty, num_real, per_share=per_share)
    yield empty
    for num_nodes in sorted({round(num_real * part) for part in (0.25, 0.5, 0.75, 1.5, 2.0)}):
        if 0 < num_nodes <= num_all and num_nodes != num_real:
            yield fill(problem, empty, num_nodes, per_share=True)


def _single_changes(problem: AllocationProblem, current: Ints) -> Iterator[Ints]:
    """Yield `current` with one job given another number of replicas, or none and others more."""
    num_real = problem.cluster.num_real
    for job in np.flatnonzero(~problem.cluster.pinned).tolist():
        space = Room(problem, current, num_real)
        space.remove(job)
        without = space.state.copy()
        least, most = int(problem.min_replicas[job]), int(problem.max_replicas[job])
        per_node = int(problem.fits[job].max())
        now = int(current[job].sum())
        for step in {*ladder(0, least, most, per_node), *ladder(now, least, most, per_node)}:
            row = space.place(job, step)
            if row is not None:
                space.set_row(job, row)
                yield space.state.copy()
                space.remove(job)
        if now:
            yield without
            yield fill(problem, without, num_real, per_share=True, skip=job)
