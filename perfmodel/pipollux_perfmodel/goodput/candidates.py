"""Candidates of (atomic batch size, accumulation steps) within bounds.

A candidate splits a batch of B samples over R replicas into s accumulation steps and the optimizer
step, with the atomic batch size a = ⌈B / (R·(s + 1))⌉. As in Pollux (section 4.1) and AdaptDL, B
has values in a geometric range, and s is the least number that keeps a within its bounds. As
rounding up may exceed the largest batch size, the same B rounded down is a candidate as well. If
there are few a and s in total, all are candidates. Columns with the same bounds and R have the same
candidates: they are of one *kind*.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .batch_bounds import TOLERANCE, BatchBounds, Bools, ColumnBounds, Integers

_NUM_CANDIDATES = 50  # as in AdaptDL
_FEW = 300  # (atomic batch size, accumulation steps) up to which all are tried


class Candidates(NamedTuple):
    """Candidates of kinds of columns; arrays of shape (candidates, kinds)."""

    atomic_bsz: Integers
    accum_steps: Integers
    allowed: Bools


class Proposal(NamedTuple):
    """The geometric candidates of each kind of column, (candidates, kinds), in ascending order."""

    up: Candidates
    down: Candidates
    """a rounded down. Of equal candidates in both, only the first is allowed."""

    @property
    def both(self) -> Candidates:
        """All candidates, those rounded up first."""
        up, down = self
        return Candidates(
            np.concatenate((up.atomic_bsz, down.atomic_bsz)),
            np.concatenate((up.accum_steps, down.accum_steps)),
            np.concatenate((up.allowed, down.allowed)),
        )


def propose(bounds: ColumnBounds, num_replicas: Integers, multiple: int) -> Proposal:
    """Return the geometric candidates, not checked against bounds; a is a multiple of a number."""
    least = np.maximum(bounds.init_batch_size, bounds.min_atomic_bsz * num_replicas)
    batch_size = np.geomspace(least, bounds.max_batch_size, _NUM_CANDIDATES)
    share = batch_size / num_replicas  # samples of one replica
    steps = _least_accum_steps(bounds, num_replicas, share, multiple)
    blocks = share / (steps + 1) / multiple
    up = np.ceil(blocks - TOLERANCE).astype(np.int64) * multiple
    down = np.maximum(np.floor(blocks + TOLERANCE), 1).astype(np.int64) * multiple
    if bounds.needs_two_batches and not bounds.accumulation:
        up = down = np.where(num_replicas == 1, np.asarray(bounds.init_batch_size, np.int64), up)
    # Both ascend with the batch size, so equal candidates are neighbours.
    new_up, new_down = np.ones(up.shape, bool), down != up
    same_steps = steps[1:] == steps[:-1]
    new_up[1:] = ~(same_steps & (up[1:] == up[:-1]))
    new_down[1:] &= ~(same_steps & ((down[1:] == down[:-1]) | (down[1:] == up[:-1])))
    return Proposal(Candidates(up, steps, new_up), Candidates(down, steps, new_down))


def compact(candidates: Candidates) -> Candidates:
    """Return the allowed candidates of every kind in its first rows, in the same order."""
    counts = np.count_nonzero(candidates.allowed, axis=0)
    rows, kinds = np.nonzero(candidates.allowed)
    places = np.cumsum(candidates.allowed, axis=0)[rows, kinds] - 1
    sizes, steps = np.ones((2, int(counts.max(initial=0)), len(counts)), np.int64)
    sizes[places, kinds] = candidates.atomic_bsz[rows, kinds]
    steps[places, kinds] = candidates.accum_steps[rows, kinds]
    return Candidates(sizes, steps, np.arange(len(sizes))[:, None] < counts)


def has_few(bounds: BatchBounds, multiple: int) -> bool:
    """Return whether atomic batch sizes and accumulation steps are so few that all are tried."""
    return _all_candidates(bounds, multiple) is not None


def list_all(bounds: ColumnBounds, num_replicas: Integers, multiple: int) -> Candidates:
    """Return every candidate of each column, if few; jobs with fewer repeat their first one."""
    found = [_all_candidates(job, multiple) for job in bounds.jobs]
    every = [candidates for candidates in found if candidates is not None]
    if len(set(bounds.jobs)) == 1:
        sizes, steps = every[0]
    else:
        rows = np.arange(max(len(sizes) for sizes, _ in every))[:, None]
        sizes, steps = (
            np.concatenate([part[np.where(rows < len(part), rows, 0), 0] for part in parts], axis=1)
            for parts in zip(*every, strict=True)
        )
        sizes, steps = sizes[:, bounds.owner], steps[:, bounds.owner]
    return _within(bounds, num_replicas, sizes, steps)


def list_atomic(bounds: ColumnBounds, num_replicas: Integers, multiple: int) -> Candidates:
    """Return every atomic batch size of one column, each with the least accumulation steps. If any
    configuration is allowed, one of these is.
    """
    job, replicas = bounds.jobs[bounds.owner[0]], int(num_replicas[0])
    least = -(-job.min_atomic_bsz // multiple) * multiple
    most = min(job.max_atomic_bsz, math.ceil(job.max_batch_size / replicas))
    atomic_bsz = np.arange(least, most + 1, multiple, dtype=np.int64)
    steps = np.zeros_like(atomic_bsz)
    if job.accumulation:
        needed = np.ceil(job.init_batch_size / (replicas * atomic_bsz) - TOLERANCE) - 1
        steps = np.maximum(needed, 0).astype(np.int64)
        if job.needs_two_batches and replicas == 1:
            steps = np.where(atomic_bsz > job.init_batch_size, 1, steps)
    return _within(bounds, num_replicas, atomic_bsz[:, None], steps[:, None])


def list_measured(
    bounds: ColumnBounds, num_replicas: Integers, multiple: int, sizes: Integers
) -> Candidates:
    """Return the multiples in `sizes` for one column, with up to `_NUM_CANDIDATES` steps each."""
    job, replicas = bounds.jobs[bounds.owner[0]], int(num_replicas[0])
    most = job.max_batch_size / (replicas * int(sizes.min())) if job.accumulation else 1.0
    numbers = np.geomspace(1, max(most, 1.0), _NUM_CANDIDATES).round().astype(np.int64)
    steps = np.unique(numbers) - 1
    fitting = sizes[sizes % multiple == 0]
    pairs = np.repeat(fitting, len(steps)), np.tile(steps, len(fitting))
    return _within(bounds, num_replicas, *(part[:, None] for part in pairs))


def _within(
    bounds: ColumnBounds, num_replicas: Integers, atomic_bsz: Integers, accum_steps: Integers
) -> Candidates:
    allowed = bounds.allow(num_replicas, atomic_bsz, accum_steps)
    sizes, steps = (np.broadcast_to(part, allowed.shape) for part in (atomic_bsz, accum_steps))
    return Candidates(sizes, steps, allowed)


@lru_cache(maxsize=1024)
def _all_candidates(bounds: BatchBounds, multiple: int) -> tuple[Integers, Integers] | None:
    """Return every atomic batch size with every number of steps if they are few, else None."""
    least = max(-(-bounds.min_atomic_bsz // multiple), 1) * multiple
    most = min(bounds.max_atomic_bsz, math.ceil(bounds.max_batch_size))
    if most - least > _FEW * multiple:
        return None
    sizes = np.arange(least, most + 1, multiple, dtype=np.int64)
    # Of one replica; a batch may be rounded up by at most a step.
    num_steps = np.ceil(bounds.max_batch_size / sizes).astype(np.int64)
    if not bounds.accumulation:
        num_steps = np.ones_like(sizes)
    if not 0 < num_steps.sum() <= _FEW:
        return None
    accum_steps = np.concatenate([np.arange(number) for number in num_steps])
    return np.repeat(sizes, num_steps)[:, None], accum_steps[:, None]


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
