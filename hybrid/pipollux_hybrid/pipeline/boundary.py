"""The header that a stage sends to the next one before the tensors of a micro-batch.

The stages of a multi-process pipeline do not know each other's layers. Every micro-batch is
therefore preceded by a header: the structure of the stage's output, and the shape, dtype and
:attr:`~torch.Tensor.requires_grad` of each tensor in it. Micro-batches of one step may differ in
all of these: the last one may be shorter, and a layer may omit a mask if no row is padded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pipollux_hybrid.errors import ConfigurationError

from . import named_tuples
from .microbatch import LEAF, PyTree, Structure, flatten, unflatten

HEADER_BYTES = 4096
"""Bytes of the first message; longer headers continue in a second one."""
LENGTH_BYTES = 8


class TensorKind(NamedTuple):
    """A tensor of one micro-batch, without its elements."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def empty(self, device: torch.device) -> Tensor:
        """Return an uninitialized tensor of this kind that does not require a gradient."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)


@dataclass(frozen=True)
class BoundaryLayout:
    """The output of one stage for one micro-batch, as input of the next."""

    structure: Structure
    leaves: tuple[Any, ...]
    """A :class:`TensorKind` in the place of each tensor; plain values unchanged."""

    @cached_property
    def kinds(self) -> list[TensorKind]:
        """The tensors, in order."""
        return [leaf for leaf in self.leaves if isinstance(leaf, TensorKind)]

    @property
    def is_tensors(self) -> bool:
        """Whether equal layouts look the same to layers: 1, 1.0 and True are equal as well."""
        return all(leaf is None or isinstance(leaf, TensorKind) for leaf in self.leaves)

    def value(self, tensors: Sequence[Tensor]) -> PyTree:
        """Return the PyTree with the given tensors."""
        if self.structure is LEAF:
            (tensor,) = tensors
            return tensor
        rest = iter(tensors)
        leaves = [next(rest) if isinstance(x, TensorKind) else x for x in self.leaves]
        return unflatten(leaves, self.structure)


def describe(value: PyTree, what: str) -> tuple[BoundaryLayout, list[Tensor]]:
    """Return the layout of a PyTree, and its tensors."""
    if isinstance(value, Tensor):
        return BoundaryLayout(LEAF, (_kind_of(value),)), [value]
    leaves, structure = flatten(value, what)
    kinds = tuple(_kind_of(x) if isinstance(x, Tensor) else x for x in leaves)
    return BoundaryLayout(structure, kinds), [x for x in leaves if isinstance(x, Tensor)]


def _kind_of(tensor: Tensor) -> TensorKind:
    return TensorKind(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)


def to_header(boundary: BoundaryLayout, what: str) -> tuple[Tensor, Tensor | None]:
    """Return the messages that encode a layout: uint8 [:data:`HEADER_BYTES`], and one for the rest.
    Raises a ConfigurationError for other types than tuples, lists, dicts and named tuples.
    """
    named = named_tuples.names_of(boundary.structure, what)
    try:
        structure = pytree.treespec_dumps(boundary.structure)
    except (NotImplementedError, TypeError) as error:
        raise ConfigurationError(
            f"{what} cannot be sent to the process of the next stage: between "
            f"stages pass tuples, named tuples, lists and dicts of tensors ({error})"
        ) from error
    leaves = [_encode(leaf) for leaf in boundary.leaves]
    text = json.dumps({"named": named, "structure": structure, "leaves": leaves})
    content = text.encode()
    packed = len(content).to_bytes(LENGTH_BYTES, "little") + content
    rest = packed[HEADER_BYTES:]
    return _bytes(packed[:HEADER_BYTES].ljust(HEADER_BYTES)), _bytes(rest) if rest else None


def rest_of_header(first: Tensor) -> int:
    """Return the bytes that follow the first message."""
    length = int.from_bytes(first[:LENGTH_BYTES].numpy().tobytes(), "little")
    return max(length + LENGTH_BYTES - HEADER_BYTES, 0)


def from_header(first: Tensor, rest: Tensor | None) -> BoundaryLayout:
    """Return the layout that messages encode; see :func:`to_header`."""
    packed = first.numpy().tobytes() + (b"" if rest is None else rest.numpy().tobytes())
    length = int.from_bytes(packed[:LENGTH_BYTES], "little")
    told = json.loads(packed[LENGTH_BYTES : LENGTH_BYTES + length])
    named_tuples.register(told["named"])
    structure = pytree.treespec_loads(told["structure"])
    leaves = tuple(_decode(x) for x in told["leaves"])
    is_tensor = structure.is_leaf() and isinstance(leaves[0], TensorKind)
    return BoundaryLayout(LEAF if is_tensor else structure, leaves)


class HeaderWriter:
    """Encodes headers; repeated layouts are cached."""

    def __init__(self) -> None:
        self._last: BoundaryLayout | None = None
        self._messages: tuple[Tensor, ...] = ()

    def encode(self, boundary: BoundaryLayout, what: str) -> tuple[Tensor, ...]:
        """Return the messages of a layout; see :func:`to_header`."""
        if not boundary.is_tensors or boundary != self._last:
            self._last = boundary
            self._messages = tuple(x for x in to_header(boundary, what) if x is not None)
        return self._messages


class HeaderReader:
    """Decodes headers; repeated ones are cached."""

    def __init__(self) -> None:
        self._last = b""
        self._boundary: BoundaryLayout | None = None

    def decode(self, first: Tensor, receive: Callable[[int], Tensor]) -> BoundaryLayout:
        """Return the layout of a header; ``receive`` gets the length of a second message."""
        content = first.numpy().tobytes()
        if self._boundary is not None and content == self._last:
            return self._boundary
        count = rest_of_header(first)
        rest = receive(count) if count else None
        content += b"" if rest is None else rest.numpy().tobytes()
        if self._boundary is None or content != self._last:
            self._last, self._boundary = content, from_header(first, rest)
        return self._boundary


def _bytes(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _encode(leaf: Any) -> Any:
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
