"""The script's thread-local state around a forward, restored in the threads that run stages.

Stages run in worker threads if they are on several devices, and in autograd threads when
recomputed, which lack the contexts entered around the forward: a forward under ``torch.autocast``
would run in float32 and be recomputed in bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class ThreadLocalState:
    """Contexts entered at the start of a forward in the script's thread.

    Example::

        outer = ThreadLocalState.capture({"cuda"})     # in the thread of the script
        with outer.entered():                       # in any other
            layer(x)
    """

    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    """Device type, whether autocast is on, and its dtype."""
    inference: bool
    device: torch.device
    """Default device of factory functions."""
    saved_tensors: tuple[Any, Any] | None
    """Innermost pair of :class:`torch.autograd.graph.saved_tensors_hooks`."""

    @classmethod
    def capture(cls, device_types: Iterable[str]) -> ThreadLocalState:
        """Capture the caller's thread-local state, for devices of these types and the CPU."""
        types = sorted({"cpu", *device_types})
        return cls(
            autocast=tuple(
                (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
                for kind in types
            ),
            inference=torch.is_inference_mode_enabled(),
            device=torch.get_default_device(),
            saved_tensors=_innermost_hooks(),
        )

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Run the body with the captured state, in any thread."""
        with ExitStack() as stack:
            for kind, enabled, dtype in self.autocast:
                now = (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
                if now != (enabled, dtype) or (enabled and torch.is_autocast_cache_enabled()):
                    # Without the cache of cast weights, which must not outlive a forward without
                    # gradients: a later recomputation would use weights without gradients.
                    stack.enter_context(torch.autocast(kind, dtype, enabled, cache_enabled=False))
            if self.inference and not torch.is_inference_mode_enabled():
                stack.enter_context(torch.inference_mode())
            if self.device != torch.get_default_device():
                stack.enter_context(self.device)
            if self.saved_tensors is not None and self.saved_tensors != _innermost_hooks():
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*self.saved_tensors))
            yield


def _innermost_hooks() -> tuple[Any, Any] | None:
    # PyTorch itself only uses the innermost pair, and has no public API for it.
    hooks: tuple[Any, Any] | None = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks
