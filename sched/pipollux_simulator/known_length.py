"""A policy's knowledge of the remaining work of simulated jobs.

A scheduler cannot measure it. Scripts with a fixed number of epochs know it exactly, scripts that
stop at a target can estimate it, and Pollux works without it, so every figure states it.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class KnownLength:
    """Accuracy of the remaining work of jobs; ValueError for a factor below 1 or infinite.

    >>> KnownLength.parse("none").estimate("a", 100.0) is None
    True
    >>> 50.0 <= KnownLength.parse("2").estimate("a", 100.0) <= 200.0
    True
    """

    factor: float | None = 1.0
    """Maximum factor by which estimates are too long or too short; 1: exact. None: unknown."""
    seed: int = 0
    learned: bool = False
    """Whether lengths are estimated from completed jobs (`policy.lengths`)."""
    declared: bool = False

    def __post_init__(self) -> None:
        if self.factor is not None and not 1 <= self.factor < math.inf:
            raise ValueError(
                f"known_length: {self.factor} must be a finite factor of at least 1, "
                "as in 2 for estimates between half and double"
            )

    @classmethod
    def parse(cls, text: str, seed: int = 0) -> KnownLength:
        """Parse `exact`, `none`, `learned`, `declared`, or a factor; else raise ValueError. With
        `declared`, the lengths of jobs that do not declare theirs are estimated.
        """
        if text in ("exact", "none", "learned", "declared"):
            learned, declared = text in ("learned", "declared"), text == "declared"
            return cls(1.0 if text == "exact" else None, seed, learned, declared)
        try:
            factor = float(text)
        except ValueError:
            raise ValueError(
                f"known_length: {text!r} must be exact, none, learned, declared, or a factor of "
                "at least 1, the largest error of estimates"
            ) from None
        return cls(factor, seed)

    def estimate(self, job: str, remaining: float | None) -> float | None:
        """Return the policy's estimate of a job's remaining seconds of one replica; None: unknown.
        Its error is one factor for its whole life, drawn log-uniformly from 1 / factor to factor.
        """
        if self.factor is None or remaining is None:
            return None
        if self.factor == 1:
            return remaining
        rng = np.random.default_rng([self.seed, zlib.crc32(job.encode())])
        bound = math.log(self.factor)
        return remaining * math.exp(rng.uniform(-bound, bound))

    def __str__(self) -> str:
        """Return the text that `parse` accepts."""
        if self.factor is None:
            told = "declared" if self.declared else "learned"
            return told if self.learned else "none"
        return "exact" if self.factor == 1 else f"{self.factor:g}"


EXACT_LENGTHS = KnownLength()
