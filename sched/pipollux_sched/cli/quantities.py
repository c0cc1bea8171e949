"""Seconds, rates and errors as people read them."""

from __future__ import annotations

_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_NOTHING = 1e-7
"""Seconds below which a step's time has no part; the model's own zero is 1e-8."""


def seconds(value: float) -> str:
    """Spell a time.

    Example:
        >>> seconds(0.01234), seconds(1e-8)
        ('12.3 ms', '0 s')
    """
    if abs(value) < _NOTHING:
        return "0 s"
    size, unit = next((one for one in _UNITS if abs(value) >= one[0]), _UNITS[-1])
    return f"{significant(value / size)} {unit}"


def percent(value: float) -> str:
    """Spell a relative error.

    Example:
        >>> percent(0.0123)
        '1.2 %'
    """
    return f"{100 * value:.1f} %"


def significant(value: float) -> str:
    """Spell a number with three digits that count, and no exponent.

    Example:
        >>> significant(1234.5), significant(1.2345)
        ('1234', '1.23')
    """
    decimals = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:.{decimals}f}"
