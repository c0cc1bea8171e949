"""Random numbers that layers draw from Python and numpy, beside those of torch.

Layers drop others by ``random.random()``, or choose what to mask by ``numpy.random``. A
recomputation has to draw what the first forward drew, as it does from torch's generators.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

__all__ = ["HostRandom", "seeded"]


class HostRandom(NamedTuple):
    """The states of Python's and of numpy's own generator."""

    python: Any
    numpy: Any

    @classmethod
    def now(cls) -> HostRandom:
        """Return the present ones."""
        return cls(random.getstate(), np.random.get_state())

    def put(self) -> None:
        """Have the generators go on from these."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Draw what comes after these within, and leave the generators as they are."""
        before = self.now()
        self.put()
        try:
            yield
        finally:
            before.put()


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw numbers of a seed within, and leave the generators as they are."""
    with HostRandom.now().entered():
        random.seed(seed)
        np.random.seed(seed % 2**32)
        yield
