"""A stage: contiguous layers of the user's model; errors name the layer, inputs stay unchanged."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from pipollux_hybrid.errors import ConfigurationError

from .microbatch import PyTree, map_tensors, tensors_of

if TYPE_CHECKING:
    from .carried import CarriedValues


NOTHING = nullcontext()
"""A context without effect, for the many micro-batches with nothing to check or record."""


class _Thread(threading.local):
    in_pipeline = False


_thread = _Thread()


def in_pipeline() -> bool:
    """Return whether the caller is a layer running in a pipeline (including recomputation)."""
    return _thread.in_pipeline


class Stage(nn.Sequential):
    """Layers of one stage, with their names in the whole module, and number k from 0.

    Unlike in :class:`torch.nn.Sequential`, errors of layers name the stage and the layer, and the
    input stays unchanged for the script or the recomputation: layers get their own dicts and lists,
    which they may change, and their own tensors, on which they may register hooks. A first layer
    that works in place (``nn.ReLU(inplace=True)``) gets copies.
    """

    def __init__(self, layers: dict[str, nn.Module], index: int) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)
        self.index = index
        self.device = torch.device("cpu")
        self.output_name = f"the output of stage {index}, layer {next(reversed(layers), None)!r},"
        self.skips: CarriedValues | None = None
        """In a multi-process pipeline: the stage's skip connections."""
        self.differentiates = False
        """Whether a layer calls :func:`torch.autograd.grad`: needs a graph in every forward."""
        self._in_place: dict[bool, bool] = {}
        """In training and in evaluation: whether the first layers change their input."""

    def place(self, device: torch.device) -> Stage:
        """Move the layers to a device; return the stage."""
        self.device = device
        return self.to(device)

    def forward(self, value: PyTree) -> PyTree:
        """Run the layers one after another, on tensors of shape [micro-batch, …]."""
        before, _thread.in_pipeline = _thread.in_pipeline, True
        try:
            if self._in_place.get(self._trains()) is False:
                return self._checked_run(value)
            return self._run_on_copy(value)
        finally:
            _thread.in_pipeline = before

    def _run_on_copy(self, value: PyTree) -> PyTree:
        """Run the layers on a copy of their input, and detect whether they change it."""
        copied = map_tensors(_copy, value)
        tensors = tensors_of(copied)
        before = _versions(tensors)
        output = self._run(copied)
        if before is not None and self._trains() not in self._in_place:
            changed = before != _versions(tensors) or not _equal(tensors, tensors_of(value))
            self._in_place[self._trains()] = changed
        return output

    def _checked_run(self, value: PyTree) -> PyTree:
        """Run the layers on their input's values, in separate containers and tensors."""
        tensors = tensors_of(value)
        before = _versions(tensors)
        output = self._run(map_tensors(_alias, value))
        if before != _versions(tensors):
            raise ConfigurationError(
                f"stage {self.index}, layer {next(iter(self._modules))!r}: it changed its input in "
                "place, which it did not do in its first forward; have it do so always or never "
                "(inplace=False), as this input is still needed"
            )
        return output

    def _run(self, value: PyTree) -> PyTree:
        if self.skips is None:
            return self._run_layers(value)
        return self.skips.run(self._run_layers, value)

    def _run_layers(self, value: PyTree) -> PyTree:
        for name, layer in self._modules.items():
            assert layer is not None  # noqa: S101  # the constructor adds no None
            try:
                value = layer(value)
            except Exception as error:  # prefixed with its location, and re-raised
                name_place(
                    error,
                    f"stage {self.index} ({self.device}), layer {name!r} ({type(layer).__name__})",
                )
                raise
        return value

    def _trains(self) -> bool:
        # The stage's own flag is not set: its layers are children of the user's module.
        for layer in self._modules.values():  # noqa: SIM110  # any() takes longer, in each forward
            if layer is not None and layer.training:
                return True
        return False


def _copy(tensor: Tensor) -> Tensor:
    copy = tensor.clone()
    return copy if copy.requires_grad else copy.requires_grad_(tensor.requires_grad)


def _alias(tensor: Tensor) -> Tensor:
    """Return an alias of a tensor for one forward.

    A hook that a layer registers on its input (``x.register_hook``) would otherwise persist, and
    the recomputation, which gets the same input, would register it twice.
    """
    if not tensor.requires_grad or tensor.layout is not torch.strided:
        return tensor
    if torch.is_grad_enabled():
        return tensor.view_as(tensor)
    return tensor.detach().requires_grad_()


def name_place(error: Exception, place: str) -> None:
    """Prefix an exception's message with its location, for any type of exception."""
    if getattr(error, "_place_named", False):
        return
    error._place_named = True  # type: ignore[attr-defined]  # so that outer locations are not added
    plain = type(error).__str__ in (Exception.__str__, BaseException.__str__)
    if plain and error.args and isinstance(error.args[0], str):
        error.args = (f"{place}: {error.args[0]}", *error.args[1:])
    else:
        error.add_note(f"in {place}")


def _versions(tensors: Sequence[Tensor]) -> list[int] | None:
    """Return how often each tensor was changed in place; None if PyTorch does not count."""
    versions = []
    for tensor in tensors:
        if tensor.is_inference():
            return None
        versions.append(tensor._version)
    return versions


def _equal(copies: Sequence[Tensor], originals: Sequence[Tensor]) -> bool:
    """Return whether copies equal the originals: changes through ``x.data`` are not counted."""
    return all(
        torch.equal(copy, original)
        for copy, original in zip(copies, originals, strict=True)
        if copy.layout is torch.strided and not (copy.is_meta or copy.is_nested)
    )
