"""What a job would do on allocations: step time, throughput, goodput, speedup, for each one.

For each number of stages and replicas the job picks, as it does in training, the atomic batch size,
accumulation steps and micro-batches with the best goodput within its bounds. Stages that were not
measured are predicted from the nearest number of stages that was, cut evenly (`restage`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from pipollux_perfmodel import (
    Configuration,
    GoodputFunction,
    GradParams,
    PerfParams,
    SpeedupFunction,
    restage,
)

from .errors import ModelingError
from .params_file import NO_BOUNDS, Bounds, JobModel

# Noise without a gradient: every sample is worth as much in any batch, so efficiency is 1.
_EFFICIENCY_ONE = GradParams(0.0, 1.0)
DEFAULT_BOUNDS = Bounds(accumulation=False, num_microbatches=(1, 2, 4, 8))
"""The largest batch size is the initial one."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """How replicas lie on nodes; one of the two."""

    num_nodes: int | None = None
    """So many nodes, or one for each replica where there are fewer."""
    gpus_per_node: int = 8
    """As few nodes of so many GPUs as can be; a replica lies on one node."""

    def nodes(self, num_stages: int, num_replicas: int) -> int:
        """Return the nodes that replicas of so many stages lie on.

        Raises:
            ModelingError: not even one replica fits on a node.

        Example:
            >>> Placement(gpus_per_node=8).nodes(num_stages=3, num_replicas=5)
            3
        """
        if self.num_nodes is not None:
            return min(self.num_nodes, num_replicas)
        if num_stages > self.gpus_per_node:
            raise ModelingError(
                f"a replica of {num_stages} stages does not fit on a node of "
                f"{self.gpus_per_node} GPUs; give --gpus-per-node {num_stages} or more, "
                "or fewer --stages"
            )
        return math.ceil(num_replicas / (self.gpus_per_node // num_stages))


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked of a model."""

    replicas: tuple[int, ...]
    stages: tuple[int, ...] | None = None
    """None: those that were measured."""
    bounds: Bounds = NO_BOUNDS
    """What is not said here is as the model has it, or else `DEFAULT_BOUNDS`."""
    placement: Placement


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One allocation, and the best that the job can make of it."""

    num_stages: int
    measured: bool
    """Whether this number of stages was measured."""
    num_replicas: int
    num_nodes: int
    num_gpus: int
    num_microbatches: int
    atomic_bsz: int
    """0: no batch size is within bounds; then the rest are 0 or None, too."""
    accum_steps: int
    batch_size: int
    step_time: float | None
    """Seconds of an iteration: all accumulation steps and the optimizer step."""
    throughput: float
    """Samples per second."""
    efficiency: float | None
    """Progress per sample, relative to the initial batch size; None: not known."""
    goodput: float | None
    """Throughput times efficiency; None: not known."""
    speedup: float
    """Goodput (or throughput, where that is not known) over that of one replica of the same
    stages."""

    @property
    def feasible(self) -> bool:
        """Whether any batch size is within bounds."""
        return self.atomic_bsz > 0


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Predictions by stages and replicas, in this order, and what to know about them."""

    init_batch_size: int
    max_batch_size: int
    predictions: tuple[Prediction, ...]
    notes: tuple[str, ...]
    """Sentences: what was not measured, what is not known, what is not possible."""
    efficiency_known: bool

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain data."""
        return asdict(self)


def predict(model: JobModel, question: Question) -> Answer:
    """Answer a question about a job.

    Raises:
        ModelingError: the initial batch size is not known, or the question contradicts itself.
    """
    init_batch_size = _init_batch_size(model)
    bounds = _bounds(model, question, init_batch_size)
    measured = tuple(params.num_stages for params in model.perf_params)
    predictions: list[Prediction] = []
    for num_stages in question.stages or measured:
        params = _nearest(model, num_stages)
        if num_stages not in measured:
            params = restage(params, num_stages)
        goodput_fn = GoodputFunction(params, model.grad_params or _EFFICIENCY_ONE, init_batch_size)
        speedup_fn = SpeedupFunction(
            goodput_fn,
            max_batch_size=bounds.max_batch_size,
            atomic_bsz_range=bounds.atomic_bsz_range,
            accumulation=bool(bounds.accumulation),
            num_microbatches=bounds.num_microbatches or 1,
        )
        for num_replicas in question.replicas:
            num_nodes = question.placement.nodes(num_stages, num_replicas)
            chosen = speedup_fn.configuration(num_nodes, num_replicas)
            predictions.append(
                _prediction(
                    goodput_fn,
                    chosen,
                    num_nodes,
                    measured=num_stages in measured,
                    efficiency_known=model.grad_params is not None,
                )
            )
    return Answer(
        init_batch_size=init_batch_size,
        max_batch_size=bounds.max_batch_size or init_batch_size,
        predictions=tuple(predictions),
        notes=tuple(_notes(model, bounds, predictions)),
        efficiency_known=model.grad_params is not None,
    )


def _init_batch_size(model: JobModel) -> int:
    if model.init_batch_size is None:
        raise ModelingError(
            "the initial batch size is not known; give --init-batch-size N, "
            "the batch size that the job was tuned with on one replica"
        )
    return model.init_batch_size


def _bounds(model: JobModel, question: Question, init_batch_size: int) -> Bounds:
    bounds = question.bounds.or_else(model.bounds).or_else(DEFAULT_BOUNDS)
    if bounds.max_batch_size is None:
        return replace(bounds, max_batch_size=init_batch_size)
    if bounds.max_batch_size < init_batch_size:
        raise ModelingError(
            f"the largest batch size, {bounds.max_batch_size}, is below the initial one, "
            f"{init_batch_size}; give --max-batch-size {init_batch_size} or more"
        )
    return bounds


def _nearest(model: JobModel, num_stages: int) -> PerfParams:
    """Return the measured parameters with the nearest number of stages, the larger of two."""
    return min(
        model.perf_params,
        key=lambda params: (abs(params.num_stages - num_stages), -params.num_stages),
    )


def _prediction(
    goodput_fn: GoodputFunction,
    chosen: Configuration,
    num_nodes: int,
    *,
    measured: bool,
    efficiency_known: bool,
) -> Prediction:
    feasible = chosen.goodput > 0
    sizes = num_nodes, chosen.num_replicas, chosen.atomic_bsz, chosen.accum_steps
    times = goodput_fn.step_time(*sizes, chosen.num_microbatches) if feasible else None
    batch_size = chosen.batch_size if feasible else 0
    return Prediction(
        num_stages=chosen.num_stages,
        measured=measured,
        num_replicas=chosen.num_replicas,
        num_nodes=num_nodes,
        num_gpus=chosen.num_stages * chosen.num_replicas,
        num_microbatches=chosen.num_microbatches if feasible else 0,
        atomic_bsz=int(chosen.atomic_bsz) if feasible else 0,
        accum_steps=int(chosen.accum_steps) if feasible else 0,
        batch_size=int(batch_size),
        step_time=None if times is None else float(times.total),
        throughput=0.0 if times is None else float(batch_size / times.total),
        efficiency=(
            float(goodput_fn.efficiency(batch_size)) if feasible and efficiency_known else None
        ),
        goodput=float(chosen.goodput) if efficiency_known else None,
        speedup=float(chosen.speedup),
    )


def _notes(model: JobModel, bounds: Bounds, predictions: Sequence[Prediction]) -> list[str]:
    notes = []
    if model.grad_params is None:
        notes.append(
            "The gradient statistics are not known, so efficiency and goodput are not shown, and "
            "the fastest batch size is chosen; --grad-sqr and --grad-var give them."
        )
    if bounds.max_batch_size == model.init_batch_size:
        notes.append(
            f"The batch size stays at the initial one, {model.init_batch_size}; "
            "--max-batch-size allows more."
        )
    unmeasured = sorted({one.num_stages for one in predictions if not one.measured})
    if unmeasured:
        measured = ", ".join(str(params.num_stages) for params in model.perf_params)
        notes.append(
            f"Stages marked * were not measured ({measured} were): they are predicted from the "
            "nearest number that was, as if the same work were cut evenly; real cuts are slower."
        )
    notes += _network_notes(model, predictions)
    impossible = sum(not one.feasible for one in predictions)
    if impossible:
        notes.append(
            f"No batch size is within bounds in {impossible} "
            f"{'row' if impossible == 1 else 'rows'} marked –; change --max-batch-size, "
            "--atomic-bsz, or allow --accumulation."
        )
    return notes


def _network_notes(model: JobModel, predictions: Sequence[Prediction]) -> list[str]:
    """Say once which part of the network rests on assumptions that these predictions lean on."""
    across, inside = set[str](), set[str]()  # what predictions of each kind assume
    for one in predictions:
        source = _nearest(model, one.num_stages).num_stages
        assumed = (model.assumed or {}).get(source, ())
        if one.num_nodes > 1:
            across.update(assumed)
        elif one.num_replicas > 1:
            inside.update(assumed)
    notes = []
    for assumed_here, alpha, beta, where in (
        (across, "alpha_n", "beta_n", "several nodes"),
        (inside, "alpha_r", "beta_r", "one node"),
    ):
        if alpha in assumed_here:
            notes.append(
                f"Several replicas were never measured on {where}: "
                "what synchronising them costs is assumed."
            )
        elif beta in assumed_here:
            notes.append(
                f"Never more than two replicas were measured on {where}: "
                "what more of them cost is assumed."
            )
    return notes
