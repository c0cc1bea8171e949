"""What a policy is told of how long a simulated job still has to train.

No scheduler knows it by itself. A script that trains a fixed number of epochs can tell exactly; one
that stops by a target can guess; Pollux is not told. What a policy makes of a workload depends on
it, so every figure names it.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class KnownLength:
    """How much of a job's length its policy is told.

    Example:
        >>> KnownLength.parse("none").told("a", 100.0) is None
        True
        >>> 50.0 <= KnownLength.parse("2").told("a", 100.0) <= 200.0
        True

    Raises:
        ValueError: the factor is not a finite number of at least 1.
    """

    factor: float | None = 1.0
    """Every job's remaining work is told this many times too long or too short at most; 1: exactly.
    None: not told at all."""
    seed: int = 0
    """Of the jobs' errors."""

    def __post_init__(self) -> None:
        if self.factor is not None and not 1 <= self.factor < math.inf:
            raise ValueError(
                f"known_length: {self.factor} must be a finite factor of at least 1, "
                "as in 2 for lengths that are told half or double at worst"
            )

    @classmethod
    def parse(cls, text: str, seed: int = 0) -> KnownLength:
        """Read `exact`, `none`, or a factor.

        Raises:
            ValueError: it is none of them.
        """
        if text in ("exact", "none"):
            return cls(1.0 if text == "exact" else None, seed)
        try:
            factor = float(text)
        except ValueError:
            raise ValueError(
                f"known_length: {text!r} must be exact, none, or a factor of at least 1 by which "
                "lengths are told wrong at most"
            ) from None
        return cls(factor, seed)

    def told(self, job: str, remaining: float | None) -> float | None:
        """Return what is told of a job.

        Args:
            job: its name. A job is misjudged by the same factor for all of its life, drawn
                log-uniformly between ``1 / factor`` and ``factor``.
            remaining: seconds that one replica would still train; None: not even the job knows.
        """
        if self.factor is None or remaining is None:
            return None
        if self.factor == 1:
            return remaining
        rng = np.random.default_rng([self.seed, zlib.crc32(job.encode())])
        bound = math.log(self.factor)
        return remaining * math.exp(rng.uniform(-bound, bound))

    def __str__(self) -> str:
        """Return what `parse` reads."""
        if self.factor is None:
            return "none"
        return "exact" if self.factor == 1 else f"{self.factor:g}"


TOLD_EXACTLY = KnownLength()
"""Jobs that train for a number of epochs, and say so."""
