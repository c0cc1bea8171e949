"""Bounds of batch sizes: of one job, and of columns that belong to several jobs.

A column is one allocation of one job. Where all jobs of some columns have the same bound it stays a
number, else it is an array with an entry for each column.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipollux_perfmodel.timing.gpipe import Numbers
from pipollux_perfmodel.timing.stacked_params import spread, take

Integers = NDArray[np.int64]
Bools = NDArray[np.bool_]

TOLERANCE = 1e-8
"""Of floor and ceil, as AdaptDL's."""


class BatchBounds(NamedTuple):
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

    @property
    def rules(self) -> tuple[bool, bool, bool]:
        """What columns that are looked at together must have in common."""
        return self.accumulation, self.needs_two_batches, self.rounds_up


class ColumnBounds(NamedTuple):
    """Bounds of columns, field by field those of `BatchBounds`."""

    init_batch_size: Numbers
    max_batch_size: Numbers
    min_atomic_bsz: Numbers
    max_atomic_bsz: Numbers
    accumulation: bool
    needs_two_batches: bool
    rounds_up: bool
    jobs: tuple[BatchBounds, ...]
    """The bounds of every job."""
    owner: Integers
    """(columns,): index into `jobs`."""

    def at(self, columns: NDArray[np.intp]) -> ColumnBounds:
        """Return the bounds of some columns, by index."""
        if len(columns) == len(self.owner) and bool((np.diff(columns) > 0).all()):
            return self  # all of them
        return self._replace(
            init_batch_size=take(self.init_batch_size, columns),
            max_batch_size=take(self.max_batch_size, columns),
            min_atomic_bsz=take(self.min_atomic_bsz, columns),
            max_atomic_bsz=take(self.max_atomic_bsz, columns),
            owner=self.owner[columns],
        )

    def distinct(self, num_replicas: Integers) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Return the first column of each bounds and R, and which of these every column is like."""
        numbers = {bounds: number for number, bounds in enumerate(dict.fromkeys(self.jobs))}
        of_job = np.array([numbers[bounds] for bounds in self.jobs])
        codes = of_job[self.owner] * (int(num_replicas.max(initial=0)) + 1) + num_replicas
        _, first, inverse = np.unique(codes, return_index=True, return_inverse=True)
        return first, inverse

    def allow(self, num_replicas: Integers, atomic_bsz: Integers, accum_steps: Integers) -> Bools:
        """Return which candidates are within all bounds: (candidates, columns)."""
        batch_size = num_replicas * atomic_bsz * (accum_steps + 1)
        within = batch_size <= self.max_batch_size
        if self.rounds_up:
            within |= self._is_rounded(num_replicas, atomic_bsz, accum_steps)
        allowed: Bools = self.allow_atomic(atomic_bsz) & (self.init_batch_size <= batch_size)
        allowed = allowed & within
        if self.needs_two_batches:
            one_only = (num_replicas == 1) & (accum_steps == 0)
            allowed &= ~(one_only & (batch_size > self.init_batch_size))
        return allowed

    def leave_room(self, num_replicas: Integers) -> Bools:
        """Return which numbers of replicas allow any batch size: (columns,)."""
        room = self.min_atomic_bsz * num_replicas <= self.max_batch_size
        if self.rounds_up:
            room |= (self.min_atomic_bsz - 1) * num_replicas < self.max_batch_size
        if not self.accumulation:
            room &= self.max_atomic_bsz * num_replicas >= self.init_batch_size
        allowed: Bools = room & (self.init_batch_size <= self.max_batch_size)
        return allowed

    def allow_atomic(self, atomic_bsz: Integers) -> Bools:
        """Return which atomic batch sizes are within theirs."""
        allowed: Bools = (self.min_atomic_bsz <= atomic_bsz) & (atomic_bsz <= self.max_atomic_bsz)
        return allowed

    def _is_rounded(
        self, num_replicas: Integers, atomic_bsz: Integers, accum_steps: Integers
    ) -> Bools:
        """Return which candidates are the largest batch size, rounded up no more than needed."""
        steps = accum_steps + 1
        fewest = np.ceil(self.max_batch_size / (num_replicas * self.max_atomic_bsz) - TOLERANCE)
        unit = num_replicas * np.where(steps <= fewest, steps, 1)
        rounded: Bools = num_replicas * atomic_bsz * steps - unit < self.max_batch_size
        return rounded


def stack_bounds(jobs: Sequence[BatchBounds], num_columns: Sequence[int]) -> ColumnBounds:
    """Return the bounds of all columns of some jobs, one job after the other.

    Args:
        jobs: the bounds of each, with the same `rules`.
        num_columns: of each job.
    """
    return ColumnBounds(
        spread([bounds.init_batch_size for bounds in jobs], num_columns),
        spread([bounds.max_batch_size for bounds in jobs], num_columns),
        spread([bounds.min_atomic_bsz for bounds in jobs], num_columns),
        spread([bounds.max_atomic_bsz for bounds in jobs], num_columns),
        *jobs[0].rules,
        tuple(jobs),
        np.repeat(np.arange(len(jobs)), num_columns),
    )
