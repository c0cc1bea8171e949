"""The numbers that describe a job: its step times (`PerfParams`) and its gradients (`GradParams`).

`step_time`, `gpipe` and `goodput` have the formulas. The first seven fields of `PerfParams` are
those of Pollux (Qiao et al., OSDI'21, section 3.2) and AdaptDL, in their order, so
`PerfParams(*seven)` equals AdaptDL's model. The others describe a pipeline and effects that AdaptDL
omits, each with a neutral default.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias

# A backward pass costs about two forward passes.
FORWARD_SHARE = 1 / 3
BACKWARD_SHARE = 2 / 3

MAX_LEVELS = 8
"""Most levels of a network above the node."""
_SHARE_TOLERANCE = 1e-6

Checkpoint = Literal["never", "except_last", "always"]
"""Which micro-batches are recomputed in the backward (torchgpipe's names)."""
CHECKPOINTS: tuple[Checkpoint, ...] = ("never", "except_last", "always")
"""Checkpoint modes, in decreasing order of kept activations."""
Checkpoints: TypeAlias = Checkpoint | tuple[Checkpoint, ...]
"""One mode for all stages, or one per stage."""

ScheduleKind = Literal["gpipe", "1f1b", "interleaved"]
SCHEDULES: tuple[ScheduleKind, ...] = ("gpipe", "1f1b", "interleaved")
CUT_SCHEDULES: tuple[ScheduleKind, ...] = ("gpipe", "1f1b")
"""Schedules whose stages are contiguous layers, for which cuts are searched and predicted."""


AUTO = -1
"""Value of `PerfParams.sync_every`: H follows from the step time parameters."""
SYNC_SHARE = 0.05
"""Share of the time that pushes and pulls may take if H is `AUTO`."""


class PerfParams(NamedTuple):
    """Step time parameters of a job.

    One micro-batch of b samples takes C(b) = alpha_c + beta_c·b over all K stages, forward and
    backward (including recomputation). Fields with K or K - 1 entries may be empty, for their
    default.

    >>> PerfParams(0.1, 0.01, 0.2, 0.02, 0.05, 0.01, 1.5).num_stages
    1
    """

    alpha_c: float
    """Seconds of a micro-batch independent of its size: C(b) = alpha_c + beta_c·b."""
    beta_c: float
    """Seconds per sample: C(b) = alpha_c + beta_c·b."""
    alpha_n: float
    """Seconds to synchronize two replicas on two nodes: T_net = alpha_n + beta_n·(R - 2)."""
    beta_n: float
    """Seconds per replica beyond two, across nodes: T_net = alpha_n + beta_n·(R - 2)."""
    alpha_r: float
    """Seconds to synchronize two replicas on one node: T_net = alpha_r + beta_r·(R - 2)."""
    beta_r: float
    """Seconds per replica beyond two, on one node: T_net = alpha_r + beta_r·(R - 2)."""
    gamma: float
    """Overlap of compute and network, 1 (none) to 10 (about full): without `gradient_shares`
    T_optim = (T_pipe^gamma + T_net^gamma)^(1/gamma), else see `step_time`."""
    forward_shares: tuple[float, ...] = (FORWARD_SHARE,)
    """φ_k, one per stage: stage k's forward takes φ_k·C(b). Σφ + Σψ = 1."""
    backward_shares: tuple[float, ...] = (BACKWARD_SHARE,)
    """ψ_k, one per stage: stage k's backward takes ψ_k·C(b). Σφ + Σψ = 1."""
    overlap: float = 1.0
    """ω in [0, 1], overlap of stages: 0 none, 1 an ideal pipeline."""
    forward_alpha_shares: tuple[float, ...] = ()
    """φα_k, one per stage, if alpha_c is distributed differently from beta_c: stage k's forward
    takes φα_k·alpha_c + φ_k·beta_c·b. Empty: φ_k. Σφα + Σψα = 1."""
    backward_alpha_shares: tuple[float, ...] = ()
    """ψα_k, one per stage, the same for the backward. Empty: ψ_k."""
    alpha_t: tuple[float, ...] = ()
    """Seconds of the copy from stage k to k + 1, and back, independent of its size: t_k(b) =
    alpha_t[k] + beta_t[k]·b; K - 1 entries. Empty: 0."""
    beta_t: tuple[float, ...] = ()
    """Seconds per sample of the same copy; K - 1 entries. Empty: 0."""
    transfers_overlap: bool = True
    """Whether copies run concurrently with compute, or occupy the receiving device."""
    checkpoint: Checkpoints = "never"
    """The recomputed micro-batches, for all stages or per stage. The shares include recomputation
    for "always" and "except_last"; with the latter the last backward is shorter by its forward."""
    gradient_shares: tuple[float, ...] = ()
    """ρ_k, one per stage: ρ_k·T_net synchronizes stage k's gradients as soon as they are final. Σρ
    = 1. Empty: all of T_net follows the whole backward."""
    shared_link: bool = True
    """Whether the stages' all-reduces share one link, one after another, or have one link each."""
    gamma_c: float = 1.0
    """Overlap of a micro-batch's fixed and per-sample cost, at least 1 (they add): C(b) =
    (alpha_c^gamma_c + (beta_c·b)^gamma_c)^(1/gamma_c)."""
    contention: float = 0.0
    """κ >= 0: contention of replicas that share a node, C(b)·(1 + κ·(R/n - 1))."""
    growth_n: float = 1.0
    """p: T_net across nodes grows as ((R - 1)^p - 1)/p; 1 by R - 2, 0 by log(R - 1)."""
    two_node_penalty: float = 0.0
    """δ >= 0: T_net across exactly two nodes is 1 + δ times what it is across more."""
    overhead: float = 0.0
    """Seconds of a forward and backward besides its micro-batches (loading, the loss, launching),
    independent of their number and size: T_pipe = overhead + …"""
    schedule: ScheduleKind = "gpipe"
    """Order of a stage's work: "gpipe", all forwards first, the last micro-batch's backward first;
    "1f1b", backwards as soon as possible; "interleaved", 1F1B with several chunks per stage."""
    chunks_per_stage: int = 1
    """V, chunks of layers per stage, chunk q in stage q mod K; 1 unless interleaved. Chunks of a
    stage count as equally slow."""
    tied_exchange: float = 0.0
    """T_tie: seconds in which stages add up the gradients of shared parameters, once per optimizer
    step, after everything else. 0 without shared parameters, or in a single-process pipeline."""
    sync_every: int = 0
    """H: replicas push to servers and pull from them every H steps, in T_net seconds. `AUTO`: the
    smallest H for which this takes at most `SYNC_SHARE` of the time. 0: an all-reduce per step."""
    sync_overlap: int = 0
    """τ: steps that hide a part of T_net of a push and pull; below H."""
    alpha_levels: tuple[float, ...] = ()
    """alpha_n of the network levels 2, 3, … above the node (across racks, across zones); alpha_n
    is level 1's. Higher levels cost as much as the last one. Empty: all levels cost alpha_n."""
    beta_levels: tuple[float, ...] = ()
    """beta_n of the same levels."""

    @property
    def num_stages(self) -> int:
        """K, the number of stages."""
        return len(self.forward_shares)

    def at_level(self, level: int) -> PerfParams:
        """Return the parameters of allocations whose nodes meet at a network level.

        Level 1 is the lowest above the node, such as a rack. The result has the level's alpha_n and
        beta_n, and no other levels. Raises ValueError for a level below 1.

        >>> params = PerfParams(0.1, 0.01, 0.2, 0.02, 0.05, 0.01, 1.5)
        >>> racks = params._replace(alpha_levels=(0.8,), beta_levels=(0.1,))
        >>> racks.at_level(1).alpha_n, racks.at_level(2).alpha_n, racks.at_level(3).alpha_n
        (0.2, 0.8, 0.8)
        """
        if level < 1:
            raise ValueError(f"level is {level}; the lowest level above the node is 1")
        if not self.alpha_levels:
            return self
        above = min(level - 1, len(self.alpha_levels))
        return self._replace(
            alpha_n=(self.alpha_n, *self.alpha_levels)[above],
            beta_n=(self.beta_n, *self.beta_levels)[above],
            alpha_levels=(),
            beta_levels=(),
        )


class GradParams(NamedTuple):
    """Size and noise of a job's gradient at its initial batch size (Pollux, section 3.1)."""

    sqr: float
    """Squared norm of the true gradient, |E g|²."""
    var: float
    """Variance of the gradient of one batch of the initial batch size, E|g - E g|²."""


def even_shares(num_stages: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return forward and backward shares of equally slow stages; ValueError without a stage."""
    if num_stages < 1:
        raise ValueError(f"num_stages is {num_stages}; give at least one stage")
    return (FORWARD_SHARE / num_stages,) * num_stages, (BACKWARD_SHARE / num_stages,) * num_stages


def check_params(params: PerfParams) -> PerfParams:
    """Return the parameters; ValueError if a field is out of range or of a wrong length."""
    check_shares(params.forward_shares, params.backward_shares)
    if params.forward_alpha_shares or params.backward_alpha_shares:
        names = "forward_alpha_shares", "backward_alpha_shares"
        check_shares(params.forward_alpha_shares, params.backward_alpha_shares, names)
        _check_length("forward_alpha_shares", params.forward_alpha_shares, params.num_stages)
    _check_entries(params)
    if params.gradient_shares and abs(math.fsum(params.gradient_shares) - 1) > _SHARE_TOLERANCE:
        raise ValueError(
            f"gradient_shares sum to {math.fsum(params.gradient_shares):g}; divide each by the "
            "total so that they sum to 1"
        )
    stage_modes(params.checkpoint, params.num_stages)
    if params.schedule not in SCHEDULES:
        raise ValueError(f"schedule is {params.schedule!r}; give one of {SCHEDULES}")
    chunks = params.chunks_per_stage
    if chunks < 1 or (chunks > 1 and params.schedule != "interleaved"):
        raise ValueError(
            f"chunks_per_stage is {chunks} with schedule {params.schedule!r}; give 1, or more with "
            "'interleaved'"
        )
    _check_range("overlap", params.overlap, 0.0, 1.0)
    _check_range("gamma_c", params.gamma_c, 1.0, math.inf)
    _check_range("contention", params.contention, 0.0, math.inf)
    _check_range("two_node_penalty", params.two_node_penalty, 0.0, math.inf)
    _check_range("overhead", params.overhead, 0.0, math.inf)
    _check_range("tied_exchange", params.tied_exchange, 0.0, math.inf)
    _check_range("growth_n", params.growth_n, -math.inf, math.inf)
    _check_range("sync_every", params.sync_every, AUTO, math.inf)
    _check_range("sync_overlap", params.sync_overlap, 0, math.inf)
    return params


def stage_modes(checkpoint: Checkpoints, num_stages: int) -> tuple[Checkpoint, ...]:
    """Return the checkpoint mode of each of K stages; ValueError if wrong or unknown.

    >>> stage_modes("always", 2), stage_modes(("always", "never"), 2)
    (('always', 'always'), ('always', 'never'))
    """
    modes = (checkpoint,) * num_stages if isinstance(checkpoint, str) else checkpoint
    for mode in modes:
        if mode not in CHECKPOINTS:
            raise ValueError(f"checkpoint is {checkpoint!r}; give one of {CHECKPOINTS}")
    if len(modes) != num_stages:
        raise ValueError(
            f"checkpoint is {checkpoint!r}, of {len(modes)} stages; give one mode for all "
            f"{num_stages} stages, or one for each"
        )
    return modes


def joined_modes(modes: Sequence[Checkpoint]) -> Checkpoints:
    """Return the single mode if all stages have the same, else one per stage."""
    return modes[0] if len(set(modes)) == 1 else tuple(modes)


def keeps_most(checkpoint: Checkpoints) -> Checkpoint:
    """Return the mode that keeps most activations, among modes of stages.

    >>> keeps_most(("always", "except_last", "always"))
    'except_last'
    """
    modes = (checkpoint,) if isinstance(checkpoint, str) else checkpoint
    return min(stage_modes(modes, len(modes)), key=CHECKPOINTS.index)


def modes_of_cut(checkpoint: Checkpoints, num_stages: int) -> Checkpoints:
    """Return the modes assumed for K stages: of a list for another K, the one that keeps most."""
    of_these = isinstance(checkpoint, str) or len(checkpoint) == num_stages
    return checkpoint if of_these else keeps_most(checkpoint)


def check_shares(
    forward_shares: tuple[float, ...],
    backward_shares: tuple[float, ...],
    names: tuple[str, str] = ("forward_shares", "backward_shares"),
) -> None:
    """Raise ValueError for shares that do not split C(b) over the stages: >= 0, and 1 in total."""
    if not forward_shares or len(forward_shares) != len(backward_shares):
        raise ValueError(
            f"{names[0]} has {len(forward_shares)} and {names[1]} "
            f"{len(backward_shares)} entries; give one of each per stage"
        )
    for name, shares in zip(names, (forward_shares, backward_shares), strict=True):
        for stage, share in enumerate(shares):
            if not (math.isfinite(share) and share >= 0):
                raise ValueError(f"{name}[{stage}] is {share}; give a finite share >= 0")
    total = math.fsum(forward_shares) + math.fsum(backward_shares)
    if abs(total - 1) > _SHARE_TOLERANCE:
        raise ValueError(
            f"{names[0]} and {names[1]} sum to {total:g}; "
            "divide each by the total so that they sum to 1"
        )


def _check_entries(params: PerfParams) -> None:
    if len(params.alpha_levels) != len(params.beta_levels):
        raise ValueError(
            f"alpha_levels has {len(params.alpha_levels)} entries and beta_levels "
            f"{len(params.beta_levels)}; give one of each per network level from level 2 on"
        )
    lengths = {
        "alpha_t": params.num_stages - 1,
        "beta_t": params.num_stages - 1,
        "gradient_shares": params.num_stages,
        "alpha_levels": len(params.alpha_levels),
        "beta_levels": len(params.beta_levels),
    }
    for name, length in lengths.items():
        values = getattr(params, name)
        if values:
            _check_length(name, values, length)
        for index, value in enumerate(values):
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name}[{index}] is {value}; give a finite number >= 0")


def _check_length(name: str, values: tuple[float, ...], length: int) -> None:
    if len(values) != length:
        raise ValueError(
            f"{name} has {len(values)} entries; forward_shares has one per stage, so give {length}"
        )


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if not (math.isfinite(value) and low <= value <= high):
        raise ValueError(f"{name} is {value}; give a finite number from {low:g} to {high:g}")
