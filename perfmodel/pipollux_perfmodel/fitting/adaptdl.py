"""AdaptDL's fit, for comparison and migration: its loss, starting point and search.

    rmse(log T_accum) + rmse(log T_optim)
      + 1e-3·(γ - 1)² + 1e-2·((beta_n / alpha_n)² + (beta_r / alpha_r)²)

over the seven parameters of one stage (Qiao et al., OSDI'21, section 4.1; AdaptDL 0.2.11), by
L-BFGS-B from a fixed start with gradients from autograd. `fit_perf_params` finds a smaller loss in
less time, with a more accurate model; this fit reproduces AdaptDL's numbers.
"""

from __future__ import annotations

import threading
from typing import Any

import autograd
import autograd.numpy as anp
import numpy as np
import scipy.optimize
from numpy.typing import ArrayLike

from pipollux_perfmodel.timing.gpipe import Numbers
from pipollux_perfmodel.timing.params import PerfParams
from pipollux_perfmodel.timing.step_time import EPSILON

from .measurements import Profile, make_profile

_START = (0.1, 0.01, 0.1, 0.01, 0.1, 0.01, 1.001)
_LARGEST_GAMMA = 10.0
_INTER_NODE_FACTOR = 1.1

# autograd keeps one stack of traces for all threads, so only one at a time may differentiate.
_AUTOGRAD_LOCK = threading.Lock()


def fit_like_adaptdl(
    num_nodes: ArrayLike,
    num_replicas: ArrayLike,
    atomic_bsz: ArrayLike,
    accum_step_time: ArrayLike,
    optim_step_time: ArrayLike,
) -> PerfParams:
    """Return the parameters that AdaptDL 0.2.11 fits to the same measurements.

    Args:
        num_nodes: nodes of the allocation, shape (points,) like all following arguments.
        num_replicas: R.
        atomic_bsz: samples per replica in one forward and backward.
        accum_step_time: seconds of an accumulation step.
        optim_step_time: seconds of an optimizer step, including synchronization.

    Raises:
        ValueError: an argument is empty, of the wrong length, or out of range.

    Example:
        >>> params = fit_like_adaptdl([1, 1], [1, 2], [8, 16], [0.18, 0.26], [0.18, 0.31])
        >>> params.alpha_n == params.alpha_r * 1.1
        True
    """
    profile = make_profile(
        num_nodes, num_replicas, atomic_bsz, accum_step_time, optim_step_time, None, None
    )
    first, lower, upper = _bounds(profile)
    differentiated = autograd.grad(_loss)

    def gradient(values: Any, *args: Any) -> Any:
        # At a perfect fit the rmse has no derivative; AdaptDL's search ends there as well.
        with _AUTOGRAD_LOCK, np.errstate(divide="ignore", invalid="ignore"):
            return differentiated(values, *args)

    result = scipy.optimize.minimize(
        _loss,
        first,
        args=(profile,),
        jac=gradient,
        bounds=scipy.optimize.Bounds(lower, upper, keep_feasible=True),
    )
    values = result.x.tolist()
    if not np.any(profile.num_nodes > 1):
        values[2] = max(values[2], values[4] * _INTER_NODE_FACTOR)
        values[3] = max(values[3], values[5] * _INTER_NODE_FACTOR)
    return PerfParams(*values)


def _bounds(profile: Profile) -> tuple[list[float], list[float], list[float]]:
    first = list(_START)
    lower, upper = [EPSILON] * 6 + [1.0], [np.inf] * 6 + [_LARGEST_GAMMA]
    if len(np.unique(profile.micro_bsz)) == 1:
        first[0] = lower[0] = upper[0] = float(np.mean(profile.accum_time)) / 2
    several, across = profile.num_replicas > 1, profile.num_nodes > 1
    unseen: set[int] = set()
    if not across.any():
        unseen |= {2, 3}
    if not (several & ~across).any():
        unseen |= {4, 5}
    if not (profile.num_replicas > 2).any():
        unseen |= {3, 5}
    for index in unseen:
        first[index] = upper[index] = lower[index]
    return first, lower, upper


def _loss(values: Numbers, profile: Profile) -> Numbers:
    # The same order of terms as AdaptDL: rounding errors accumulate over the long search.
    params = PerfParams(*values)
    nodes, replicas = profile.num_nodes, profile.num_replicas
    accum = params.alpha_c + params.beta_c * profile.micro_bsz
    seen = [nodes > 1, replicas > 1]
    constant = anp.select(seen, [params.alpha_n, params.alpha_r], EPSILON)
    slope = anp.select(seen, [params.beta_n, params.beta_r], EPSILON)
    network = constant + slope * anp.maximum(replicas - 2, EPSILON)
    log_optim = anp.log(accum**params.gamma + network**params.gamma) / params.gamma
    return (
        _rmse(anp.log(accum), np.log(profile.accum_time))
        + _rmse(log_optim, np.log(profile.optim_time))
        + 1e-3 * (params.gamma - 1) ** 2
        + 1e-2 * ((params.beta_n / params.alpha_n) ** 2 + (params.beta_r / params.alpha_r) ** 2)
    )


def _rmse(predicted: Numbers, measured: Numbers) -> Numbers:
    return anp.sqrt(((predicted - measured) ** 2).mean())
