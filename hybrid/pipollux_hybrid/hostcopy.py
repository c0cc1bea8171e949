"""Copies of tensors in the host's memory, taken without making a GPU wait.

The buffers are kept from one copy to the next: memory that is new has to be mapped page by page,
which takes longer than the copy itself, and pinned memory even more so.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

__all__ = ["HostCopy"]


class HostCopy:
    """Copies nested dicts, lists and tuples of tensors into buffers of its own.

    One copy is good until the next is taken.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[Any, ...], Tensor] = {}
        self._events: list[torch.cuda.Event] = []

    def take(self, content: Any) -> Any:
        """The same structure with all tensors on the host.

        Copies from CUDA devices are queued behind the kernels that are under way, and before those
        that change the tensors next; :meth:`wait` until they are done before reading them.
        """
        devices: set[torch.device] = set()
        result = self._copy(content, (), devices)
        self._events = []
        for device in devices:
            with torch.cuda.device(device):
                event = torch.cuda.Event()
                event.record()
            self._events.append(event)
        return result

    def wait(self) -> None:
        """Return when the copies taken last are complete; called by the thread that writes."""
        for event in self._events:
            event.synchronize()

    def _copy(self, value: Any, path: tuple[Any, ...], devices: set[torch.device]) -> Any:
        if isinstance(value, Tensor):
            return self._copy_tensor(value.detach(), path, devices)
        if isinstance(value, dict):
            return {key: self._copy(x, (*path, key), devices) for key, x in value.items()}
        if type(value) in (list, tuple):
            return type(value)(self._copy(x, (*path, i), devices) for i, x in enumerate(value))
        return copy.deepcopy(value)

    def _copy_tensor(
        self, tensor: Tensor, path: tuple[Any, ...], devices: set[torch.device]
    ) -> Tensor:
        buffer = self._buffers.get(path)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._buffers[path] = buffer
        buffer.copy_(tensor, non_blocking=tensor.is_cuda)
        if tensor.is_cuda:
            devices.add(tensor.device)
        return buffer
