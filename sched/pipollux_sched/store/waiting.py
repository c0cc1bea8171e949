"""Waiting for a condition of a store."""

from __future__ import annotations

import time
from collections.abc import Callable

from .store import Store

__all__ = ["wait_until"]

LONGEST = 1.0
"""Seconds after which the predicate is called again without any change."""


def wait_until(store: Store, predicate: Callable[[], bool], timeout: float | None) -> bool:
    """Return whether a predicate becomes true within `timeout` seconds (None: no limit)."""
    deadline = None if timeout is None else time.monotonic() + timeout
    while True:
        version = store.version
        if predicate():
            return True
        left = LONGEST if deadline is None else deadline - time.monotonic()
        if left <= 0:
            return False
        store.wait(version, min(left, LONGEST))
