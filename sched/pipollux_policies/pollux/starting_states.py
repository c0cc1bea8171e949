"""Starting states of the genetic algorithm.

A population that starts from the current allocation alone, and mutates at random over twice the
number of nodes, hardly ever reaches a state that fits the real nodes: it stalls under load.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from pipollux_policies.placement.node_choice import Ints

from .problem import AllocationProblem
from .state_builder import StateBuilder, replica_steps

MOST_SINGLE_CHANGES = 400
"""The most states in which one job's allocation differs from the current one, the best first."""


def fill(
    problem: AllocationProblem, state: Ints, num_nodes: int, *, per_share: bool, skip: int = -1
) -> Ints:
    """Grow jobs by the step with the greatest gain, until no step gains anything.

    From a feasible state, except job `skip`, on the first `num_nodes` nodes only; with `per_share`,
    gains are divided by the share of the cluster that they need.
    """
    builder = StateBuilder(problem, state, num_nodes)
    heap: list[tuple[float, int]] = []
    for job in problem.cluster.movable_jobs.tolist():
        if job != skip:
            step = _best_step(problem, builder, job, per_share)
            if step is not None:
                heapq.heappush(heap, (-step.gain, job))
    while heap:
        _, job = heapq.heappop(heap)
        # Other jobs have used room since this gain was computed, so it can only have fallen.
        step = _best_step(problem, builder, job, per_share)
        if step is None:
            continue
        if heap and step.gain < -heap[0][0]:
            heapq.heappush(heap, (-step.gain, job))
            continue
        builder.give(step.row, step.cells)
        heapq.heappush(heap, (-step.gain, job))
    return builder.state


class _Step(NamedTuple):
    gain: float
    row: int
    cells: Ints


def _best_step(
    problem: AllocationProblem, builder: StateBuilder, job: int, per_share: bool
) -> _Step | None:
    """Return the step with the greatest gain: more replicas in the same shape, or another shape."""
    held_row, held = builder.rows[job], builder.held(job)
    now = int(held.sum())
    loss = float(problem.losses(problem.row_values(held_row, held[None]))[0])
    share = problem.shares[held_row] * now
    best: _Step | None = None
    for row in problem.cluster.spans[job]:
        steps = replica_steps(problem, row, now if row == held_row else 0)
        placed = [cells for step in steps if (cells := builder.place(row, step)) is not None]
        if not placed:
            continue
        stacked = np.stack(placed)
        gains = loss - problem.losses(problem.row_values(row, stacked))
        useful = gains > 1e-12 * abs(loss)
        if per_share:
            # A better shape that needs no more than the current one costs next to nothing.
            extra = problem.shares[row] * stacked.sum(axis=1) - share
            gains = gains / np.maximum(extra, 1e-3 * problem.shares[row])
        index = int(np.where(useful, gains, -np.inf).argmax())
        if useful[index] and (best is None or gains[index] > best.gain):
            best = _Step(float(gains[index]), row, stacked[index])
    return best


def starting_states(problem: AllocationProblem, current: Ints) -> Ints:
    """Return feasible states without duplicates, (P, I, N): `current`, it with one job changed, and
    fills. `current` must be feasible and on real nodes.
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
    """Yield `current` with one job changed, or with one job removed and the others grown."""
    num_real = problem.cluster.num_real
    changes: list[_Step] = []
    for job in problem.cluster.movable_jobs.tolist():
        builder = StateBuilder(problem, current, num_real)
        held_row, held = builder.rows[job], builder.held(job).copy()
        now = int(held.sum())
        loss = problem.losses(problem.row_values(held_row, held[None]))[0]
        builder.remove(job)
        for row in problem.cluster.spans[job]:
            above = replica_steps(problem, row, now) if row == held_row else []
            steps = sorted({*replica_steps(problem, row, 0), *above})
            placed = [cells for step in steps if (cells := builder.place(row, step)) is not None]
            if placed:
                values = problem.row_values(row, np.stack(placed))
                gains = loss - problem.losses(values)
                changes.extend(map(_Step, gains.tolist(), [row] * len(placed), placed))
        if now:
            yield builder.state
            yield fill(problem, builder.state, num_real, per_share=True, skip=job)
    # Each change concerns one job, so its gain does not depend on the whole state.
    changes.sort(key=lambda change: -change.gain)
    for change in changes[:MOST_SINGLE_CHANGES]:
        state = current.copy()
        state[problem.cluster.spans[problem.cluster.job_of[change.row]]] = 0
        state[change.row] = change.cells
        yield state
