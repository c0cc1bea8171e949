"""Batch sizes a job may run with: candidates of (atomic batch size, accumulation steps).

A candidate splits a batch of B samples over R replicas into s accumulation steps and the optimizer
step, with the atomic batch size a = ⌈B / (R·(s + 1))⌉. As in Pollux (section 4.1) and AdaptDL, B
runs over a geometric range and s is the least that keeps a within its bounds. Rounding up may carry
R·a·(s + 1) past the largest batch size; the same B rounded down then stands beside it. The
neighbours of the best are tried after that, in a and in s. Where there are few atomic batch sizes
and accumulation steps in all, or bounds so tight that none of these fits, every one is tried.

Of many candidates the goodput is first estimated in single precision. Only those are evaluated that
are the best by that, or as good to within its error: the choice is the same.

Arrays of candidates have shape (candidates, columns); a column is one allocation of a job, and may
stand beside those of other jobs.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from .batch_bounds import TOLERANCE, BatchBounds, Bools, ColumnBounds, Integers

Floats = NDArray[np.float64]


class GoodputOf(Protocol):
    """Goodput of candidates; columns are indices, shape (columns,)."""

    def __call__(self, columns: Integers, atomic_bsz: Integers, accum_steps: Integers) -> Floats:
        """Return it in shape (candidates, columns); the others have that, or (candidates, 1)."""

    def of_pairs(self, columns: Integers, atomic_bsz: Integers, accum_steps: Integers) -> Floats:
        """Return that of candidates of any columns, all of shape (pairs,)."""

    def estimate(
        self, columns: Integers, atomic_bsz: Integers, accum_steps: Integers
    ) -> NDArray[np.float32] | None:
        """Return an estimate of the shape of a call's answer; None: there is none.

        Of two candidates of one column whose estimates differ by more than `ESTIMATE_ERROR` of the
        larger one, that is also the better by its goodput. No unit is common to two columns.
        """


_NUM_CANDIDATES = 50  # as AdaptDL's
_FEW = 300  # (atomic batch size, accumulation steps) that are all tried
_ROUNDS = 2  # of trying the neighbours of the best
_NEIGHBOUR_STEPS = np.array([-1, 0, 1, 2, 3])
_NEIGHBOUR_BLOCKS = np.array([-1, 0, 1, 2])
_BETTER = 1.003  # how much better a choice must be than AdaptDL's to be taken in its place
_FEW_TO_ESTIMATE = 4096  # candidates of all columns up to which all are evaluated at once
ESTIMATE_ERROR = 1e-4
"""Fifty times what single precision errs by."""


class BatchChoice(NamedTuple):
    """The best candidate of each column; arrays of shape (columns,), 0 where none is allowed."""

    goodput: Floats
    atomic_bsz: Integers
    accum_steps: Integers


class _Candidates(NamedTuple):
    atomic_bsz: Integers
    accum_steps: Integers


def choose(
    bounds: ColumnBounds, num_replicas: Integers, num_microbatches: int, goodput_of: GoodputOf
) -> BatchChoice:
    """Return the candidate with the highest goodput for each column.

    Atomic batch sizes that are a multiple of `num_microbatches` come first; others are looked at
    only in columns where no multiple is allowed.

    Args:
        bounds: what to keep to; of several jobs only where all or none `has_few`.
        num_replicas: R of each column, shape (columns,).
        num_microbatches: M.
        goodput_of: goodput of candidates.
    """
    columns = num_replicas.shape
    choice = BatchChoice(np.zeros(columns), np.zeros(columns, int), np.zeros(columns, int))
    possible = bounds.leave_room(num_replicas)
    if not possible.any():
        return choice
    for multiple in dict.fromkeys((num_microbatches, 1)):
        todo = possible & (choice.atomic_bsz == 0)
        _choose_geometric(choice, bounds, num_replicas, multiple, goodput_of, todo)
        theirs = [values.copy() for values in choice]
        few = has_few(bounds.jobs[0], multiple)
        if few:
            left = np.flatnonzero(todo)
            every = _all_of_columns(bounds.at(left), multiple)
            _try(choice, bounds, num_replicas, goodput_of, left, every)
        for column in np.flatnonzero(todo & (choice.atomic_bsz == 0)):
            job = bounds.jobs[bounds.owner[column]]
            found = _enumerate(job, int(num_replicas[column]), multiple)
            _try(choice, bounds, num_replicas, goodput_of, np.array([column]), found)
        if not few:
            _refine(choice, bounds, num_replicas, multiple, goodput_of, todo)
        if bounds.needs_two_batches:
            as_good = (theirs[0] > 0) & (choice.goodput <= _BETTER * theirs[0])
            for chosen, values in zip(choice, theirs, strict=True):
                chosen[as_good] = values[as_good]
    return choice


def _choose_geometric(
    choice: BatchChoice,
    bounds: ColumnBounds,
    num_replicas: Integers,
    multiple: int,
    goodput_of: GoodputOf,
    possible: Bools,
) -> None:
    columns = np.flatnonzero(possible)
    if not columns.size:
        return
    all_bounds = bounds
    replicas, bounds = num_replicas[columns], bounds.at(columns)
    # They follow from bounds and R alone, which jobs often have in common.
    first, inverse = bounds.distinct(replicas)
    distinct = _propose(bounds.at(first), replicas[first], multiple)
    if bounds.needs_two_batches:
        up = _Candidates(*(np.take(part[:_NUM_CANDIDATES], inverse, axis=1) for part in distinct))
        # AdaptDL's choice, which ignores the largest batch size, wherever that is allowed.
        theirs, goodput = _best(goodput_of, columns, up, bounds.allow_atomic(up.atomic_bsz))
        here = theirs, np.arange(len(columns))
        allowed = bounds.allow(replicas, up.atomic_bsz[here], up.accum_steps[here])
        _store(choice, columns, theirs, goodput, allowed, up)
        left = np.flatnonzero(~allowed)
        columns, inverse = columns[left], inverse[left]
    candidates = _Candidates(*(np.take(part, inverse, axis=1) for part in distinct))
    _try(choice, all_bounds, num_replicas, goodput_of, columns, candidates)


def _refine(
    choice: BatchChoice,
    bounds: ColumnBounds,
    num_replicas: Integers,
    multiple: int,
    goodput_of: GoodputOf,
    todo: Bools,
) -> None:
    """Try the neighbours of the choice: about the same batch in fewer or more steps."""
    columns = np.flatnonzero(todo & (choice.atomic_bsz > 0))
    for _ in range(_ROUNDS):
        if not columns.size:
            return
        before, steps = choice.atomic_bsz[columns], choice.accum_steps[columns]
        changes = _NEIGHBOUR_STEPS if bounds.accumulation else np.array([0])
        accum_steps = np.maximum(steps + changes[:, None], 0)
        blocks = before * (steps + 1) // ((accum_steps + 1) * multiple)
        atomic_bsz = (blocks[:, None] + _NEIGHBOUR_BLOCKS[:, None]) * multiple
        accum_steps = np.broadcast_to(accum_steps[:, None], atomic_bsz.shape)
        flat = (-1, len(columns))
        near = _Candidates(
            np.maximum(atomic_bsz, multiple).reshape(flat), accum_steps.reshape(flat)
        )
        found = choice.goodput[columns]
        _try(choice, bounds, num_replicas, goodput_of, columns, near)
        # The neighbours of the same choice would be the same again.
        columns = columns[choice.goodput[columns] > found]


def _try(
    choice: BatchChoice,
    bounds: ColumnBounds,
    num_replicas: Integers,
    goodput_of: GoodputOf,
    columns: NDArray[np.intp],
    candidates: _Candidates,
) -> None:
    """Take the best candidate in columns where it is better than the choice."""
    if not columns.size or not candidates.atomic_bsz.size:
        return
    allowed = bounds.at(columns).allow(num_replicas[columns], *candidates)
    best, goodput = _best(goodput_of, columns, candidates, allowed)
    _store(choice, columns, best, goodput, goodput > choice.goodput[columns], candidates)


def _best(
    goodput_of: GoodputOf, columns: NDArray[np.intp], candidates: _Candidates, allowed: Bools
) -> tuple[NDArray[np.intp], Floats]:
    """Return the best of the allowed candidates of each column, the first of equal ones, and its
    goodput: -1.0 where none is allowed.
    """
    if allowed.size > _FEW_TO_ESTIMATE:
        near = _nearly_best(goodput_of, columns, candidates, allowed)
        if near is not None:
            return _best_of_few(goodput_of, columns, candidates, near)
    goodput = np.where(allowed, goodput_of(columns, *candidates), -1.0)
    best = np.argmax(goodput, axis=0)
    return best, np.take_along_axis(goodput, best[None], 0)[0]


def _nearly_best(
    goodput_of: GoodputOf, columns: NDArray[np.intp], candidates: _Candidates, allowed: Bools
) -> Bools | None:
    """Return which candidates may be the best of their column; None: it cannot be told."""
    estimate = goodput_of.estimate(columns, *candidates)
    if estimate is None:
        return None
    estimate = np.where(allowed, estimate, np.float32(-1.0))
    top = estimate.max(axis=0)
    if not np.isfinite(top).all():
        return None
    near: Bools = (estimate >= top * np.float32(1.0 - ESTIMATE_ERROR)) & allowed
    return near


def _best_of_few(
    goodput_of: GoodputOf, columns: NDArray[np.intp], candidates: _Candidates, near: Bools
) -> tuple[NDArray[np.intp], Floats]:
    """Return the best of some candidates of each column, as `_best` does."""
    places, rows = np.nonzero(near.T)
    sizes, steps = (np.broadcast_to(part, near.shape)[rows, places] for part in candidates)
    found = goodput_of.of_pairs(columns[places], sizes, steps)
    best, goodput = np.zeros(len(columns), np.intp), np.full(len(columns), -1.0)
    counts = np.count_nonzero(near, axis=0)
    some = counts > 0
    goodput[some] = np.maximum.reduceat(found, (np.cumsum(counts) - counts)[some])
    # In reverse, so that the first of equal ones is written last.
    equal = np.flatnonzero(found == goodput[places])[::-1]
    best[places[equal]] = rows[equal]
    return best, goodput


def _store(
    choice: BatchChoice,
    columns: NDArray[np.intp],
    best: NDArray[np.intp],
    goodput: Floats,
    kept: Bools,
    candidates: _Candidates,
) -> None:
    """Write the best candidate of each column into the choice, where it is to be kept."""
    here = best[kept], np.flatnonzero(kept)
    choice.goodput[columns[kept]] = goodput[kept]
    for chosen, values in zip(choice[1:], candidates, strict=True):
        shape = values.shape[0], len(columns)
        chosen[columns[kept]] = np.broadcast_to(values, shape)[here]


def _propose(bounds: ColumnBounds, num_replicas: Integers, multiple: int) -> _Candidates:
    """Return the geometric candidates, a rounded up, then the same with a rounded down."""
    least = np.maximum(bounds.init_batch_size, bounds.min_atomic_bsz * num_replicas)
    batch_size = np.geomspace(least, bounds.max_batch_size, _NUM_CANDIDATES)
    share = batch_size / num_replicas  # samples of one replica
    accum_steps = _least_accum_steps(bounds, num_replicas, share, multiple)
    blocks = share / (accum_steps + 1) / multiple
    up = np.ceil(blocks - TOLERANCE).astype(np.int64) * multiple
    down = np.maximum(np.floor(blocks + TOLERANCE), 1).astype(np.int64) * multiple
    if bounds.needs_two_batches and not bounds.accumulation:
        up = down = np.where(num_replicas == 1, np.asarray(bounds.init_batch_size, np.int64), up)
    return _Candidates(np.concatenate((up, down)), np.concatenate((accum_steps, accum_steps)))


def has_few(bounds: BatchBounds, multiple: int) -> bool:
    """Tell whether atomic batch sizes and accumulation steps are so few that all are tried."""
    return _all_candidates(bounds, multiple) is not None


def _all_of_columns(bounds: ColumnBounds, multiple: int) -> _Candidates:
    """Return every candidate of the job of each column; of fewer than others the first again."""
    found = [_all_candidates(job, multiple) for job in bounds.jobs]
    every = [candidates for candidates in found if candidates is not None]
    if len(set(bounds.jobs)) == 1:
        return every[0]
    most = max(len(one.atomic_bsz) for one in every)
    rows = np.arange(most)[:, None]
    padded = (
        [part[np.where(rows < len(part), rows, 0), 0] for part in parts]
        for parts in zip(*every, strict=True)
    )
    return _Candidates(*(np.concatenate(parts, axis=1)[:, bounds.owner] for parts in padded))


@lru_cache(maxsize=1024)
def _all_candidates(bounds: BatchBounds, multiple: int) -> _Candidates | None:
    """Return every atomic batch size with every number of steps, if they are few, else None."""
    least = max(-(-bounds.min_atomic_bsz // multiple), 1) * multiple
    most = min(bounds.max_atomic_bsz, math.ceil(bounds.max_batch_size))
    if most - least > _FEW * multiple:
        return None
    sizes = np.arange(least, most + 1, multiple, dtype=np.int64)
    # Of one replica; the most that a batch may be rounded up is a step.
    num_steps = np.ceil(bounds.max_batch_size / sizes).astype(np.int64)
    if not bounds.accumulation:
        num_steps = np.ones_like(sizes)
    if not 0 < num_steps.sum() <= _FEW:
        return None
    accum_steps = np.concatenate([np.arange(number) for number in num_steps])
    return _Candidates(np.repeat(sizes, num_steps)[:, None], accum_steps[:, None])


def _enumerate(bounds: BatchBounds, num_replicas: int, multiple: int) -> _Candidates:
    """Return every atomic batch size of one column, each with the least accumulation steps.

    If any configuration is allowed, one of these is.
    """
    least = -(-bounds.min_atomic_bsz // multiple) * multiple
    most = min(bounds.max_atomic_bsz, math.ceil(bounds.max_batch_size / num_replicas))
    atomic_bsz = np.arange(least, most + 1, multiple, dtype=np.int64)
    accum_steps = np.zeros_like(atomic_bsz)
    if bounds.accumulation:
        needed = np.ceil(bounds.init_batch_size / (num_replicas * atomic_bsz) - TOLERANCE) - 1
        accum_steps = np.maximum(needed, 0).astype(np.int64)
        if bounds.needs_two_batches and num_replicas == 1:
            accum_steps = np.where(atomic_bsz > bounds.init_batch_size, 1, accum_steps)
    return _Candidates(atomic_bsz[:, None], accum_steps[:, None])


def _least_accum_steps(
    bounds: ColumnBounds, num_replicas: Integers, share: NDArray[np.float64], multiple: int
) -> Integers:
    if not bounds.accumulation:
        return np.zeros(share.shape, dtype=np.int64)
    largest = np.maximum(bounds.max_atomic_bsz // multiple * multiple, 1)
    accum_steps = np.ceil(share / largest - TOLERANCE) - 1
    if bounds.needs_two_batches:
        above_init = (num_replicas == 1) & (share > bounds.init_batch_size + TOLERANCE)
        accum_steps = np.where(above_init, np.maximum(accum_steps, 1), accum_steps)
    steps: Integers = accum_steps.astype(np.int64)
    return steps
