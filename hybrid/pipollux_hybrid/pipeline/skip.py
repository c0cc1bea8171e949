"""Skip connections: layers that pass tensors to a later layer, bypassing those in between.

The interface is torchgpipe's: ``@skippable(stash=[…], pop=[…])`` on a layer's class whose
``forward`` is a generator with ``yield stash(name, x)`` and ``x = yield pop(name)``. In a
single-process pipeline the tensor goes directly from one stage to the other; a multi-process
pipeline carries it through the stages between (:mod:`.carried`). Unlike in torchgpipe, such layers
can be pickled, and integer, boolean and non-differentiable tensors may be stashed.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torchgpipe.checkpoint import is_checkpointing
from torchgpipe.microbatch import Batch
from torchgpipe.skip import Namespace, pop, stash, verify_skippables
from torchgpipe.skip import skippable as _skippable
from torchgpipe.skip.layout import SkipLayout
from torchgpipe.skip.portal import Portal
from torchgpipe.skip.skippable import Skippable
from torchgpipe.skip.tracker import SkipTrackerThroughPotals

from pipollux_hybrid.errors import ConfigurationError

from .lanes import join
from .transfer import Parcel

__all__ = ["Namespace", "SkipTracker", "connections_of", "layout_of", "pop", "skippable", "stash"]


def skippable(
    stash: Iterable[str] = (), pop: Iterable[str] = ()
) -> Callable[[type[nn.Module]], type[Skippable]]:
    """Declare which tensors a layer stashes for later layers, and which it pops.

    Example::

        @skippable(stash=["long"])
        class Down(nn.Module):
            def forward(self, x):
                yield stash("long", x)
                return self.conv(x)


        @skippable(pop=["long"])
        class Up(nn.Module):
            def forward(self, x):
                return x + (yield pop("long"))

    Use :meth:`~Skippable.isolate` with a :class:`Namespace` to distinguish pairs of the same name.

    Args:
        stash: Names of tensors that ``forward`` stashes.
        pop: Names of tensors that ``forward`` pops.
    """
    names = (tuple(sorted(stash)), tuple(sorted(pop)))

    def decorate(layer: type[nn.Module]) -> type[Skippable]:
        return _wrap(layer, *names)

    return decorate


_wrappers: dict[Any, type[Skippable]] = {}


def _wrap(layer: type[nn.Module], *names: tuple[str, ...]) -> type[Skippable]:
    key = (layer, *names)
    if key not in _wrappers:
        _wrappers[key] = _new_wrapper(layer, *names)
    return _wrappers[key]


def _new_wrapper(
    layer: type[nn.Module], stash: tuple[str, ...], pop: tuple[str, ...]
) -> type[Skippable]:
    wrapper = _skippable(stash=stash, pop=pop)(layer)
    wrapper.__module__, wrapper.__doc__ = layer.__module__, layer.__doc__
    wrapper.__qualname__ = layer.__qualname__
    if getattr(sys.modules.get(layer.__module__), layer.__qualname__, None) is layer:
        # Called as a function: the layer keeps its name, under which the wrapper cannot be found.
        setattr(wrapper, "__reduce_ex__", _reduce)  # noqa: B010  # mypy refuses to assign methods
    else:
        # The decorator replaces the layer's name; pickle finds it as the wrapper's attribute.
        layer.__qualname__ = f"{layer.__qualname__}.module_cls"
    return wrapper


def _reduce(self: Skippable, _protocol: object) -> tuple[Any, ...]:
    names = (tuple(self.stashable_names), tuple(self.poppable_names))
    return _revive, (self.module_cls, *names), self.__dict__


def _revive(layer: type[nn.Module], *names: tuple[str, ...]) -> Skippable:
    wrapper = _wrap(layer, *(tuple(sorted(some)) for some in names))
    return wrapper.__new__(wrapper)


Key: TypeAlias = tuple[Namespace, str]


class Connection(NamedTuple):
    """A skip connection between two stages, or two chunks; or within one."""

    key: Key
    source: int
    target: int


def connections_of(
    module: nn.Sequential, stages: Sequence[nn.Sequential], part: str = "stage"
) -> list[Connection]:
    """Return the skip connections, in an order that is the same in all processes.

    Args:
        module: The layers, which may contain others that stash and pop.
        stages: The same layers by stage, or by chunk.
        part: What messages call one of ``stages``.

    Raises:
        ConfigurationError: A stash has no pop or vice versa, or several layers of different stages
            stash or pop the same value.
    """
    stashes, pops = defaultdict[Key, list[int]](list), defaultdict[Key, list[int]](list)
    # Names of a layer have no order, and namespaces are others in each process.
    layers = list(_skippables(stages))
    if {layer for _, layer in layers} <= set(module):
        _check_pairs(module)
    for index, layer in layers:
        for key in sorted(layer.stashable(), key=lambda key: key[1]):
            stashes[key].append(index)
        for key in sorted(layer.poppable(), key=lambda key: key[1]):
            pops[key].append(index)
    found = []
    for key in dict.fromkeys((*stashes, *pops)):
        sources, targets = stashes[key], pops[key]
        within = set(sources) == set(targets) == {*sources[:1]}
        if not within and (len(sources) != 1 or len(targets) != 1 or sources[0] > targets[0]):
            raise ConfigurationError(
                f"the skip connection {key[1]!r} is stashed in {_parts(part, sources)} and popped "
                f"in {_parts(part, targets)}: one layer stashes a value and one later layer pops "
                "it; give each such pair a Namespace (layer.isolate(namespace))"
            )
        found.append(Connection(key, sources[0], targets[0]))
    return found


def _skippables(stages: Sequence[nn.Sequential]) -> Iterator[tuple[int, Skippable]]:
    for index, stage in enumerate(stages):
        for layer in stage.modules():
            if isinstance(layer, Skippable):
                yield index, layer


def _check_pairs(module: nn.Sequential) -> None:
    try:
        verify_skippables(module)
    except TypeError as error:
        findings = " ".join(str(error).split())
        raise ConfigurationError(f"skip connections of the module: {findings}") from error


def _parts(part: str, indices: Sequence[int]) -> str:
    numbers = " and ".join(map(str, sorted(set(indices))))
    return f"{part} {numbers}" if numbers else "no layer"


def layout_of(module: nn.Sequential, stages: Sequence[nn.Sequential]) -> SkipLayout:
    """Return torchgpipe's layout of the skip connections; see :func:`connections_of`."""
    routes = {x.key: (x.source, x.target) for x in connections_of(module, stages)}
    return SkipLayout(len(stages), routes)


class SkipTracker(SkipTrackerThroughPotals):
    """The stashed tensors of one micro-batch between stages."""

    def __init__(self, layout: SkipLayout) -> None:
        super().__init__(layout)
        self._parcels: dict[tuple[Namespace, str], Parcel] = {}

    def save(self, batch: Batch, ns: Namespace, name: str, tensor: Tensor | None) -> None:
        """Save a tensor stashed by a layer."""
        key = (ns, name)
        if not self.skip_layout.requires_copy(ns, name):
            self.tensors[key] = tensor
        elif tensor is not None and not isinstance(tensor, Tensor):
            raise TypeError(
                f"a layer stashes a {type(tensor).__name__} as {name!r} for another stage: in a "
                "single-process pipeline that is one tensor or None; stash several under a name "
                "each"
            )
        elif tensor is None or not _differentiable(tensor):
            # Sent directly: without a gradient there is no way back.
            self._parcels[key] = Parcel.of(tensor)
        else:
            _check_carrier(batch, name)
            phony = self._portal(key, tensor).blue()
            batch[0] = join(batch[0], phony)

    def load(self, batch: Batch, ns: Namespace, name: str) -> Tensor | None:
        """Pop a tensor for a layer."""
        parcel = self._parcels.get((ns, name))
        if parcel is not None:
            content: Tensor | None = parcel.open(batch[0].device)
            return content
        if self.skip_layout.requires_copy(ns, name):
            _check_carrier(batch, name)
        return super().load(batch, ns, name)

    def copy(
        self, batch: Batch, prev_stream: Any, next_stream: Any, ns: Namespace, name: str
    ) -> None:
        """Copy a tensor between two stages to the device of its pop."""
        if (ns, name) not in self._parcels:
            super().copy(batch, prev_stream, next_stream, ns, name)

    def _portal(self, key: tuple[Namespace, str], tensor: Tensor) -> Portal:
        portal = self.portals.get(key)
        if portal is not None:
            # Stashed again by the recomputation; the tensor itself is not needed again.
            portal.put_tensor(tensor, 1)
            return portal
        # Uses of the tensor: by the stash, by the pop, and by the recomputed pop.
        portal = ForgivingPortal(tensor, 3 if is_checkpointing() else 2)
        self.portals[key] = portal
        return portal


class ForgivingPortal(Portal):
    """A portal whose gradient is zero if the popped tensor was used without one.

    torchgpipe's portal fails then: a mask, or a tensor that is only compared, gets no gradient.
    """

    def put_tensor(self, tensor: Tensor | None, tensor_life: int) -> None:
        """Keep a tensor for a number of uses, and the shape of its gradient."""
        super().put_tensor(tensor, tensor_life)
        if tensor is not None:
            self._like = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            self._shape = tensor.shape

    @property
    def grad(self) -> Tensor:
        """The received gradient, or zeros of its shape."""
        if self._gradient is None:
            return self._like.new_zeros(self._shape)
        return self._gradient

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self._gradient = value


def _differentiable(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _check_carrier(batch: Batch, name: str) -> None:
    if not _differentiable(batch[0]):
        raise TypeError(
            f"a layer that stashes or pops {name!r} across stages takes and gives a tuple that "
            f"begins with a tensor of {batch[0].dtype}: put one of floating point type first, as "
            "the gradient returns through it"
        )
