"""What all replicas of a job need alike, compared by the servers when they join.

Options, trained parameters and frozen ones are compared with those that the servers hold. The inner
optimizer and fixed buffers never reach a server, so they are compared as *settings*, with those of
the replicas that are there: a job that is stopped may go on with other ones.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from .key_range import LayerState
from .transport import bytes_of

DIFFERENCES = {
    "layers": "the model has another number of layers than that of other replicas, or of the last "
    "run of the servers' job: all need the same model",
    "frozen": "the frozen parameters differ from those of other replicas: load the same weights on "
    "all of them, or set the same seed",
}
"""What is wrong where replicas differ in more than an option."""
HOW_IT_RUNS = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Hyperparameters that depend on the device, and change no result but for rounding."""
ROUNDING = 1e-3
"""Difference between equal buffers that were computed on different machines, as a part of 1."""
NAMED = 3
"""Differences that a message names."""

Settings = Mapping[str, Any]
"""Strings, and for buffers two numbers, by name."""


def settings_of(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    lr_scheduler: torch.optim.lr_scheduler.LRScheduler | None,
) -> dict[str, Any]:
    """Return the settings of a replica, before it restores a checkpoint."""
    settings: dict[str, Any] = {"optimizer": type(optimizer).__name__}
    settings["lr_scheduler"] = None if lr_scheduler is None else type(lr_scheduler).__name__
    settings["number of parameter groups"] = str(len(optimizer.param_groups))
    for index, group in enumerate(optimizer.param_groups):
        settings[f"number of parameters in group {index}"] = str(len(group["params"]))
        for name, value in _hyperparameters(group, optimizer.defaults):
            settings[f"{name} of group {index}"] = value
    return settings | {f"buffer {name}": _marks(buffer) for name, buffer in fixed_buffers(module)}


def _hyperparameters(
    group: Mapping[str, Any], defaults: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    """Yield hyperparameters, without the changes that a schedule has made."""
    for name in sorted((defaults.keys() & group.keys()) - HOW_IT_RUNS):
        if name == "lr":
            yield name, _word(group.get("initial_lr", group["lr"]))
        elif not (name in ("momentum", "betas") and "base_momentum" in group):
            yield name, _word(group[name])


def _word(value: object) -> str:
    if isinstance(value, Tensor):
        return str(value.tolist())
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_word, value))})"
    plain = isinstance(value, (bool, int, float, str)) or value is None
    return str(value) if plain else type(value).__name__


def fixed_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers besides running statistics, which each replica has of its own samples."""
    for prefix, layer in module.named_modules():
        if not isinstance(layer, _NormBase):
            yield from layer.named_buffers(prefix, recurse=False)


def has_running_statistics(module: nn.Module) -> bool:
    """Return whether normalization layers have running statistics."""
    return any(getattr(layer, "running_mean", None) is not None for layer in module.modules())


def _marks(buffer: Tensor) -> list[float]:
    """Return two numbers that differ between buffers, but little by rounding: the root mean square,
    and the projection on a fixed direction.
    """
    values = torch.view_as_real(buffer) if buffer.is_complex() else buffer
    values = values.detach().flatten().cpu().double().nan_to_num(0.0, 1.0, -1.0)
    size = float(values.square().mean().sqrt()) if values.numel() else 0.0
    if size == 0.0 or not math.isfinite(size):
        return [0.0, 0.0]
    direction = torch.arange(1.0, len(values) + 1.0, dtype=torch.float64).cos()
    return [size, float(values @ direction) / (size * math.sqrt(len(values)))]


def difference(theirs: Settings, ours: Settings) -> str:
    """Return the first differences between settings, in words; empty: there are none. Names that
    one side lacks are those of another version of PyTorch.
    """
    both = [name for name in theirs if name in ours]
    found = [name for name in both if not _are_alike(theirs[name], ours[name])]
    words = [
        f"{name} differs"
        if isinstance(theirs[name], list)
        else f"{name} is {theirs[name]} there and {ours[name]} here"
        for name in found[:NAMED]
    ]
    more = [f"and {len(found) - NAMED} more"] if len(found) > NAMED else []
    return "; ".join([*words, *more])


def _are_alike(theirs: Any, ours: Any) -> bool:
    if isinstance(theirs, list) and isinstance(ours, list):
        (size, mark), (own_size, own_mark) = theirs, ours
        return abs(mark - own_mark) <= ROUNDING and math.isclose(size, own_size, rel_tol=ROUNDING)
    return bool(theirs == ours)


def check_settings(replica: int, theirs: Settings, ours: Settings) -> None:
    """Refuse a replica whose settings differ from those of the replicas that are there.

    Raises:
        ValueError: With the differences.
    """
    found = difference(theirs, ours)
    if found:
        raise ValueError(
            f"replica {replica} differs from the replicas that train: {found}: start all of them "
            "with the same script, arguments and seed; a learning rate of its own may be set after "
            "HybridParallel(…)"
        )


def check_options(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Refuse options that differ from those of the servers' job with a ValueError."""
    for name, value in ours.items():
        if theirs[name] != value and name in DIFFERENCES:
            raise ValueError(DIFFERENCES[name])
        if theirs[name] != value:
            raise ValueError(
                f"PushPull({name}={value!r}), but the servers' job has {name}={theirs[name]!r}: "
                "all replicas need the same options, and servers with others a new start"
            )


def check_parameters(
    names: Mapping[str, Sequence[str]],
    values: Mapping[int, Sequence[Tensor]],
    known: Mapping[int, LayerState],
    kept: Collection[int],
) -> None:
    """Refuse a replica whose layers have other parameters than those that are known.

    Args:
        names: Names of the parameters of each layer.
        values: The parameters.
        known: Layers of the servers.
        kept: Those of them that were read from the folder.

    Raises:
        ValueError: With the first difference.
    """
    for key in values.keys() & known.keys():
        ours = _described(names[str(key)], values[key])
        there = _described(known[key].names, known[key].outer.values)
        if ours == there:
            continue
        first = next(pair for pair in zip_longest(ours, there) if pair[0] != pair[1])
        mine, other = (name or "nothing" for name in first)
        if key in kept:
            raise ValueError(
                f"layer {key} has {mine}, and the servers' folder has {other}: empty it, or go on "
                "with that model"
            )
        raise ValueError(
            f"layer {key} has {mine}, and on other replicas {other}: all need the same model, and "
            "another job servers of its own"
        )


def _described(names: Iterable[str], tensors: Iterable[Tensor]) -> list[str]:
    """Return parameters in words."""
    return [
        f"{name} of shape {list(tensor.shape)} and {str(tensor.dtype).removeprefix('torch.')}"
        for name, tensor in zip(names, tensors, strict=True)
    ]


def digest_of_frozen(module: nn.Module) -> int:
    """Return a checksum of the frozen parameters, which servers do not hold."""
    total = 0
    for parameter in module.parameters():
        if not parameter.requires_grad:
            total = zlib.crc32(bytes_of(parameter), total)
    return total
