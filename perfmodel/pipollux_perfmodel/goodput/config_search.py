"""The best configuration of a job on each of many allocations.

For every cut of the model and every number of micro-batches, `batch_size` chooses the best batch
size, and the best combination is kept. Memory grows with the micro-batch, so a memory limit is a
largest atomic batch size. Allocations that the model does not distinguish are evaluated once.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from pipollux_perfmodel.timing.gpipe import Numbers
from pipollux_perfmodel.timing.params import GradParams, PerfParams, check_params
from pipollux_perfmodel.timing.step_time import EPSILON

from .batch_bounds import BatchBounds, Bools, Integers
from .batch_size import BatchChoice, Floats
from .size_corrections import SizeCorrections
from .stacks import ColumnSearch, search_columns


class PricedCut(Protocol):
    """A cut of a model into stages, made by `plan_stages`."""

    @property
    def perf_params(self) -> PerfParams:
        """Step times of the cut."""

    @property
    def shards_optimizer(self) -> bool:
        """Whether memory depends on the number of replicas."""

    def for_replicas(self, num_replicas: int) -> PricedCut:
        """Return the same cut with its memory for a number of replicas."""

    def at_level(self, level: int) -> PricedCut:
        """Return the same cut for allocations whose nodes meet at a network level."""

    def largest_micro_bsz(self, memory_limit: float, num_microbatches: int) -> Numbers:
        """Return the maximum samples per micro-batch that fit every stage."""


class _Three(NamedTuple):
    goodput: Numbers
    atomic_bsz: Numbers
    accum_steps: Numbers


class Optimum(_Three):
    """The best configuration of an allocation, or arrays: AdaptDL's tuple, with attributes."""

    num_microbatches: Numbers
    num_stages: Numbers
    plan: Numbers

    def __new__(
        cls,
        goodput: Numbers,
        atomic_bsz: Numbers,
        accum_steps: Numbers,
        num_microbatches: Numbers = 1,
        num_stages: Numbers = 1,
        plan: Numbers = 0,
    ) -> Self:
        """Create an optimum from all six fields."""
        made = super().__new__(cls, goodput, atomic_bsz, accum_steps)
        made.num_microbatches = num_microbatches
        made.num_stages = num_stages
        made.plan = plan
        return made


class _Best(NamedTuple):
    goodput: Floats
    atomic_bsz: Integers
    accum_steps: Integers
    num_microbatches: Integers
    num_stages: Integers
    plan: Integers


class ConfigSearch(NamedTuple):
    """The search for the best configurations of one job (`GoodputFunction.search`)."""

    perf_params: PerfParams
    grad_params: GradParams
    num_nodes: Integers
    """n of every allocation, any shape; R has the same shape."""
    num_replicas: Integers
    bounds: BatchBounds
    num_microbatches: tuple[int, ...]
    plans: Sequence[PricedCut | None] = (None,)
    memory_limit: float | None = None
    """Bytes of a stage's device; None: unbounded."""
    sizes: SizeCorrections | None = None
    """Corrections of the model by measurements, for a single allocation."""


def search_all(searches: Sequence[ConfigSearch]) -> list[Optimum]:
    """Return the best configurations of several jobs, as from separate searches but much faster.

    The arrays have the shape of the search's allocations. If nothing is within bounds, goodput is
    0.0 and the atomic batch size is the nearest within its own range.
    """
    jobs = _search_parts(searches)
    for job in jobs:
        job.take_best()
    return [job.optimum() for job in jobs]


def best_goodputs(searches: Sequence[ConfigSearch]) -> list[Floats]:
    """Return only the goodput of `search_all`, flat, at a lower cost."""
    return [job.goodput() for job in _search_parts(searches)]


def _search_parts(searches: Sequence[ConfigSearch]) -> list[_JobSearch]:
    known: dict[tuple[int, int, int], _Distinct] = {}
    jobs = [_JobSearch(search, known) for search in searches]
    answers = iter(search_columns([part.columns for job in jobs for part in job.parts]))
    for job in jobs:
        job.answers = [next(answers) for _ in job.parts]
    return jobs


class _Part(NamedTuple):
    plan: int
    allocations: Bools | slice
    columns: ColumnSearch


class _JobSearch:
    def __init__(self, search: ConfigSearch, known: dict[tuple[int, int, int], _Distinct]) -> None:
        self._search = search
        self.answers: Sequence[BatchChoice] = ()
        self._all_params = [
            search.perf_params if plan is None else check_params(PerfParams(*plan.perf_params))
            for plan in search.plans
        ]
        # Jobs often share allocations, in the same arrays.
        most = _most_nodes(self._all_params)
        key = id(search.num_nodes), id(search.num_replicas), most
        if key not in known:
            known[key] = _distinct(search.num_nodes.ravel(), search.num_replicas.ravel(), most)
        self._nodes, self._replicas, self._inverse = known[key]
        self.parts = list(self._ways())

    def _ways(self) -> Iterator[_Part]:
        search = self._search
        for index, (plan, params) in enumerate(zip(search.plans, self._all_params, strict=True)):
            for count in search.num_microbatches:
                limits = search.bounds, plan, search.memory_limit, count, self._replicas
                for chosen, limited in _limited(*limits):
                    where = self._nodes[chosen], self._replicas[chosen]
                    model = params, search.grad_params, limited
                    columns = ColumnSearch(*model, *where, count, search.sizes)
                    yield _Part(index, chosen, columns)

    def goodput(self) -> Floats:
        best = np.zeros(self._replicas.shape)
        for part, choice in zip(self.parts, self.answers, strict=True):
            best[part.allocations] = np.fmax(best[part.allocations], choice.goodput)
        return best[self._inverse]

    def take_best(self) -> None:
        search, replicas = self._search, self._replicas
        bounds = search.bounds
        nearest = np.ceil(bounds.init_batch_size / replicas - EPSILON).astype(np.int64)
        self._best = best = _Best(
            np.zeros(replicas.shape),
            np.clip(nearest, bounds.min_atomic_bsz, bounds.max_atomic_bsz),
            np.zeros_like(replicas),
            np.full_like(replicas, search.num_microbatches[0]),
            np.full_like(replicas, self._all_params[0].num_stages),
            np.zeros_like(replicas),
        )
        for part, choice in zip(self.parts, self.answers, strict=True):
            chosen = np.arange(len(replicas))[part.allocations]
            better = choice.goodput > best.goodput[chosen]
            chosen = chosen[better]
            for kept, values in zip(best[:3], choice, strict=True):
                kept[chosen] = values[better]
            if len(search.plans) * len(search.num_microbatches) > 1:
                best.num_microbatches[chosen] = part.columns.num_microbatches
                best.num_stages[chosen] = self._all_params[part.plan].num_stages
                best.plan[chosen] = part.plan

    def optimum(self) -> Optimum:
        shape = self._search.num_nodes.shape
        return Optimum(*(values[self._inverse].reshape(shape) for values in self._best))


def _limited(
    bounds: BatchBounds,
    plan: PricedCut | None,
    memory_limit: float | None,
    num_microbatches: int,
    num_replicas: Integers,
) -> Iterator[tuple[Bools | slice, BatchBounds]]:
    if plan is None or memory_limit is None or not plan.shards_optimizer:
        limited = _within_memory(bounds, plan, memory_limit, num_microbatches)
        if limited is not None:
            yield slice(None), limited
        return
    by_count = {
        count: _within_memory(bounds, plan.for_replicas(count), memory_limit, num_microbatches)
        for count in np.unique(num_replicas).tolist()
    }
    for limited in set(by_count.values()) - {None}:
        alike = [count for count, found in by_count.items() if found == limited]
        if limited is not None:
            yield np.isin(num_replicas, alike), limited


def _within_memory(
    bounds: BatchBounds, plan: PricedCut | None, memory_limit: float | None, num_microbatches: int
) -> BatchBounds | None:
    two = num_microbatches == 1
    least, most = bounds.min_atomic_bsz, bounds.max_atomic_bsz
    if plan is not None and memory_limit is not None:
        # Memory counts whole samples, so each micro-batch has at least one.
        least = max(least, num_microbatches)
        room = float(plan.largest_micro_bsz(memory_limit, num_microbatches)) * num_microbatches
        most = int(min(most, room))
        if most < least:
            return None
    return bounds._replace(needs_two_batches=two, min_atomic_bsz=least, max_atomic_bsz=most)


class _Distinct(NamedTuple):
    num_nodes: Integers
    num_replicas: Integers
    inverse: NDArray[np.intp] | slice


def _most_nodes(all_params: Sequence[PerfParams]) -> int:
    if any(params.contention for params in all_params):
        return sys.maxsize
    # One node, several, or one, two, more; as many as there are replicas, to be possible.
    return 3 if any(params.two_node_penalty for params in all_params) else 2


def _distinct(num_nodes: Integers, num_replicas: Integers, most_nodes: int) -> _Distinct:
    nodes = np.minimum(num_nodes.astype(np.int64), most_nodes)
    replicas = num_replicas.astype(np.int64)
    if not len(replicas):
        return _Distinct(nodes, replicas, slice(None))
    width = int(replicas.max()) + 1
    codes = nodes * width + replicas
    if (codes[1:] > codes[:-1]).all():
        return _Distinct(nodes, replicas, slice(None))
    codes, inverse = np.unique(codes, return_inverse=True)
    return _Distinct(codes // width, codes % width, inverse)
