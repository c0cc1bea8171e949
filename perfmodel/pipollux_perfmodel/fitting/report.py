"""Report of a fit: its errors by regime, parameters that rest on priors, and outliers."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipollux_perfmodel.timing.params import PerfParams
from pipollux_perfmodel.timing.step_time import (
    compute_time,
    network_time,
    optim_time,
    pipeline_factor,
    slowdown,
)

from .loss import NAMES
from .measurements import Floats, Profile
from .priors import identifiable

_REASONS = {
    "alpha_c": "one micro-batch size was measured; half of its time is taken to be fixed",
    "alpha_n": "never ran on several nodes; taken to be as fast as inside a node, or free",
    "beta_n": "never more than two replicas across nodes; taken not to grow",
    "alpha_r": "never several replicas on one node; taken to be free",
    "beta_r": "never more than two replicas on one node; taken not to grow",
    "gamma": "fewer than two configurations with several replicas; taken not to overlap",
    "overlap": "one number of micro-batches and no stage times; taken to be an ideal pipeline",
    "gamma_c": "fewer than four micro-batch sizes; fixed and per-sample cost are taken to add",
    "contention": "one number of replicas per node; taken not to slow each other down",
    "overhead": "one number of micro-batches, or too few sizes with it; taken to be in alpha_c",
    "two_node_penalty": "two nodes and more than two were not compared; taken to be alike",
}
# An outlier is off by this factor of the usual error, and by at least this much.
_OUTLIER_FACTOR = 6.0
_LEAST_OUTLIER = 0.3
_MAD_TO_SIGMA = 1.4826


class RegimeError(NamedTuple):
    """Relative errors of predictions on the measurements of one regime."""

    name: str
    num_measurements: int
    mean_error: float
    """Mean of |predicted / measured - 1|, without outliers; `worst_error` is the largest."""
    worst_error: float


class Assumption(NamedTuple):
    """A parameter that no measurement determines."""

    parameter: str
    value: float
    reason: str


class FitReport(NamedTuple):
    """Errors and assumptions of a fit."""

    regimes: tuple[RegimeError, ...]
    """Accumulation steps, then optimizer steps by allocation; only measured regimes."""
    assumed: tuple[Assumption, ...]
    outliers: tuple[int, ...]
    """Rows with large errors while the others have small ones."""


def make_report(params: PerfParams, profile: Profile, shape: PerfParams) -> FitReport:
    """Return the errors of a fit on its measurements, and its assumptions. `shape` has the shares,
    checkpoint mode and schedule of the job.
    """
    accum, optim = _errors(params, profile)
    outlying = _outlying(accum) | _outlying(optim)
    nodes, several = profile.num_nodes, profile.num_replicas > 1
    regimes = (
        ("accumulation steps", accum, np.ones_like(several)),
        ("one replica", optim, ~several),
        ("one node", optim, several & (nodes == 1)),
        ("two nodes", optim, nodes == 2),
        ("three or more nodes", optim, nodes > 2),
        *_by_level(profile, optim),
    )
    known = identifiable(profile, shape)
    meaningless = {"overlap"} if shape.num_stages == 1 else set()
    if np.all(profile.num_microbatches == 1):
        meaningless.add("overhead")
    levels = profile.levels
    if levels and levels[0] > 1:
        known |= {"alpha_n": False, "beta_n": False}
    reasons = {**_REASONS, "growth_n": _growth_reason(params, known), **_level_reasons(levels)}
    assumed = tuple(
        Assumption(name, float(getattr(params, name)), reasons[name])
        for name in NAMES
        if not known[name] and name not in meaningless
    )
    return FitReport(
        regimes=tuple(
            _regime(name, errors[chosen], outlying[chosen])
            for name, errors, chosen in regimes
            if chosen.any()
        ),
        assumed=assumed,
        outliers=tuple(np.flatnonzero(outlying).tolist()),
    )


def _by_level(profile: Profile, errors: Floats) -> list[tuple[str, Floats, NDArray[np.bool_]]]:
    """Return a regime for every network level, if there is any besides the lowest."""
    levels = profile.levels
    if max(levels, default=1) == 1:
        return []
    across = profile.num_nodes > 1
    return [(f"network level {x}", errors, across & (profile.row_level == x)) for x in levels]


def _level_reasons(levels: list[int]) -> dict[str, str]:
    if not levels or levels[0] == 1:
        return {}
    only = f"several nodes met at network level {levels[0]} or above only"
    return {
        "alpha_n": f"{only}; level 1 is taken to be as fast as inside a node, or free",
        "beta_n": f"{only}; level 1 is taken to grow as inside a node, or not at all",
    }


def _growth_reason(params: PerfParams, known: dict[str, bool]) -> str:
    if not known["beta_n"]:
        return "never more than two replicas across nodes; nothing grows that it could bend"
    grown = "linear" if params.growth_n == 1 else "logarithmic"
    return f"fewer than three numbers of replicas across nodes; taken to be {grown}"


def _errors(params: PerfParams, profile: Profile) -> tuple[Floats, Floats]:
    slow = slowdown(params, profile.num_nodes, profile.num_replicas)
    factor = pipeline_factor(params, profile.num_microbatches)
    accum = compute_time(params, profile.micro_bsz) * slow * factor + params.overhead
    network = network_time(params, profile.num_nodes, profile.num_replicas, profile.row_level)
    optim = optim_time(params.gamma, accum, network)
    return np.log(accum / profile.accum_time), np.log(optim / profile.optim_time)


def _outlying(errors: Floats) -> NDArray[np.bool_]:
    usual = _MAD_TO_SIGMA * float(np.median(np.abs(errors)))
    return np.abs(errors) > max(_OUTLIER_FACTOR * usual, _LEAST_OUTLIER)


def _regime(name: str, errors: Floats, outlying: NDArray[np.bool_]) -> RegimeError:
    kept = errors[~outlying] if not outlying.all() else errors
    relative = np.abs(np.expm1(kept))
    return RegimeError(name, len(errors), float(relative.mean()), float(relative.max()))
