"""Tensors that layers keep as attributes, which are no outputs of the model.

A script may have a layer keep an auxiliary loss (``self.aux_loss = …``) and add it to its own. In a
pipeline the attribute is of the last micro-batch only, and where that is recomputed it has no
graph: the loss would be another one. So after the first forwards the script cannot compute with
such tensors; layers can, and anybody may detach or show them. Where each stage has a process, the
loss is refused if it reaches parameters past the output, and so is a layer of an earlier stage that
keeps a scalar with a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipollux_hybrid.errors import ConfigurationError

from .stage import in_pipeline

__all__ = ["LayerAttributes"]

CHECKED_FORWARDS = 64
"""Forwards, from the first one of a stage on, after which attributes are looked at."""
HARMLESS = frozenset(
    (
        *("detach", "item", "tolist", "numpy", "size", "dim", "numel", "is_floating_point"),
        *("__get__", "__len__", "__bool__", "__int__", "__float__", "__repr__", "__str__"),
        *("__format__", "__hash__", "__deepcopy__", "__reduce_ex__"),
    )
)
"""Functions whose results no gradient follows, or which a layer is copied and saved by."""
WHAT_TO_DO = "return it as an output of the layers, shape [batch], and add it to the loss"


class KeptTensor(Tensor):
    """A tensor that a layer keeps: outside of the pipeline nothing is computed with it."""

    place: str

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],  # torch's signature
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run a function on the plain tensors, if it may be run."""
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
    """The attributes of a stage's layers.

    Args:
        layers: The stage; what is compiled in it is left alone.
    """

    def __init__(self, layers: nn.Module) -> None:
        self._layers = [
            (name, layer) for name, layer in layers.named_modules() if not _is_compiled(layer)
        ]
        self._forwards = 0

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Run a forward within, and have the tensors that it keeps refuse to be computed with."""
        with self._kept() as kept:
            yield
        for place, container, key in kept:
            tensor = container[key].as_subclass(KeptTensor)
            tensor.place = place
            container[key] = tensor

    @contextmanager
    def without_losses(self) -> Iterator[None]:
        """Run a forward within, whose layers may keep no scalar with a graph.

        Raises:
            ConfigurationError: One does.
        """
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
        """Fill a list with the places of tensors that the forward within has set."""
        kept: list[tuple[str, Any, Any]] = []
        if self._forwards >= CHECKED_FORWARDS:
            yield kept
            return
        self._forwards += 1
        before = [container[key] for _, container, key in self._places()]
        yield kept
        known = set(map(id, before))
        kept += [x for x in self._places() if id(x[1][x[2]]) not in known]

    def _places(self) -> Iterator[tuple[str, Any, Any]]:
        """Yield the tensors that layers keep: where, the container and the key in it."""
        for path, layer in self._layers:
            attributes = vars(layer)
            for name, value in list(attributes.items()):
                place = f"attribute {name!r} of layer {path!r}"
                if _is_plain(value):
                    yield place, attributes, name
                elif type(value) in (list, dict) and not name.startswith("_"):
                    keys = range(len(value)) if isinstance(value, list) else list(value)
                    yield from ((place, value, key) for key in keys if _is_plain(value[key]))


def _is_plain(value: object) -> bool:
    return isinstance(value, Tensor) and type(value) is Tensor and value.is_floating_point()


def _is_compiled(layer: nn.Module) -> bool:
    compiled = getattr(layer, "_compiled_call_impl", None) is not None
    return compiled or hasattr(layer, "_orig_mod")
