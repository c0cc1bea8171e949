"""Goodput of many batch sizes on many allocations: what `batch_size` chooses by.

An allocation is a column, and the columns may belong to several jobs (`stack_params`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

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
from .batch_size import Floats


class _Columns(NamedTuple):
    """What goodput depends on besides the batch size; numbers, or arrays (columns,)."""

    params: PerfParams
    sqr: Numbers
    var: Numbers
    init_batch_size: Numbers
    nodes: Integers
    replicas: Integers
    factor: Numbers
    """T_pipe without overhead over C(b), where that is one number."""
    network: Numbers
    """T_net."""
    slow: Numbers
    """1 + κ·(R/n - 1)."""


class CandidateGoodput:
    """Goodput of candidates in columns; what depends on columns only is computed once.

    Args:
        all_params: step times of each job; of several jobs with one `stack_key`.
        all_gradients: size and noise of each job's gradient.
        init_batch_sizes: what the efficiency of each job is relative to.
        num_columns: of each job.
        num_nodes: n of each column, (columns,).
        num_replicas: R of each column, (columns,).
        num_microbatches: M.
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
        # Without gradient and noise, so unknown, a larger batch is assumed to gain nothing.
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
        asked = self._at(columns)
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
        if len(columns) == len(self._all.replicas):
            return self._all
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
