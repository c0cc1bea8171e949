"""What a stage tells the next one of the tensors that it is about to send.

Stages in processes of their own do not know each other's layers. So the first micro-batch of every
step is preceded by a few bytes: the structure of what the stage gives, and the shape, type and
:attr:`~torch.Tensor.requires_grad` of each tensor in it. The other micro-batches of the step differ
in their samples only, that is, in dimension 0.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pipollux_hybrid.errors import ConfigurationError

from .microbatch import PyTree, Structure, flatten, unflatten

__all__ = [
    "HEADER_BYTES",
    "BoundaryLayout",
    "describe",
    "from_header",
    "rest_of_header",
    "to_header",
]

HEADER_BYTES = 4096
"""Bytes of the message that comes first; what does not fit follows in a second one."""
LENGTH_BYTES = 8


@dataclass(frozen=True)
class TensorKind:
    """A tensor of one micro-batch, without its elements."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def of(self, samples: int, of_samples: int) -> TensorKind:
        """Return the same of a micro-batch of other samples: dimension 0 is in proportion."""
        if samples == of_samples or not self.shape:
            return self
        rows = self.shape[0] * samples // of_samples
        return TensorKind((rows, *self.shape[1:]), self.dtype, self.requires_grad)

    def empty(self, device: torch.device) -> Tensor:
        """Return a tensor of this kind to be overwritten; nothing requires its gradient yet."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)


@dataclass(frozen=True)
class BoundaryLayout:
    """What crosses from one stage to the next with a micro-batch."""

    structure: Structure
    """What the leaves hang on."""
    leaves: tuple[Any, ...]
    """In the place of each tensor its :class:`TensorKind`, and plain values as they are."""

    @property
    def kinds(self) -> list[TensorKind]:
        """The tensors, in order."""
        return [leaf for leaf in self.leaves if isinstance(leaf, TensorKind)]

    def of(self, samples: int, of_samples: int) -> BoundaryLayout:
        """Return what crosses with a micro-batch of other samples."""
        leaves = (
            leaf.of(samples, of_samples) if isinstance(leaf, TensorKind) else leaf
            for leaf in self.leaves
        )
        return BoundaryLayout(self.structure, tuple(leaves))

    def value(self, tensors: Sequence[Tensor]) -> PyTree:
        """Return the PyTree with these tensors in it."""
        rest = iter(tensors)
        leaves = [next(rest) if isinstance(x, TensorKind) else x for x in self.leaves]
        return unflatten(leaves, self.structure)


def describe(value: PyTree, what: str) -> tuple[BoundaryLayout, list[Tensor]]:
    """Return what a PyTree looks like, and its tensors.

    Args:
        value: Of one micro-batch.
        what: Whose it is, for the message.

    Raises:
        ConfigurationError: A leaf is neither a tensor nor a plain value.
    """
    leaves, structure = flatten(value, what)
    kinds = tuple(
        TensorKind(tuple(x.shape), x.dtype, x.requires_grad) if isinstance(x, Tensor) else x
        for x in leaves
    )
    return BoundaryLayout(structure, kinds), [x for x in leaves if isinstance(x, Tensor)]


def to_header(boundary: BoundaryLayout, what: str) -> tuple[Tensor, Tensor | None]:
    """Return the messages that tell of a boundary: one, and another if that is too short.

    Args:
        boundary: What is told of.
        what: Whose it is, for the message.

    Returns:
        Tensors of uint8, the first of shape [:data:`HEADER_BYTES`].

    Raises:
        ConfigurationError: The structure is none of tuples, lists and dicts.
    """
    try:
        structure = pytree.treespec_dumps(boundary.structure)
    except (NotImplementedError, TypeError) as error:
        raise ConfigurationError(
            f"{what} cannot be told to the next stage, which has a process of its own: between "
            f"stages pass tuples, lists and dicts of tensors ({error})"
        ) from error
    text = json.dumps({"structure": structure, "leaves": [_encode(x) for x in boundary.leaves]})
    content = text.encode()
    packed = len(content).to_bytes(LENGTH_BYTES, "little") + content
    rest = packed[HEADER_BYTES:]
    return _bytes(packed[:HEADER_BYTES].ljust(HEADER_BYTES)), _bytes(rest) if rest else None


def rest_of_header(first: Tensor) -> int:
    """Return the bytes that follow a first message."""
    length = int.from_bytes(first[:LENGTH_BYTES].numpy().tobytes(), "little")
    return max(length + LENGTH_BYTES - HEADER_BYTES, 0)


def from_header(first: Tensor, rest: Tensor | None) -> BoundaryLayout:
    """Return the boundary that messages tell of; see :func:`to_header`."""
    packed = first.numpy().tobytes() + (b"" if rest is None else rest.numpy().tobytes())
    length = int.from_bytes(packed[:LENGTH_BYTES], "little")
    told = json.loads(packed[LENGTH_BYTES : LENGTH_BYTES + length])
    return BoundaryLayout(
        pytree.treespec_loads(told["structure"]), tuple(_decode(x) for x in told["leaves"])
    )


def _bytes(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _encode(leaf: Any) -> Any:
    """Return a leaf as JSON can hold it; the kinds of plain values are those of ``PLAIN``."""
    match leaf:
        case TensorKind(shape, dtype, requires_grad):
            return {"tensor": [list(shape), _name(dtype), requires_grad]}
        case torch.Size():
            return {"size": list(leaf)}
        case torch.dtype():
            return {"dtype": _name(leaf)}
        case torch.device():
            return {"device": str(leaf)}
        case complex():
            return {"complex": [leaf.real, leaf.imag]}
        case bytes():
            return {"bytes": leaf.hex()}
        case _:
            return leaf


def _decode(told: Any) -> Any:
    if not isinstance(told, dict):
        return told
    ((kind, content),) = told.items()
    match kind:
        case "tensor":
            shape, dtype, requires_grad = content
            return TensorKind(tuple(shape), getattr(torch, dtype), requires_grad)
        case "size":
            return torch.Size(content)
        case "dtype":
            return getattr(torch, content)
        case "device":
            return torch.device(content)
        case "complex":
            return complex(*content)
        case _:
            return bytes.fromhex(content)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
