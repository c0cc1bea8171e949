"""Asynchronous saves: states are copied at a step boundary, and a thread writes them.

One save runs at a time. Its errors are printed and training continues; the next save follows after
the same interval. The buffers of copies are reused: mapping new memory page by page takes longer
than the copy itself, and pinned memory even longer.
"""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipollux_hybrid.errors import CheckpointError

__all__ = ["AsyncSaver", "StagingBuffers"]

SAVE_TIMEOUT = 1800.0
"""Seconds that a stop waits for a running save: the timeout of replicas for a silent peer."""


class AsyncSaver:
    """The thread that writes checkpoints, at most one at a time."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._failure: str | None = None

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, write: Callable[[], Path]) -> None:
        """Write a checkpoint; waits for a running save first."""
        self.wait()
        # Not a daemon: the interpreter waits for it before it exits.
        self._thread = threading.Thread(
            target=self._run, args=(write,), name="pipollux-checkpoint", daemon=False
        )
        self._thread.start()

    def wait(self) -> None:
        """Wait for a running save; raise a CheckpointError if the disk hangs."""
        if self._thread is not None:
            self._thread.join(SAVE_TIMEOUT)
            if self._thread.is_alive():
                raise CheckpointError(
                    f"the checkpoint under way was not written within {SAVE_TIMEOUT:.0f} s: the "
                    "storage of PIPOLLUX_CHECKPOINT_DIR hangs"
                )
            self._thread = None
        self.say_failure()

    def say_failure(self) -> None:
        """Print the error of the last save, once; called at step boundaries."""
        failure, self._failure = self._failure, None
        if failure is not None:
            print(f"pipollux: {failure}", file=sys.stderr, flush=True)

    def _run(self, write: Callable[[], Path]) -> None:
        try:
            write()
        except Exception as error:  # printed by the training thread at a boundary
            self._failure = str(error)


class StagingBuffers:
    """Reusable copies of nested containers of tensors; a copy is valid until the next one."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[Any, ...], Tensor] = {}
        self._events: list[torch.cuda.Event] = []

    def take(self, content: Any) -> Any:
        """Return the same structure with all tensors on the host. Copies from CUDA devices are
        queued behind the current kernels, and before those that change the tensors next; call
        :meth:`wait` before reading them.
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
        """Wait until the last copies are complete; called by the thread that writes."""
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
