"""Values on their way from one device to another that no gradient comes back for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["Parcel"]


@dataclass(frozen=True)
class Parcel:
    """A tensor or plain value, and the moment from which it may be read.

    Stages on CUDA devices run ahead of their results; the event says when this one is there.
    """

    content: Any
    ready: torch.cuda.Event | None

    @classmethod
    def of(cls, content: Any) -> Parcel:
        """Wrap what the present stream has just been told to compute."""
        if not (isinstance(content, Tensor) and content.is_cuda):
            return cls(content, None)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(content.device))
        return cls(content, event)

    def open(self, device: torch.device) -> Any:
        """The content on a device, for use in its present stream."""
        if not isinstance(self.content, Tensor):
            return self.content
        # Another tensor over the same memory: a layer may hand it on as its output, which would
        # then become part of one graph, and be found there by the next that opens the parcel.
        content = self.content.detach()
        if self.ready is not None:
            # A copy between devices runs in the source's present stream of this thread.
            source = torch.cuda.current_stream(self.content.device)
            source.wait_event(self.ready)
            if device.type == "cuda":
                torch.cuda.current_stream(device).wait_event(self.ready)
            content.record_stream(source)
        return content.to(device, non_blocking=device.type == "cuda")
