"""Scattering of PyTrees of tensors into micro-batches, and gathering.

A PyTree is a tensor, or tuples, lists and dicts of PyTrees, mixed with plain values (None, numbers,
strings). Every tensor of a batch has the samples in dimension 0, unless it is marked
(:mod:`.samples`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pipollux_hybrid.errors import ConfigurationError

from .samples import PerSample, Whole, is_marked, map_marked, plain_batch

PyTree: TypeAlias = Any
"""A tensor, or tuples, lists and dicts of PyTrees; types cannot express it more precisely."""
Structure: TypeAlias = pytree.TreeSpec
"""A PyTree without its leaves."""

PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
"""Types of values besides tensors in a PyTree: they mean the same on every device."""
LEAF: Structure = pytree.tree_structure(0)
"""The structure of a single tensor, by far the most frequent PyTree: it is compared by identity."""


def flatten(value: PyTree, what: str) -> tuple[list[Any], Structure]:
    """Return a PyTree's leaves and structure; a ConfigurationError for unsupported leaves."""
    if isinstance(value, Tensor):
        return [value], LEAF
    leaves, structure = pytree.tree_flatten(value)
    for leaf in leaves:
        if not isinstance(leaf, (Tensor, *PLAIN)) and leaf is not None:
            raise ConfigurationError(
                f"{what} is or holds a {type(leaf).__name__}: a pipeline carries tensors, tuples, "
                "lists and dicts of tensors, and numbers, strings or None between them"
            )
    return leaves, structure


def unflatten(leaves: Sequence[Any], structure: Structure) -> PyTree:
    """Return the PyTree with these leaves."""
    if structure is LEAF:
        (value,) = leaves
        return value
    return pytree.tree_unflatten(leaves, structure)


def tensors_of(value: PyTree) -> list[Tensor]:
    """Return the tensors of a PyTree, in order."""
    if isinstance(value, Tensor):  # the most frequent PyTree
        return [value]
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def map_tensors(function: Callable[[Tensor], Tensor], value: PyTree) -> PyTree:
    """Return the PyTree with a function applied to each tensor."""
    if isinstance(value, Tensor):
        return function(value)
    return pytree.tree_map_only(Tensor, function, value)


def scatter(
    batch: PyTree, sizes: Sequence[int], what: str = "the input of the model"
) -> list[PyTree]:
    """Cut every tensor of a batch along dimension 0; plain values go into every micro-batch.

    Marked values (:mod:`.samples`) are cut, or passed to every micro-batch, without their mark.

    Example:
        >>> [x["ids"].tolist() for x in scatter({"ids": torch.arange(3), "scale": 2}, [2, 1])]
        [[0, 1], [2]]
    """
    if isinstance(batch, Tensor):
        return list(batch.split(list(sizes)))
    flatten(batch, what)
    leaves, structure = pytree.tree_flatten(batch, is_leaf=is_marked)
    columns = [_cut(leaf, sizes) for leaf in leaves]
    return [unflatten([column[i] for column in columns], structure) for i in range(len(sizes))]


def unmarked(batch: PyTree) -> PyTree:
    """Return an uncut batch, without marks."""
    return map_marked(lambda marked: marked.value, batch)


def _cut(leaf: Any, sizes: Sequence[int]) -> Sequence[Any]:
    if isinstance(leaf, Whole):
        return [_with_own_containers(leaf.value) for _ in sizes]
    value = leaf.value if isinstance(leaf, PerSample) else leaf
    if isinstance(value, Tensor):
        return list(value.split(list(sizes)))
    if value is leaf:
        return [leaf] * len(sizes)
    ends = itertools.accumulate(sizes)
    parts = (value[end - size : end] for end, size in zip(ends, sizes, strict=True))
    return [_with_own_containers(part) for part in parts]


def _with_own_containers(value: PyTree) -> PyTree:
    return map_tensors(lambda tensor: tensor, value)


def gather(outputs: Sequence[PyTree], sizes: Sequence[int]) -> PyTree:
    """Concatenate the outputs of micro-batches along dimension 0. Raises a ConfigurationError if
    they cannot be concatenated; with the reason and the required output.
    """
    if len(outputs) == 1:
        return outputs[0]
    flat = [flatten(output, "the output of the model") for output in outputs]
    structure = flat[0][1]
    if any(other is not structure and other != structure for _, other in flat):
        raise ConfigurationError(
            "the model returned a PyTree of another structure for another micro-batch: return the "
            "same tuple, list or dict for every input"
        )
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    return unflatten([_join_leaf(column, sizes) for column in columns], structure)


def _join_leaf(column: Sequence[Any], sizes: Sequence[int]) -> Any:
    if not isinstance(column[0], Tensor):
        if any(leaf != column[0] for leaf in column):
            raise ConfigurationError(
                f"the model returned {column[0]!r} for one micro-batch and another value for "
                "another: return a tensor with one entry per sample"
            )
        return column[0]
    if any(tensor.dim() == 0 for tensor in column):
        raise ConfigurationError(
            "the model returned a scalar, and micro-batches are put together along the batch "
            "dimension: return one value per sample, and reduce it outside of the model"
        )
    rows = [tensor.shape[0] for tensor in column]
    if any(rows[0] * size != count * sizes[0] for count, size in zip(rows, sizes, strict=True)):
        raise ConfigurationError(
            f"the model returned tensors whose dimension 0 has sizes {rows} for micro-batches of "
            f"{list(sizes)} samples: dimension 0 must be the batch, as micro-batches are put "
            "together along it"
        )
    return torch.cat(list(column))


def microbatch_sizes(batch_size: int, num_microbatches: int) -> list[int]:
    """Return the samples of each micro-batch, cut like :meth:`torch.Tensor.chunk`.

    Example:
        >>> microbatch_sizes(5, 4)
        [2, 2, 1]
    """
    size = -(-batch_size // num_microbatches)
    full, rest = divmod(batch_size, size)
    return [size] * full + ([rest] if rest else [])


def num_samples(inputs: PyTree) -> int:
    """Return the samples of a batch: the size of its tensors' first dimension. Raises a
    ConfigurationError if there is no such tensor.
    """
    leaves = pytree.tree_leaves(plain_batch(inputs), is_leaf=is_marked)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if not tensors or any(x.dim() == 0 or x.shape[0] == 0 for x in tensors):
        raise ConfigurationError(
            "example_inputs holds no tensor of shape [batch, …] with at least one sample: give "
            "a batch that the module takes"
        )
    return min(x.shape[0] for x in tensors)


def samples_of(batch: PyTree, what: str = "the inputs") -> int | None:
    """Return the samples of inputs or targets; None if nothing in them belongs to samples. Raises a
    ConfigurationError if sizes of dimension 0 differ, or a tensor has no dimension.
    """
    leaves = pytree.tree_leaves(batch, is_leaf=is_marked)
    cut = [leaf for leaf in leaves if isinstance(leaf, (Tensor, PerSample))]
    if any(isinstance(leaf, Tensor) and leaf.dim() == 0 for leaf in cut):
        raise ConfigurationError(
            f"there is a scalar in {what}, and each tensor needs a batch dimension: pass a number "
            "as a float or int, or pipollux.whole(tensor)"
        )
    sizes = {leaf.size if isinstance(leaf, PerSample) else leaf.shape[0] for leaf in cut}
    if len(sizes) > 1:
        shapes = ", ".join(
            f"{leaf.size} items" if isinstance(leaf, PerSample) else str(tuple(leaf.shape))
            for leaf in cut
        )
        raise ConfigurationError(
            f"{what} have batch dimensions of different size ({shapes}): the pipeline cuts all "
            "of them along dimension 0; pass pipollux.whole(tensor) where it is not the batch, and "
            "pipollux.per_sample(list) for a list with an entry for each sample"
        )
    return sizes.pop() if sizes else None


def batch_size_of(batch: PyTree) -> int:
    """Return the samples of a batch: the size of dimension 0 of all its tensors. Raises a
    ConfigurationError if there is no tensor, or the sizes differ.
    """
    size = samples_of(batch)
    if size is None:
        raise ConfigurationError(
            f"the model got a {type(batch).__name__} without a tensor in it: a batch is a tensor, "
            "or tuples, lists and dicts of tensors"
        )
    if size == 0:
        raise ConfigurationError("the model got an empty batch: at least one sample is needed")
    return size
