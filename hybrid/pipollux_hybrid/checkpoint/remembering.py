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
from pipollux_hybrid.pipeline.batchnorm import deferred_layers

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
    """Copies of those buffers of a module that forwards change.

    Which these are is known after an iteration, so at first all are copied; then of those that have
    not changed the small ones are kept. Running statistics that only the end of a step changes are
    left out.

    Args:
        module: The module.
    """

    def __init__(self, module: nn.Module) -> None:
        deferred = set(deferred_layers(module))
        layers = (layer for layer in module.modules() if layer not in deferred)
        self._places = [(layer, name) for layer in layers for name in layer._buffers]
        self._seen: list[tuple[Tensor | None, int]] = [(None, -1)] * len(self._places)
        self._copies: dict[int, Tensor] = {}
        self._times = 0

    def remember(self) -> Callable[[], None]:
        """Copy what has changed since the last time; return what puts all buffers back."""
        seen, self._seen = self._seen, [(b, -1 if b is None else b._version) for b in self._now()]
        copies: list[Tensor] = []
        changed: list[Tensor] = []
        constant: list[int] = []
        for index, (before, now) in enumerate(zip(seen, self._seen, strict=True)):
            if now[0] is None or _are_same(now, before):
                constant.append(index)
                continue
            copy, buffer = self._copies.get(index), now[0].detach()
            if copy is None or copy.shape != buffer.shape or copy.dtype != buffer.dtype:
                self._copies[index] = buffer.clone()
            else:
                copies.append(copy)
                changed.append(buffer)
        if copies:
            torch._foreach_copy_(copies, changed)
        self._times += 1
        if self._times == 2:
            self._drop(constant)
        return self._restore

    def _drop(self, constant: list[int]) -> None:
        """Let go of the copies of buffers that do not change, but of small ones."""
        kept = 0
        for index in constant:
            kept += size_of(self._copies.get(index))
            if kept > REMEMBERED_BYTES:
                self._copies.pop(index, None)

    @torch.no_grad()
    def _restore(self) -> None:
        for index, (now, before) in enumerate(zip(list(self._now()), self._seen, strict=True)):
            if _are_same((now, -1 if now is None else now._version), before):
                continue
            (layer, name), buffer = self._places[index], before[0]
            if buffer is not None and index not in self._copies:
                raise CheckpointError(
                    f"buffer {name!r} of a {type(layer).__name__} has changed in the step that is "
                    "void, and there is no copy of it"
                )
            layer._buffers[name] = buffer
            if buffer is not None:
                buffer.copy_(self._copies[index])

    def _now(self) -> Iterable[Tensor | None]:
        return (layer._buffers.get(name) for layer, name in self._places)


def _are_same(one: tuple[Tensor | None, int], other: tuple[Tensor | None, int]) -> bool:
    return one[0] is other[0] and one[1] == other[1]
