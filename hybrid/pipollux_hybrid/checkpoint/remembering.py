"""What a step may have changed, kept so that it can be put back.

Where replicas come and go, one that dies voids the iteration under way: what the script has changed
in it must be as it was at its beginning. Small things are copied at every step boundary, at a few
microseconds each. Of large ones it is known whether they have changed, as tensors count changes in
place; where one has, the job goes on from its checkpoint instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from pipollux_hybrid.errors import CheckpointError

__all__ = ["REMEMBERED_BYTES", "BufferCopies", "copied", "size_of", "unchanged"]

REMEMBERED_BYTES = 1 << 20
"""Bytes of a state that are copied at every step boundary at most."""


def unchanged(name: str, tensors: Iterable[Tensor]) -> Callable[[], None]:
    """Return a check that none of the tensors has changed.

    Args:
        name: What they are, for the message.
        tensors: Any; they are not copied.

    Returns:
        What raises a CheckpointError if one has.
    """
    versions = [(tensor, tensor._version) for tensor in tensors]

    def check() -> None:
        if any(tensor._version != version for tensor, version in versions):
            raise CheckpointError(
                f"the script has changed {name} in the step that is void, and it is too large to "
                "be copied at every step"
            )

    return check


def copied(value: Any) -> Any:
    """Return a copy of what a ``state_dict()`` gave: of containers and tensors, not of others."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return type(value)((key, copied(x)) for key, x in value.items())
    if type(value) in (list, tuple):
        return type(value)(map(copied, value))
    return value


def size_of(value: Any) -> int:
    """Return the bytes of the tensors in what a ``state_dict()`` gave."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, dict):
        return sum(map(size_of, value.values()))
    return sum(map(size_of, value)) if isinstance(value, (list, tuple)) else 0


class BufferCopies:
    """Copies of those buffers of a module that steps change.

    Args:
        module: The module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._places = [
            (layer, name) for layer in module.modules() for name in layer._buffers if name
        ]
        self._seen: list[tuple[Tensor | None, int]] = []
        self._copies: dict[int, Tensor] = {}

    def remember(self) -> Callable[[], None]:
        """Copy what has changed since the last time; return what puts all buffers back."""
        now = [(b, -1 if b is None else b._version) for b in self._buffers()]
        if self._seen:
            for index, ((buffer, version), before) in enumerate(zip(now, self._seen, strict=True)):
                if buffer is not None and (buffer is not before[0] or version != before[1]):
                    self._copy(index, buffer)
        self._seen = now
        return self._restore

    def _copy(self, index: int, buffer: Tensor) -> None:
        copy = self._copies.get(index)
        if copy is None or copy.shape != buffer.shape or copy.dtype != buffer.dtype:
            self._copies[index] = buffer.detach().clone()
        else:
            copy.copy_(buffer.detach())

    @torch.no_grad()
    def _restore(self) -> None:
        for index, (now, (before, version)) in enumerate(
            zip(list(self._buffers()), self._seen, strict=True)
        ):
            if now is before and (now is None or now._version == version):
                continue
            layer, name = self._places[index]
            if before is not None and index not in self._copies:
                raise CheckpointError(
                    f"buffer {name!r} of a {type(layer).__name__} has changed in the step that is "
                    "void, for the first time, and there is no copy of it"
                )
            layer._buffers[name] = before
            if before is not None:
                before.copy_(self._copies[index])

    def _buffers(self) -> Iterable[Tensor | None]:
        return (layer._buffers.get(name) for layer, name in self._places)
