"""Step time of a pipeline with data parallelism.

The compute term is GPipe's (`gpipe`) or 1F1B's (`one_f_one_b`); the network term and the γ-norm
that combines both are Pollux's (Qiao et al., OSDI'21, section 3.2, as in AdaptDL), each with
additional parameters. Every function broadcasts over its arguments.

    K, R, M   stages, replicas, micro-batches          n   nodes that the replicas lie on
    b         samples per micro-batch                  s   accumulation steps
    φ_k, ψ_k  forward and backward share of stage k    ω   overlap of the stages
    ρ_k       share of T_net for stage k's gradients   κ   contention of replicas on a node
    p, δ      growth across nodes, two-node penalty    (x, y)_q = (x^q + y^q)^(1/q)
    ε = 1e-8  stands for zero seconds and for zero replicas beyond two, as in AdaptDL

    C(b)      = (alpha_c, beta_c·b)_gamma_c · (1 + κ·(R/n - 1))
    f_k, g_k  = φ_k·C(b), ψ_k·C(b)
    fin_i     = (1 - ω)·(stages taking turns) + ω·(GPipe or 1F1B)
    T_pipe    = overhead + fin_0
    T_net     = (alpha_n + beta_n·max(((R - 1)^p - 1)/p, ε))·(1 + δ·[n = 2])   n > 1
                alpha_r + beta_r·max(R - 2, ε)                                 n = 1, R > 1
                ε                                                              R = 1
    alpha_n, beta_n are those of the network level at which the nodes meet (`PerfParams.at_level`)
    E         = end of the last all-reduce, ρ_i·T_net from overhead + fin_i on, less T_pipe
    H         = B - E, with B = T_net over one link, max ρ·T_net over one link each
    T_optim   = H + (T_pipe - H, E)_γ + T_tie
    T_iter    = s·T_pipe + T_optim

The γ-norm combines the parts in which compute and network are not otherwise overlapped, so no
second of compute hides two of the network, and less work never lengthens an iteration. Without
gradient shares, as in AdaptDL, E is T_net and H is 0. Nothing hides T_tie, which follows the
averages and is 0 unless stages of several processes share parameters.

Replicas that push to servers and pull from them every h steps (`sync_every`) train on their own in
between, with τ steps (`sync_overlap`) during which a push and pull is under way:

    T_iter    = (s + 1)·T_pipe + T_tie + max(T_net - τ·(s + 1)·T_pipe, 0)/h
    h         = ⌈max(T_net - τ·(s + 1)·T_pipe, 0) / (0.05·(s + 1)·T_pipe)⌉, at least 1, if `AUTO`

Without alpha shares, copies or `except_last` every schedule is one number, F(M) = fin_0 / C(b):

    F(M)      = (1 - ω)·M + ω·(1 + (M - 1)·(max φ + max ψ))                      by GPipe
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from . import interleaved, one_f_one_b
from .gpipe import (
    Numbers,
    StageTimes,
    final_times,
    network_end,
    serial_final_times,
)
from .params import AUTO, SYNC_SHARE, PerfParams, stage_modes

EPSILON = 1e-8
ZERO_POWER = 1e-6
"""Below this, (x^p - 1)/p is log(x) to within rounding."""
_LEAST = 1e-300  # so that the norm of two zeros is about zero
_ROUNDING = 1e-12
_NOTHING = 1e-16  # seconds; a γ-norm with zero has no derivative


class StepTime(NamedTuple):
    """Times of one iteration in seconds; floats, or arrays of one shape."""

    accum_time: Numbers
    """T_pipe, of one accumulation step."""
    network_time: Numbers
    """T_net, of one synchronization of gradients."""
    optim_time: Numbers
    """T_optim, of the optimizer step: its forward, backward, synchronization and T_tie."""
    total: Numbers
    """T_iter = s·T_pipe + T_optim."""


def norm(x: Numbers, y: Numbers, power: Numbers) -> Numbers:
    """Return (x^power + y^power)^(1/power); never below either, and x + y for power 1."""
    # Factors out the larger number, so that no power overflows or underflows.
    larger = np.maximum(x, y)
    if larger.size and larger.min() > _LEAST and larger.max() < np.inf:
        # One of both powers is 1.
        return larger * (1 + (np.minimum(x, y) / larger) ** power) ** (1 / power)
    largest = np.maximum(larger, _LEAST)
    return largest * ((x / largest) ** power + (y / largest) ** power) ** (1 / power)


def compute_time(params: PerfParams, micro_bsz: Numbers) -> Numbers:
    """Return C(b): seconds of one micro-batch over all stages, on a node without other replicas."""
    return _line(params.alpha_c, params.beta_c * micro_bsz, params.gamma_c)


def slowdown(params: PerfParams, num_nodes: Numbers, num_replicas: Numbers) -> Numbers:
    """Return 1 + κ·(R/n - 1), the slowdown of compute on shared nodes."""
    return 1 + params.contention * (num_replicas / num_nodes - 1)


def stage_times(params: PerfParams, micro_bsz: Numbers) -> StageTimes:
    """Return the times of one micro-batch in every stage, on a node without other replicas."""
    compute = _stage_computes(params, micro_bsz)
    offsets, slopes = params.alpha_t, params.beta_t
    boundaries = range(max(len(offsets), len(slopes)))
    transfer = [
        (offsets[k] if offsets else 0.0) + (slopes[k] if slopes else 0.0) * micro_bsz
        for k in boundaries
    ]
    return compute._replace(transfer=transfer or [0.0] * (params.num_stages - 1))


def pipeline_factor(params: PerfParams, num_microbatches: Numbers) -> Numbers:
    """Return F(M) = fin_0 / C(b), if all stages have the same ratio of fixed to other cost."""
    if params.schedule != "gpipe" or "except_last" in params.checkpoint:  # a mode, or several
        return _unit_final_times(params, num_microbatches)[0]
    slowest = max(params.forward_shares) + max(params.backward_shares)
    one_by_one, ideal = num_microbatches, 1 + (num_microbatches - 1) * slowest
    return (1 - params.overlap) * one_by_one + params.overlap * ideal


def pipeline_time(params: PerfParams, micro_bsz: Numbers, num_microbatches: Numbers) -> Numbers:
    """Return T_pipe of replicas that share no nodes, without the overhead."""
    if is_uniform(params):
        factor = pipeline_factor(params, num_microbatches)
        return compute_time(params, micro_bsz) * factor
    return _final_times(params, stage_times(params, micro_bsz), num_microbatches)[0]


def network_time(
    params: PerfParams, num_nodes: Numbers, num_replicas: Numbers, level: Numbers = 1
) -> Numbers:
    """Return T_net: seconds to synchronize the gradients of all replicas. `level` is the network
    level at which several nodes meet.
    """
    alpha_n, beta_n = _of_level(params, level)
    beyond_two = np.maximum(num_replicas - 2, EPSILON)
    growth = _growth(params.growth_n, num_replicas, beyond_two)
    penalty = 1 + params.two_node_penalty * (num_nodes == 2)
    across = (alpha_n + beta_n * growth) * penalty
    inside = params.alpha_r + params.beta_r * beyond_two
    return np.where(num_nodes > 1, across, np.where(num_replicas > 1, inside, EPSILON))


def optim_time(gamma: Numbers, accum: Numbers, network: Numbers) -> Numbers:
    """Return T_optim without hidden parts: the γ-norm of T_pipe and T_net; below neither."""
    return norm(accum, network, gamma)


def step_time(
    params: PerfParams,
    num_nodes: Numbers,
    num_replicas: Numbers,
    atomic_bsz: Numbers,
    accum_steps: Numbers,
    num_microbatches: Numbers,
    level: Numbers = 1,
) -> StepTime:
    """Return all times of an iteration; b = atomic_bsz / M."""
    micro_bsz = atomic_bsz / num_microbatches
    slow = slowdown(params, num_nodes, num_replicas)
    network = network_time(params, num_nodes, num_replicas, level)
    if is_simple(params):
        accum = pipeline_time(params, micro_bsz, num_microbatches) * slow + params.overhead
        optim = optim_time(params.gamma, accum, network)
    else:
        final = _all_final_times(params, micro_bsz, num_microbatches, slow)
        accum = final[0]
        optim = _overlapped_optim_time(params, final, network)
    if pushes(params):
        optim = accum + _exposed(params, network, (accum_steps + 1) * accum)
    optim = optim + params.tied_exchange
    return StepTime(accum, network, optim, accum_steps * accum + optim)


def is_uniform(params: PerfParams) -> bool:
    """Return whether every stage's time is a constant share of C(b), and copies are free."""
    return not (params.forward_alpha_shares or params.alpha_t or params.beta_t)


def is_simple(params: PerfParams) -> bool:
    """Return whether T_pipe is a multiple of C(b), and all of T_net follows it in every step."""
    follows = not params.gradient_shares or params.num_stages == 1
    return is_uniform(params) and follows and not pushes(params)


def pushes(params: PerfParams) -> bool:
    """Return whether replicas push and pull, rather than average gradients in every step."""
    return bool(np.any(np.not_equal(params.sync_every, 0)))


def sync_interval(params: PerfParams, network: Numbers, compute: Numbers) -> Numbers:
    """Return h, the steps between two pushes, for T_net and the compute time of a step.

    >>> from pipollux_perfmodel import PerfParams
    >>> params = PerfParams(0.1, 0.01, 0.2, 0.02, 0.05, 0.01, 1.0, sync_every=AUTO)
    >>> int(sync_interval(params, 2.0, 0.5)), int(sync_interval(params, 0.01, 0.5))
    (80, 1)
    """
    left = np.maximum(network - params.sync_overlap * compute, 0.0)
    affordable = np.maximum(np.ceil(left / (SYNC_SHARE * compute) * (1 - _ROUNDING)), 1.0)
    return np.where(np.equal(params.sync_every, AUTO), affordable, params.sync_every)


class SyncCost(NamedTuple):
    """What pushes and pulls cost on one allocation."""

    interval: int
    """h, the steps between two of them."""
    seconds: float
    """T_net, of one push and pull of all parameters."""
    share: float
    """Part of the time of an iteration in which replicas wait for them."""

    def __str__(self) -> str:
        steps = "after every step" if self.interval == 1 else f"every {self.interval} steps"
        if self.seconds < 1e-6:
            return f"Replicas push and pull {steps}; what this takes was not measured."
        took = f"{self.seconds * 1e3:.3g} ms" if self.seconds < 1.0 else f"{self.seconds:.3g} s"
        return (
            f"Replicas push and pull {steps}: {took} each time, during which training waits for "
            f"{self.share:.1%} of the time."
        )


def sync_cost(
    params: PerfParams,
    num_nodes: int,
    num_replicas: int,
    atomic_bsz: int,
    accum_steps: int = 0,
    num_microbatches: int = 1,
) -> SyncCost | None:
    """Return what pushes and pulls cost; None for an all-reduce per step.

    >>> params = PerfParams(0.1, 0.0, 4.0, 0.0, 0.05, 0.0, 1.0, sync_every=100)
    >>> sync_cost(params, 2, 2, atomic_bsz=8).interval
    100
    """
    if not pushes(params):
        return None
    sizes = (num_nodes, num_replicas, atomic_bsz, accum_steps, num_microbatches)
    time = step_time(params, *map(np.asarray, sizes))
    compute = (accum_steps + 1) * time.accum_time
    interval = int(sync_interval(params, time.network_time, compute))
    exposed = float(_exposed(params, time.network_time, compute))
    return SyncCost(interval, float(time.network_time), exposed / float(time.total))


def _exposed(params: PerfParams, network: Numbers, compute: Numbers) -> Numbers:
    """Return the part of a push and pull that delays a step, for the compute time of a step."""
    left = np.maximum(network - params.sync_overlap * compute, 0.0)
    return left / sync_interval(params, network, compute)


def _of_level(params: PerfParams, level: Numbers) -> tuple[Numbers, Numbers]:
    # Of stacked jobs alpha_n is an array, and the level is always 1 (`PerfParams.at_level`).
    if not params.alpha_levels or (isinstance(level, int) and level == 1):
        return params.alpha_n, params.beta_n
    above = np.minimum(np.asarray(level, np.int64) - 1, len(params.alpha_levels))
    every = (params.alpha_n, *params.alpha_levels), (params.beta_n, *params.beta_levels)
    alpha_n, beta_n = (np.array(values)[above] for values in every)
    return alpha_n, beta_n


def _line(offset: Numbers, slope: Numbers, power: Numbers) -> Numbers:
    if isinstance(power, float) and power == 1.0:
        return offset + slope
    return norm(offset, slope, power)


def _stage_computes(params: PerfParams, micro_bsz: Numbers) -> StageTimes:
    if not params.forward_alpha_shares:
        whole = compute_time(params, micro_bsz)
        unit = _unit_times(params)
        forward, backward, last = ([share * whole for share in part] for part in unit[:3])
        same = unit.last_backward is unit.backward
        return StageTimes(forward, backward, backward if same else last, [])
    parts = (
        (params.forward_alpha_shares, params.forward_shares),
        (params.backward_alpha_shares, params.backward_shares),
    )
    forward, backward = (
        [
            _line(of_alpha * params.alpha_c, of_beta * params.beta_c * micro_bsz, params.gamma_c)
            for of_alpha, of_beta in zip(*part, strict=True)
        ]
        for part in parts
    )
    return StageTimes(forward, backward, _last_backward(params, forward, backward), [])


def _unit_times(params: PerfParams) -> StageTimes:
    forward, backward = list(params.forward_shares), list(params.backward_shares)
    last = _last_backward(params, forward, backward)
    return StageTimes(forward, backward, last, [0.0] * (params.num_stages - 1))


def _last_backward(
    params: PerfParams, forward: list[Numbers], backward: list[Numbers]
) -> list[Numbers]:
    if "except_last" not in params.checkpoint:  # which is a mode, or several
        return backward
    modes = stage_modes(params.checkpoint, params.num_stages)
    return [
        np.maximum(g - f, 0.0) if mode == "except_last" else g
        for f, g, mode in zip(forward, backward, modes, strict=True)
    ]


def _unit_final_times(params: PerfParams, num_microbatches: Numbers) -> list[Numbers]:
    unit = _unit_times(params)
    if params.schedule == "gpipe":
        return _final_times(params, unit, num_microbatches)
    shares = tuple(tuple(map(float, part)) for part in unit[:3])
    counts, inverse = np.unique(num_microbatches, return_inverse=True)
    of_count = [_ideal_of_one(params, shares, count) for count in counts.tolist()]
    shape = np.shape(num_microbatches)
    ideal = [row[inverse].reshape(shape)[()] for row in np.array(of_count).T]
    return _overlapped(params, _serial_final_times(params, unit, num_microbatches), ideal)


def _ideal_of_one(
    params: PerfParams, shares: tuple[tuple[float, ...], ...], count: int
) -> tuple[float, ...]:
    forward, backward, last = shares
    if params.schedule == "1f1b":
        return one_f_one_b.final_times_of_one(forward, backward, last, count)
    several = params.chunks_per_stage
    return interleaved.final_times_of_one(forward, backward, last, several, count)


def _final_times(params: PerfParams, times: StageTimes, num_microbatches: Numbers) -> list[Numbers]:
    overlap = params.transfers_overlap
    if params.schedule == "gpipe":
        ideal = final_times(times, num_microbatches, overlap)
    elif params.schedule == "1f1b":
        ideal = one_f_one_b.final_times(times, num_microbatches, overlap)
    else:
        several = params.chunks_per_stage
        ideal = interleaved.final_times(times, several, num_microbatches, overlap)
    return _overlapped(params, _serial_final_times(params, times, num_microbatches), ideal)


def _serial_final_times(
    params: PerfParams, times: StageTimes, num_microbatches: Numbers
) -> Sequence[Numbers]:
    if params.schedule == "gpipe":
        return serial_final_times(times, num_microbatches)
    if params.schedule == "1f1b":
        return one_f_one_b.serial_final_times(times, num_microbatches)
    return interleaved.serial_final_times(times, params.chunks_per_stage, num_microbatches)


def _overlapped(
    params: PerfParams, serial: Sequence[Numbers], ideal: Sequence[Numbers]
) -> list[Numbers]:
    overlap = params.overlap
    return [(1 - overlap) * a + overlap * b for a, b in zip(serial, ideal, strict=True)]


def _all_final_times(
    params: PerfParams,
    micro_bsz: Numbers,
    num_microbatches: Numbers,
    slow: Numbers,
) -> list[Numbers]:
    if is_uniform(params):
        whole = compute_time(params, micro_bsz) * slow
        unit = _unit_final_times(params, num_microbatches)
        return [share * whole + params.overhead for share in unit]
    if params.schedule == "gpipe":
        final = _slowed_final_times(params, micro_bsz, num_microbatches, slow)
    elif params.alpha_t or params.beta_t:
        final = _of_distinct(params, micro_bsz, num_microbatches, slow)
    else:
        final = [slow * t for t in _of_distinct(params, micro_bsz, num_microbatches, 1.0)]
    return [seconds + params.overhead for seconds in final]


def _slowed_final_times(
    params: PerfParams, micro_bsz: Numbers, num_microbatches: Numbers, slow: Numbers
) -> list[Numbers]:
    """Return fin_i of every stage if compute is slowed down and copies are not."""
    times = stage_times(params, micro_bsz)
    same = times.last_backward is times.backward
    forward, backward, last = ([t * slow for t in part] for part in times[:3])
    slowed = StageTimes(forward, backward, backward if same else last, times.transfer)
    return _final_times(params, slowed, num_microbatches)


def _of_distinct(
    params: PerfParams, micro_bsz: Numbers, num_microbatches: Numbers, slow: Numbers
) -> list[Numbers]:
    """Return the same, evaluating each distinct pipeline once: candidates repeat a few b."""
    sizes, counts, slowed = np.broadcast_arrays(micro_bsz, num_microbatches, slow)
    keys = np.stack((sizes, counts, slowed)).reshape(3, -1)
    # Column by column: finding unique rows would take ten times as long.
    code = np.zeros(keys.shape[1], np.int64)
    for key in keys:
        number = np.unique(key, return_inverse=True)[1]
        code = code * (int(number.max(initial=0)) + 1) + number
    _, first, inverse = np.unique(code, return_index=True, return_inverse=True)
    final = _slowed_final_times(params, *keys[:, first])
    return [np.asarray(t)[inverse].reshape(sizes.shape)[()] for t in final]


def _overlapped_optim_time(params: PerfParams, final: list[Numbers], network: Numbers) -> Numbers:
    if not params.gradient_shares:
        return optim_time(params.gamma, final[0], network)
    all_reduce = [share * network for share in params.gradient_shares]
    exposed = network_end(final, all_reduce, params.shared_link) - final[0]
    busy = network if params.shared_link else max(params.gradient_shares) * network
    hidden = busy - exposed
    # Neither rest is negative, except for rounding.
    rests = np.maximum(final[0] - hidden, _NOTHING), np.maximum(exposed, _NOTHING)
    return hidden + optim_time(params.gamma, *rests)


def _growth(power: Numbers, num_replicas: Numbers, beyond_two: Numbers) -> Numbers:
    """Return ((R - 1)^p - 1)/p, which is R - 2 for p = 1 and log(R - 1) for p = 0."""
    if isinstance(power, float) and power == 1.0:
        return beyond_two
    logarithm = np.log(np.maximum(num_replicas - 1, 1.0))
    if isinstance(power, float) and abs(power) < ZERO_POWER:
        return np.maximum(logarithm, EPSILON)
    safe = np.where(abs(power) < ZERO_POWER, ZERO_POWER, power)
    return np.maximum((np.exp(safe * logarithm) - 1) / safe, EPSILON)
