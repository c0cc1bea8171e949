"""Marks of a batch's parts that are cut into micro-batches, or not.

In inputs and targets, dimension 0 of every tensor is the batch, and numbers, strings and None are
the same for all samples. Exceptions are marked with :func:`whole` and :func:`per_sample`. Some
missing marks are detected: a list with as many items as samples, a causal mask or positions as long
as the batch, and a tensor that is reused for the next samples.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pipollux_hybrid.errors import ConfigurationError

from .unloaded import is_loaded

CHECKED_BATCHES = 10
"""First batches, whose tensors are checked."""
CHOICE = (
    "pass pipollux.whole(…) if every micro-batch gets all of it, or pipollux.per_sample(…) if it "
    "has an entry for each sample"
)


class Marked:
    """A part of a batch with an explicit rule for cutting.

    A PyTree node, so that functions of a batch's tensors also apply to tensors in it.
    """

    def __init__(self, value: Any) -> None:
        self.value = value


class Whole(Marked):
    """A value passed whole to every micro-batch; see :func:`whole`."""


class PerSample(Marked):
    """A sequence or tensor with one entry per sample; see :func:`per_sample`."""

    @property
    def size(self) -> int:
        """Number of samples."""
        return len(self.value)


def whole(value: Any) -> Any:
    """Mark a part of inputs or targets that every micro-batch gets unchanged.

    For tensors whose dimension 0 is not the batch (a causal mask, positions, class weights), and
    lists that are unrelated to samples. Layers and the loss function get the value itself.

    Example::

        mask = nn.Transformer.generate_square_subsequent_mask(length)
        output = model({"tokens": tokens, "mask": pipollux.whole(mask)})

    Args:
        value: A tensor of any shape, a plain value, or tuples, lists and dicts of these.
    """
    return Whole(value)


def per_sample(value: Any) -> Any:
    """Mark a part of inputs or targets with one entry per sample.

    For lists and tuples, such as strings, or tensors of different shapes, from a collate function.
    Layers and the loss function get the entries of their micro-batch, as a list or tuple. For
    tensors dimension 0 is the batch even without a mark.

    Example::

        loss = model.train_step(images, pipollux.per_sample(boxes), loss_fn)  # a list of tensors

    Args:
        value: A list, tuple or tensor.

    Raises:
        ConfigurationError: The value is neither of these.
    """
    if not isinstance(value, (list, tuple, Tensor)) or (
        isinstance(value, Tensor) and not value.dim()
    ):
        raise ConfigurationError(
            f"per_sample(…) got a {type(value).__name__}: a list, a tuple or a tensor with one "
            "entry for each sample is needed"
        )
    return PerSample(value)


def is_marked(value: object) -> bool:
    """Return whether a value is marked by :func:`whole` or :func:`per_sample`."""
    return isinstance(value, Marked)


def map_marked(function: Callable[[Any], Any], value: Any) -> Any:
    """Return a PyTree with a function applied to each marked value in it."""
    if isinstance(value, Tensor):
        return value
    return pytree.tree_map(lambda x: function(x) if is_marked(x) else x, value, is_leaf=is_marked)


def _flatten(marked: Marked) -> tuple[list[Any], None]:
    return [marked.value], None


def _unflatten(kind: type[Marked], values: Iterable[Any], _: None) -> Marked:
    return kind(*values)


def _flatten_with_keys(marked: Marked) -> tuple[list[tuple[pytree.KeyEntry, Any]], None]:
    return [(pytree.GetAttrKey("value"), marked.value)], None


for _kind in (Whole, PerSample):
    pytree.register_pytree_node(
        _kind,
        _flatten,
        partial(_unflatten, _kind),
        serialized_type_name=f"pipollux.{_kind.__name__}",
        flatten_with_keys_fn=_flatten_with_keys,
    )


def plain_batch(batch: Any) -> Any:
    """Return a batch with other mappings, such as a ``BatchEncoding``, replaced by dicts."""
    if isinstance(batch, Tensor):
        return batch
    return pytree.tree_map_only(
        Mapping, lambda x: plain_batch(dict(x)), batch, is_leaf=lambda x: isinstance(x, torch.Size)
    )


class BatchCheck:
    """Rejects values that would be cut, or not be cut, by mistake."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._batches = 0
        self._others: set[str] = set()
        """Lists that once had another length than the batch."""
        self._last: dict[str, Callable[[], Tensor | None]] = {}

    def check(self, batch: Any, num_samples: int, num_microbatches: int) -> None:
        """Check a batch before it is cut; a ConfigurationError has the path of an ambiguous or
        unsuitable value and the mark to use.
        """
        if isinstance(batch, Tensor) or num_microbatches == 1 or num_samples == 1:
            return
        if not is_loaded(batch):
            return  # the stage that needs the values checks them
        for path, items in _lists(batch, self._what):
            if len(items) != num_samples:
                self._others.add(path)
            elif path not in self._others:
                self._refuse(path, f"a {type(items).__name__} of {num_samples} items", num_samples)
        if self._batches < CHECKED_BATCHES:
            self._batches += 1
            self._check_tensors(batch, num_samples)

    def _check_tensors(self, batch: Any, num_samples: int) -> None:
        found = pytree.tree_flatten_with_path(batch, is_leaf=is_marked)[0]
        tensors = {self._what + pytree.keystr(p): x for p, x in found if isinstance(x, Tensor)}
        for path, tensor in tensors.items():
            others = [x for x in tensors.values() if x is not tensor]
            if _is_causal(tensor):
                self._refuse(path, "a causal mask, [length, length]", num_samples)
            if _is_positions(tensor) and any(x.shape[1:2] == tensor.shape for x in others):
                self._refuse(path, "positions, [length]", num_samples)
        before, self._last = self._last, {path: weakref.ref(x) for path, x in tensors.items()}
        again = [path for path, x in tensors.items() if path in before and before[path]() is x]
        if len(again) < len(tensors):
            for path in again:
                if not _same_rows(tensors[path]):
                    self._refuse(path, "the very tensor that came with other samples", num_samples)

    def _refuse(self, path: str, like: str, num_samples: int) -> NoReturn:
        raise ConfigurationError(
            f"{path} is {like}, and the batch has {num_samples} samples; it is ambiguous "
            f"whether micro-batches share it: {CHOICE}"
        )


def _lists(value: Any, path: str) -> Iterator[tuple[str, Sequence[Any]]]:
    """Yield the lists and tuples in a PyTree that have items and contain no tensor."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _lists(item, f"{path}[{key!r}]")
    elif isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        if value and not any(isinstance(x, Tensor) or is_marked(x) for x in _leaves(value)):
            yield path, value
        for index, item in enumerate(value):
            yield from _lists(item, f"{path}[{index}]")


def _leaves(value: Any) -> list[Any]:
    return pytree.tree_leaves(value, is_leaf=is_marked)


def _is_causal(tensor: Tensor) -> bool:
    """Return whether a tensor is a causal mask, in any of the usual forms."""
    if tensor.dim() != 2 or tensor.shape[0] != tensor.shape[1] or tensor.shape[0] < 3:
        return False
    later = torch.ones_like(tensor, dtype=torch.bool).triu(1)
    return torch.equal(tensor == tensor[0, -1], later)


def _is_positions(tensor: Tensor) -> bool:
    if tensor.dim() != 1 or tensor.is_floating_point() or len(tensor) < 3:
        return False
    return torch.equal(tensor, torch.arange(len(tensor), device=tensor.device, dtype=tensor.dtype))


def _same_rows(tensor: Tensor) -> bool:
    return torch.equal(tensor, tensor[:1].expand_as(tensor))
