"""What a micro-batch carries from stage to stage, with and without gradients."""

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
        """Return the content on a device, for use in its present stream."""
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


@dataclass(frozen=True)
class Boundary:
    """What one micro-batch carries from stage to stage without gradients."""

    structure: Structure
    parcels: dict[int, Parcel]
    """By place among the leaves: tensors that no gradient follows, and plain values."""
    places: tuple[int, ...]
    """Where among the leaves the others belong."""

    @classmethod
    def of(cls, value: PyTree, what: str, *, is_input: bool = False) -> Boundary:
        """Take a PyTree apart.

        Args:
            value: The PyTree.
            what: Whose it is, for the message.
            is_input: Whether it comes from the script. Then only what the script wants a gradient
                of is followed, or the first layer would compute one of data for nothing.

        Raises:
            ConfigurationError: It holds something that no pipeline carries.
        """
        leaves, structure = flatten(value, what)
        floating = [
            n
            for n, leaf in enumerate(leaves)
            if _floating(leaf) and (leaf.requires_grad or not is_input)
        ]
        # The first tensor carries the order of the backward, so it should be one that has one.
        floating.sort(key=lambda n: not leaves[n].requires_grad)
        rest = {n: Parcel.of(leaf) for n, leaf in enumerate(leaves) if n not in floating}
        return cls(structure, rest, tuple(floating))

    def floating(self, value: PyTree, device: torch.device, what: str) -> Tensors:
        """Return the tensors of a PyTree that gradients follow; an empty one if there are none.

        Raises:
            ConfigurationError: The PyTree is not like the one that this boundary was made of.
        """
        leaves, structure = flatten(value, what)
        if structure != self.structure:
            raise ConfigurationError(
                f"{what} is {structure} when recomputed and was {self.structure} at first: layers "
                "must do the same both times (torchgpipe.is_recomputing() tells them apart)"
            )
        return tuple(leaves[n] for n in self.places) or (torch.empty(0, device=device),)

    def restore(self, tensors: Tensors, device: torch.device) -> PyTree:
        """Return the PyTree again, all of it on a device."""
        leaves: list[Any] = [None] * (len(self.places) + len(self.parcels))
        for n, tensor in zip(self.places, tensors, strict=False):  # without places: one for none
            leaves[n] = tensor
        for n, parcel in self.parcels.items():
            leaves[n] = parcel.open(device)
        return unflatten(leaves, self.structure)


def _floating(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())
