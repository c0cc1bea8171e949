"""Step time parameters for a different number of stages, without a profile of the layers."""

from __future__ import annotations

import math

from pipollux_perfmodel.timing.params import PerfParams, modes_of_cut


def restage(params: PerfParams, num_stages: int) -> PerfParams:
    """Return parameters for a different number of stages, without a profile of the layers.

    Assumes the same C(b), equally slow stages with equally many parameters, and the average
    measured time for every copy, or 0 without measured copies. With the same number of stages the
    parameters stay unchanged. Real cuts are less even, so this is an upper bound of their speed.

    >>> one = PerfParams(0.1, 0.01, 0.2, 0.02, 0.05, 0.01, 1.5)
    >>> [round(share, 3) for share in restage(one, 2).backward_shares]
    [0.333, 0.333]
    """
    if num_stages < 1:
        raise ValueError(f"num_stages is {num_stages}; give at least one stage")
    if num_stages == params.num_stages:
        return params
    # () means all of T_net after the backward, which for one stage equals its own share.
    synchronized_late = params.num_stages > 1 and not params.gradient_shares
    return params._replace(
        forward_shares=_evenly(params.forward_shares, num_stages),
        backward_shares=_evenly(params.backward_shares, num_stages),
        forward_alpha_shares=_evenly(params.forward_alpha_shares, num_stages),
        backward_alpha_shares=_evenly(params.backward_alpha_shares, num_stages),
        alpha_t=_average(params.alpha_t, num_stages - 1),
        beta_t=_average(params.beta_t, num_stages - 1),
        checkpoint=modes_of_cut(params.checkpoint, num_stages),
        gradient_shares=() if synchronized_late else (1 / num_stages,) * num_stages,
        tied_exchange=params.tied_exchange if num_stages > 1 else 0.0,
    )


def _evenly(shares: tuple[float, ...], num_stages: int) -> tuple[float, ...]:
    return (math.fsum(shares) / num_stages,) * num_stages if shares else ()


def _average(values: tuple[float, ...], num_cuts: int) -> tuple[float, ...]:
    return (math.fsum(values) / len(values),) * num_cuts if values else ()
