"""States without their tensors, sent before the tensors.

A skeleton is the :meth:`~pipollux_hybrid.State.content` of a state with a number in place of each
tensor, so its receiver can allocate the tensors and insert them. A tensor with several places, such
as a tied parameter, is sent once.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

__all__ = ["Kind", "Spare", "fill", "find_room", "is_dense", "take_apart"]

STANDS_FOR_A_TENSOR = "pipollux tensor"
Path = tuple[Any, ...]


class Kind(NamedTuple):
    """Type, shape and memory order of a tensor without gaps."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> Kind:
        """Return the kind of a tensor, or of a contiguous copy if it has gaps."""
        whole = tensor if is_dense(tensor) else torch.empty(tensor.shape, device="meta")
        shape = tuple(tensor.shape)
        steps = zip(whole.stride(), shape, strict=True)
        return cls(tensor.dtype, shape, tuple(x if size > 1 else 1 for x, size in steps))

    @property
    def size(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def make(self, device: str = "cpu") -> Tensor:
        """Return an uninitialised tensor."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)


Spare = dict[Kind, list[Tensor]]
"""Memory allocated for expected tensors."""


def take_apart(content: Any, tensors: list[Tensor]) -> Any:
    """Return the skeleton of a content of nested dicts, lists and tuples; its tensors are appended
    to ``tensors``, by whose indices the skeleton refers to them.
    """
    known: dict[Any, int] = {}

    def number(_: Path, value: Any) -> Any:
        if not _is_plain(value):
            return value
        memory = (value.data_ptr(), value.stride(), value.device, Kind.of(value))
        if memory not in known:
            known[memory] = len(tensors)
            tensors.append(value.detach())
        return {STANDS_FOR_A_TENSOR: known[memory]}

    return _map(content, number)


def fill(skeleton: Any, tensors: Sequence[Tensor]) -> Any:
    """Return the content of a skeleton, with tensors in their places."""
    return _map(skeleton, lambda _, value: tensors[value.number] if _stands(value) else value)


def find_room(skeleton: Any, own: Any, kinds: Sequence[Kind]) -> dict[int, Tensor]:
    """Return the tensors of this replica's content that can be overwritten: by number in another
    replica's skeleton, the tensor at the same place, if its kind is the same; none of them twice.
    """
    ours: dict[Path, Tensor] = {}

    def note(path: Path, value: Any) -> Any:
        if _is_plain(value) and is_dense(value):
            ours[path] = value.detach()
        return value

    _map(own, note)
    room: dict[int, Tensor] = {}
    taken: set[int] = set()

    def place(path: Path, value: Any) -> Any:
        here = ours.get(path)
        if (
            _stands(value)
            and value.number not in room
            and here is not None
            and Kind.of(here) == kinds[value.number]
            and here.data_ptr() not in taken
        ):
            room[value.number] = here
            taken.add(here.data_ptr())
        return value

    _map(skeleton, place)
    return room


class _Number(NamedTuple):
    number: int


def _stands(value: Any) -> bool:
    return isinstance(value, _Number)


def _map(value: Any, function: Callable[[Path, Any], Any], path: Path = ()) -> Any:
    if isinstance(value, Mapping) and set(value) == {STANDS_FOR_A_TENSOR}:
        return function(path, _Number(int(value[STANDS_FOR_A_TENSOR])))
    if type(value) in (dict, OrderedDict):
        copy = type(value)((key, _map(x, function, (*path, key))) for key, x in value.items())
        if type(value) is OrderedDict:  # a module's state has the versions of its layers here
            vars(copy).update(vars(value))
        return copy
    if type(value) in (list, tuple):
        return type(value)(_map(x, function, (*path, i)) for i, x in enumerate(value))
    return function(path, value)


def _is_plain(value: Any) -> bool:
    return (
        type(value) in (Tensor, nn.Parameter)
        and value.layout is torch.strided
        and value.device.type in ("cpu", "cuda")
        and value.numel() > 0
        and not (value.is_quantized or value.is_conj() or value.is_neg())
    )


def is_dense(tensor: Tensor) -> bool:
    """Return whether no two elements overlap, and there are no gaps."""
    expected = 1
    for stride, size in sorted(_steps(tensor)):
        if stride != expected:
            return False
        expected *= size
    return True


def _steps(tensor: Tensor) -> Iterator[tuple[int, int]]:
    sizes = zip(tensor.stride(), tensor.shape, strict=True)
    return ((stride, size) for stride, size in sizes if size > 1)
