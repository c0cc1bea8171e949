"""Tied parameters: layers that share a parameter must be in one stage.

In a multi-process pipeline each stage holds a copy (:mod:`pipollux_hybrid.sync.tied_copies`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn

from pipollux_hybrid.errors import ConfigurationError
from pipollux_perfmodel import Layer, LayerProfile

__all__ = ["TiedParameters", "blocks_of", "check_ties", "find_ties", "merge_layers"]


@dataclass(frozen=True)
class TiedParameters:
    """A parameter shared by several layers."""

    parameter: str
    first: int
    last: int
    """Positions of the first and the last layer with the parameter."""
    layers: tuple[str, ...]
    """Names of all layers with the parameter."""
    positions: tuple[int, ...] = ()
    """Their positions."""

    def __str__(self) -> str:
        """Return the text for messages: ``layers '0' and '4' share the parameter '0.weight'``."""
        *most, end = (repr(name) for name in self.layers)
        return f"layers {', '.join(most)} and {end} share the parameter {self.parameter!r}"


def find_ties(module: nn.Sequential) -> list[TiedParameters]:
    """Return the parameters shared by several layers, in the order of their first layer."""
    names = {parameter: name for name, parameter in module.named_parameters()}
    holders: dict[nn.Parameter, list[tuple[int, str]]] = {}
    for index, (name, layer) in enumerate(module.named_children()):
        for parameter in layer.parameters():
            holders.setdefault(parameter, []).append((index, name))
    return [
        TiedParameters(
            names[parameter],
            held[0][0],
            held[-1][0],
            tuple(name for _, name in held),
            tuple(index for index, _ in held),
        )
        for parameter, held in holders.items()
        if len(held) > 1
    ]


def check_ties(ties: Sequence[TiedParameters], balance: Sequence[int]) -> None:
    """Raise a ConfigurationError if a balance separates layers with a shared parameter."""
    ends = list(itertools.accumulate(balance))
    for tie in ties:
        if any(tie.first < end <= tie.last for end in ends):
            raise ConfigurationError(
                f"balance={list(balance)}: {tie}, and would be on different stages: give a balance "
                f"that keeps layers {tie.first} to {tie.last} in one stage, untie them, or "
                "use a multi-process pipeline (schedule=)"
            )


def check_chunks(ties: Sequence[TiedParameters], balance: Sequence[int], num_stages: int) -> None:
    """Raise a ConfigurationError if chunks of one stage (chunk q is in stage q mod K) share a
    parameter, as each would give it a gradient.
    """
    chunks = [q for q, count in enumerate(balance) for _ in range(count)]
    for tie in ties:
        held = {chunks[index] for index in tie.positions}
        if len(held) > len({q % num_stages for q in held}):
            raise ConfigurationError(
                f"balance={list(balance)}: {tie}, and would be in several chunks of one stage: "
                "give a balance that keeps them in one chunk or in different stages (chunk q is "
                f"in stage q mod {num_stages}), untie them, or use schedule='1f1b'"
            )


def blocks_of(ties: Sequence[TiedParameters], num_layers: int) -> list[int]:
    """Return the number of layers of each block that must not be cut, in order.

    Example:
        >>> blocks_of([TiedParameters("1.weight", 1, 3, ("1", "3"))], 6)
        [1, 3, 1, 1]
    """
    whole = {cut for tie in ties for cut in range(tie.first + 1, tie.last + 1)}
    cuts = [cut for cut in range(num_layers + 1) if cut not in whole]
    return [end - start for start, end in itertools.pairwise(cuts)]


def merge_layers(profile: LayerProfile, blocks: Sequence[int]) -> LayerProfile:
    """Return the profile of blocks, with the summed costs of their layers."""
    merged, start = [], 0
    for count in blocks:
        layers = profile.layers[start : start + count]
        start += count
        sums = {
            field: sum(getattr(layer, field) for layer in layers)
            for field in Layer._fields
            if field not in ("output_bytes", "name")
        }
        merged.append(layers[-1]._replace(**sums, name=layers[0].name))
    return replace(profile, layers=tuple(merged))
