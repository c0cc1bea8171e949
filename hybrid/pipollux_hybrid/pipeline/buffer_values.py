"""Values of buffers at the first forward of a micro-batch, for its recomputation.

A layer that changes a buffer in its forward would change it again in the recomputation, and compute
with different values. So the recomputation runs on copies of the values before the first forward
and leaves the buffers unchanged.

The vectors of :func:`torch.nn.utils.spectral_norm` change once per batch, as in the plain model:
all micro-batches start with the first one's values, and only the first one's change stays, and so
do the parts of an iteration. Other layers change their buffers once per micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

from pipollux_hybrid.errors import ConfigurationError

from .batchnorm import deferred_layers
from .stage import NOTHING

SMALL_BYTES = 1 << 16
"""Maximum bytes of a buffer that is copied before every forward, without being known to change."""
ABSENT = object()


class Value(NamedTuple):
    """The value of a layer's buffer: a copy, None, or :data:`ABSENT`."""

    layer: nn.Module
    name: str
    value: Any


Values = list[Value]
BufferVersions: TypeAlias = dict[tuple[nn.Module, str], tuple[Any, int, Any]]
"""By layer and name: the tensor, its version, and for some buffers a copy."""


class BufferValues:
    """The buffers of a stage, except those of batch normalization, which forwards do not change."""

    def __init__(self, layers: nn.Module) -> None:
        deferred = set(deferred_layers(layers))
        self._layers = [layer for layer in layers.modules() if layer not in deferred]
        self._once = list(_once_a_batch(self._layers))
        self._start: Values = []
        self._changing: set[tuple[nn.Module, str]] | None = None

    def forward(self, microbatch: int) -> AbstractContextManager[None]:
        """Run the first forward of a micro-batch."""
        if not self._once:
            return NOTHING
        return self._first_forward() if microbatch == 0 else self.replaced(self._start)

    @contextmanager
    def _first_forward(self) -> Iterator[None]:
        self._start = [Value(x, n, _copy(x._buffers.get(n, ABSENT))) for x, n in self._once]
        yield

    @contextmanager
    def kept(self) -> Iterator[Values]:
        """Run a forward that will be recomputed; the yielded list then has the previous values of
        changed buffers. Raises a ConfigurationError if a large buffer changed for the first time.
        """
        changed: Values = []
        before = [self._before(layer, name) for layer, name in self._places()]
        try:
            yield changed
        except Exception:  # any error of the layers, re-raised
            _put([Value(x, n, y) for x, n, *_, y in before if y is not None])
            raise
        known = {(layer, name) for layer, name, *_ in before}
        for layer, name in self._places():
            if (layer, name) not in known:
                changed.append(Value(layer, name, ABSENT))
        for layer, name, buffer, version, copy in before:
            now = layer._buffers.get(name, ABSENT)
            if now is buffer and _version(now) == version:
                continue
            if copy is None and isinstance(buffer, Tensor) and now is buffer:
                raise ConfigurationError(
                    f"buffer {name!r} of a {type(layer).__name__} was changed by a forward, but "
                    "not by the first: its recomputation needs the values from before; change "
                    "it in every forward, or use activation_checkpoint='never'"
                )
            changed.append(Value(layer, name, buffer if copy is None else copy))
        if self._changing is None:
            self._changing = set()
        self._changing |= {(layer, name) for layer, name, _ in changed}

    @contextmanager
    def replaced(self, values: Values) -> Iterator[None]:
        """Run a forward on copies of these values; the buffers stay unchanged."""
        now = [Value(x, name, x._buffers.get(name, ABSENT)) for x, name, _ in values]
        _put([Value(x, name, _copy(value)) for x, name, value in values])
        try:
            yield
        finally:
            _put(now)

    def untouched(self) -> AbstractContextManager[None]:
        """Run a forward without side effects on buffers."""
        return self.replaced([Value(x, name, x._buffers[name]) for x, name in self._places()])

    def versions(self) -> BufferVersions:
        """Return the state of the buffers, except those that change once per batch."""
        once = set(self._once)
        return {
            (layer, name): self._before(layer, name)[2:]
            for layer, name in self._places()
            if (layer, name) not in once
        }

    def changed(self, before: BufferVersions) -> Iterator[tuple[nn.Module, str]]:
        """Yield the buffers that have changed since, by layer and name."""
        for (layer, name), (buffer, version, copy) in before.items():
            now = layer._buffers.get(name, ABSENT)
            counted = now is not buffer or _version(now) != version
            if counted or (isinstance(copy, Tensor) and not _same(copy, buffer)):
                yield layer, name

    def _places(self) -> list[tuple[nn.Module, str]]:
        return [(x, name) for x in self._layers if x._buffers for name in x._buffers]

    def _before(
        self, layer: nn.Module, name: str
    ) -> tuple[nn.Module, str, Tensor | None, int, Tensor | None]:
        buffer = layer._buffers[name]
        known = self._changing is None or (layer, name) in self._changing
        wanted = buffer is not None and (
            known or buffer.numel() * buffer.element_size() <= SMALL_BYTES
        )
        return layer, name, buffer, _version(buffer), _copy(buffer) if wanted else None


class OncePerIteration:
    """Vectors of spectral normalization in the parts of an iteration (accumulation steps): the k-th
    forward of each part starts with the values of the first part's, whose change alone stays.
    """

    def __init__(self, module: nn.Module) -> None:
        self.places = list(_once_a_batch(list(module.modules())))
        """The layers and the names of their vectors."""
        self._part: object = None
        self._starts: list[Values] = []
        self._next = 0

    @contextmanager
    def forward(self, part: object, *, is_first: bool) -> Iterator[None]:
        """Run a forward of a part; ``is_first``: it is the iteration's first."""
        if part is not self._part:
            self._part, self._next = part, 0
            if is_first:
                self._starts = []
        number, self._next = self._next, self._next + 1
        now = [Value(x, name, x._buffers.get(name, ABSENT)) for x, name in self.places]
        if is_first or number >= len(self._starts):
            self._starts.append([Value(x, name, _copy(value)) for x, name, value in now])
            yield
            return
        _put([Value(x, name, _copy(value)) for x, name, value in self._starts[number]])
        try:
            yield
        finally:
            _put(now)


def _once_a_batch(layers: list[nn.Module]) -> Iterator[tuple[nn.Module, str]]:
    """Yield the buffers that change once per batch, independently of the samples."""
    for layer in layers:
        if isinstance(layer, _SpectralNorm):
            yield from ((layer, name) for name in layer._buffers)
        for hook in layer._forward_pre_hooks.values():
            if isinstance(hook, SpectralNorm):
                yield from ((layer, f"{hook.name}_{vector}") for vector in "uv")


def _put(values: Values) -> None:
    for layer, name, value in values:
        if value is ABSENT:
            layer._buffers.pop(name, None)
        else:
            layer._buffers[name] = value


def _same(copy: Tensor, buffer: Tensor) -> bool:
    """Return whether a copy equals the buffer, including NaN."""
    if torch.equal(copy, buffer):
        return True
    return copy.is_floating_point() and torch.allclose(copy, buffer, 0.0, 0.0, equal_nan=True)


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _version(value: object) -> int:
    return value._version if isinstance(value, Tensor) and not value.is_inference() else 0
