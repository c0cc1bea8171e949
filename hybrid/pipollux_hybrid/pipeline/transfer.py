"""Transfer of a micro-batch between stages, with and without gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from pipollux_hybrid.errors import ConfigurationError

from .microbatch import PyTree, Structure, flatten, unflatten

__all__ = ["Boundary", "Parcel", "Tensors"]

Tensors: TypeAlias = tuple[Tensor, ...]


@dataclass(frozen=True)
class Parcel:
    """A tensor or plain value, and the event after which a stage that runs ahead may read it."""

    content: Any
    ready: torch.cuda.Event | None

    @classmethod
    def of(cls, content: Any) -> Parcel:
        """Wrap a value whose computation is queued in the current stream."""
        if not (isinstance(content, Tensor) and content.is_cuda):
            return cls(content, None)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(content.device))
        return cls(content, event)

    def open(self, device: torch.device) -> Any:
        """Return the content on a device, for use in its current stream."""
        if not isinstance(self.content, Tensor):
            return self.content
        # Another tensor over the same memory: a layer may return it as its output, which would then
        # become part of one graph, and appear there for other readers of the parcel.
        content = self.content.detach()
        if self.ready is not None:
            # A copy between devices runs in the source's current stream of this thread.
            source = torch.cuda.current_stream(self.content.device)
            source.wait_event(self.ready)
            if device.type == "cuda":
                torch.cuda.current_stream(device).wait_event(self.ready)
            content.record_stream(source)
        return content.to(device, non_blocking=device.type == "cuda")


@dataclass(frozen=True)
class Boundary:
    """The parts of one micro-batch that pass between stages without gradients."""

    structure: Structure
    parcels: dict[int, Parcel]
    """By position among the leaves: tensors without gradients, and plain values."""
    places: tuple[int, ...]

    @classmethod
    def of(cls, value: PyTree, what: str, *, is_input: bool = False) -> Boundary:
        """Split a PyTree, called ``what`` in messages; raise a ConfigurationError for an
        unsupported value. Of the script's inputs only tensors that require a gradient are
        differentiated, else the first layer would compute unneeded gradients of data.
        """
        leaves, structure = flatten(value, what)
        floating = [
            n
            for n, leaf in enumerate(leaves)
            if _floating(leaf) and (leaf.requires_grad or not is_input)
        ]
        # The first tensor carries the order of the backward, so it should require a gradient.
        floating.sort(key=lambda n: not leaves[n].requires_grad)
        rest = {n: Parcel.of(leaf) for n, leaf in enumerate(leaves) if n not in floating}
        return cls(structure, rest, tuple(floating))

    def floating(self, value: PyTree, device: torch.device, what: str) -> Tensors:
        """Return the differentiable tensors of a PyTree; an empty tensor if there are none. Raises
        a ConfigurationError if the PyTree differs from that of this boundary.
        """
        leaves, structure = flatten(value, what)
        if structure != self.structure:
            raise ConfigurationError(
                f"{what} is {structure} when recomputed and was {self.structure} at first: layers "
                "must do the same both times (torchgpipe.is_recomputing() tells them apart)"
            )
        return tuple(leaves[n] for n in self.places) or (torch.empty(0, device=device),)

    def restore(self, tensors: Tensors, device: torch.device) -> PyTree:
        """Return the PyTree, with all of it on a device."""
        leaves: list[Any] = [None] * (len(self.places) + len(self.parcels))
        for n, tensor in zip(self.places, tensors, strict=False):  # without places: an empty tensor
            leaves[n] = tensor
        for n, parcel in self.parcels.items():
            leaves[n] = parcel.open(device)
        return unflatten(leaves, self.structure)


def _floating(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())
