"""What a policy knows of the remaining work of simulated jobs.

A scheduler cannot measure it. A script that trains a fixed number of epochs knows it exactly, one
that stops at a target can estimate it, and Pollux does without. Results depend on it, so every
figure names it.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class KnownLength:
    """How well a policy knows the remaining work of jobs.

    Example:
        >>> KnownLength.parse("none").estimate("a", 100.0) is None
        True
        >>> 50.0 <= KnownLength.parse("2").estimate("a", 100.0) <= 200.0
        True

    Raises:
        ValueError: the factor is not a finite number of at least 1.
    """

    factor: float | None = 1.0
    """Estimates are at most this many times too long or too short; 1: exact. None: unknown."""
    seed: int = 0
    """Of the errors of the estimates."""
    learned: bool = False
    """Whether it learns lengths from the jobs that have completed (`policy.lengths`)."""
    declared: bool = False
    """Whether jobs that declare their length are believed, exactly."""

    def __post_init__(self) -> None:
        if self.factor is not None and not 1 <= self.factor < math.inf:
            raise ValueError(
                f"known_length: {self.factor} must be a finite factor of at least 1, "
                "as in 2 for estimates between half and double"
            )

    @classmethod
    def parse(cls, text: str, seed: int = 0) -> KnownLength:
        """Read `exact`, `none`, `learned`, `declared`, or a factor.

        `declared` is learned for the jobs that do not declare their length.

        Raises:
            ValueError: it is none of them.
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
        """Return the policy's estimate of a job's remaining work.

        Args:
            job: its name. Its error is one factor for all of its life, drawn log-uniformly between
                ``1 / factor`` and ``factor``.
            remaining: seconds that one replica would still train; None: unknown.
        """
        if self.factor is None or remaining is None:
            return None
        if self.factor == 1:
            return remaining
        rng = np.random.default_rng([self.seed, zlib.crc32(job.encode())])
        bound = math.log(self.factor)
        return remaining * math.exp(rng.uniform(-bound, bound))

    def __str__(self) -> str:
        """Return the text that `parse` reads."""
        if self.factor is None:
            told = "declared" if self.declared else "learned"
            return told if self.learned else "none"
        return "exact" if self.factor == 1 else f"{self.factor:g}"


EXACT_LENGTHS = KnownLength()
"""Jobs that train for a known number of epochs."""
