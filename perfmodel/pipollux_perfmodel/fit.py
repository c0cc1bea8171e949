"""Fit of the step time parameters to measured step times, as Pollux does while a job trains.

The loss is AdaptDL's, with a term for measured compute times where there are any:

    rmse(log T_pipe) + rmse(log T_optim) + 0.1·rmse(log C)
      + 1e-3·(γ - 1)² + 1e-2·((beta_n / alpha_n)² + (beta_r / alpha_r)²) + 1e-3·(ω - 1)²

minimised within AdaptDL's bounds by exact gradients. Three things differ from AdaptDL, for they
find smaller losses in less time: the search starts from straight lines through the data; it runs
twice, for a well rounded tip of the rmse first (its cone has no gradient where a fit is perfect);
and it is SLSQP, for since SciPy 1.15 L-BFGS-B waits for the threads of OpenBLAS at every step,
milliseconds on a machine that is busy training (scipy/scipy#22438).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import autograd
import autograd.numpy as anp
import numpy as np
import scipy.optimize
from numpy.typing import ArrayLike

from .params import BACKWARD_SHARE, FORWARD_SHARE, PerfParams, check_shares
from .priors import NAMES, NUM_TIMES, Start, raise_unseen, start
from .profile import Floats, Profile, make_profile
from .steptime import (
    EPSILON,
    ArrayModule,
    Numbers,
    compute_time,
    network_time,
    optim_time,
    pipeline_factor,
)

_LONGEST = 1e8  # seconds, an upper bound that only keeps the search from overflowing
_LIMITS = {"gamma": (1.0, 10.0), "overlap": (0.0, 1.0)}
_COMPUTE_WEIGHT = 0.1  # step times decide the predictions; compute times only split them up


class _Pass(NamedTuple):
    """One of the two searches."""

    rounding: float
    """Relative error below which the rmse is rounded off."""
    tolerance: float
    """Change of the loss at which the search ends."""
    by_logarithm: bool
    """Whether times vary by their logarithms. Steps of ratios go far along the valley between
    gamma and the network times, but creep towards zero."""


_COARSE = _Pass(1e-2, 1e-6, by_logarithm=False)
_FINE = _Pass(1e-4, 1e-9, by_logarithm=True)
_MAX_ITERATIONS = 100

# autograd keeps one stack of traces for all threads, so they take turns at it.
_AUTOGRAD_LOCK = threading.Lock()


def fit_perf_params(
    num_nodes: ArrayLike,
    num_replicas: ArrayLike,
    atomic_bsz: ArrayLike,
    accum_step_time: ArrayLike,
    optim_step_time: ArrayLike,
    *,
    num_microbatches: ArrayLike | None = None,
    forward_shares: Sequence[float] | None = None,
    backward_shares: Sequence[float] | None = None,
    compute_time: ArrayLike | None = None,
) -> PerfParams:
    """Fit step time parameters to measurements; safe to call from several threads.

    Each measurement is the mean over the steps of one configuration; all arrays have shape
    (points,). What the data cannot tell is assumed as `priors` has it. The overlap of stages is
    fitted when there are several, and either compute times or more than one number of
    micro-batches were measured; else it is 1.

    Args:
        num_nodes: nodes that the replicas lay on.
        num_replicas: R.
        atomic_bsz: samples per replica in one forward and backward.
        accum_step_time: seconds of an accumulation step.
        optim_step_time: seconds of an optimizer step, its synchronisation included.
        num_microbatches: M; None: 1 everywhere.
        forward_shares: share of compute time in each stage's forward; None: one stage.
        backward_shares: share of compute time in each stage's backward; None: one stage.
        compute_time: seconds of one micro-batch summed over stages, forward and backward, not a
            number where not measured; None: never measured. Not used with one stage.

    Raises:
        ValueError: naming the argument that is empty, of another length, or out of range.
    """
    shape = _shape(forward_shares, backward_shares)
    profile = make_profile(
        num_nodes,
        num_replicas,
        atomic_bsz,
        accum_step_time,
        optim_step_time,
        num_microbatches,
        compute_time if shape.num_stages > 1 else None,
    )
    begin = start(profile, shape)
    for search in (_COARSE, _FINE):
        begin = begin._replace(values=_search(profile, shape, begin, search))
    return raise_unseen(_params(shape, begin.values.tolist()), profile)


def loss(params: PerfParams, profile: Profile, xp: ArrayModule, rounding: float = 0.0) -> Numbers:
    """Return the loss of parameters, its rmse rounded off below `rounding`."""
    compute = compute_time(params, profile.micro_bsz)
    accum = compute * pipeline_factor(params, profile.num_microbatches)
    network = network_time(params, profile.num_nodes, profile.num_replicas, xp)
    optim = optim_time(params.gamma, accum, network, xp)
    error = _rmse(accum, profile.accum_time, xp, rounding)
    error = error + _rmse(optim, profile.optim_time, xp, rounding)
    measured = np.flatnonzero(~np.isnan(profile.compute_time))
    if measured.size:
        there = _rmse(compute[measured], profile.compute_time[measured], xp, rounding)
        error = error + _COMPUTE_WEIGHT * there
    growth = (params.beta_n / params.alpha_n) ** 2 + (params.beta_r / params.alpha_r) ** 2
    extremes = (params.gamma - 1) ** 2 + (params.overlap - 1) ** 2
    return error + 1e-3 * extremes + 1e-2 * growth


def _rmse(predicted: Numbers, measured: Floats, xp: ArrayModule, rounding: float) -> Numbers:
    """Return the root mean square of relative (logarithmic) errors."""
    errors = xp.log(predicted) - np.log(measured)
    return xp.sqrt(xp.mean(errors**2) + rounding**2)


def _shape(forward: Sequence[float] | None, backward: Sequence[float] | None) -> PerfParams:
    """Return parameters that know nothing but the shares."""
    if (forward is None) != (backward is None):
        missing = "forward_shares" if forward is None else "backward_shares"
        raise ValueError(f"{missing} is missing; give both or none")
    shares = tuple(forward or (FORWARD_SHARE,)), tuple(backward or (BACKWARD_SHARE,))
    check_shares(*shares)
    nothing = PerfParams(EPSILON, EPSILON, EPSILON, EPSILON, EPSILON, EPSILON, 1.0)
    return nothing._replace(forward_shares=shares[0], backward_shares=shares[1])


def _params(shape: PerfParams, values: Sequence[Numbers]) -> PerfParams:
    return shape._replace(**dict(zip(NAMES, values, strict=True)))


def _search(profile: Profile, shape: PerfParams, begin: Start, search: _Pass) -> Floats:
    """Return the numbers of `NAMES` that minimise the loss, from `begin`.

    The variables are the free times relative to where they begin (or the logarithms of that), then
    gamma and overlap as they are, where free.
    """
    free = np.flatnonzero(begin.free)
    num_times = np.count_nonzero(free < NUM_TIMES)
    scales, others = begin.values[free[:num_times]], free[num_times:]

    def decode(variables: Numbers, xp: ArrayModule) -> list[Numbers]:
        values: list[Numbers] = begin.values.tolist()
        relative = variables[:num_times]
        times = scales * (xp.exp(relative) if search.by_logarithm else relative)
        for position, index in enumerate(free):
            values[index] = times[position] if position < num_times else variables[position]
        return values

    def objective(variables: Numbers) -> Numbers:
        return loss(_params(shape, decode(variables, anp)), profile, anp, search.rounding)

    differentiated = autograd.value_and_grad(objective)

    def locked(variables: Floats) -> Any:
        with _AUTOGRAD_LOCK:
            return differentiated(variables)

    ends = np.array((EPSILON / scales, np.ones(num_times), _LONGEST / scales))
    lower, first, upper = np.log(ends) if search.by_logarithm else ends
    limits = np.array([_LIMITS[NAMES[index]] for index in others]).reshape(-1, 2)
    lower, upper = np.append(lower, limits[:, 0]), np.append(upper, limits[:, 1])
    result = scipy.optimize.minimize(
        locked,
        np.append(first, begin.values[others]),
        jac=True,
        method="SLSQP",
        bounds=scipy.optimize.Bounds(lower, upper),
        options={"maxiter": _MAX_ITERATIONS, "ftol": search.tolerance},
    )
    return np.array(decode(np.clip(result.x, lower, upper), np), dtype=float)
