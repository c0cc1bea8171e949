"""The best configuration of a job on each of many allocations.

For every way to cut the model and every number of micro-batches the best batch size is chosen
(`batch_size`); the best of those is kept. Memory grows with the micro-batch, so a memory limit is a
largest atomic batch size.

Allocations that the model does not tell apart are looked at once: with nothing that depends on how
replicas are spread over nodes, all that matters is R, and whether there are one, two or more nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from pipollux_perfmodel.timing.gpipe import Numbers
from pipollux_perfmodel.timing.params import GradParams, PerfParams, check_params
from pipollux_perfmodel.timing.step_time import (
    EPSILON,
    is_simple,
    network_time,
    optim_time,
    pipeline_time,
    slowdown,
    step_time,
)

from .batch_size import BatchBounds, Floats, Integers, choose


class PricedCut(Protocol):
    """A way to cut a model into stages, as `plan_stages` makes it."""

    @property
    def perf_params(self) -> PerfParams:
        """Step times of that cut."""

    @property
    def shards_optimizer(self) -> bool:
        """Whether memory depends on the number of replicas."""

    def for_replicas(self, num_replicas: int) -> PricedCut:
        """Return the same cut with the memory that it takes on so many replicas."""

    def largest_micro_bsz(self, memory_limit: float, num_microbatches: int) -> Numbers:
        """Return the most samples per micro-batch that fit every stage."""


class _Three(NamedTuple):
    goodput: Numbers
    atomic_bsz: Numbers
    accum_steps: Numbers


class Optimum(_Three):
    """The best configuration of an allocation, or arrays of those.

    A tuple (goodput, atomic_bsz, accum_steps), as AdaptDL returns it, with three attributes more.
    """

    num_microbatches: Numbers
    """M of the best configuration."""
    num_stages: Numbers
    """K of the best configuration."""
    plan: Numbers
    """Which of the plans it runs, the first being 0; also 0 without plans."""

    def __new__(
        cls,
        goodput: Numbers,
        atomic_bsz: Numbers,
        accum_steps: Numbers,
        num_microbatches: Numbers = 1,
        num_stages: Numbers = 1,
        plan: Numbers = 0,
    ) -> Self:
        """Make one of all six."""
        made = super().__new__(cls, goodput, atomic_bsz, accum_steps)
        made.num_microbatches = num_microbatches
        made.num_stages = num_stages
        made.plan = plan
        return made


class _Best(NamedTuple):
    """Arrays of shape (allocations,)."""

    goodput: Floats
    atomic_bsz: Integers
    accum_steps: Integers
    num_microbatches: Integers
    num_stages: Integers
    plan: Integers


def optimize_pipeline(
    perf_params: PerfParams,
    grad_params: GradParams,
    num_nodes: Integers,
    num_replicas: Integers,
    bounds: BatchBounds,
    num_microbatches: Sequence[int],
    plans: Sequence[PricedCut | None],
    memory_limit: float | None,
) -> _Best:
    """Return the best configuration of each allocation.

    Args:
        perf_params: step times of plan None.
        grad_params: size and noise of the gradient.
        num_nodes: n, any shape.
        num_replicas: R, the same shape.
        bounds: what the batch size must keep to; efficiency is relative to its initial one.
        num_microbatches: numbers of micro-batches to choose from.
        plans: ways to cut the model to choose from.
        memory_limit: bytes of a stage's device; None: unbounded.

    Returns:
        Arrays of shape (allocations,), flattened. Where nothing is within bounds goodput is 0.0,
        and the atomic batch size the nearest within its own range.
    """
    all_params = [
        perf_params if plan is None else check_params(PerfParams(*plan.perf_params))
        for plan in plans
    ]
    nodes, replicas, inverse = _distinct(num_nodes.ravel(), num_replicas.ravel(), all_params)
    nearest = np.ceil(bounds.init_batch_size / replicas - EPSILON).astype(np.int64)
    best = _Best(
        np.zeros(replicas.shape),
        np.clip(nearest, bounds.min_atomic_bsz, bounds.max_atomic_bsz),
        np.zeros_like(replicas),
        np.full_like(replicas, num_microbatches[0]),
        np.full_like(replicas, all_params[0].num_stages),
        np.zeros_like(replicas),
    )
    for index, (plan, params) in enumerate(zip(plans, all_params, strict=True)):
        for count in num_microbatches:
            for chosen, limited in _limited(bounds, plan, memory_limit, count, replicas):
                where = nodes[chosen], replicas[chosen]
                goodput_of = _Goodput(params, grad_params, bounds, *where, count)
                some = _Best._make([values[chosen] for values in best])
                better = _improve(some, goodput_of, where[1], limited, count)
                some.num_stages[better] = params.num_stages
                some.plan[better] = index
                for values, new in zip(best, some, strict=True):
                    values[chosen] = new
    return _Best(
        best.goodput[inverse],
        best.atomic_bsz[inverse],
        best.accum_steps[inverse],
        best.num_microbatches[inverse],
        best.num_stages[inverse],
        best.plan[inverse],
    )


def _limited(
    bounds: BatchBounds,
    plan: PricedCut | None,
    memory_limit: float | None,
    num_microbatches: int,
    num_replicas: Integers,
) -> Iterator[tuple[NDArray[np.bool_], BatchBounds]]:
    """Yield allocations, as a mask, and their bounds within memory; none where no sample fits."""
    everywhere = np.ones(num_replicas.shape, bool)
    if plan is None or memory_limit is None or not plan.shards_optimizer:
        limited = _within_memory(bounds, plan, memory_limit, num_microbatches)
        if limited is not None:
            yield everywhere, limited
        return
    by_count = {
        count: _within_memory(bounds, plan.for_replicas(count), memory_limit, num_microbatches)
        for count in np.unique(num_replicas).tolist()
    }
    for limited in set(by_count.values()) - {None}:
        alike = [count for count, found in by_count.items() if found == limited]
        if limited is not None:
            yield np.isin(num_replicas, alike), limited


def _improve(
    best: _Best,
    goodput_of: _Goodput,
    num_replicas: Integers,
    bounds: BatchBounds,
    num_microbatches: int,
) -> NDArray[np.bool_]:
    """Write the best batch sizes with M micro-batches where they are better; return where."""
    choice = choose(bounds, num_replicas, num_microbatches, goodput_of)
    better = choice.goodput > best.goodput
    for kept, values in zip(best[:3], choice, strict=True):
        kept[better] = values[better]
    best.num_microbatches[better] = num_microbatches
    return better


def _within_memory(
    bounds: BatchBounds, plan: PricedCut | None, memory_limit: float | None, num_microbatches: int
) -> BatchBounds | None:
    """Return the bounds within memory, None if not one sample fits."""
    bounds = replace(bounds, needs_two_batches=num_microbatches == 1)
    if plan is None or memory_limit is None:
        return bounds
    # Memory is counted in whole samples, so each micro-batch has at least one.
    least = max(bounds.min_atomic_bsz, num_microbatches)
    room = float(plan.largest_micro_bsz(memory_limit, num_microbatches)) * num_microbatches
    most = int(min(bounds.max_atomic_bsz, room))
    if most < least:
        return None
    return replace(bounds, min_atomic_bsz=least, max_atomic_bsz=most)


def _distinct(
    num_nodes: Integers, num_replicas: Integers, all_params: Sequence[PerfParams]
) -> tuple[Integers, Integers, NDArray[np.intp]]:
    """Return nodes and replicas of allocations that the model distinguishes, and their indices."""
    nodes = num_nodes.astype(np.int64)
    if not any(params.contention for params in all_params):
        penalty = any(params.two_node_penalty for params in all_params)
        # One node, several, or one, two, more; as many as there are replicas, to be possible.
        nodes = np.minimum(nodes, 3 if penalty else 2)
    replicas = num_replicas.astype(np.int64)
    if not len(replicas):
        return nodes, replicas, np.zeros(0, np.intp)
    width = int(replicas.max()) + 1
    codes, inverse = np.unique(nodes * width + replicas, return_inverse=True)
    return codes // width, codes % width, inverse


class _Goodput:
    """Goodput of candidates in columns; what depends on columns only is computed once."""

    def __init__(
        self,
        params: PerfParams,
        grad_params: GradParams,
        bounds: BatchBounds,
        num_nodes: Integers,
        num_replicas: Integers,
        num_microbatches: int,
    ) -> None:
        self._params, self._grad_params = params, grad_params
        self._init_batch_size = bounds.init_batch_size
        self._nodes, self._replicas = num_nodes, num_replicas
        self._num_microbatches = num_microbatches
        self._network = network_time(self._params, num_nodes, num_replicas)
        self._slow = slowdown(self._params, num_nodes, num_replicas)

    def __call__(self, columns: Integers, atomic_bsz: Integers, accum_steps: Integers) -> Floats:
        """Return goodput, shape (candidates, columns)."""
        replicas = self._replicas[columns]
        batch_size = replicas * atomic_bsz * (accum_steps + 1.0)
        total = self._total_time(columns, atomic_bsz, accum_steps)
        sqr, var = self._grad_params
        # efficiency · batch size = (var + sqr) / (var/scale + sqr) · init, without dividing twice
        noise = var * self._init_batch_size + sqr * batch_size
        progress = np.where(noise > 0, (var + sqr) * batch_size / np.where(noise > 0, noise, 1), 1)
        goodput: Floats = self._init_batch_size * progress / total
        return goodput

    def _total_time(
        self, columns: Integers, atomic_bsz: Integers, accum_steps: Integers
    ) -> Numbers:
        params = self._params
        if not is_simple(params):
            where = self._nodes[columns], self._replicas[columns]
            times = step_time(params, *where, atomic_bsz, accum_steps, self._num_microbatches)
            return times.total
        micro_bsz = atomic_bsz / self._num_microbatches
        pipeline = pipeline_time(params, micro_bsz, self._num_microbatches)
        accum = pipeline * self._slow[columns] + params.overhead
        optim = optim_time(params.gamma, accum, self._network[columns])
        return accum_steps * accum + optim
