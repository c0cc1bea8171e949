"""Goodput of many batch sizes on many allocations (columns), for the choice in `batch_size`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipollux_perfmodel.timing.gpipe import Numbers
from pipollux_perfmodel.timing.params import GradParams, PerfParams
from pipollux_perfmodel.timing.stacked_params import spread, stack_params, take, take_params
from pipollux_perfmodel.timing.step_time import (
    compute_time,
    is_simple,
    network_time,
    optim_time,
    pipeline_factor,
    slowdown,
    step_time,
)

from .batch_bounds import Integers
from .batch_size import Floats, Nearby


class _Columns(NamedTuple):
    """Quantities that goodput depends on besides the batch size; numbers, or arrays (columns,)."""

    params: PerfParams
    sqr: Numbers
    var: Numbers
    init_batch_size: Numbers
    nodes: Integers
    replicas: Integers
    factor: Numbers
    """T_pipe without overhead over C(b), if that is one number."""
    network: Numbers
    slow: Numbers


class _Estimate(NamedTuple):
    """Quantities that an estimate depends on besides the batch size, in single precision.

    T_pipe is (fixed, slope · a)_line + overhead. Up to a factor of the column, efficiency times
    batch size is batch size / (signal · batch size + noise).
    """

    fixed: Singles
    slope: Singles
    line: Singles
    overhead: Singles
    network: Singles
    gamma: Singles
    replicas: Singles
    signal: Singles
    noise: Singles
    tied: Singles


Singles = NDArray[np.float32]
_PLAIN = 1e-12, 1e15
"""Range of numbers, besides 0, that single precision represents without loss."""


class CandidateGoodput:
    """Goodput of candidates in columns; quantities of columns are computed once. The sequences have
    one entry per job, of jobs with one `stack_key`; n and R one per column.
    """

    def __init__(
        self,
        all_params: Sequence[PerfParams],
        all_gradients: Sequence[GradParams],
        init_batch_sizes: Sequence[float],
        num_columns: Sequence[int],
        num_nodes: Integers,
        num_replicas: Integers,
        num_microbatches: int,
    ) -> None:
        params = stack_params(all_params, num_columns)
        self._simple = is_simple(params)
        # Without gradient and noise, a larger batch is assumed to gain nothing.
        self._is_known = all(gradient.sqr > 0 or gradient.var > 0 for gradient in all_gradients)
        self._num_microbatches = num_microbatches
        factors: list[Numbers] = [1.0]
        if self._simple:
            factors = [pipeline_factor(one, num_microbatches) for one in all_params]
        self._all = _Columns(
            params,
            spread([gradient.sqr for gradient in all_gradients], num_columns),
            spread([gradient.var for gradient in all_gradients], num_columns),
            spread(init_batch_sizes, num_columns),
            num_nodes,
            num_replicas,
            spread(factors, num_columns),
            network_time(params, num_nodes, num_replicas),
            slowdown(params, num_nodes, num_replicas),
        )

    def __call__(self, columns: Integers, atomic_bsz: Integers, accum_steps: Integers) -> Floats:
        """Return goodput, shape (candidates, columns)."""
        everywhere = len(columns) == len(self._all.replicas) and bool((np.diff(columns) > 0).all())
        asked = self._all if everywhere else self._at(columns)
        return self._goodput(asked, atomic_bsz, accum_steps)

    def of_pairs(self, columns: Integers, atomic_bsz: Integers, accum_steps: Integers) -> Floats:
        """Return goodput of candidates of any columns, all of shape (pairs,)."""
        return self._goodput(self._at(columns), atomic_bsz, accum_steps)

    def estimate(
        self, columns: Integers, atomic_bsz: Integers, accum_steps: Integers
    ) -> Singles | None:
        """Return goodput in a separate unit per column, in single precision: see `GoodputOf`."""
        if self._in_single is None:
            return None
        at = _Estimate(*(take(values, columns) for values in self._in_single))
        size = atomic_bsz.astype(np.float32, copy=False)
        steps = accum_steps.astype(np.float32, copy=False)
        with np.errstate(divide="ignore", invalid="ignore"):  # callers check the result
            accum = self._accum(at, size)
            total = _norm(accum, at.network, at.gamma)
            accum *= steps
            total += accum
            total += at.tied
            batch_size = (steps + 1) * size
            batch_size *= at.replicas
            total *= at.signal * batch_size + at.noise
            batch_size /= total
        estimate: Singles = batch_size
        return estimate

    def most_nearby(
        self, columns: Integers, atomic_bsz: Integers, accum_steps: Integers, nearby: Nearby
    ) -> Singles | None:
        """Return a bound on goodput nearby, relative to that of a candidate: see `GoodputOf`.

        With A samples of one replica, of B in all, s steps and T_pipe = fixed + slope · A/(s + 1),

            goodput  is in proportion to  B / (signal · B + noise) / T_iter
            T_iter   = s · T_pipe + (T_pipe, T_net)_γ + T_tie

        the first factor is concave in A, and T_iter convex, so both are bounded by their tangents.
        t additional steps take at least t · fixed additional seconds, as they hide less of T_net.
        The quotient of two linear functions is maximal at an end of a range.
        """
        if self._in_single is None or not self._is_line or np.any(self._all.params.gamma < 1):
            return None
        at = _Estimate(*(take(values, columns) for values in self._in_single))
        size, steps = atomic_bsz.astype(np.float32), accum_steps.astype(np.float32)
        samples = size * (steps + 1)
        with np.errstate(all="ignore"):  # callers check the result
            accum = self._accum(at, size)
            optim = _norm(accum, at.network, at.gamma)
            total = steps * accum + optim + at.tied
            optim_slope = (accum / optim) ** (at.gamma - 1)
            slower = at.slope * size * (steps + optim_slope) / total
            better = at.noise / (at.noise + at.signal * at.replicas * samples)
            later = nearby.more_steps.astype(np.float32) * ((at.fixed + at.overhead) / total)
            gains = [
                (1 + better * change) / (1 + slower * change + later)
                for end in nearby[1:]
                for change in [(end / samples - 1).astype(np.float32)]
            ]
        possible = nearby.least <= nearby.most
        gain: Singles = np.where(possible, np.maximum(*gains), 0).max(axis=0, initial=1)
        return gain

    def _accum(self, at: _Estimate, size: Singles) -> Singles:
        accum = at.slope * size
        accum = accum + at.fixed if self._is_line else _norm(accum, at.fixed, at.line)
        accum += at.overhead
        return accum

    @property
    def _is_line(self) -> bool:
        power = self._all.params.gamma_c
        return isinstance(power, float) and power == 1.0

    @cached_property
    def _in_single(self) -> _Estimate | None:
        """The columns for `estimate`; None if formulas or numbers do not allow it."""
        everywhere = self._all
        params = everywhere.params
        if not (self._simple and self._is_known):
            return None
        times = everywhere.factor * everywhere.slow
        progress = everywhere.sqr + everywhere.var
        exact = (
            params.alpha_c * times,
            params.beta_c * times / self._num_microbatches,
            params.gamma_c,
            params.overhead,
            everywhere.network,
            params.gamma,
            everywhere.replicas,
            everywhere.sqr / progress,
            everywhere.var / progress * everywhere.init_batch_size,
            params.tied_exchange,
        )
        least, most = _PLAIN
        for values in exact:
            given = np.asarray(values)
            if not ((given == 0) | ((given > least) & (given < most))).all():
                return None
        return _Estimate(*(np.asarray(values, np.float32)[()] for values in exact))

    def _goodput(self, asked: _Columns, atomic_bsz: Integers, accum_steps: Integers) -> Floats:
        init, sqr, var = asked.init_batch_size, asked.sqr, asked.var
        batch_size = asked.replicas * (atomic_bsz * (accum_steps + 1.0))
        total = self._total_time(asked, atomic_bsz, accum_steps)
        # efficiency · batch size = (var + sqr) / (var/scale + sqr) · init
        noise = sqr * batch_size + var * init
        goodput: Floats
        if self._is_known:
            goodput = (init * (var + sqr)) * batch_size / (noise * total)
        else:
            progress = (var + sqr) * batch_size / np.where(noise > 0, noise, 1)
            goodput = init * np.where(noise > 0, progress, 1) / total
        return goodput

    def _at(self, columns: Integers) -> _Columns:
        params, *others = self._all
        return _Columns(take_params(params, columns), *(take(one, columns) for one in others))

    def _total_time(self, asked: _Columns, atomic_bsz: Integers, accum_steps: Integers) -> Numbers:
        params = asked.params
        if not self._simple:
            sizes = atomic_bsz, accum_steps, self._num_microbatches
            return step_time(params, asked.nodes, asked.replicas, *sizes).total
        micro_bsz = atomic_bsz / self._num_microbatches
        accum = compute_time(params, micro_bsz) * asked.factor * asked.slow + params.overhead
        optim = optim_time(params.gamma, accum, asked.network) + params.tied_exchange
        return accum_steps * accum + optim


def _norm(x: Singles, y: Singles, power: Singles) -> Singles:
    """Return (x^power + y^power)^(1/power) in single precision; nan where both are 0."""
    larger, ratio = np.maximum(x, y), np.minimum(x, y)
    ratio /= larger
    # Logarithm and exponential in single precision take a fifth of the time of a power.
    np.log(ratio, out=ratio)
    ratio *= power
    np.exp(ratio, out=ratio)
    ratio += 1
    np.log(ratio, out=ratio)
    ratio /= power
    np.exp(ratio, out=ratio)
    larger *= ratio
    return larger
