"""The inputs of a recorded model: their structure, and the sizes that may vary."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pipollux_hybrid.errors import ConfigurationError
from pipollux_hybrid.pipeline.samples import is_marked, map_marked, plain_batch

LOSS_INPUTS = (
    *("labels", "label", "return_loss", "start_positions", "end_positions", "mc_labels"),
    *("next_sentence_label", "sentence_order_label"),
)
"""Arguments with which models of Hugging Face compute a loss."""


def arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a batch as the arguments of a model's forward: a dict has keyword arguments."""
    batch = map_marked(lambda marked: marked.value, plain_batch(batch))
    if isinstance(batch, dict):
        return (), batch
    return (batch if isinstance(batch, tuple) else (batch,)), {}


Probe: TypeAlias = Callable[[bool, tuple[int, ...]], str | None]
"""Returns what a model does differently in training or not at these lengths, or None."""


@dataclass(frozen=True)
class Dimension:
    """A size that may vary: that of dimension 0, or a length of sequences."""

    name: str
    places: tuple[tuple[int, int], ...]
    """Inputs, by their number among the leaves of a batch, and their dimensions of this size."""
    size: int
    minimum: int = 1
    """The smallest size for which layers were recorded."""
    maximum: float = math.inf
    """The largest one."""


class Inputs:
    """Sizes, dtypes and structure of a model's inputs, from an example.

    ``lengths_vary``: whether sequences may be shorter than the example's.
    """

    def __init__(self, example: Any, *, lengths_vary: bool) -> None:
        example = plain_batch(example)
        leaves, self._structure = pytree.tree_flatten(example, is_leaf=is_marked)
        self._marked = [is_marked(x) for x in leaves]
        given = arguments(example)
        self._leaves, self._spec = pytree.tree_flatten(given)
        if len(self._leaves) != len(leaves):
            raise ConfigurationError(
                "example_inputs marks a container: mark each of its tensors, so that the layers "
                "know their sizes"
            )
        self._keywords = list(given[1])
        self._are_tensors = len(given[1]) == len(leaves) and not any(self._marked)
        """Whether a batch is a dict of tensors, which is read without a walk over its tree."""
        self.dimensions = [self._batch()]
        if lengths_vary:
            self.dimensions += self._lengths(given)
        self._varying: list[list[tuple[int, int]]] = [[] for _ in self._leaves]
        """Of each leaf, the dimensions whose sizes vary, with their numbers here."""
        for number, dimension in enumerate(self.dimensions):
            for i, dim in dimension.places:
                self._varying[i].append((dim, number))
        self._verified: dict[tuple[bool, tuple[int, ...]], str | None] = {}
        """Why lengths are refused, or None, by mode."""
        self._probe: Probe | None = None

    def __deepcopy__(self, _: Any) -> Inputs:
        """Copies of a layer share it, and what is known about lengths."""
        return self

    def samples(self, count: int) -> Inputs:
        """Return the inputs with the first samples of the example only, and no limits."""
        made = copy.copy(self)
        lengths = [replace(x, minimum=1, maximum=math.inf) for x in self.dimensions[1:]]
        made._leaves = list(self._leaves)
        for i, dim in self.dimensions[0].places:
            made._leaves[i] = self._leaves[i].narrow(dim, 0, min(count, self.dimensions[0].size))
            made._leaves[i] = made._leaves[i].clone()  # the rest of the example can be freed
        first = replace(self.dimensions[0], size=min(count, self.dimensions[0].size))
        made.dimensions = [first, *lengths]
        return made

    def verify_lengths_by(self, probe: Probe) -> None:
        """Verify lengths at their first use; those that are no different are allowed."""
        self._probe = probe

    def know(self, sizes: Sequence[int], *, training: bool) -> None:
        """Allow lengths that were recorded."""
        self._verified[training, tuple(sizes[1:])] = None

    def refusal(self, sizes: Sequence[int], *, training: bool) -> str | None:
        """Return why a batch of these lengths is refused, or None."""
        if self._probe is None or len(self.dimensions) == 1:
            return None
        key = training, tuple(sizes[1:])
        if key not in self._verified:
            self._verified[key] = self._probe(*key)
        return self._verified[key]

    @property
    def tensors(self) -> dict[int, Tensor]:
        """The tensors among the leaves, by their number."""
        return {i: x for i, x in enumerate(self._leaves) if isinstance(x, Tensor)}

    def _batch(self) -> Dimension:
        cut = [(i, 0) for i, x in self.tensors.items() if not self._marked[i]]
        sizes = {self._leaves[i].shape[:1] for i, _ in cut}
        if len(sizes) != 1 or not sizes.copy().pop():
            raise ConfigurationError(
                "example_inputs: dimension 0 of each tensor must be the batch, and the sizes are "
                f"{sorted(map(tuple, sizes))}; pass pipollux.whole(tensor) where it is not"
            )
        return Dimension("batch", tuple(cut), sizes.pop()[0])

    def _lengths(self, given: Any) -> list[Dimension]:
        """Return the lengths of token ids and masks; other dimensions of that size follow."""
        paths, _ = pytree.tree_flatten_with_path(given)
        # Those of encoder and decoder may be equal in the example, and differ in other batches.
        side = ["decoder_" in pytree.keystr(path) for path, _ in paths]
        lengths = {
            (x.shape[1], side[i])
            for i, x in self.tensors.items()
            if x.dim() == 2 and not x.is_floating_point() and x.shape[1] > 3
        }
        return [
            Dimension(
                "decoder length" if decoder else "length",
                tuple(
                    (i, dim)
                    for i, x in self.tensors.items()
                    for dim in range(0 if self._marked[i] else 1, x.dim())
                    if (x.shape[dim], side[i]) == (length, decoder)
                ),
                length,
            )
            for length, decoder in sorted(lengths)
        ]

    def resized(self, sizes: Sequence[int], roll: int = 0) -> Any:
        """Return the arguments with other sizes; rows repeat, sequences are cut at their end.

        ``roll`` exchanges the samples and tokens for others.
        """
        leaves = list(self._leaves)
        for i, tensor in self.tensors.items():
            leaves[i] = tensor
        for dimension, size in zip(self.dimensions, sizes, strict=True):
            for i, dim in dimension.places:
                index = torch.arange(roll, roll + size, device=leaves[i].device)
                leaves[i] = leaves[i].index_select(dim, index % dimension.size)
        return pytree.tree_unflatten(leaves, self._spec)

    def forget_values(self) -> None:
        """Keep the shapes and dtypes of the example only."""
        self._leaves = [
            torch.empty_like(x, device="meta") if isinstance(x, Tensor) else x for x in self._leaves
        ]

    def read(self, batch: Any, training: bool) -> tuple[tuple[int, ...], list[Any]]:
        """Return the sizes and the leaves of a batch.

        Raises:
            ConfigurationError: It has another structure, dtype, or a size that may not vary.
        """
        leaves = self._leaves_of(batch)
        firsts = (dimension.places[0] for dimension in self.dimensions)
        sizes = tuple(leaves[i].shape[dim] for i, dim in firsts)
        for i, leaf in enumerate(leaves):
            self._check(i, leaf, sizes)
        self._check_sizes(sizes, training)
        return sizes, leaves

    def _leaves_of(self, batch: Any) -> list[Any]:
        if self._are_tensors and isinstance(batch, Mapping) and len(batch) == len(self._keywords):
            leaves = [batch.get(name) for name in self._keywords]
            if all(isinstance(leaf, Tensor) for leaf in leaves):
                return leaves
        leaves, structure = pytree.tree_flatten(plain_batch(batch), is_leaf=is_marked)
        if structure != self._structure or any(map(is_marked, leaves)):
            return self._in_order(batch)
        return leaves

    def _check_sizes(self, sizes: tuple[int, ...], training: bool) -> None:
        for place, (dimension, size) in enumerate(zip(self.dimensions, sizes, strict=True)):
            if not dimension.minimum <= size <= dimension.maximum:
                raise ConfigurationError(
                    f"the batch has {dimension.name} {size}, and the layers were recorded for "
                    f"{self._range(place)}: the model may do something else at other sizes; pad "
                    "the batch, or give example_inputs as long as the longest batch"
                )
        why = self.refusal(sizes, training=training)
        if why is not None:
            named = zip(self.dimensions[1:], sizes[1:], strict=True)
            recorded = ", ".join(f"{x.name} {x.size}" for x in self.dimensions[1:])
            raise ConfigurationError(
                f"the batch has {', '.join(f'{x.name} {size}' for x, size in named)}, and the "
                f"layers were recorded for {recorded}; at the batch's, the model does something "
                f"else: {why}; pad the batch, or give example_inputs as long as the longest batch"
            )

    def _range(self, place: int) -> str:
        dimension = self.dimensions[place]
        if place == 0:
            return f"{dimension.minimum} or more"
        return f"lengths from {dimension.minimum} to {dimension.maximum}"

    def limit(self, place: int, minimum: int, maximum: float = math.inf) -> None:
        """Refuse batches in which a dimension is smaller or larger, also by an earlier limit."""
        known = self.dimensions[place]
        minimum, maximum = max(minimum, known.minimum), min(maximum, known.maximum)
        self.dimensions[place] = replace(known, minimum=minimum, maximum=maximum)

    def set_minimum(self, place: int, minimum: int) -> None:
        """Set the smallest size of a dimension."""
        self.dimensions[place] = replace(self.dimensions[place], minimum=minimum)

    def _in_order(self, batch: Any) -> list[Any]:
        """Return the leaves of a batch whose entries are marked, or in another order."""
        args, given = arguments(batch)
        labels = [name for name in given if name in LOSS_INPUTS and name not in self._keywords]
        if labels:
            raise ConfigurationError(
                f"the batch has {', '.join(map(repr, labels))}, with which the model would compute "
                "its loss: take them out of the batch, and give them to the loss function as "
                "targets"
            )
        if set(given) != set(self._keywords):
            raise ConfigurationError(
                f"the batch has the entries {sorted(given)}, and example_inputs has "
                f"{sorted(self._keywords)}: give an example with the same entries as each batch"
            )
        leaves, spec = pytree.tree_flatten((args, {name: given[name] for name in self._keywords}))
        if spec != self._spec:
            raise ConfigurationError(
                "the batch has another structure than example_inputs: give HybridParallel or "
                "as_layers an example as the data loader returns it"
            )
        return leaves

    def _check(self, i: int, leaf: Any, sizes: tuple[int, ...]) -> None:
        example = self._leaves[i]
        if not isinstance(leaf, Tensor) or not isinstance(example, Tensor):
            if isinstance(leaf, Tensor) != isinstance(example, Tensor) or leaf != example:
                raise ConfigurationError(
                    f"input {i} of the batch is {leaf!r}, and in example_inputs it is {example!r}: "
                    "layers are recorded for one value of everything that is no tensor"
                )
            return
        expected = list(example.shape)
        for dim, number in self._varying[i]:
            expected[dim] = sizes[number]
        if list(leaf.shape) != expected or leaf.dtype != example.dtype:
            raise ConfigurationError(
                f"input {i} of the batch has shape {tuple(leaf.shape)} and dtype {leaf.dtype}, and "
                f"the layers were recorded for {self._allowed(i)} and {example.dtype}: pad or "
                "convert the batch, or record the layers with such an example"
            )

    def _allowed(self, i: int) -> str:
        shape = [str(size) for size in self._leaves[i].shape]
        for dim, number in self._varying[i]:
            shape[dim] = self.dimensions[number].name
        return f"[{', '.join(shape)}]"
