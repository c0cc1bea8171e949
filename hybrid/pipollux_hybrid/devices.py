"""Devices that a stage can run on: what is asked for has to be there."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .errors import ConfigurationError

__all__ = ["find_devices"]


def find_devices(names: Sequence[torch.device | str], source: str) -> list[torch.device]:
    """The devices of such names.

    Args:
        names: As PyTorch names them.
        source: Where they come from, for the message.

    Raises:
        ConfigurationError: One of them is not there, or no device for stages.
    """
    return [_find(name, source) for name in names]


def _find(name: torch.device | str, source: str) -> torch.device:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        device = None
    if device is not None and device.type == "cpu":
        return device
    if device is not None and device.type == "cuda" and (device.index or 0) < count:
        return device
    others = "".join(f", 'cuda:{index}'" for index in range(count))
    hint = (
        "fewer stages or replicas on this node, or other devices"
        if count
        else f"torch {torch.__version__} sees no CUDA device; leave devices out to train on the CPU"
    )
    raise ConfigurationError(
        f"{source} ask for {str(name)!r}, and stages can run on 'cpu'{others} here: {hint}"
    )
