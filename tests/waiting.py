"""Waiting for what happens in its own time: asking again and again until it is true."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

__all__ = ["PATIENCE", "until"]

PATIENCE = 240.0
"""Seconds that something may take in a test."""
T = TypeVar("T")


def until(
    condition: Callable[[], T | None],
    what: str = "it",
    patience: float = PATIENCE,
    ignored: tuple[type[Exception], ...] = (),
) -> T:
    """Return what a function returns, as soon as that is true.

    Args:
        condition: asked again and again.
        what: named where it never becomes true, such as "pod a is running".
        patience: seconds after which it never will.
        ignored: exceptions of the function that count as not yet true.
    """
    deadline = time.monotonic() + patience
    last: Exception | None = None
    while time.monotonic() < deadline:
        try:
            if found := condition():
                return found
        except ignored as error:
            last = error
        time.sleep(0.05)
    raise AssertionError(f"not within {patience:g} s: {what}" + (f" ({last})" if last else ""))
