"""Batch sizes a job may run with: candidates of (atomic batch size, accumulation steps).

A candidate splits a batch of B samples over R replicas into s accumulation steps and the optimizer
step, with the atomic batch size a = ⌈B / (R·(s + 1))⌉. As in Pollux (section 4.1) and AdaptDL, B
runs over a geometric range and s is the least that keeps a within its bounds. Rounding up may carry
R·a·(s + 1) past the largest batch size; the same B rounded down then stands beside it. The
neighbours of the best are tried after that, in a and in s. Where there are few atomic batch sizes
and accumulation steps in all, or bounds so tight that none of these fits, every one is tried.

Arrays of candidates have shape (candidates, columns); a column is one allocation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]

# (columns, atomic_bsz, accum_steps) to goodput; columns are indices, shape (columns,), the others
# have shape (candidates, columns) or (candidates, 1).
GoodputOf = Callable[[Integers, Integers, Integers], Floats]

_TOLERANCE = 1e-8  # of floor and ceil, as AdaptDL's
_NUM_CANDIDATES = 50  # as AdaptDL's
_FEW = 300  # (atomic batch size, accumulation steps) that are all tried
_ROUNDS = 2  # of trying the neighbours of the best
_NEIGHBOUR_STEPS = np.array([-1, 0, 1, 2, 3])
_NEIGHBOUR_BLOCKS = np.array([-1, 0, 1, 2])
_BETTER = 1.003  # how much better a choice must be than AdaptDL's to be taken in its place


@dataclass(frozen=True, kw_only=True)
class BatchBounds:
    """Bounds of a job's batch size."""

    init_batch_size: float
    """Least batch size."""
    max_batch_size: float
    """Largest batch size."""
    min_atomic_bsz: int
    """Least atomic batch size."""
    max_atomic_bsz: int
    """Largest atomic batch size."""
    accumulation: bool
    """Whether accumulation steps are allowed."""
    needs_two_batches: bool
    """Whether a single replica must accumulate above the initial batch size: gradient noise is
    measured between atomic batches, and without micro-batches there is only one."""
    rounds_up: bool = False
    """Whether the largest batch size may be passed by less than one sample per replica (and step,
    in as few steps as the largest atomic batch size allows), so that a batch is not refused because
    replicas do not divide it."""

    def allow(
        self, num_replicas: Integers, atomic_bsz: Integers, accum_steps: Integers
    ) -> NDArray[np.bool_]:
        """Return which candidates are within all bounds."""
        batch_size = num_replicas * atomic_bsz * (accum_steps + 1)
        within = batch_size <= self.max_batch_size
        if self.rounds_up:
            within |= self._is_rounded(num_replicas, atomic_bsz, accum_steps)
        allowed = self.allow_atomic(atomic_bsz) & (self.init_batch_size <= batch_size) & within
        if self.needs_two_batches:
            one_only = (num_replicas == 1) & (accum_steps == 0)
            allowed &= ~(one_only & (batch_size > self.init_batch_size))
        return allowed

    def leave_room(self, num_replicas: Integers) -> NDArray[np.bool_]:
        """Return which numbers of replicas allow any batch size."""
        room = self.min_atomic_bsz * num_replicas <= self.max_batch_size
        if self.rounds_up:
            room |= (self.min_atomic_bsz - 1) * num_replicas < self.max_batch_size
        if not self.accumulation:
            room &= self.max_atomic_bsz * num_replicas >= self.init_batch_size
        return room & (self.init_batch_size <= self.max_batch_size)

    def _is_rounded(
        self, num_replicas: Integers, atomic_bsz: Integers, accum_steps: Integers
    ) -> NDArray[np.bool_]:
        """Return which candidates are the largest batch size, rounded up no more than needed."""
        steps = accum_steps + 1
        fewest = np.ceil(self.max_batch_size / (num_replicas * self.max_atomic_bsz) - _TOLERANCE)
        unit = num_replicas * np.where(steps <= fewest, steps, 1)
        rounded: NDArray[np.bool_] = num_replicas * atomic_bsz * steps - unit < self.max_batch_size
        return rounded

    def allow_atomic(self, atomic_bsz: Integers) -> NDArray[np.bool_]:
        """Return which atomic batch sizes are within theirs."""
        return (self.min_atomic_bsz <= atomic_bsz) & (atomic_bsz <= self.max_atomic_bsz)


class BatchChoice(NamedTuple):
    """The best candidate of each column; arrays of shape (columns,), 0 where none is allowed."""

    goodput: Floats
    atomic_bsz: Integers
    accum_steps: Integers


class _Candidates(NamedTuple):
    atomic_bsz: Integers
    accum_steps: Integers


def choose(
    bounds: BatchBounds, num_replicas: Integers, num_microbatches: int, goodput_of: GoodputOf
) -> BatchChoice:
    """Return the candidate with the highest goodput for each column.

    Atomic batch sizes that are a multiple of `num_microbatches` come first; others are looked at
    only in columns where no multiple is allowed.

    Args:
        bounds: what to keep to.
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
        every = _all_candidates(bounds, multiple)
        if every is not None:
            _try(choice, bounds, num_replicas, goodput_of, np.flatnonzero(todo), every)
        for column in np.flatnonzero(todo & (choice.atomic_bsz == 0)):
            found = _enumerate(bounds, int(num_replicas[column]), multiple)
            _try(choice, bounds, num_replicas, goodput_of, np.array([column]), found)
        if every is None:
            _refine(choice, bounds, num_replicas, multiple, goodput_of, todo)
        if bounds.needs_two_batches:
            as_good = (theirs[0] > 0) & (choice.goodput <= _BETTER * theirs[0])
            for chosen, values in zip(choice, theirs, strict=True):
                chosen[as_good] = values[as_good]
    return choice


def _choose_geometric(
    choice: BatchChoice,
    bounds: BatchBounds,
    num_replicas: Integers,
    multiple: int,
    goodput_of: GoodputOf,
    possible: NDArray[np.bool_],
) -> None:
    columns = np.flatnonzero(possible)
    if not columns.size:
        return
    replicas = num_replicas[columns]
    candidates = _propose(bounds, replicas, multiple)
    goodput = goodput_of(columns, *candidates)
    allowed = bounds.allow(replicas, *candidates)
    best = np.argmax(np.where(allowed, goodput, -1.0), axis=0)
    if bounds.needs_two_batches:
        # AdaptDL's choice, which ignores the largest batch size, wherever that is allowed.
        in_range = bounds.allow_atomic(candidates.atomic_bsz[:_NUM_CANDIDATES])
        theirs = np.argmax(np.where(in_range, goodput[:_NUM_CANDIDATES], 0.0), axis=0)
        best = np.where(np.take_along_axis(allowed, theirs[None], 0)[0], theirs, best)
    _store(choice, columns, best, goodput, allowed, candidates)


def _refine(
    choice: BatchChoice,
    bounds: BatchBounds,
    num_replicas: Integers,
    multiple: int,
    goodput_of: GoodputOf,
    todo: NDArray[np.bool_],
) -> None:
    """Try the neighbours of the choice: about the same batch in fewer or more steps."""
    for _ in range(_ROUNDS):
        columns = np.flatnonzero(todo & (choice.atomic_bsz > 0))
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
        _try(choice, bounds, num_replicas, goodput_of, columns, near)


def _try(
    choice: BatchChoice,
    bounds: BatchBounds,
    num_replicas: Integers,
    goodput_of: GoodputOf,
    columns: NDArray[np.intp],
    candidates: _Candidates,
) -> None:
    """Take the best candidate in columns where it is better than the choice."""
    if not columns.size or not candidates.atomic_bsz.size:
        return
    allowed = bounds.allow(num_replicas[columns], *candidates)
    goodput = np.where(allowed, goodput_of(columns, *candidates), -1.0)
    best = np.argmax(goodput, axis=0)
    better = np.take_along_axis(goodput, best[None], 0)[0] > choice.goodput[columns]
    _store(choice, columns, best, goodput, better[None] & allowed, candidates)


def _store(
    choice: BatchChoice,
    columns: NDArray[np.intp],
    best: NDArray[np.intp],
    goodput: Floats,
    allowed: NDArray[np.bool_],
    candidates: _Candidates,
) -> None:
    """Write the best candidate of each column into the choice, where it is allowed."""
    here = best, np.arange(len(columns))
    found = allowed[here]
    for chosen, values in zip(choice, (goodput, *candidates), strict=True):
        chosen[columns[found]] = np.broadcast_to(values, goodput.shape)[here][found]


def _propose(bounds: BatchBounds, num_replicas: Integers, multiple: int) -> _Candidates:
    """Return the geometric candidates, a rounded up, then the same with a rounded down."""
    least = np.maximum(bounds.init_batch_size, bounds.min_atomic_bsz * num_replicas)
    batch_size = np.geomspace(least, bounds.max_batch_size, _NUM_CANDIDATES)
    share = batch_size / num_replicas  # samples of one replica
    accum_steps = _least_accum_steps(bounds, num_replicas, share, multiple)
    blocks = share / (accum_steps + 1) / multiple
    up = np.ceil(blocks - _TOLERANCE).astype(np.int64) * multiple
    down = np.maximum(np.floor(blocks + _TOLERANCE), 1).astype(np.int64) * multiple
    if bounds.needs_two_batches and not bounds.accumulation:
        up = down = np.where(num_replicas == 1, np.int64(bounds.init_batch_size), up)
    return _Candidates(np.concatenate((up, down)), np.concatenate((accum_steps, accum_steps)))


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
        needed = np.ceil(bounds.init_batch_size / (num_replicas * atomic_bsz) - _TOLERANCE) - 1
        accum_steps = np.maximum(needed, 0).astype(np.int64)
        if bounds.needs_two_batches and num_replicas == 1:
            accum_steps = np.where(atomic_bsz > bounds.init_batch_size, 1, accum_steps)
    return _Candidates(atomic_bsz[:, None], accum_steps[:, None])


def _least_accum_steps(
    bounds: BatchBounds, num_replicas: Integers, share: NDArray[np.float64], multiple: int
) -> Integers:
    if not bounds.accumulation:
        return np.zeros(share.shape, dtype=np.int64)
    largest = max(bounds.max_atomic_bsz // multiple * multiple, 1)
    accum_steps = np.ceil(share / largest - _TOLERANCE) - 1
    if bounds.needs_two_batches:
        above_init = (num_replicas == 1) & (share > bounds.init_batch_size + _TOLERANCE)
        accum_steps = np.where(above_init, np.maximum(accum_steps, 1), accum_steps)
    return accum_steps.astype(np.int64)
