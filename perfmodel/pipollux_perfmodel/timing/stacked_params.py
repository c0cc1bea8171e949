"""Step time parameters of many jobs in one `PerfParams`, so that one evaluation covers them all.

A number or share that differs between jobs is an array with one entry per column, where a column is
one allocation of one job. Properties that select a formula must be equal for all jobs
(`stack_key`).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .gpipe import Numbers
from .params import PerfParams
from .step_time import ZERO_POWER, is_simple, pushes

_NUMBERS = (
    *("alpha_c", "beta_c", "alpha_n", "beta_n", "alpha_r", "beta_r", "gamma", "overlap"),
    *("gamma_c", "contention", "growth_n", "two_node_penalty", "overhead"),
    *("tied_exchange", "sync_every", "sync_overlap"),
)
_OF_STAGES = (
    *("forward_shares", "backward_shares", "forward_alpha_shares", "backward_alpha_shares"),
    *("alpha_t", "beta_t", "gradient_shares"),
)
_OWN_POWERS = frozenset((0.5, 1.0, 2.0))
"""Powers for which numpy uses a different algorithm if the exponent is a scalar."""


def spread(values: Sequence[Numbers], num_columns: Sequence[int]) -> Numbers:
    """Return a job's number for each of its columns; the number itself if all are equal.

    >>> spread([1, 1], [2, 1]), spread([1, 2], [2, 1])
    (1, array([1, 1, 2]))
    """
    first = values[0]
    if all(value == first for value in values):
        return first
    return np.repeat(values, num_columns)


def take(values: Numbers, columns: NDArray[np.intp]) -> Numbers:
    """Return the numbers of some columns, by index; a plain number applies to all."""
    return values[columns] if isinstance(values, np.ndarray) and values.ndim else values


def stack_key(params: PerfParams) -> Hashable | None:
    """Return the properties that stacked jobs must have in common; None: cannot be stacked.
    Simulated schedules cannot, unless one number describes all stages.
    """
    powers = _own_power(params.gamma), _own_power(params.gamma_c), _own_growth(params)
    if is_simple(params):
        return powers
    if params.schedule != "gpipe":
        return None
    lengths = tuple(len(getattr(params, name)) for name in _OF_STAGES)
    return (
        powers,
        pushes(params),
        lengths,
        params.checkpoint,
        params.transfers_overlap,
        params.shared_link,
    )


def stack_params(all_params: Sequence[PerfParams], num_columns: Sequence[int]) -> PerfParams:
    """Return the parameters of jobs with one `stack_key`, for each of their columns. For jobs whose
    stages reduce to one number, `pipeline_factor`, the stages are the first job's.
    """
    first = all_params[0]
    if len(all_params) == 1:
        return first
    changed: dict[str, Any] = {
        name: spread([getattr(params, name) for params in all_params], num_columns)
        for name in _NUMBERS
    }
    for name in () if is_simple(first) else _OF_STAGES:
        by_stage = zip(*(getattr(params, name) for params in all_params), strict=True)
        changed[name] = tuple(spread(shares, num_columns) for shares in by_stage)
    return first._replace(**changed)


def take_params(params: PerfParams, columns: NDArray[np.intp]) -> PerfParams:
    """Return the parameters of some columns, by index."""
    changed: dict[str, Any] = {name: take(getattr(params, name), columns) for name in _NUMBERS}
    for name in () if is_simple(params) else _OF_STAGES:
        changed[name] = tuple(take(shares, columns) for shares in getattr(params, name))
    return params._replace(**changed)


def _own_power(power: float) -> Hashable:
    """Return a power that is only stacked with equal ones; None for all others."""
    special = power in _OWN_POWERS or 1 / power in _OWN_POWERS
    return (power, isinstance(power, float)) if special else None


def _own_growth(params: PerfParams) -> Hashable:
    power = params.growth_n
    special = power == 1.0 or abs(power) < ZERO_POWER
    return (power, isinstance(power, float)) if special else None
