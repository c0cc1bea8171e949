"""Predictions for allocations of a job: step time, throughput, goodput, speedup of each.

For each number of stages and replicas the job chooses, as in training, the configuration with the
best goodput within its bounds. Unmeasured numbers of stages are predicted from the nearest measured
one: from the layers of the model if given (`cutting`), else as if the same work were cut evenly
(`restage`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeAlias

from pipollux_perfmodel.partitioning.restage import restage
from pipollux_perfmodel.timing.step_time import sync_cost

from .arguments import spell_size
from .cutting import Layers, ScheduleWish
from .errors import ModelingError
from .params_file import NO_BOUNDS, Bounds, ModelFile
from .stage_model import Prediction, StageModel

Pipeline: TypeAlias = tuple[int, ScheduleWish]

DEFAULT_BOUNDS = Bounds(accumulation=False, num_microbatches=(1, 2, 4, 8))
"""The maximum batch size is the initial one."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Placement of replicas on nodes, by one of the two fields."""

    num_nodes: int | None = None
    """The number of nodes; with fewer replicas, one node per replica."""
    gpus_per_node: int = 8
    """GPUs per node; replicas use as few nodes as possible, and each lies on one node."""

    def nodes(self, num_stages: int, num_replicas: int) -> int:
        """Return the number of nodes for R replicas; ModelingError if not even one fits on a node.

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
    """The allocations and bounds of a prediction."""

    replicas: tuple[int, ...]
    stages: tuple[int, ...] | None = None
    """None: the measured numbers of stages."""
    bounds: Bounds = NO_BOUNDS
    """Omitted bounds are the model's, or else those of `DEFAULT_BOUNDS`."""
    placement: Placement
    layers: Layers | None = None
    """Layers to cut unmeasured stages from, with the memory limit; None: unknown."""
    schedules: tuple[ScheduleWish, ...] = ()
    """Schedules to predict; empty: that of the measured stages."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Predictions by stages, schedules and replicas, in this order, with notes."""

    init_batch_size: int
    max_batch_size: int
    predictions: tuple[Prediction, ...]
    notes: tuple[str, ...]
    efficiency_known: bool
    schedules_asked: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return asdict(self)


def predict(model: ModelFile, question: Question) -> Answer:
    """Predict the allocations of a question. Raises ModelingError if the initial batch size is
    unknown, or the question is inconsistent.
    """
    init_batch_size = _init_batch_size(model)
    bounds = _bounds(model, question, init_batch_size)
    predictions: list[Prediction] = []
    too_large: dict[Pipeline, float] = {}  # bytes needed by pipelines that do not fit
    notes: list[str] = []
    for num_stages in question.stages or model.stages:
        for schedule in _schedules(question, num_stages, notes):
            stages = StageModel(
                model, question.layers, bounds, init_batch_size, num_stages, schedule
            )
            if not stages.fit:
                too_large[num_stages, stages.schedule] = stages.least_memory
            for num_replicas in question.replicas:
                num_nodes = question.placement.nodes(num_stages, num_replicas)
                predictions.append(stages.predict(num_nodes, num_replicas))
    return Answer(
        init_batch_size=init_batch_size,
        max_batch_size=bounds.max_batch_size or init_batch_size,
        predictions=tuple(_marked(predictions)),
        notes=(*_all_notes(model, bounds, question, predictions, too_large), *notes),
        efficiency_known=model.grad_params is not None,
        schedules_asked=bool(question.schedules),
    )


def _schedules(
    question: Question, num_stages: int, notes: list[str]
) -> Sequence[ScheduleWish | None]:
    if not question.schedules or num_stages == 1:  # one stage waits for none
        return (None,)
    layers = question.layers.profile.num_layers if question.layers else math.inf
    fine = [one for one in question.schedules if num_stages * one.chunks_per_stage <= layers]
    if len(question.schedules) == 1 or len(fine) == len(question.schedules):
        return question.schedules
    notes.append(
        f"{num_stages} stages are not interleaved: the layers are {layers:g}, and each chunk of a "
        "stage needs one."
    )
    return fine


def _marked(predictions: Sequence[Prediction]) -> list[Prediction]:
    """Mark the best of each number of stages and replicas; the smallest if tied."""
    best: dict[tuple[int, int], Prediction] = {}
    for one in predictions:
        place = one.num_stages, one.num_replicas
        if one.feasible and (place not in best or _worth(one) > _worth(best[place])):
            best[place] = one
    chosen = {id(one) for one in best.values()}
    return [replace(one, best=id(one) in chosen) for one in predictions]


def _worth(one: Prediction) -> tuple[float, float]:
    """Return the key to maximize; values that differ only by rounding are equal."""
    rate = one.throughput if one.goodput is None else one.goodput
    return float(f"{rate:.9e}"), -(one.memory or 0.0)


def _init_batch_size(model: ModelFile) -> int:
    if model.init_batch_size is None:
        raise ModelingError(
            "the initial batch size is not known; give --init-batch-size N, "
            "the batch size that the job was tuned with on one replica"
        )
    return model.init_batch_size


def _bounds(model: ModelFile, question: Question, init_batch_size: int) -> Bounds:
    bounds = question.bounds.or_else(model.bounds).or_else(DEFAULT_BOUNDS)
    if bounds.max_batch_size is None:
        return replace(bounds, max_batch_size=init_batch_size)
    if bounds.max_batch_size < init_batch_size:
        raise ModelingError(
            f"the largest batch size, {bounds.max_batch_size}, is below the initial one, "
            f"{init_batch_size}; give --max-batch-size {init_batch_size} or more"
        )
    return bounds


def _all_notes(
    model: ModelFile,
    bounds: Bounds,
    question: Question,
    predictions: Sequence[Prediction],
    too_large: Mapping[Pipeline, float],
) -> list[str]:
    """`too_large` has the minimum bytes of pipelines for which no cut fits into memory."""
    notes, layers = [], question.layers
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
    notes += _unmeasured_notes(model, layers, predictions)
    notes += _schedule_notes(model, layers, predictions) if question.schedules else []
    notes += _memory_notes(question, predictions, too_large)
    notes += _network_notes(model, predictions)
    notes += _sync_notes(model, predictions)
    impossible = sum(
        not one.feasible
        and (one.num_stages, ScheduleWish(one.schedule, one.chunks_per_stage)) not in too_large
        for one in predictions
    )
    if impossible:
        limited = layers is not None and layers.memory_limit is not None
        notes.append(
            f"No batch size is within bounds in {impossible} "
            f"{'row' if impossible == 1 else 'rows'} marked –; change --max-batch-size, "
            f"--atomic-bsz,{' --memory-limit,' if limited else ''} or allow --accumulation."
        )
    return notes


def _unmeasured_notes(
    model: ModelFile, layers: Layers | None, predictions: Sequence[Prediction]
) -> list[str]:
    if all(one.measured for one in predictions):
        return []
    measured = ", ".join(str(number) for number in model.stages)
    stages = f"Stages marked * were not measured ({measured} were): they are predicted from "
    if layers is None:
        return [
            f"{stages}the nearest number that was, as if the same work were cut evenly; "
            "real cuts are slower."
        ]
    return [
        f"{stages}layers, those of {layers.name}{_balances(predictions, from_layers=True)}; "
        "network and overlap are as in the nearest number that was."
    ]


def _schedule_notes(
    model: ModelFile, layers: Layers | None, predictions: Sequence[Prediction]
) -> list[str]:
    if all(one.schedule_measured for one in predictions):
        return []
    many = [x for x in model.perf_params if x.num_stages > 1] or model.perf_params
    ran = ", ".join(dict.fromkeys(params.schedule for params in many))
    notes = [
        f"Schedules marked * were not measured ({ran} was): stages take as long by any of them, "
        "and only wait differently; overlap is as measured."
    ]
    if any(one.chunks_per_stage > 1 and not one.schedule_measured for one in predictions) and (
        layers is None or layers.link is None
    ):
        notes.append(
            "What interleaved stages send more than others counts as free; --layers with --link "
            "prices it."
        )
    return notes


def _memory_notes(
    question: Question, predictions: Sequence[Prediction], too_large: Mapping[Pipeline, float]
) -> list[str]:
    layers = question.layers
    if layers is None or layers.memory_limit is None:
        return []
    notes = []
    if any(one.measured and one.balance for one in predictions):
        notes.append(
            f"The memory of measured stages is that of the layers of {layers.name}"
            f"{_balances(predictions, from_layers=False)}; "
            "their times are those measured, however they were cut."
        )
    for (num_stages, schedule), least in too_large.items():
        stages = "1 stage needs" if num_stages == 1 else f"{num_stages} stages need"
        named = f"By {schedule} " if question.schedules and num_stages > 1 else ""
        notes.append(
            f"{named}{stages} at least {spell_size(least)} on one device, however the layers are "
            f"cut; --memory-limit is {spell_size(layers.memory_limit)}."
        )
    return notes


def _balances(predictions: Sequence[Prediction], *, from_layers: bool) -> str:
    """Spell the cuts of stages, as in `` cut 6+6, 4+4+4``."""
    cuts = dict.fromkeys(
        "+".join(map(str, one.balance))
        for one in predictions
        if one.balance and one.from_layers == from_layers
    )
    return f" cut {', '.join(cuts)}" if cuts else ""


def _sync_notes(model: ModelFile, predictions: Sequence[Prediction]) -> list[str]:
    """Return what pushes and pulls cost on the most replicas; nothing for all-reduces."""
    able = [one for one in predictions if one.feasible]
    if not able:
        return []
    most = max(able, key=lambda one: (one.num_replicas, one.num_nodes))
    cost = sync_cost(
        restage(model.nearest(most.num_stages), most.num_stages),
        most.num_nodes,
        most.num_replicas,
        most.atomic_bsz,
        most.accum_steps,
        most.num_microbatches,
    )
    if cost is None:
        return []
    return [f"{cost} (on {most.num_replicas} replicas)"]


def _network_notes(model: ModelFile, predictions: Sequence[Prediction]) -> list[str]:
    """Return a sentence per part of the network for which predictions rest on assumptions."""
    across, inside = set[str](), set[str]()  # what predictions of each kind assume
    for one in predictions:
        source = model.nearest(one.num_stages).num_stages
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
                "what synchronizing them costs is assumed."
            )
        elif beta in assumed_here:
            notes.append(
                f"Never more than two replicas were measured on {where}: "
                "what more of them cost is assumed."
            )
    return notes
