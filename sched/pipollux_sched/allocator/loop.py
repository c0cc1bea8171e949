"""The thread that decides: at every interval, and after every relevant change."""

from __future__ import annotations

import logging
import threading
import time

from pipollux_sched.utils.failure_log import FailureLog

from .allocator import Allocator
from .autoscaler import Autoscaler

_LOG = logging.getLogger(__name__)


class AllocationLoop:
    """Runs the allocator periodically, one decision at a time.

    Args:
        reconsider: set when a job or node has changed, so that a decision is due immediately.
        autoscaler: controls the number of nodes; None: it stays fixed.
    """

    def __init__(
        self,
        allocator: Allocator,
        *,
        interval: float,
        reconsider: threading.Event,
        ending: threading.Event,
        autoscaler: Autoscaler | None = None,
    ) -> None:
        self._allocator = allocator
        self._interval = interval
        self._reconsider = reconsider
        self._ending = ending
        self._autoscaler = autoscaler

    def run(self) -> None:
        """Decide until the scheduler ends; log failures, and retry in the next round."""
        failures = FailureLog(_LOG, "the allocator")
        while not self._ending.is_set():
            self._reconsider.clear()
            began = time.monotonic()
            try:
                self._decide()
            except Exception as error:  # the death of this thread would freeze all allocations
                if self._ending.is_set():
                    return
                failures.failed(error)
            else:
                failures.succeeded()
            # Batch frequent changes, so that decisions take at most half of the time.
            self._ending.wait(min(time.monotonic() - began, self._interval))
            self._reconsider.wait(self._pause())

    def _pause(self) -> float:
        """Return the seconds to the next decision: the interval, or less if a notice ends."""
        due = self._allocator.due
        return self._interval if due is None else min(max(due - time.time(), 0.0), self._interval)

    def _decide(self) -> None:
        self._allocator.run_once()
        if self._autoscaler is not None and self._allocator.adjust(self._autoscaler):
            self._reconsider.set()
