"""Snapshots of a step, to undo changes of the script.

In an elastic job a dying replica voids the current iteration: everything that the script has
changed in it must be restored. Small states are copied at every step boundary, in a few
microseconds. Large ones are only checked for changes, by the version counters of tensors; if one
has changed, the job continues from its checkpoint instead.
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
"""Largest size of a state in bytes that is copied at every step boundary."""


def unchanged(name: str, tensors: Iterable[Tensor]) -> Callable[[], None]:
    """Return a check that raises a CheckpointError if tensors, not copied, have changed."""
    versions = [(tensor, tensor._version) for tensor in tensors]

    def check() -> None:
        if any(tensor._version != version for tensor, version in versions):
            raise CheckpointError(
                f"the script has changed {name} in the step that is void, and it is too large to "
                "be copied at every step"
            )

    return check


def copied(value: Any) -> Any:
    """Return a copy of a ``state_dict()`` that shares objects other than containers and tensors."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return type(value)((key, copied(x)) for key, x in value.items())
    if type(value) in (list, tuple):
        return type(value)(map(copied, value))
    return value


def size_of(value: Any) -> int:
    """Return the bytes of the tensors in a ``state_dict()``."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, dict):
        return sum(map(size_of, value.values()))
    return sum(map(size_of, value)) if isinstance(value, (list, tuple)) else 0


class BufferCopies:
    """Copies of the buffers of a module that forwards change.

    Which buffers change is known after an iteration, so all are copied at first; later the copies
    of unchanged buffers are dropped, except small ones. Running statistics that only the end of a
    step changes are left out.
    """

    def __init__(self, module: nn.Module) -> None:
        deferred = set(deferred_layers(module))
        layers = (layer for layer in module.modules() if layer not in deferred)
        self._places = [(layer, name) for layer in layers for name in layer._buffers]
        self._seen: list[tuple[Tensor | None, int]] = [(None, -1)] * len(self._places)
        self._copies: dict[int, Tensor] = {}
        self._times = 0

    def remember(self) -> Callable[[], None]:
        """Copy buffers changed since the last call; return a function that restores all buffers."""
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
