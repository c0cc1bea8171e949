"""Fragments: groups of a stage's layers that are pushed together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from pipollux_hybrid.errors import ConfigurationError


def layer_parameters(module: nn.Sequential) -> dict[int, list[tuple[str, nn.Parameter]]]:
    """Return the parameters of each layer that is here and has any; shared ones are the first
    layer's.
    """
    names = {parameter: name for name, parameter in module.named_parameters()}
    seen: set[nn.Parameter] = set()
    layers: dict[int, list[tuple[str, nn.Parameter]]] = {}
    for key, layer in enumerate(module):
        own = [parameter for parameter in layer.parameters() if parameter not in seen]
        seen.update(own)
        if own:
            layers[key] = [(names[parameter], parameter) for parameter in own]
    return layers


def layer_sizes(module: nn.Sequential) -> list[int]:
    """Return the bytes of each layer's parameters; shared ones are the first layer's."""
    found = layer_parameters(module)
    return [
        sum(x.numel() * x.element_size() for _, x in found.get(key, ()))
        for key in range(len(module))
    ]


def fragments_of(sizes: Mapping[int, int], count: int) -> list[list[int]]:
    """Divide layers into at most ``count`` groups whose largest is small: each layer, from the
    largest, goes to the smallest group (Decoupled DiLoCo's packing, arXiv 2604.21428).

    Example:
        >>> fragments_of({0: 4, 1: 1, 2: 3}, 2)
        [[0], [1, 2]]
    """
    groups: list[list[int]] = [[] for _ in range(min(count, len(sizes)))]
    for key in sorted(sizes, key=lambda key: (-sizes[key], key)):
        smallest = min(groups, key=lambda group: (sum(sizes[k] for k in group), len(group)))
        smallest.append(key)
    return sorted(sorted(group) for group in groups)


def check_layers(
    layers: Mapping[int, Sequence[tuple[str, nn.Parameter]]], compression: str | None
) -> None:
    """Refuse parameters that cannot be averaged or compressed."""
    for several in layers.values():
        for name, parameter in several:
            if not (parameter.is_floating_point() or parameter.is_complex()):
                raise ConfigurationError(
                    f"parameter {name} is of {parameter.dtype}: push and pull average changes, "
                    "which only floating-point parameters have"
                )
            if parameter.is_complex() and compression is not None:
                raise ConfigurationError(
                    f"parameter {name} is complex, and compression={compression!r} is for real "
                    "numbers: leave it out"
                )


def master_values(several: Sequence[tuple[str, nn.Parameter]]) -> list[Tensor]:
    """Return copies of parameters on the CPU, in the servers' dtype."""
    return [master_value(parameter) for _, parameter in several]


def master_value(parameter: Tensor) -> Tensor:
    """Return a copy of a parameter on the CPU, in the servers' dtype."""
    return parameter.detach().to("cpu", master_dtype(parameter), copy=True)


def master_dtype(parameter: Tensor) -> torch.dtype:
    """Return the dtype in which servers hold a parameter: at least float32."""
    if parameter.is_complex():
        return parameter.dtype
    return torch.promote_types(parameter.dtype, torch.float32)
