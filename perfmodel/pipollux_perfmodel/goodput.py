"""Goodput: training progress per second, and the batch size that makes most of it.

    goodput    = throughput · efficiency                         samples per second
    throughput = R·a·(s + 1) / T_iter                            `steptime`
    efficiency = (var + sqr) / (var / scale + sqr) / scale       scale = batch size / initial one

from Pollux (Qiao et al., OSDI'21, section 3); a is the atomic batch size, s the number
of accumulation steps. With one stage and one micro-batch all numbers are AdaptDL's.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .batchsize import BatchBounds, Floats, Integers, choose
from .params import GradParams, PerfParams, check_shares
from .steptime import Numbers, StepTime, step_time

AtomicBszRange = Sequence[int | None]
"""Least and largest atomic batch size; None (or 0): unbounded."""


class GoodputFunction:
    """Goodput of a job as a function of its configuration.

    All methods take scalars or arrays, which broadcast; scalars give a float.

    Args:
        perf_params: step time parameters; seven numbers mean one stage.
        grad_params: (sqr, var) of the gradient at the initial batch size.
        init_batch_size: the batch size that efficiency is relative to, and the least one.

    Raises:
        ValueError: for shares that do not sum to 1, or an initial batch size below 1.

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
        self._perf_params = PerfParams(*perf_params)
        self._grad_params = GradParams(*grad_params)
        check_shares(self._perf_params.forward_shares, self._perf_params.backward_shares)
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

    def __call__(
        self,
        num_nodes: Numbers,
        num_replicas: Numbers,
        atomic_bsz: Numbers,
        accum_steps: Numbers,
        num_microbatches: Numbers = 1,
    ) -> Numbers:
        """Return `evaluate` of the same arguments."""
        return self.evaluate(num_nodes, num_replicas, atomic_bsz, accum_steps, num_microbatches)

    def evaluate(
        self,
        num_nodes: Numbers,
        num_replicas: Numbers,
        atomic_bsz: Numbers,
        accum_steps: Numbers,
        num_microbatches: Numbers = 1,
    ) -> Numbers:
        """Return goodput in samples (of the initial batch size's worth) per second.

        Raises:
            ValueError: when a batch size is below the initial one, where efficiency means nothing.
        """
        smallest = np.min(_batch_size(num_replicas, atomic_bsz, accum_steps))
        if smallest < self._init_batch_size:
            raise ValueError(
                f"batch size {smallest:g} (num_replicas · atomic_bsz · (accum_steps + 1))"
                f" is below init_batch_size {self._init_batch_size:g}; give at least that"
            )
        return self._goodput(num_nodes, num_replicas, atomic_bsz, accum_steps, num_microbatches)

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
        """Return progress per sample relative to the initial batch size.

        In (0, 1] from the initial batch size on, and falling; above 1 below it.
        """
        sqr, var = self._grad_params
        scale = np.asarray(batch_size) / self._init_batch_size
        noise = var / scale + sqr
        # No gradient and no noise: nothing known, so a larger batch is taken to be worth nothing.
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
            xp=np,
        )
        return StepTime(*map(_plain, times))

    def optimize(
        self,
        num_nodes: Numbers,
        num_replicas: Numbers,
        max_batch_size: float | None = None,
        atomic_bsz_range: AtomicBszRange | None = None,
        accumulation: bool = False,
        num_microbatches: int = 1,
    ) -> tuple[Numbers, Numbers, Numbers]:
        """Return (goodput, atomic_bsz, accum_steps) of the best batch size within bounds.

        The atomic batch size is a multiple of `num_microbatches` wherever bounds allow it. With one
        micro-batch the choice is AdaptDL's: one replica above the initial batch size takes at least
        one accumulation step (without accumulation it stays at the initial batch size), since
        gradient noise is measured between atomic batches. With more, it is measured between
        micro-batches, and one replica is free.

        Args:
            num_nodes: nodes that the replicas lie on, scalar or array.
            num_replicas: R, scalar or array.
            max_batch_size: largest batch size; None: the initial batch size.
            atomic_bsz_range: least and largest atomic batch size; None: unbounded.
            accumulation: whether accumulation steps are allowed.
            num_microbatches: M.

        Returns:
            Three scalars, or three arrays of the broadcast shape. Where no batch size is within
            bounds all three are 0.

        Raises:
            ValueError: unless 1 <= num_nodes <= num_replicas and num_microbatches >= 1.
        """
        nodes, replicas = np.broadcast_arrays(num_nodes, num_replicas)
        if np.any((nodes < 1) | (nodes > replicas)) or num_microbatches < 1:
            raise ValueError(
                f"num_nodes is {num_nodes}, num_replicas {num_replicas}, num_microbatches "
                f"{num_microbatches}; give 1 <= num_nodes <= num_replicas, num_microbatches >= 1"
            )
        bounds = self._bounds(max_batch_size, atomic_bsz_range, accumulation, num_microbatches)

        def goodput_of(columns: Integers, atomic_bsz: Integers, accum_steps: Integers) -> Floats:
            where = nodes.ravel()[columns], replicas.ravel()[columns]
            goodput: Floats = self._goodput(*where, atomic_bsz, accum_steps, num_microbatches)
            return goodput

        choice = choose(bounds, replicas.ravel(), num_microbatches, goodput_of)
        goodput, atomic_bsz, accum_steps = (
            _plain(values.reshape(nodes.shape)) for values in choice
        )
        return goodput, atomic_bsz, accum_steps

    def _goodput(self, num_nodes: Numbers, num_replicas: Numbers, *sizes: Numbers) -> Numbers:
        throughput = self.throughput(num_nodes, num_replicas, *sizes)
        return throughput * self.efficiency(_batch_size(num_replicas, *sizes[:2]))

    def _bounds(
        self,
        max_batch_size: float | None,
        atomic_bsz_range: AtomicBszRange | None,
        accumulation: bool,
        num_microbatches: int,
    ) -> BatchBounds:
        largest = self._init_batch_size if max_batch_size is None else max_batch_size
        if not largest >= 1:
            raise ValueError(f"max_batch_size is {max_batch_size}; give at least 1 or None")
        low, high = atomic_bsz_range or (None, None)
        return BatchBounds(
            init_batch_size=self._init_batch_size,
            max_batch_size=largest,
            min_atomic_bsz=low or 1,
            max_atomic_bsz=high or int(largest),
            accumulation=accumulation,
            needs_two_batches=num_microbatches == 1,
        )


def _batch_size(num_replicas: Numbers, atomic_bsz: Numbers, accum_steps: Numbers) -> Numbers:
    return np.multiply(num_replicas, atomic_bsz) * np.add(accum_steps, 1)


def _plain(values: Numbers) -> Numbers:
    """Return a float or int for what holds one number and has no dimension."""
    return np.asarray(values).item() if np.ndim(values) == 0 else values
