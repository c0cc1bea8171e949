"""Skip connections between stages in several processes.

A value that one stage stashes for a later one is an additional output of that stage, an additional
input and output of each stage between, and an additional input of the stage that pops it::

    stage 0            stage 1            stage 2
    layers(x)      →   layers(y)      →   layers(z), pop a
    stash a        →   a, unchanged   →

So schedules, headers and gradients treat it like any other tensor that passes between stages. A
value that is popped in the stage that stashes it stays there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torchgpipe.skip.tracker import SkipTracker, use_skip_tracker

from pipollux_hybrid.errors import ConfigurationError

from .microbatch import PyTree, flatten, tensors_of
from .skip import Connection, Key

COMPARED_FORWARDS = 8
"""First forwards in which values are compared, as PyTorch does not count changes of ``x.data``."""


class CarriedValues:
    """The skip connections into, out of and past one stage, or chunk.

    The stage's layers get ``value``, or ``(value, popped)`` if they pop values of earlier stages,
    and return ``output``, or ``(output, stashed)`` if they stash values for later ones. Messages
    between stages are ``output``, or ``(output, carried)``, or ``(output, carried, shared)`` with
    the positions of the tensors that share memory with others: as they become separate tensors in
    the next process, no stage may change one of them in place. ``name`` is that of the stage in
    messages.
    """

    def __init__(self, connections: Sequence[Connection], index: int, name: str) -> None:
        self._arriving = [x for x in connections if x.source < index <= x.target]
        self._leaving = [x for x in connections if x.source <= index < x.target]
        self._popped = [x.key for x in self._arriving if x.target == index]
        self._stashed = [x.key for x in self._leaving if x.source == index]
        self._index, self._name = index, name
        self._forwards = 0
        self._shared: list[int] = []
        """Positions, in the input of the next forward, of tensors that share memory."""
        self._passing_shared: set[int] = set()
        """The same of tensors that only pass."""
        self._memory: set[int] = set()
        """Addresses of these tensors in the last forward."""

    @property
    def names(self) -> str:
        """The names of the values that leave the stage."""
        return ", ".join(repr(x.key[1]) for x in self._leaving)

    def split(self, message: PyTree) -> tuple[PyTree, list[PyTree]]:
        """Return the input of the layers, and the values that only pass."""
        self._shared, self._passing_shared, self._memory = [], set(), set()
        if not self._arriving:
            return message, []
        value, carried, *shared = message
        pairs = list(zip(self._arriving, carried, strict=True))
        passing = [x for connection, x in pairs if connection.target != self._index]
        tensors = tensors_of((value, carried))
        if self._popped:
            value = value, [x for connection, x in pairs if connection.target == self._index]
        if shared:
            found = {id(tensors[n]) for n in shared[0]}
            self._shared = [n for n, x in enumerate(tensors_of(value)) if id(x) in found]
            self._passing_shared = {n for n, x in enumerate(tensors_of(passing)) if id(x) in found}
        return value, passing

    def run(self, layers: Callable[[PyTree], PyTree], value: PyTree) -> PyTree:
        """Run the stage's layers; stashes and pops have no effect outside of this call.

        Raises:
            ConfigurationError: A value cannot be passed to another process, or the layers change a
                tensor that shares memory with a carried value.
        """
        shared, self._shared = self._shared, []  # not for forwards that only check
        given = tensors_of(value) if shared else []
        watched = [given[n] for n in shared]
        before = self._state(watched)
        tracker = SkipTracker()
        if self._popped:
            value, popped = value
            tracker.tensors.update(zip(self._popped, popped, strict=True))
        with use_skip_tracker(tracker):
            output = layers(value)
        if watched:
            self._check_unchanged(before, self._state(watched))
            self._forwards += 1
            self._memory = set(_addresses(watched))
        if not self._stashed:
            return output
        return output, [self._stashed_value(tracker, key) for key in self._stashed]

    def join(self, output: PyTree, passing: Sequence[PyTree]) -> PyTree:
        """Return the message for the next stage from what :meth:`run` returned, and the values that
        only pass.
        """
        if not self._leaving:
            return output
        stashed: list[PyTree] = []
        if self._stashed:
            output, stashed = output
        own, past = iter(stashed), iter(passing)
        carried = [next(own if x.source == self._index else past) for x in self._leaving]
        shared = self._sharing(output, carried, tensors_of(passing))
        return (output, carried, shared) if shared else (output, carried)

    def _sharing(
        self, output: PyTree, carried: Sequence[PyTree], passing: Sequence[Tensor]
    ) -> list[int]:
        """Return the positions of tensors whose memory a carried value shares with another one."""
        tensors = tensors_of((output, carried))
        places = list(_addresses(tensors))
        first = len(tensors_of(output))
        counts, named = Counter(places), set(places[first:])
        apart = {id(passing[n]) for n in self._passing_shared}
        kept = self._memory & set(places) if apart else set()
        return [
            n
            for n, (x, place) in enumerate(zip(tensors, places, strict=True))
            if place
            and (
                (counts[place] > 1 and place in named) or place in kept or (kept and id(x) in apart)
            )
        ]

    def _stashed_value(self, tracker: SkipTracker, key: Key) -> PyTree:
        name = key[1]
        if key not in tracker.tensors:
            raise ConfigurationError(
                f"{name!r} was not stashed in this forward, and a later stage pops it: stash it in "
                "every forward, None if there is nothing to pass"
            )
        value: PyTree = tracker.tensors[key]
        flatten(value, f"the skip connection {name!r}")
        return value

    def _state(self, tensors: Sequence[Tensor]) -> list[tuple[int, Tensor | None]]:
        """Return what differs after a change of a tensor: its version, or a copy of it."""
        compared = self._forwards < COMPARED_FORWARDS
        return [
            (
                0 if x.is_inference() else x._version,
                x.detach().clone() if compared or x.is_inference() else None,
            )
            for x in tensors
        ]

    def _check_unchanged(
        self,
        before: Sequence[tuple[int, Tensor | None]],
        after: Sequence[tuple[int, Tensor | None]],
    ) -> None:
        for (version, x), (new_version, y) in zip(before, after, strict=True):
            same = x is None or y is None or torch.allclose(x, y, 0.0, 0.0, equal_nan=True)
            if version != new_version or not same:
                raise ConfigurationError(
                    f"{self._name} changes a tensor in place that shares memory with a skip "
                    "connection from an earlier one, where the plain model would change both: make "
                    "a new tensor (inplace=False), or stash a copy (x.clone())"
                )


def _addresses(tensors: Sequence[Tensor]) -> Iterator[int]:
    """Yield the address of each tensor's memory; 0 if it has none of its own."""
    for x in tensors:
        own = x.layout is torch.strided and x.numel() > 0
        yield x.untyped_storage().data_ptr() if own else 0
