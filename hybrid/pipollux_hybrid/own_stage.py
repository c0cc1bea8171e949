"""Reduces the model to the layers of one stage in a multi-process pipeline.

Every process builds the whole model, as written in the script. The layers of other processes are
then removed from it and from the optimizer, which frees their memory and keeps them from everything
that iterates over parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from pipollux_hybrid.checkpoint.parameter_groups import plain_name
from pipollux_hybrid.errors import ConfigurationError
from pipollux_hybrid.pipeline.stage import Stage


class RemoteLayer(nn.Module):
    """Placeholder of a layer in the process of another stage."""

    def __init__(self, name: str, stage: int) -> None:
        super().__init__()
        self.name, self.stage = name, stage

    def forward(self, *_: Any) -> NoReturn:
        """Refuse to run: only the whole pipeline can."""
        raise ConfigurationError(
            f"layer {self.name!r} is in the process of stage {self.stage}: call the wrapped model, "
            "which runs all stages"
        )

    def __getattr__(self, name: str) -> Any:
        """Refuse access to an attribute of the layer in the other process."""
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            raise AttributeError(
                f"layer {self.name!r} is in the process of stage {self.stage}, and its attribute "
                f"{name!r} with it: if the loss needs it, return it as an output of the layers"
            ) from error

    def extra_repr(self) -> str:
        """Return the stage."""
        return f"stage={self.stage}"


def keep_stage(
    module: nn.Sequential,
    optimizer: torch.optim.Optimizer,
    stages: Sequence[Stage],
    index: int,
) -> frozenset[str]:
    """Remove all layers but those of stage ``index`` from the module and from the optimizer.

    Removed layers are replaced by :class:`RemoteLayer`, and the optimizer's groups keep the
    remaining parameters. Returns the names of the removed parameters and buffers.
    """
    elsewhere = set()
    for layers in stages:
        if layers.index == index:
            continue
        for name, layer in layers.named_children():
            elsewhere |= {plain_name(f"{name}.{inner}") for inner in layer.state_dict()}
            module._modules[name] = RemoteLayer(name, layers.index)
    # A recorded layer has the model's names, and several may hold the same module.
    elsewhere -= {plain_name(name) for name in module.state_dict()}
    kept = set(module.parameters())
    for group in optimizer.param_groups:
        here = [parameter in kept for parameter in group["params"]]
        for field in ("params", "param_names"):
            if field in group:
                group[field] = [x for x, stays in zip(group[field], here, strict=True) if stays]
    for parameter in [x for x in optimizer.state if x not in kept]:
        del optimizer.state[parameter]
    return frozenset(elsewhere)
