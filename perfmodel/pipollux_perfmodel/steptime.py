"""Step time of a GPipe pipeline with data parallelism.

The compute term is GPipe's (Huang et al., NeurIPS'19): M micro-batches through the forwards of K
stages and back through their backwards, each a flow shop of identical jobs. The network term and
the γ-norm that joins the two are Pollux's (Qiao et al., OSDI'21, section 3.2, as in AdaptDL).

    K, R, M   stages, replicas, micro-batches          n   nodes that the replicas lie on
    b         samples per micro-batch                  s   accumulation steps
    φ_k, ψ_k  forward and backward share of stage k    ω   overlap of the stages
    ε = 1e-8  stands for zero seconds and for zero replicas beyond two, as in AdaptDL

    C(b)      = alpha_c + beta_c·b
    F(M)      = (1 - ω)·M + ω·(1 + (M - 1)·(max φ + max ψ))
    T_pipe    = C(b)·F(M)
    T_net     = alpha_n + beta_n·max(R - 2, ε)   n > 1
                alpha_r + beta_r·max(R - 2, ε)   n = 1, R > 1
                ε                                R = 1
    T_optim   = (T_pipe^γ + T_net^γ)^(1/γ)
    T_iter    = s·T_pipe + T_optim

Every function takes the array module (`numpy`, or `autograd.numpy` to differentiate) as `xp`, and
broadcasts over its other arguments.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

from .params import PerfParams

# A float for scalar arguments, else an array of the broadcast shape (or autograd's box of one).
Numbers: TypeAlias = Any
# numpy or autograd.numpy.
ArrayModule: TypeAlias = Any

EPSILON = 1e-8


class StepTime(NamedTuple):
    """Times of one iteration in seconds; floats, or arrays of one shape."""

    accum_time: Numbers
    """T_pipe, of one accumulation step."""
    network_time: Numbers
    """T_net, of one synchronisation of gradients."""
    optim_time: Numbers
    """T_optim, of the optimizer step: its forward, backward and the synchronisation."""
    total: Numbers
    """T_iter = s·T_pipe + T_optim."""


def compute_time(params: PerfParams, micro_bsz: Numbers) -> Numbers:
    """Return C(b): seconds of one micro-batch over all stages, forward and backward."""
    return params.alpha_c + params.beta_c * micro_bsz


def pipeline_factor(params: PerfParams, num_microbatches: Numbers) -> Numbers:
    """Return F(M) = T_pipe / C(b); M for one stage, at least 1 for any."""
    slowest = max(params.forward_shares) + max(params.backward_shares)
    one_by_one, ideal = num_microbatches, 1 + (num_microbatches - 1) * slowest
    return (1 - params.overlap) * one_by_one + params.overlap * ideal


def pipeline_time(params: PerfParams, micro_bsz: Numbers, num_microbatches: Numbers) -> Numbers:
    """Return T_pipe: seconds of one forward and backward of all micro-batches of a replica."""
    return compute_time(params, micro_bsz) * pipeline_factor(params, num_microbatches)


def network_time(
    params: PerfParams, num_nodes: Numbers, num_replicas: Numbers, xp: ArrayModule
) -> Numbers:
    """Return T_net: seconds to synchronise the gradients of all replicas."""
    beyond_two = xp.maximum(num_replicas - 2, EPSILON)
    across = params.alpha_n + params.beta_n * beyond_two
    inside = params.alpha_r + params.beta_r * beyond_two
    return xp.where(num_nodes > 1, across, xp.where(num_replicas > 1, inside, EPSILON))


def optim_time(gamma: Numbers, accum: Numbers, network: Numbers, xp: ArrayModule) -> Numbers:
    """Return T_optim, the γ-norm of T_pipe and T_net; never below either."""
    # The larger one is taken out of the norm, so that no power overflows or vanishes.
    largest = xp.maximum(accum, network)
    return largest * ((accum / largest) ** gamma + (network / largest) ** gamma) ** (1 / gamma)


def step_time(
    params: PerfParams,
    num_nodes: Numbers,
    num_replicas: Numbers,
    atomic_bsz: Numbers,
    accum_steps: Numbers,
    num_microbatches: Numbers,
    xp: ArrayModule,
) -> StepTime:
    """Return all times of an iteration; b = atomic_bsz / M."""
    accum = pipeline_time(params, atomic_bsz / num_microbatches, num_microbatches)
    network = network_time(params, num_nodes, num_replicas, xp)
    optim = optim_time(params.gamma, accum, network, xp)
    return StepTime(accum, network, optim, accum_steps * accum + optim)
