"""The moving average of a job's restart costs."""

from __future__ import annotations

from collections.abc import Sequence

RESTART_WEIGHT = 0.3
"""Weight of the newest restart in the moving average of restart costs."""


def moving_average(values: Sequence[float], default: float) -> float:
    """Return the exponentially weighted moving average of `values`; `default` if empty.

    Example:
        >>> moving_average([10.0, 20.0], 30.0)
        13.0
    """
    if not values:
        return default
    average = values[0]
    for value in values[1:]:
        average += RESTART_WEIGHT * (value - average)
    return average
