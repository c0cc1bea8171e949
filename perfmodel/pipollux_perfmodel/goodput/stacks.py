"""Joint evaluation of columns of many jobs with models of one form.

The overhead of an evaluation is the same for one column and for a thousand, so columns of several
jobs are concatenated into stacks of bounded size. The result of a column does not depend on its
neighbours. Several stacks run concurrently in threads, as NumPy releases the GIL. A few columns, as
in a training job, are evaluated in the calling thread.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from pipollux_perfmodel.timing.params import GradParams, PerfParams
from pipollux_perfmodel.timing.stacked_params import stack_key

from .batch_bounds import BatchBounds, Integers, stack_bounds
from .batch_size import BatchChoice, GoodputOf, choose
from .candidate_goodput import CandidateGoodput
from .candidates import has_few
from .size_corrections import CorrectedGoodput, SizeCorrections

_MOST_COLUMNS = 8192
_KEPT_BYTES = 16 << 20
"""After one allocation of this size was freed, glibc's malloc keeps freed memory up to it;
otherwise it would unmap the arrays of each stack and map them again for the next."""
_MOST_THREADS = 4
"""The Python parts run in one thread at a time, so that more threads would wait for each other."""


class ColumnSearch(NamedTuple):
    """A search for a job's best batch size by column, for one cut and number of micro-batches."""

    params: PerfParams
    grad_params: GradParams
    bounds: BatchBounds
    num_nodes: Integers
    num_replicas: Integers
    num_microbatches: int
    sizes: SizeCorrections | None = None
    """Corrections by measurements, if all columns are one allocation."""


def search_columns(searches: Sequence[ColumnSearch]) -> list[BatchChoice]:
    """Return the best batch sizes of every search, equal to running each separately."""
    if len(searches) > 1:
        np.empty(_KEPT_BYTES, np.uint8)
    stacks = list(_stacks(searches))
    parts = [[searches[index] for index in stack] for stack in stacks]
    answers: dict[int, BatchChoice] = {}
    for stack, found in zip(stacks, _search_all(parts), strict=True):
        answers.update(zip(stack, found, strict=True))
    return [answers[index] for index in range(len(searches))]


def _search_all(stacks: Sequence[Sequence[ColumnSearch]]) -> list[list[BatchChoice]]:
    # Not all systems report the processors that this process may use.
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = min(_MOST_THREADS, allowed or 1, len(stacks))
    columns = sum(len(part.num_replicas) for stack in stacks for part in stack)
    if threads > 1 and columns > _MOST_COLUMNS:
        with ThreadPoolExecutor(threads, thread_name_prefix="goodput") as pool:
            try:
                found = [pool.submit(_search, stack) for stack in stacks]
            except RuntimeError:  # during interpreter shutdown no threads can start
                pool.shutdown(cancel_futures=True)
            else:
                return [each.result() for each in found]
    return [_search(stack) for stack in stacks]


def _stacks(searches: Sequence[ColumnSearch]) -> Iterator[list[int]]:
    by_form: dict[Hashable, list[int]] = {}
    for index, search in enumerate(searches):
        key = stack_key(search.params)
        alone = key is None or search.sizes is not None
        form = index if alone else (key, *_rules(search))
        by_form.setdefault(form, []).append(index)
    for alike in by_form.values():
        stack: list[int] = []
        columns = 0
        for index in alike:
            more = len(searches[index].num_replicas)
            if stack and columns + more > _MOST_COLUMNS:
                yield stack
                stack, columns = [], 0
            stack.append(index)
            columns += more
        yield stack


def _rules(search: ColumnSearch) -> tuple[Hashable, ...]:
    count, bounds = search.num_microbatches, search.bounds
    return count, bounds.rules, has_few(bounds, count), has_few(bounds, 1)


def _search(parts: Sequence[ColumnSearch]) -> list[BatchChoice]:
    num_columns = [len(part.num_replicas) for part in parts]
    nodes = np.concatenate([part.num_nodes for part in parts])
    replicas = np.concatenate([part.num_replicas for part in parts])
    count = parts[0].num_microbatches
    goodput_of: GoodputOf = CandidateGoodput(
        [part.params for part in parts],
        [part.grad_params for part in parts],
        [part.bounds.init_batch_size for part in parts],
        num_columns,
        nodes,
        replicas,
        count,
    )
    measured = None
    if parts[0].sizes is not None:  # then it is the only part
        goodput_of = CorrectedGoodput(goodput_of, parts[0].sizes)
        measured = parts[0].sizes.atomic_bsz
    bounds = stack_bounds([part.bounds for part in parts], num_columns)
    found = choose(bounds, replicas, count, goodput_of, measured)
    goodput, atomic_bsz, accum_steps = found
    ends = np.cumsum([0, *num_columns]).tolist()
    return [
        BatchChoice(goodput[begin:end], atomic_bsz[begin:end], accum_steps[begin:end])
        for begin, end in pairwise(ends)
    ]
