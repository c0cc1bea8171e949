"""Pollux's fitness: the terms of its power mean over jobs (OSDI'21, §4.2)."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]

FLOOR = 0.01
"""The least value of a job in the power mean."""
TOLERANCE = 1e-9
"""Two fitnesses whose relative difference is below this count as equal."""


def check_power(power: float) -> float:
    """Return the power of a power mean over jobs; ValueError if it is 0 or not finite."""
    if power == 0 or not np.isfinite(power):
        raise ValueError(f"power: {power} must be a finite number other than 0")
    return power


def power_terms(values: Floats, power: float) -> Floats:
    """Return the terms of a sum over jobs that is greatest where the power mean is."""
    terms: Floats = np.sign(power) * np.maximum(values, FLOOR) ** power
    return terms
