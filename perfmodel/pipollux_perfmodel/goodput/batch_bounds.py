"""Bounds of batch sizes, for one job and for columns (allocations) of several jobs.

A bound that is equal for all columns is a number, else an array with one entry per column.
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
"""Tolerance of floor and ceil, as in AdaptDL."""


class BatchBounds(NamedTuple):
    """Bounds of a job's batch size; the initial batch size is the least one."""

    init_batch_size: float
    max_batch_size: float
    min_atomic_bsz: int
    max_atomic_bsz: int
    accumulation: bool
    needs_two_batches: bool
    """Whether a single replica must accumulate above the initial batch size: gradient noise is
    measured between atomic batches, and without micro-batches there is only one."""
    rounds_up: bool = False
    """Whether the batch may exceed the largest by less than one sample per replica (and step, in as
    few steps as possible), so that a batch is not rejected because replicas do not divide it."""

    @property
    def rules(self) -> tuple[bool, bool, bool]:
        """Properties that columns evaluated together must have in common."""
        return self.accumulation, self.needs_two_batches, self.rounds_up


class ColumnBounds(NamedTuple):
    """Bounds of columns, with the fields of `BatchBounds`."""

    init_batch_size: Numbers
    max_batch_size: Numbers
    min_atomic_bsz: Numbers
    max_atomic_bsz: Numbers
    accumulation: bool
    needs_two_batches: bool
    rounds_up: bool
    jobs: tuple[BatchBounds, ...]
    owner: Integers
    """(columns,): index into `jobs`."""

    def at(self, columns: NDArray[np.intp]) -> ColumnBounds:
        """Return the bounds of some columns, by index."""
        if len(columns) == len(self.owner) and bool((np.diff(columns) > 0).all()):
            return self  # all columns
        return self._replace(
            init_batch_size=take(self.init_batch_size, columns),
            max_batch_size=take(self.max_batch_size, columns),
            min_atomic_bsz=take(self.min_atomic_bsz, columns),
            max_atomic_bsz=take(self.max_atomic_bsz, columns),
            owner=self.owner[columns],
        )

    def distinct(self, num_replicas: Integers) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Return the first column of each distinct (bounds, R), and the index of each column's."""
        numbers = {bounds: number for number, bounds in enumerate(dict.fromkeys(self.jobs))}
        of_job = np.array([numbers[bounds] for bounds in self.jobs])
        codes = of_job[self.owner] * (int(num_replicas.max(initial=0)) + 1) + num_replicas
        _, first, inverse = np.unique(codes, return_index=True, return_inverse=True)
        return first, inverse

    def allow(self, num_replicas: Integers, atomic_bsz: Integers, accum_steps: Integers) -> Bools:
        """Return whether candidates are within all bounds, (candidates, columns)."""
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
        """Return whether numbers of replicas allow any batch size, (columns,)."""
        room = self.min_atomic_bsz * num_replicas <= self.max_batch_size
        if self.rounds_up:
            room |= (self.min_atomic_bsz - 1) * num_replicas < self.max_batch_size
        if not self.accumulation:
            room &= self.max_atomic_bsz * num_replicas >= self.init_batch_size
        allowed: Bools = room & (self.init_batch_size <= self.max_batch_size)
        return allowed

    def allow_atomic(self, atomic_bsz: Integers) -> Bools:
        """Return whether atomic batch sizes are in range."""
        allowed: Bools = (self.min_atomic_bsz <= atomic_bsz) & (atomic_bsz <= self.max_atomic_bsz)
        return allowed

    def _is_rounded(
        self, num_replicas: Integers, atomic_bsz: Integers, accum_steps: Integers
    ) -> Bools:
        steps = accum_steps + 1
        fewest = np.ceil(self.max_batch_size / (num_replicas * self.max_atomic_bsz) - TOLERANCE)
        unit = num_replicas * np.where(steps <= fewest, steps, 1)
        rounded: Bools = num_replicas * atomic_bsz * steps - unit < self.max_batch_size
        return rounded


def stack_bounds(jobs: Sequence[BatchBounds], num_columns: Sequence[int]) -> ColumnBounds:
    """Return the bounds of all columns of jobs with the same `rules`, one job after the other."""
    return ColumnBounds(
        spread([bounds.init_batch_size for bounds in jobs], num_columns),
        spread([bounds.max_batch_size for bounds in jobs], num_columns),
        spread([bounds.min_atomic_bsz for bounds in jobs], num_columns),
        spread([bounds.max_atomic_bsz for bounds in jobs], num_columns),
        *jobs[0].rules,
        tuple(jobs),
        np.repeat(np.arange(len(jobs)), num_columns),
    )
