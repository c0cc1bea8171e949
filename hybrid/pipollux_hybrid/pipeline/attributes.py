"""Tensors that layers keep as attributes instead of returning them.

A layer may keep an auxiliary loss (``self.aux_loss = …``) that the script adds to its loss. In a
pipeline it belongs to the last micro-batch only, and has no graph if that is recomputed, so the
loss would be wrong. After the first forwards scripts therefore cannot compute with such tensors;
layers can, and scripts may detach or display them. A multi-process pipeline also rejects a loss
that reaches parameters other than through the output, and a layer of an earlier stage that keeps a
scalar with a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipollux_hybrid.errors import ConfigurationError

from .stage import NOTHING, in_pipeline

CHECKED_FORWARDS = 64
"""First forwards of a stage, after which attributes are checked."""
HARMLESS = frozenset(
    (
        *("detach", "item", "tolist", "numpy", "size", "dim", "numel", "is_floating_point"),
        *("__get__", "__len__", "__bool__", "__int__", "__float__", "__repr__", "__str__"),
        *("__format__", "__hash__", "__deepcopy__", "__reduce_ex__"),
    )
)
"""Functions whose results carry no gradient, or that copy or save a layer."""
WHAT_TO_DO = "return it as an output of the layers, shape [batch], and add it to the loss"


class KeptTensor(Tensor):
    """A tensor kept by a layer; computing with it outside of the pipeline is an error."""

    place: str

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],  # torch's signature
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run a function on the plain tensors, if it is allowed."""
        given = (args, dict(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            if torch.is_grad_enabled() and not in_pipeline() and func.__name__ not in HARMLESS:
                kept = [x for x in pytree.tree_leaves(given) if isinstance(x, cls)]
                place = next((x.place for x in kept), "a tensor that a layer keeps")
                raise ConfigurationError(
                    f"{place} is used outside of the pipeline, and it is of one micro-batch only, "
                    f"without a graph if that is recomputed: {WHAT_TO_DO}; to show it, detach() it"
                )
            plain = pytree.tree_map_only(cls, lambda x: x.as_subclass(Tensor), given)
            return func(*plain[0], **plain[1])


class LayerAttributes:
    """The attributes of a stage's layers; compiled layers are not checked."""

    def __init__(self, layers: nn.Module) -> None:
        self._layers = [
            (name, layer) for name, layer in layers.named_modules() if not _is_compiled(layer)
        ]
        self._forwards = 0

    def guarded(self) -> AbstractContextManager[None]:
        """Run a forward; computing with tensors that it keeps is an error afterwards."""
        return self._guarded() if self._forwards < CHECKED_FORWARDS else NOTHING

    def without_losses(self) -> AbstractContextManager[None]:
        """Run a forward; raise a ConfigurationError if a layer keeps a scalar with a graph."""
        return self._without_losses() if self._forwards < CHECKED_FORWARDS else NOTHING

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        with self._kept() as kept:
            yield
        for place, container, key in kept:
            tensor = container[key].as_subclass(KeptTensor)
            tensor.place = place
            container[key] = tensor

    @contextmanager
    def _without_losses(self) -> Iterator[None]:
        with self._kept() as kept:
            yield
        for place, container, key in kept:
            if container[key].requires_grad and container[key].dim() == 0:
                raise ConfigurationError(
                    f"{place} is a scalar with a graph, such as an auxiliary loss, and no other "
                    f"process has it to add it to the loss: {WHAT_TO_DO}; if it is kept to be "
                    "shown, detach() it"
                )

    @contextmanager
    def _kept(self) -> Iterator[list[tuple[str, Any, Any]]]:
        """Yield a list that receives the tensors kept in the body."""
        kept: list[tuple[str, Any, Any]] = []
        self._forwards += 1
        before = [container[key] for _, container, key in self._places()]
        yield kept
        known = set(map(id, before))
        kept += [x for x in self._places() if id(x[1][x[2]]) not in known]

    def _places(self) -> Iterator[tuple[str, Any, Any]]:
        """All attributes of all layers are looked at, so nothing is called for most of them."""
        for path, layer in self._layers:
            attributes = vars(layer)
            for name, value in attributes.items():
                kind = type(value)
                if kind is Tensor:
                    keys: Iterable[Any] = (name,)
                    holder: Any = attributes
                elif (kind is list or kind is dict) and name[:1] != "_":
                    keys = range(len(value)) if kind is list else value
                    holder = value
                else:
                    continue
                for key in keys:
                    if _is_plain(holder[key]):
                        yield f"attribute {name!r} of layer {path!r}", holder, key


def _is_plain(value: object) -> bool:
    return type(value) is Tensor and value.is_floating_point()


def _is_compiled(layer: nn.Module) -> bool:
    compiled = getattr(layer, "_compiled_call_impl", None) is not None
    return compiled or hasattr(layer, "_orig_mod")
