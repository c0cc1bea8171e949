"""Sentences about predictions: what was not measured, is not known, or is not possible."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .cutting import Layers
from .params_file import Bounds, ModelFile
from .sizes import spell_size
from .stage_model import Prediction


def all_notes(
    model: ModelFile,
    bounds: Bounds,
    layers: Layers | None,
    predictions: Sequence[Prediction],
    too_large: Mapping[int, float],
) -> list[str]:
    """Return sentences about predictions.

    Args:
        model: what is known of the job.
        bounds: what its configurations keep to.
        layers: of its model, if they are known.
        predictions: what was predicted.
        too_large: by number of stages that no cut fits into memory, the bytes it needs at least.
    """
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
    notes += _unmeasured_notes(model, layers, predictions)
    notes += _memory_notes(layers, predictions, too_large)
    notes += _network_notes(model, predictions)
    impossible = sum(not one.feasible and one.num_stages not in too_large for one in predictions)
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


def _memory_notes(
    layers: Layers | None, predictions: Sequence[Prediction], too_large: Mapping[int, float]
) -> list[str]:
    if layers is None or layers.memory_limit is None:
        return []
    notes = []
    if any(one.measured and one.balance for one in predictions):
        notes.append(
            f"The memory of measured stages is that of the layers of {layers.name}"
            f"{_balances(predictions, from_layers=False)}; "
            "their times are those measured, however they were cut."
        )
    for num_stages, least in too_large.items():
        stages = "1 stage needs" if num_stages == 1 else f"{num_stages} stages need"
        notes.append(
            f"{stages} at least {spell_size(least)} on one device, however the layers are cut; "
            f"--memory-limit is {spell_size(layers.memory_limit)}."
        )
    return notes


def _balances(predictions: Sequence[Prediction], *, from_layers: bool) -> str:
    """Spell the cuts of stages, as in `` cut 6+6, 4+4+4``."""
    cuts = {
        one.num_stages: "+".join(map(str, one.balance))
        for one in predictions
        if one.balance and one.from_layers == from_layers
    }
    return f" cut {', '.join(cuts.values())}" if cuts else ""


def _network_notes(model: ModelFile, predictions: Sequence[Prediction]) -> list[str]:
    """Say once which part of the network rests on assumptions that these predictions lean on."""
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
                "what synchronising them costs is assumed."
            )
        elif beta in assumed_here:
            notes.append(
                f"Never more than two replicas were measured on {where}: "
                "what more of them cost is assumed."
            )
    return notes
