"""The loss of step time parameters on measurements, and its gradient.

    rmse(log T_pipe) + rmse(log T_optim) + 0.1·rmse(log C)
      + 1e-3·(γ - 1)² + 1e-2·((beta_n / alpha_n)² + (beta_r / alpha_r)²)            as AdaptDL
      + 1e-3·((ω - 1)² + (gamma_c - 1)² + κ² + δ²) + 1e-2·p²

With measurements of several network levels, alpha_n and beta_n are those of the lowest one; each
further level appends its own two to the numbers of `NAMES`.

The rmse is robust: an error e counts as 2·D²·(√(1 + (e/D)²) - 1), which is quadratic up to about D
= 10 % and linear beyond, so that stragglers do not distort the fit. The gradient is computed
explicitly by the chain rule through logarithms (x = log of the fixed cost, and so on), which takes
a fifteenth of autograd's time; tests compare both.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipollux_perfmodel.timing.params import PerfParams
from pipollux_perfmodel.timing.step_time import EPSILON, pipeline_factor

from .measurements import Floats, Profile

# The fitted numbers: six times in seconds, six numbers without a unit, and one more time.
NAMES = (
    "alpha_c",
    "beta_c",
    "alpha_n",
    "beta_n",
    "alpha_r",
    "beta_r",
    "gamma",
    "overlap",
    "gamma_c",
    "contention",
    "growth_n",
    "two_node_penalty",
    "overhead",
)
NEUTRAL = (EPSILON,) * 6 + (1.0, 1.0, 1.0, 0.0, 1.0, 0.0) + (0.0,)
"""The value of each number that no measurement determines."""
_COMPUTE_WEIGHT = 0.1  # step times determine predictions; compute times only split them
_ROBUST = 0.1  # D, a relative error
# Regularization of gamma, overlap, gamma_c, contention, growth_n, two_node_penalty.
_PULL_TO = np.array([1.0, 1.0, 1.0, 0.0, 0.0, 0.0])
_PULL = np.array([1e-3, 1e-3, 1e-3, 1e-3, 1e-2, 1e-3])
_PULLED = slice(6, 12)
IS_TIME = np.array([True] * 6 + [False] * 6 + [True])
_RETROGRESSION = 1e-2
_SMALL_POWER = 1e-4


def is_time(num_values: int) -> NDArray[np.bool_]:
    """Return which of the fitted numbers are times: of `NAMES`, then of further levels."""
    return np.append(IS_TIME, np.ones(num_values - len(NAMES), bool))


def with_values(shape: PerfParams, values: Any) -> PerfParams:
    """Return the parameters with the values of `NAMES` replaced."""
    return shape._replace(**dict(zip(NAMES, values, strict=True)))


class Rows(NamedTuple):
    """The constants of a search; arrays of shape (points,)."""

    micro_bsz: Floats
    crowd: Floats
    serial: Floats
    """F(M) for ω = 0."""
    ideal: Floats
    """F(M) for ω = 1."""
    across: NDArray[np.bool_]
    inside: NDArray[np.bool_]
    group: NDArray[np.intp]
    """Index of the row's network level among the measured ones; 0 on one node."""
    two: Floats
    beyond_two: Floats
    log_others: Floats
    log_accum: Floats
    log_optim: Floats
    weight: Floats
    """Sums to 1."""
    log_compute: Floats
    """Of rows with measured compute times."""
    compute_rows: NDArray[np.intp]
    compute_weight: Floats


def make_rows(profile: Profile, shape: PerfParams) -> Rows:
    """Return the constants of a search; `shape` has shares, checkpoint mode and schedule."""
    num_microbatches, replicas = profile.num_microbatches, profile.num_replicas
    serial, ideal = (
        pipeline_factor(shape._replace(overlap=overlap), num_microbatches) for overlap in (0.0, 1.0)
    )
    there = np.flatnonzero(~np.isnan(profile.compute_time))
    return Rows(
        micro_bsz=profile.micro_bsz,
        crowd=replicas / profile.num_nodes - 1,
        serial=serial * np.ones_like(replicas),
        ideal=ideal * np.ones_like(replicas),
        across=profile.num_nodes > 1,
        inside=(profile.num_nodes == 1) & (replicas > 1),
        group=groups_of(profile),
        two=(profile.num_nodes == 2).astype(float),
        beyond_two=np.maximum(replicas - 2, EPSILON),
        log_others=np.log(np.maximum(replicas - 1, 1.0)),
        log_accum=np.log(profile.accum_time),
        log_optim=np.log(profile.optim_time),
        weight=profile.weight / profile.weight.sum(),
        log_compute=np.log(profile.compute_time[there]),
        compute_rows=there,
        compute_weight=profile.weight[there] / max(profile.weight[there].sum(), EPSILON),
    )


def groups_of(profile: Profile) -> NDArray[np.intp]:
    """Return the index of each row's network level among the measured ones; 0 on one node."""
    group = np.searchsorted(profile.levels, profile.row_level)
    found: NDArray[np.intp] = np.where(profile.num_nodes > 1, group, 0)
    return found


def loss_and_gradient(values: Floats, rows: Rows, rounding: float) -> tuple[float, Floats]:
    """Return the loss of the fitted numbers, and its gradient, (len(values),). `rounding` is the
    relative error below which the rmse is smoothed.
    """
    compute, accum, optim = _log_times(values, rows)
    total, gradient = 0.0, np.zeros(len(values))
    parts = [(accum, rows.log_accum, rows.weight, 1.0), (optim, rows.log_optim, rows.weight, 1.0)]
    if rows.compute_rows.size:
        chosen = _Logarithm(
            compute.value[rows.compute_rows], compute.gradient[:, rows.compute_rows]
        )
        parts.append((chosen, rows.log_compute, rows.compute_weight, _COMPUTE_WEIGHT))
    for predicted, measured, weight, factor in parts:
        errors = predicted.value - measured
        bend = np.sqrt(1 + (errors / _ROBUST) ** 2)
        squares = float(weight @ (2 * _ROBUST**2 * (bend - 1)))
        rmse = np.sqrt(squares + rounding**2)
        total += factor * rmse
        gradient += predicted.gradient @ (factor * weight * errors / bend) / max(rmse, 1e-150)
    further = range(len(NAMES), len(values), 2)
    for alpha, beta in ((2, 3), (4, 5), *((alpha, alpha + 1) for alpha in further)):
        ratio = values[beta] / values[alpha]
        total += _RETROGRESSION * ratio**2
        gradient[beta] += 2 * _RETROGRESSION * ratio / values[alpha]
        gradient[alpha] -= 2 * _RETROGRESSION * ratio**2 / values[alpha]
    away = values[_PULLED] - _PULL_TO
    total += float(_PULL @ away**2)
    gradient[_PULLED] += 2 * _PULL * away
    return total, gradient


def rmse(values: Floats, rows: Rows) -> float:
    """Return the rmse of log step times, the larger one of accumulation and optimizer steps."""
    _, accum, optim = _log_times(values, rows)
    squares = [
        float(rows.weight @ (accum.value - rows.log_accum) ** 2),
        float(rows.weight @ (optim.value - rows.log_optim) ** 2),
    ]
    return math.sqrt(max(squares))


class _Logarithm(NamedTuple):
    """Logarithms of predicted times, (points,), and their gradient, (numbers, points)."""

    value: Floats
    gradient: Floats


def _log_times(values: Floats, rows: Rows) -> tuple[_Logarithm, _Logarithm, _Logarithm]:
    at = NAMES.index
    named = dict(zip(NAMES, values[: len(NAMES)].tolist(), strict=True))
    fixed = np.full_like(rows.micro_bsz, np.log(named["alpha_c"]))
    log_c, of_fixed, of_slope, of_power = _log_norm(
        fixed, np.log(named["beta_c"] * rows.micro_bsz), named["gamma_c"]
    )
    slow = 1 + named["contention"] * rows.crowd
    compute = _Logarithm(log_c + np.log(slow), np.zeros((len(values), len(log_c))))
    compute.gradient[at("alpha_c")] = of_fixed / named["alpha_c"]
    compute.gradient[at("beta_c")] = of_slope / named["beta_c"]
    compute.gradient[at("gamma_c")] = of_power
    compute.gradient[at("contention")] = rows.crowd / slow
    factor = (1 - named["overlap"]) * rows.serial + named["overlap"] * rows.ideal
    pipeline = np.exp(compute.value) * factor
    seconds = pipeline + named["overhead"]
    share = pipeline / seconds
    accum = _Logarithm(np.log(seconds), compute.gradient * share)
    accum.gradient[at("overlap")] = (rows.ideal - rows.serial) / factor * share
    accum.gradient[at("overhead")] = 1 / seconds
    network = _log_network(named, values, rows)
    log_optim, of_accum, of_network, of_gamma = _log_norm(
        accum.value, network.value, named["gamma"]
    )
    optim = _Logarithm(log_optim, accum.gradient * of_accum + network.gradient * of_network)
    optim.gradient[at("gamma")] += of_gamma
    return compute, accum, optim


def _log_network(named: dict[str, float], values: Floats, rows: Rows) -> _Logarithm:
    at = NAMES.index
    # The places of alpha and beta of every measured level.
    further = np.arange(len(NAMES), len(values), 2)
    alphas = np.append(at("alpha_n"), further)
    betas = np.append(at("beta_n"), further + 1)
    alpha_n, beta_n = values[alphas[rows.group]], values[betas[rows.group]]
    growth, of_power = _growth(named["growth_n"], rows.log_others)
    penalty = 1 + named["two_node_penalty"] * rows.two
    across = alpha_n + beta_n * growth
    inside = named["alpha_r"] + named["beta_r"] * rows.beyond_two
    seconds = np.where(rows.across, across * penalty, np.where(rows.inside, inside, EPSILON))
    gradient = np.zeros((len(values), len(seconds)))
    there = rows.across / across
    points = np.arange(len(seconds))
    gradient[alphas[rows.group], points] = there
    gradient[betas[rows.group], points] = there * growth
    gradient[at("growth_n")] = there * beta_n * of_power
    gradient[at("two_node_penalty")] = rows.across * rows.two / penalty
    there = rows.inside / inside
    gradient[at("alpha_r")] = there
    gradient[at("beta_r")] = there * rows.beyond_two
    return _Logarithm(np.log(seconds), gradient)


def _growth(power: float, log_others: Floats) -> tuple[Floats, Floats]:
    if abs(power) < _SMALL_POWER:
        growth = log_others + power * log_others**2 / 2
        slope = log_others**2 / 2 + power * log_others**3 / 3
    else:
        powers = np.exp(power * log_others)
        growth = (powers - 1) / power
        slope = (log_others * powers - growth) / power
    return np.maximum(growth, EPSILON), slope


def _log_norm(x: Floats, y: Floats, power: float) -> tuple[Floats, Floats, Floats, Floats]:
    """Return z = log((e^(qx) + e^(qy))^(1/q)) for q = power, and dz/dx, dz/dy, dz/dq."""
    largest = np.maximum(x, y)
    of_x, of_y = np.exp(power * (x - largest)), np.exp(power * (y - largest))
    both = of_x + of_y
    value = largest + np.log(both) / power
    of_x /= both
    of_y /= both
    return value, of_x, of_y, (of_x * (x - value) + of_y * (y - value)) / power
