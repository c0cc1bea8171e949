"""Random numbers that layers draw from Python's and numpy's generators.

A recomputed forward must draw the same numbers as the first one. The recomputation restores torch's
generators, this module the host's. Most layers never use them, so a stage that has not drawn in its
first forwards is no longer monitored.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np

WATCHED_FORWARDS = 64
"""First forwards of a stage, in which draws are detected."""
HostStates: TypeAlias = list[Any]
"""The states of both generators before a forward that drew numbers; empty for other forwards."""


class HostGenerators:
    """Python's and numpy's generators, as used by the layers of one stage."""

    def __init__(self) -> None:
        self._forwards = 0
        self._drawn = False

    @contextmanager
    def kept(self) -> Iterator[HostStates]:
        """Run a forward that will be recomputed; yields its previous states if it drew numbers."""
        states: HostStates = []
        if self._forwards >= WATCHED_FORWARDS and not self._drawn:
            yield states
            return
        self._forwards += 1
        before = host_states()
        yield states
        if not equal_states(before, host_states()):
            self._drawn = True
            states.append(before)

    @staticmethod
    @contextmanager
    def replaced(states: HostStates) -> Iterator[None]:
        """Run a forward that draws the first one's numbers, without other side effects."""
        if not states:
            yield
            return
        now = host_states()
        _restore(states[0])
        try:
            yield
        finally:
            _restore(now)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw the numbers of a seed in the body, and restore the generators."""
    with HostGenerators.replaced([host_states()]):
        random.seed(seed)
        np.random.seed(seed % 2**32)
        yield


def host_states() -> Any:
    """Return the states of both generators."""
    return random.getstate(), np.random.get_state(legacy=False)


def _restore(states: Any) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])


def equal_states(first: Any, second: Any) -> bool:
    """Return whether two results of :func:`host_states` are equal."""
    (python, numpy), (other_python, other_numpy) = first, second
    if python != other_python or numpy.keys() != other_numpy.keys():
        return False
    pairs = ((numpy[key], other_numpy[key]) for key in numpy if key != "state")
    return all(x == y for x, y in pairs) and all(
        np.array_equal(value, other_numpy["state"][key]) for key, value in numpy["state"].items()
    )
