"""Good states to start the genetic algorithm from.

A population that starts from the current allocation alone, and mutates at random over twice the
nodes that there are, hardly ever meets a state that fits the real nodes: it freezes under load. So
the search starts from states that a careful person would think of: what is there now, what is there
now with one job changed, and greedy fills of the cluster at several sizes.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from .arrays import Bools, Ints, room
from .problem import AllocationProblem

MOST_SINGLE_CHANGES = 400
"""Of the states in which one job's allocation differs from the current one, the best so many."""


class Room:
    """What is left of the nodes while jobs are placed on them one by one.

    Args:
        problem: the problem.
        state: (I, N), a feasible state.
        num_nodes: only the first so many nodes may be used for more.
    """

    def __init__(self, problem: AllocationProblem, state: Ints, num_nodes: int) -> None:
        self._problem = problem
        cluster = problem.cluster
        movable = state[~cluster.pinned]
        self.state = state.copy()
        self.rows = [cluster.held_row(job, state) for job in range(cluster.num_jobs)]
        """(J,): the row in which each job holds what it holds."""
        held = np.einsum("in,it->nt", movable, cluster.needs[~cluster.pinned])
        self._free: Ints = problem.free - held
        self._free[num_nodes:] = 0
        spread = np.count_nonzero(movable, axis=1) > 1
        self._num_distributed: Ints = np.count_nonzero(movable[spread], axis=0)

    def held(self, job: int) -> Ints:
        """Return what a job holds: (N,)."""
        cells: Ints = self.state[self.rows[job]]
        return cells

    def remove(self, job: int) -> None:
        """Take everything from a job."""
        self.give(self.rows[job], np.zeros_like(self.held(job)))

    def give(self, row: int, cells: Ints) -> None:
        """Let the row's job hold these cells and nothing else; they must fit."""
        job = int(self._problem.cluster.job_of[row])
        old_row, needs = self.rows[job], self._problem.cluster.needs
        for change, where, what in ((-1, old_row, self.state[old_row]), (1, row, cells)):
            self._free -= change * what[:, None] * needs[where]
            if np.count_nonzero(what) > 1:
                self._num_distributed += change * (what > 0)
        self.state[old_row] = 0
        self.state[row] = cells
        self.rows[job] = row

    def place(self, row: int, num_replicas: int) -> Ints | None:
        """Find nodes for all replicas of a row, as if its job held none; None if they do not fit.

        One node if one has room, the tightest such; else as few nodes as possible, none of which
        carries another distributed job.
        """
        base = self._problem.cluster.base[row]
        counts, foreign = self._room_for(row)
        cells: Ints = np.zeros_like(base)
        tight = np.where(counts >= num_replicas, counts, np.iinfo(np.int64).max)
        if tight.min() < np.iinfo(np.int64).max:
            cells[_prefer(tight == tight.min(), base)] = num_replicas
            return cells
        counts[foreign] = 0
        for node in np.argsort(-counts, kind="stable"):
            left = num_replicas - int(cells.sum())
            if left <= counts[node]:
                last = np.where((counts >= left) & (cells == 0), counts, np.iinfo(np.int64).max)
                cells[int(last.argmin())] = left
                return cells
            if counts[node] == 0:
                return None
            cells[node] = counts[node]
        return None

    def accepts(self, row: int, cells: Ints) -> bool:
        """Tell whether a row's job could hold these cells."""
        counts, foreign = self._room_for(row)
        shares = np.count_nonzero(cells) > 1 and bool((foreign & (cells > 0)).any())
        return bool((cells <= counts).all()) and not shares

    def _room_for(self, row: int) -> tuple[Ints, Bools]:
        """Return room for a row on each node, and which nodes carry another distributed job."""
        cluster = self._problem.cluster
        job = int(cluster.job_of[row])
        old = self.held(job)
        free = self._free + old[:, None] * cluster.needs[self.rows[job]]
        own = (old > 0) & (np.count_nonzero(old) > 1)
        return room(cluster.needs[row], free) * cluster.allowed[
            row
        ], self._num_distributed - own > 0


def _prefer(allowed: Bools, current: Ints) -> int:
    """Choose an allowed node: one that the job is on now, else the first."""
    both = allowed & (current > 0)
    return int((both if both.any() else allowed).argmax())


def ladder(now: int, least: int, most: int, per_node: int) -> list[int]:
    """Return numbers of replicas worth trying above `now`: one more, whole nodes, doublings."""
    steps = {now + 1, now + 2, 2 * now, 4 * now, most, least}
    steps |= {(now // per_node + 1) * per_node} if per_node else set()
    return sorted(step for step in steps if max(now + 1, least) <= step <= most)


def steps_of(problem: AllocationProblem, row: int, now: int) -> list[int]:
    """Return numbers of replicas of a row worth trying above `now`, within its bounds."""
    least, most = int(problem.min_replicas[row]), int(problem.max_replicas[row])
    return ladder(now, least, most, int(problem.fits[row].max()))


def fill(
    problem: AllocationProblem, state: Ints, num_nodes: int, *, per_share: bool, skip: int = -1
) -> Ints:
    """Give jobs more, always the step that gains most, until nothing gains anything.

    Args:
        problem: the problem.
        state: (I, N), feasible; where to start.
        num_nodes: only the first so many nodes may be used.
        per_share: gain is divided by the share of the cluster that it takes.
        skip: a job that gets nothing more, by number.
    """
    space = Room(problem, state, num_nodes)
    heap: list[tuple[float, int]] = []
    for job in problem.cluster.movable_jobs.tolist():
        if job != skip:
            step = _best_step(problem, space, job, per_share)
            if step is not None:
                heapq.heappush(heap, (-step.gain, job))
    while heap:
        _, job = heapq.heappop(heap)
        # Others have taken room since this gain was computed, so it can only have fallen.
        step = _best_step(problem, space, job, per_share)
        if step is None:
            continue
        if heap and step.gain < -heap[0][0]:
            heapq.heappush(heap, (-step.gain, job))
            continue
        space.give(step.row, step.cells)
        heapq.heappush(heap, (-step.gain, job))
    return space.state


class _Step(NamedTuple):
    """Something that one job could be given."""

    gain: float
    row: int
    cells: Ints


def _best_step(problem: AllocationProblem, space: Room, job: int, per_share: bool) -> _Step | None:
    """Find what gains most: more replicas in the shape that the job has, or another shape."""
    held_row, held = space.rows[job], space.held(job)
    now = int(held.sum())
    loss = float(problem.losses(problem.row_values(held_row, held[None]))[0])
    share = problem.shares[held_row] * now
    best: _Step | None = None
    for row in problem.cluster.spans[job]:
        steps = steps_of(problem, row, now if row == held_row else 0)
        options = [cells for step in steps if (cells := space.place(row, step)) is not None]
        if not options:
            continue
        stacked = np.stack(options)
        gains = loss - problem.losses(problem.row_values(row, stacked))
        useful = gains > 1e-12 * abs(loss)
        if per_share:
            # A better shape on no more than the job has costs next to nothing.
            extra = problem.shares[row] * stacked.sum(axis=1) - share
            gains = gains / np.maximum(extra, 1e-3 * problem.shares[row])
        index = int(np.where(useful, gains, -np.inf).argmax())
        if useful[index] and (best is None or gains[index] > best.gain):
            best = _Step(float(gains[index]), row, stacked[index])
    return best


def starting_states(problem: AllocationProblem, current: Ints) -> Ints:
    """Return feasible states worth starting from; the first is `current`.

    Args:
        problem: the problem.
        current: (I, N), the current allocations, feasible and on real nodes.

    Returns:
        (P, I, N), without duplicates.
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
    """Yield `current` with one job given something else, or nothing and the others more."""
    num_real = problem.cluster.num_real
    changes: list[_Step] = []
    for job in problem.cluster.movable_jobs.tolist():
        space = Room(problem, current, num_real)
        held_row, held = space.rows[job], space.held(job).copy()
        now = int(held.sum())
        loss = problem.losses(problem.row_values(held_row, held[None]))[0]
        space.remove(job)
        for row in problem.cluster.spans[job]:
            above = steps_of(problem, row, now) if row == held_row else []
            steps = sorted({*steps_of(problem, row, 0), *above})
            options = [cells for step in steps if (cells := space.place(row, step)) is not None]
            if options:
                values = problem.row_values(row, np.stack(options))
                gains = loss - problem.losses(values)
                changes.extend(map(_Step, gains.tolist(), [row] * len(options), options))
        if now:
            yield space.state
            yield fill(problem, space.state, num_real, per_share=True, skip=job)
    # Every change is one job's own, so its worth is known without a look at the whole state.
    changes.sort(key=lambda change: -change.gain)
    for change in changes[:MOST_SINGLE_CHANGES]:
        state = current.copy()
        state[problem.cluster.spans[problem.cluster.job_of[change.row]]] = 0
        state[change.row] = change.cells
        yield state
