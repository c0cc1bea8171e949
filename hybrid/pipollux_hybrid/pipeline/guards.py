"""Keeps the forwards of a stage equal to those of the plain model, or rejects its layers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from .attributes import LayerAttributes
from .buffer_values import BufferValues, Values
from .contributions import Contributions
from .host_random import HostGenerators, HostStates
from .injected import InjectionCheck
from .microbatch import PyTree
from .mixing import MixingCheck
from .same_again import SameAgain
from .stage import Stage
from .state_changes import StateChanges

__all__ = ["BeforeForward", "StageGuards"]


class BeforeForward(NamedTuple):
    """State before a first forward, which its recomputation starts with."""

    buffers: Values
    generators: HostStates


class StageGuards:
    """The state of a stage's layers, and the checks of their first forwards."""

    def __init__(self, stage: Stage) -> None:
        self.buffers = BufferValues(stage)
        self.attributes = LayerAttributes(stage)
        self.same = SameAgain(stage)
        self.contributions = Contributions(stage)
        self.changes = StateChanges(stage, self.buffers)
        self._generators = HostGenerators()
        self._injections = InjectionCheck(stage, self.buffers)
        self._mixing = MixingCheck(stage, self.buffers)

    @contextmanager
    def kept(self) -> Iterator[BeforeForward]:
        """Run a forward that will be recomputed; yields its prior state, complete at the end."""
        with self.buffers.kept() as buffers, self._generators.kept() as generators:
            yield BeforeForward(buffers, generators)

    @contextmanager
    def replaced(self, state: BeforeForward) -> Iterator[None]:
        """Run a recomputation in the body, with the state of the first forward."""
        with self.buffers.replaced(state.buffers), self._generators.replaced(state.generators):
            yield

    def check(self, value: PyTree, output: PyTree) -> None:
        """Check a forward of one of several micro-batches.

        Raises:
            ConfigurationError: A layer injects a gradient, or mixes samples of micro-batches.
        """
        self._injections.check(value, output)
        self._mixing.check(value, output)
        self.contributions.add(value, output)
