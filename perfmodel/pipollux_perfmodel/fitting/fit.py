"""Fit of the step time parameters to measured step times, as in Pollux during training.

`loss` defines the loss, `priors` the assumptions about unmeasured regimes. The search differs from
AdaptDL's (`adaptdl`): it starts from straight lines through the data and runs twice, first with a
strongly rounded tip of the rmse, whose cone has no gradient at a perfect fit. It uses SLSQP with
the same bounds instead of L-BFGS-B, which since SciPy 1.15 waits for the threads of OpenBLAS in
every step and takes twenty times as long on a machine that is busy training (scipy/scipy#22438).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from pipollux_perfmodel.timing.params import (
    BACKWARD_SHARE,
    FORWARD_SHARE,
    Checkpoints,
    PerfParams,
    ScheduleKind,
    check_params,
    check_shares,
    even_shares,
)
from pipollux_perfmodel.timing.step_time import EPSILON

from .loss import (
    NAMES,
    NEUTRAL,
    Rows,
    is_time,
    loss_and_gradient,
    make_rows,
    rmse,
    with_values,
)
from .measurements import Floats, Profile, make_profile, merge, stage_shares
from .priors import StartingPoint, place_levels, start
from .report import FitReport, make_report

_LONGEST = 1e8  # seconds, an upper bound that keeps the search from overflowing
_LIMITS = {
    "gamma": (1.0, 10.0),
    "overlap": (0.0, 1.0),
    "gamma_c": (1.0, 10.0),
    "contention": (0.0, 10.0),
    "growth_n": (-2.0, 2.0),
    "two_node_penalty": (0.0, 10.0),
}


class _Pass(NamedTuple):
    rounding: float
    """Relative error below which the rmse is smoothed."""
    tolerance: float
    by_logarithm: bool
    """Whether times are varied by their logarithms. Multiplicative steps move fast along the valley
    between gamma and the network times, but slowly towards zero."""


_PASSES = (_Pass(1e-2, 1e-6, by_logarithm=False), _Pass(1e-4, 1e-9, by_logarithm=True))
_POLISH = (_Pass(1e-6, 1e-13, by_logarithm=True), _Pass(1e-9, 1e-16, by_logarithm=True))
_ROUNDING = _PASSES[-1].rounding
_MAX_ITERATIONS = 150
# Relative error of AdaptDL's seven parameters below which additional ones are not needed. Formulas
# reach it, measured clusters do not.
_PLAIN_ENOUGH = 2e-3
_NEARLY = 2e-2  # below this a finer search may reach it
_EXTRAS = ("gamma_c", "contention", "growth_n", "two_node_penalty", "overhead")


class FitResult(NamedTuple):
    """The result of a fit."""

    perf_params: PerfParams
    report: FitReport


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
    checkpoint: Checkpoints = "never",
    schedule: ScheduleKind = "gpipe",
    chunks_per_stage: int = 1,
    sync_every: int = 0,
    sync_overlap: int = 0,
    level: ArrayLike | None = None,
) -> PerfParams:
    """Fit step time parameters to measurements; safe to call from several threads.

    Each measurement is a step, or the mean over the steps of one configuration; all arrays have
    shape (points,). Parameters that the data do not determine follow `priors`. The overlap of
    stages is fitted with several stages and either compute times or several M; otherwise it is 1.

    Args:
        num_nodes: nodes of the allocation.
        num_replicas: R.
        atomic_bsz: samples per replica in one forward and backward.
        accum_step_time: seconds of an accumulation step.
        optim_step_time: seconds of an optimizer step, including synchronization.
        num_microbatches: M; None: 1 everywhere.
        forward_shares: share of compute time in each stage's forward; None: one stage.
        backward_shares: the same for the backward.
        compute_time: seconds of one micro-batch summed over stages, forward and backward, nan if
        not measured; None: never measured. Not used with one stage.
        checkpoint: the recomputed micro-batches, for all stages or per stage.
        schedule: "gpipe", "1f1b" or "interleaved", the order of the stages' work.
        chunks_per_stage: V of "interleaved".
        sync_every: H of replicas that push and pull. Their `optim_step_time` is that of a step with
        a whole push and pull after it, whatever H is.
        sync_overlap: τ of such replicas.
        level: network level at which the nodes meet, 1 for the lowest above the node; None: 1
        everywhere. With several levels, each has its own alpha and beta.

    Raises:
        ValueError: an argument is empty, of the wrong length, or out of range.

    Example:
        >>> params = fit_perf_params([1, 1], [1, 1], [8, 16], [0.18, 0.26], [0.18, 0.26])
        >>> round(params.alpha_c, 3), round(params.beta_c, 3)
        (0.1, 0.01)
    """
    shape = _shape(forward_shares, backward_shares, checkpoint, schedule, chunks_per_stage)
    shape = check_params(shape._replace(sync_every=sync_every, sync_overlap=sync_overlap))
    several = shape.num_stages > 1
    profile = make_profile(
        num_nodes,
        num_replicas,
        atomic_bsz,
        accum_step_time,
        optim_step_time,
        num_microbatches,
        compute_time if several else None,
        level,
    )
    return _fit(profile, shape)


def fit_measurements(
    num_nodes: ArrayLike,
    num_replicas: ArrayLike,
    atomic_bsz: ArrayLike,
    accum_step_time: ArrayLike,
    optim_step_time: ArrayLike,
    *,
    num_microbatches: ArrayLike | None = None,
    forward: ArrayLike | None = None,
    backward: ArrayLike | None = None,
    num_stages: int = 1,
    checkpoint: Checkpoints = "never",
    schedule: ScheduleKind = "gpipe",
    chunks_per_stage: int = 1,
    level: ArrayLike | None = None,
) -> FitResult:
    """Fit step time parameters to measurements, and report their errors.

    Like `fit_perf_params`, but takes stage times. Without stage times, stages count as equally
    slow, and the pipeline's gain can only be determined from steps with several M.

    Args:
        num_nodes: nodes of the allocation, shape (points,) like all following arguments.
        num_replicas: R.
        atomic_bsz: samples per replica in one forward and backward.
        accum_step_time: seconds of an accumulation step.
        optim_step_time: seconds of an optimizer step.
        num_microbatches: M; None: 1 everywhere.
        forward: seconds of one micro-batch's forward in each stage, shape (points, num_stages), nan
        if not measured; None: never measured.
        backward: the same for the backward, including recomputation.
        num_stages: K.
        checkpoint: the recomputed micro-batches, for all stages or per stage.
        schedule: "gpipe", "1f1b" or "interleaved", the order of the stages' work.
        chunks_per_stage: V of "interleaved".
        level: network level at which the nodes meet; None: 1 everywhere.

    Raises:
        ValueError: an argument is empty, of the wrong shape, or out of range.
    """
    forward_shares, backward_shares = even_shares(num_stages)
    compute: ArrayLike | None = None
    if forward is not None and backward is not None:
        measured = stage_shares(forward, backward, num_stages)
        forward_shares, backward_shares = measured.forward_shares, measured.backward_shares
        compute = measured.compute_time if num_stages > 1 else None
    elif (forward is None) != (backward is None):
        missing = "forward" if forward is None else "backward"
        raise ValueError(f"{missing} is missing; give both or none")
    profile = make_profile(
        num_nodes,
        num_replicas,
        atomic_bsz,
        accum_step_time,
        optim_step_time,
        num_microbatches,
        compute,
        level,
    )
    shape = _shape(forward_shares, backward_shares, checkpoint, schedule, chunks_per_stage)
    params = _fit(profile, shape)
    return FitResult(params, make_report(params, profile, shape))


def _fit(profile: Profile, shape: PerfParams) -> PerfParams:
    merged = merge(profile)
    rows = make_rows(merged, shape)
    begin = start(merged, shape)
    found = _search_all(rows, _without_extras(begin), _PASSES)
    if rmse(found.values, rows) < _NEARLY:
        found = _search_all(rows, found, _POLISH)
    if rmse(found.values, rows) >= _PLAIN_ENOUGH:
        # Additional parameters reduce the error, unless their search gets stuck.
        more = _search_all(rows, begin, _PASSES)
        found = min(more, found, key=lambda x: loss_and_gradient(x.values, rows, _ROUNDING)[0])
    values = found.values.tolist()
    params, further = with_values(shape, values[: len(NAMES)]), values[len(NAMES) :]
    return place_levels(params, further, merged)


def _without_extras(begin: StartingPoint) -> StartingPoint:
    extra = np.isin(NAMES, _EXTRAS)
    values, free = begin.values.copy(), begin.free.copy()
    values[: len(NAMES)][extra] = np.array(NEUTRAL)[extra]
    free[: len(NAMES)][extra] = False
    return StartingPoint(values, free)


def _search_all(rows: Rows, begin: StartingPoint, passes: Sequence[_Pass]) -> StartingPoint:
    for search in passes:
        begin = begin._replace(values=_search(rows, begin, search))
    return begin


def _shape(
    forward: Sequence[float] | None,
    backward: Sequence[float] | None,
    checkpoint: Checkpoints,
    schedule: ScheduleKind,
    chunks_per_stage: int,
) -> PerfParams:
    if (forward is None) != (backward is None):
        missing = "forward_shares" if forward is None else "backward_shares"
        raise ValueError(f"{missing} is missing; give both or none")
    shares = tuple(forward or (FORWARD_SHARE,)), tuple(backward or (BACKWARD_SHARE,))
    check_shares(*shares)
    nothing = PerfParams(EPSILON, EPSILON, EPSILON, EPSILON, EPSILON, EPSILON, 1.0)
    return check_params(
        nothing._replace(
            forward_shares=shares[0],
            backward_shares=shares[1],
            checkpoint=checkpoint,
            schedule=schedule,
            chunks_per_stage=chunks_per_stage,
        )
    )


def _search(rows: Rows, begin: StartingPoint, search: _Pass) -> Floats:
    """Return the values of `NAMES` that minimize the loss, starting from `begin`. The variables are
    the free times relative to their start (or their logarithms), then the others.
    """
    from scipy.optimize import Bounds, minimize  # imports slowly

    times = is_time(len(begin.values))
    times_free, others_free = (np.flatnonzero(begin.free & kind) for kind in (times, ~times))
    free, num_times = np.append(times_free, others_free), len(times_free)
    scales, others = begin.values[free[:num_times]], free[num_times:]

    def decode(variables: Floats) -> Floats:
        values = begin.values.copy()
        relative = variables[:num_times]
        times = np.exp(relative) if search.by_logarithm else relative
        values[free] = np.concatenate((scales * times, variables[num_times:]))
        return values

    def objective(variables: Floats) -> tuple[float, Floats]:
        values = decode(variables)
        total, gradient = loss_and_gradient(values, rows, search.rounding)
        gradient = gradient[free]
        gradient[:num_times] *= values[free[:num_times]] if search.by_logarithm else scales
        return total, gradient

    ends = np.array((EPSILON / scales, np.ones(num_times), _LONGEST / scales))
    lower, first, upper = np.log(ends) if search.by_logarithm else ends
    limits = np.array([_LIMITS[NAMES[index]] for index in others]).reshape(-1, 2)
    lower, upper = np.append(lower, limits[:, 0]), np.append(upper, limits[:, 1])
    first = np.clip(np.append(first, begin.values[others]), lower, upper)
    result = minimize(
        objective,
        first,
        jac=True,
        method="SLSQP",
        bounds=Bounds(lower, upper),
        options={"maxiter": _MAX_ITERATIONS, "ftol": search.tolerance},
    )
    return decode(np.clip(result.x, lower, upper))
