"""Goodput: training progress per second, and the batch size that maximizes it.

    goodput    = throughput · efficiency                         samples per second
    throughput = R·a·(s + 1) / T_iter                            `step_time`
    efficiency = (var + sqr) / (var / scale + sqr) / scale       scale = batch size / initial one

from Pollux (Qiao et al., OSDI'21, section 3); a is the atomic batch size, s the number of
accumulation steps. With one stage and one micro-batch all numbers are AdaptDL's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from pipollux_perfmodel.timing.gpipe import Numbers
from pipollux_perfmodel.timing.params import GradParams, PerfParams, check_params
from pipollux_perfmodel.timing.step_time import StepTime, step_time

from .batch_bounds import BatchBounds
from .config_search import ConfigSearch, Optimum, PricedCut, search_all
from .size_corrections import SizeCorrections

AtomicBszRange = Sequence[int | None]
"""Minimum and maximum atomic batch size; None (or 0): unbounded."""


class GoodputFunction:
    """Goodput of a job as a function of its configuration.

    All methods take scalars or arrays, which broadcast; scalars give a float.

    Args:
        perf_params: step time parameters; seven numbers mean one stage.
        grad_params: (sqr, var) of the gradient at the initial batch size.
        init_batch_size: minimum batch size, which efficiency is relative to.

    Raises:
        ValueError: the parameters describe no pipeline (`check_params`), or the initial batch size
        is below 1.

    Example:
        >>> goodput_fn = GoodputFunction((0.1, 0.01, 0.2, 0.02, 0.05, 0.01, 1.5), (1.0, 8.0), 32)
        >>> goodput, atomic_bsz, accum_steps = goodput_fn.optimize(
        ...     1, 2, max_batch_size=256, atomic_bsz_range=(8, 64), accumulation=True)
        >>> atomic_bsz, accum_steps
        (38, 0)
    """

    def __init__(
        self,
        perf_params: PerfParams | Sequence[float],
        grad_params: GradParams | Sequence[float],
        init_batch_size: float,
    ) -> None:
        self._perf_params = check_params(PerfParams(*perf_params))
        self._grad_params = GradParams(*grad_params)
        if not init_batch_size >= 1:
            raise ValueError(f"init_batch_size is {init_batch_size}; give at least 1")
        self._init_batch_size = init_batch_size

    @property
    def perf_params(self) -> PerfParams:
        """Step time parameters."""
        return self._perf_params

    @property
    def grad_params(self) -> GradParams:
        """Size and noise of the gradient."""
        return self._grad_params

    @property
    def init_batch_size(self) -> float:
        """Batch size that efficiency is relative to."""
        return self._init_batch_size

    def evaluate(
        self,
        num_nodes: Numbers,
        num_replicas: Numbers,
        atomic_bsz: Numbers,
        accum_steps: Numbers,
        num_microbatches: Numbers = 1,
    ) -> Numbers:
        """Return goodput in samples (in units of the initial batch size) per second. Raises
        ValueError for batch sizes below the initial one, where efficiency is undefined.
        """
        smallest = np.min(_batch_size(num_replicas, atomic_bsz, accum_steps))
        if smallest < self._init_batch_size:
            raise ValueError(
                f"batch size {smallest:g} (num_replicas · atomic_bsz · (accum_steps + 1))"
                f" is below init_batch_size {self._init_batch_size:g}; give at least that"
            )
        return self._goodput(num_nodes, num_replicas, atomic_bsz, accum_steps, num_microbatches)

    __call__ = evaluate

    def throughput(
        self,
        num_nodes: Numbers,
        num_replicas: Numbers,
        atomic_bsz: Numbers,
        accum_steps: Numbers,
        num_microbatches: Numbers = 1,
    ) -> Numbers:
        """Return samples per second."""
        sizes = num_replicas, atomic_bsz, accum_steps
        total = self.step_time(num_nodes, *sizes, num_microbatches).total
        return _plain(_batch_size(*sizes) / total)

    def efficiency(self, batch_size: Numbers) -> Numbers:
        """Return progress per sample relative to the initial batch size; at most 1 above it."""
        sqr, var = self._grad_params
        scale = np.asarray(batch_size) / self._init_batch_size
        noise = var / scale + sqr
        # Without gradient and noise, a larger batch is assumed to gain nothing.
        gain = np.where(noise > 0, (var + sqr) / np.where(noise > 0, noise, 1.0), 1.0)
        return _plain(gain / scale)

    def step_time(
        self,
        num_nodes: Numbers,
        num_replicas: Numbers,
        atomic_bsz: Numbers,
        accum_steps: Numbers,
        num_microbatches: Numbers = 1,
    ) -> StepTime:
        """Return the times of one iteration in seconds."""
        times = step_time(
            self._perf_params,
            np.asarray(num_nodes),
            np.asarray(num_replicas),
            np.asarray(atomic_bsz),
            np.asarray(accum_steps),
            np.asarray(num_microbatches),
        )
        return StepTime(*map(_plain, times))

    def optimize(
        self,
        num_nodes: Numbers,
        num_replicas: Numbers,
        max_batch_size: float | None = None,
        atomic_bsz_range: AtomicBszRange | None = None,
        accumulation: bool = False,
        num_microbatches: int | Sequence[int] = 1,
        *,
        plans: Sequence[PricedCut] = (),
        memory_limit: float | None = None,
        corrections: SizeCorrections | None = None,
    ) -> Optimum:
        """Return the best batch size, number of micro-batches and number of stages within bounds.

        The atomic batch size is a multiple of M if bounds allow it. With one micro-batch the choice
        equals AdaptDL's, unless another is 0.3 % better: one replica above the initial batch size
        takes at least one accumulation step (without accumulation it stays at the initial batch
        size), as gradient noise is measured between atomic batches. With several micro-batches,
        noise is measured between them, and one replica has no such constraint.

        Args:
            num_nodes: number of nodes of the allocation, scalar or array.
            num_replicas: R, scalar or array.
            max_batch_size: None: the initial batch size, rounded up to a multiple of R.
            atomic_bsz_range: minimum and maximum atomic batch size; None: unbounded.
            accumulation: whether accumulation steps are allowed.
            num_microbatches: M, or several to choose from.
            plans: cuts of the model to choose from, for example one per number of stages and
            schedule (`plan_stages`); empty: the stages of `perf_params`.
            memory_limit: bytes of a stage's device, which bound the micro-batches of each plan to
            at least one whole sample; None: unbounded. Requires `plans`.
            corrections: corrections of the model by measurements, for a single allocation.

        Returns:
            (goodput, atomic_bsz, accum_steps) as in AdaptDL, with the attributes
            `num_microbatches`, `num_stages` and `plan`, the index of the plan; scalars, or arrays
            of the broadcast shape. If no batch size is within bounds, goodput is 0.0.

        Raises:
            ValueError: unless 1 <= num_nodes <= num_replicas and num_microbatches >= 1; or for a
            memory limit without plans, or corrections with several allocations.

        Example:
            >>> goodput_fn = GoodputFunction((0.1, 0.01, 0.2, 0.02, 0.05, 0.01, 1.5), (1, 8), 32)
            >>> best = goodput_fn.optimize(1, 2, 256, (8, 64), num_microbatches=(1, 2, 4))
            >>> best.atomic_bsz, best.num_microbatches
            (38, 1)
        """
        search = self.search(
            num_nodes,
            num_replicas,
            max_batch_size,
            atomic_bsz_range,
            accumulation,
            num_microbatches,
            plans=plans,
            memory_limit=memory_limit,
            corrections=corrections,
        )
        (best,) = search_all([search])
        sizes = best.num_microbatches, best.num_stages, best.plan
        return Optimum(*(_plain(values) for values in (*best, *sizes)))

    def search(
        self,
        num_nodes: Numbers,
        num_replicas: Numbers,
        max_batch_size: float | None = None,
        atomic_bsz_range: AtomicBszRange | None = None,
        accumulation: bool = False,
        num_microbatches: int | Sequence[int] = 1,
        *,
        plans: Sequence[PricedCut] = (),
        memory_limit: float | None = None,
        corrections: SizeCorrections | None = None,
    ) -> ConfigSearch:
        """Return the search that `optimize` runs, for `search_all`; same errors."""
        nodes, replicas = np.asarray(num_nodes), np.asarray(num_replicas)
        if nodes.shape != replicas.shape:
            nodes, replicas = np.broadcast_arrays(nodes, replicas)
        counts = tuple(np.atleast_1d(num_microbatches).tolist())
        if (nodes < 1).any() or (nodes > replicas).any() or not counts or min(counts) < 1:
            raise ValueError(
                f"num_nodes is {num_nodes}, num_replicas {num_replicas}, num_microbatches "
                f"{num_microbatches}; give 1 <= num_nodes <= num_replicas, num_microbatches >= 1"
            )
        if memory_limit is not None and not plans:
            raise ValueError(
                f"memory_limit is {memory_limit:g} but there are no plans; give plans made by "
                "plan_stages, which know the bytes of each stage"
            )
        if corrections is not None and nodes.size != 1:
            raise ValueError(
                f"corrections are of one allocation, and num_replicas is {num_replicas}; ask for "
                "each allocation with its own"
            )
        bounds = self._bounds(max_batch_size, atomic_bsz_range, accumulation)
        return ConfigSearch(
            perf_params=self._perf_params,
            grad_params=self._grad_params,
            num_nodes=nodes,
            num_replicas=replicas,
            bounds=bounds,
            num_microbatches=counts,
            plans=plans or (None,),
            memory_limit=memory_limit,
            sizes=corrections,
        )

    def with_params(self, perf_params: PerfParams) -> GoodputFunction:
        """Return the goodput of the same job with different step time parameters."""
        return GoodputFunction(perf_params, self._grad_params, self._init_batch_size)

    def _goodput(self, num_nodes: Numbers, num_replicas: Numbers, *sizes: Numbers) -> Numbers:
        throughput = self.throughput(num_nodes, num_replicas, *sizes)
        return throughput * self.efficiency(_batch_size(num_replicas, *sizes[:2]))

    def _bounds(
        self,
        max_batch_size: float | None,
        atomic_bsz_range: AtomicBszRange | None,
        accumulation: bool,
    ) -> BatchBounds:
        largest = self._init_batch_size if max_batch_size is None else max_batch_size
        if not largest >= 1:
            raise ValueError(f"max_batch_size is {max_batch_size}; give at least 1 or None")
        low, high = atomic_bsz_range or (None, None)
        return BatchBounds(
            init_batch_size=self._init_batch_size,
            max_batch_size=largest,
            min_atomic_bsz=low or 1,
            max_atomic_bsz=high or math.ceil(largest),
            accumulation=accumulation,
            needs_two_batches=False,
            rounds_up=max_batch_size is None,
        )


def _batch_size(num_replicas: Numbers, atomic_bsz: Numbers, accum_steps: Numbers) -> Numbers:
    return np.multiply(num_replicas, atomic_bsz) * np.add(accum_steps, 1)


def _plain(values: Numbers) -> Numbers:
    return np.asarray(values).item() if np.ndim(values) == 0 else values
