"""Detects layers that change state in each forward: counters, codebooks, hidden states, weights.

The plain model changes it once per batch. A pipeline calls layers once per micro-batch, and each
call sees the change of the previous one::

    plain      batch                      state 0 → 1
    pipeline   micro-batch 0, 1, 2, 3     state 0 → 1 → 2 → 3 → 4

If the output depends on that state, this would train another model, so the first steps reject such
layers, unless :func:`per_microbatch` marks them. If it does not depend on it yet, one warning is
logged. Weights that a forward sets from its data would depend on one micro-batch only, so they are
rejected, too. Batch normalisation (:mod:`.batchnorm`) and spectral normalisation
(:mod:`.buffer_values`) change their state once per batch here as well.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from pipollux_hybrid.errors import ConfigurationError

from .batchnorm import deferred_layers, uncounted
from .buffer_values import BufferValues, BufferVersions
from .host_random import HostGenerators, host_states
from .microbatch import PyTree, map_tensors, tensors_of
from .same_again import SUMMED, agree
from .stage import Stage

__all__ = ["StateChanges", "per_microbatch"]

CHECKED_STEPS = 3
"""First batches with a backward, whose forwards are checked."""
LOG = logging.getLogger(__name__)
OF_ANY_MODULE = frozenset(vars(nn.Module()))
MARK = "_pipollux_per_microbatch"
L = TypeVar("L", bound=nn.Module)


def per_microbatch(layer: L) -> L:
    """Accept that a layer, and all layers in it, change their state once per micro-batch.

    The plain model changes it once per batch. Mark layers whose counters and buffers may change
    more often: statistics that are only displayed, sums over samples, or a moving average whose
    momentum is chosen for micro-batches. Returns the same layer.

    Example::

        layers = nn.Sequential(encoder, pipollux.per_microbatch(VectorQuantizer()), decoder)
    """
    setattr(layer, MARK, True)
    return layer


class Change(NamedTuple):
    """State that a forward has changed."""

    layer: nn.Module
    path: str
    kind: str
    """``"attribute"`` or ``"buffer"``."""
    name: str

    @property
    def is_counted(self) -> bool:
        """Whether it is a buffer or a number, on which later forwards may depend."""
        return self.kind == "buffer" or isinstance(vars(self.layer)[self.name], (int, float))

    def __str__(self) -> str:
        return f"{self.kind} {self.name!r} of layer {self.path!r} ({type(self.layer).__name__})"


class StateChanges:
    """The state of a stage's layers over the forwards of its first batches."""

    def __init__(self, stage: Stage, buffers: BufferValues) -> None:
        self._stage, self._buffers = stage, buffers
        accepted = {x for layer in stage.modules() if hasattr(layer, MARK) for x in layer.modules()}
        self._layers = [(p, x) for p, x in stage.named_modules() if p and x not in accepted]
        self._deferred = deferred_layers(stage)
        self._batches = 0
        self._warned = False

    def run(self, microbatch: int, value: PyTree) -> PyTree:
        """Run the first forward of a micro-batch, of several, of a batch that has a backward.

        Raises:
            ConfigurationError: It changed a weight, or state that the output depends on.
        """
        self._batches += microbatch == 0
        if self._batches > CHECKED_STEPS or not self._layers:
            return self._stage(value)
        kept = map_tensors(lambda x: x.detach().requires_grad_(x.requires_grad), value)
        random = _RandomStates(self._stage.device)
        weights, attributes = self._weights(), self._attributes()
        buffers = self._buffers.versions()
        output = self._stage(value)
        self._check_weights(weights)
        if microbatch > 0:
            changed = [*self._changed_attributes(attributes), *self._changed_buffers(buffers)]
            if changed:
                self._judge(changed, microbatch, kept, random, output)
        return output

    # --- weights -----------------------------------------------------------------------------

    def _weights(self) -> dict[str, tuple[int, float]]:
        """Return each weight's number of changes, and its norm in the first forward."""
        named = {
            f"{path}.{name}": parameter
            for path, layer in self._layers
            for name, parameter in layer.named_parameters(recurse=False)
            if parameter.dtype in SUMMED and type(parameter.data) is Tensor
        }
        norms = [0.0] * len(named)
        if named and self._batches == 1:  # PyTorch does not count changes of x.data
            with torch.no_grad():
                norms = [float(norm) for norm in torch._foreach_norm(list(named.values()))]
        pairs = zip(named.items(), norms, strict=True)
        return {name: (weight._version, norm) for (name, weight), norm in pairs}

    def _check_weights(self, before: dict[str, tuple[int, float]]) -> None:
        for name, (version, norm) in self._weights().items():
            old_version, old_norm = before.get(name, (-1, norm))
            if version != old_version or (norm != old_norm and math.isfinite(norm)):
                raise ConfigurationError(
                    f"the forward of stage {self._stage.index} changes the weight {name!r}: from "
                    "one micro-batch, where the plain model takes the batch, and on one replica; "
                    "if it is set from data once, run a batch through the layers before they are "
                    "wrapped; if it is normalised, do so after optimizer.step()"
                )

    # --- attributes and buffers --------------------------------------------------------------

    def _attributes(self) -> list[dict[str, Any]]:
        with torch._C.DisableTorchFunctionSubclass():  # reads tensors that reject operations
            return [
                {
                    name: found
                    for name, value in vars(layer).items()
                    if name not in OF_ANY_MODULE and (found := _snapshot(value)) is not None
                }
                for _, layer in self._layers
            ]

    def _changed_attributes(self, before: Sequence[dict[str, Any]]) -> Iterator[Change]:
        for (path, layer), old, new in zip(self._layers, before, self._attributes(), strict=True):
            for name in old.keys() & new.keys():
                if not _is_same(old[name], new[name]):
                    yield Change(layer, path, "attribute", name)

    def _changed_buffers(self, before: BufferVersions) -> Iterator[Change]:
        paths = {layer: path for path, layer in self._layers}
        for layer, name in self._buffers.changed(before):
            combine: Any = getattr(layer, "combined_buffers", tuple)  # kept by the layer
            if layer in paths and name not in combine():
                yield Change(layer, paths[layer], "buffer", name)

    def _judge(
        self,
        changed: Sequence[Change],
        microbatch: int,
        value: PyTree,
        random: _RandomStates,
        output: PyTree,
    ) -> None:
        """Repeat a forward on the state that it has left, and compare the outputs."""
        attributes, buffers = self._attributes(), self._buffers.versions()
        # Identity hooks hide its tensors from a checkpoint around the forward.
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
        with random.replaced(), self._untouched(microbatch), hooks, uncounted(self._deferred):
            again = self._stage.forward(value)
            # State that follows from the input alone is the same after the same input.
            moved = {*self._changed_attributes(attributes), *self._changed_buffers(buffers)}
        if not agree(tensors_of(output), tensors_of(again)):
            raise ConfigurationError(
                f"each forward changes {_names(changed)}, and the output depends on it: a pipeline "
                "calls the layer once for each micro-batch, where the plain model does so once for "
                "each batch; change it in the training loop, or pass num_microbatches=1, or accept "
                "it by pipollux.per_microbatch(layer)"
            )
        counted = [change for change in changed if change in moved and change.is_counted]
        if counted and not self._warned:
            self._warned = True
            LOG.warning(
                "each forward changes %s: once for each micro-batch, where the plain model does "
                "so once for each batch; if anything computed depends on it later, change it in "
                "the training loop; pipollux.per_microbatch(layer) accepts it",
                _names(counted),
            )

    @contextmanager
    def _untouched(self, microbatch: int) -> Iterator[None]:
        """Run the body on copies of the state, which stays unchanged."""
        layers = [vars(layer) for _, layer in self._layers]
        kept = [{name: attributes[name] for name in attributes} for attributes in layers]
        with self._buffers.untouched(), self._buffers.forward(microbatch):
            for attributes, found in zip(layers, self._attributes(), strict=True):
                attributes.update({name: _copy(attributes[name]) for name in found})
            try:
                yield
            finally:
                for attributes, values in zip(layers, kept, strict=True):
                    for name in attributes.keys() - values.keys():
                        del attributes[name]
                    attributes.update(values)


def _snapshot(value: object) -> Any:
    """Return a value that differs once the state has changed; None if it is no state.

    It keeps tensors alive, so that no new one reuses their identity.
    """
    if isinstance(value, (int, float)):
        return value
    if isinstance(value, Tensor):
        return value, 0 if value.is_inference() else value._version
    if type(value) is dict:
        return [(key, _snapshot(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return [(key, _snapshot(item)) for key, item in enumerate(value)]
    return None


def _is_same(old: Any, new: Any) -> bool:
    if isinstance(old, tuple) and isinstance(new, tuple):
        if isinstance(old[0], Tensor) and isinstance(new[0], Tensor):
            return old[0] is new[0] and bool(old[1] == new[1])
        return bool(old[0] == new[0]) and _is_same(old[1], new[1])
    if isinstance(old, list) and isinstance(new, list):
        return len(old) == len(new) and all(map(_is_same, old, new))
    return type(old) is type(new) and bool(old == new or old is new)


def _copy(value: Any) -> Any:
    """Return a value with its own containers and tensors."""
    if isinstance(value, nn.Parameter):
        return value
    if isinstance(value, Tensor):
        with torch._C.DisableTorchFunctionSubclass():
            return value.detach().clone()
    if type(value) in (list, tuple):
        return type(value)(map(_copy, value))
    if type(value) is dict:
        return {key: _copy(item) for key, item in value.items()}
    return value


def _names(changes: Sequence[Change]) -> str:
    return ", ".join(map(str, changes[:3])) + (" and others" if len(changes) > 3 else "")


class _RandomStates:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._torch = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        self._host = host_states()

    @contextmanager
    def replaced(self) -> Iterator[None]:
        """Replay the random numbers in the body, and restore the generators."""
        devices = [] if self._cuda is None else [self._device]
        with torch.random.fork_rng(devices), HostGenerators.replaced([self._host]):
            torch.set_rng_state(self._torch)
            if self._cuda is not None:
                torch.cuda.set_rng_state(self._cuda, self._device)
            yield
