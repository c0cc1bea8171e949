"""Logging of a task that is retried: equal failures are logged once, and so is the recovery."""

from __future__ import annotations

import logging

from pipollux_perfmodel.errors import PipolluxError

__all__ = ["FailureLog"]


class FailureLog:
    """Logs the failures of one task, equal ones once: a full disk causes thousands."""

    def __init__(self, logger: logging.Logger, task: str) -> None:
        self._logger = logger
        self._task = task
        self._last: str | None = None

    def failed(self, error: Exception) -> None:
        """Log a failure, unless it equals the last one; without traceback for users' errors."""
        said = f"{type(error).__name__}: {error}"
        if said == self._last:
            return
        self._last = said
        if isinstance(error, PipolluxError | OSError):
            self._logger.error("%s failed and is retried: %s", self._task, error)
        else:
            self._logger.error("%s failed and is retried", self._task, exc_info=error)

    def succeeded(self) -> None:
        """Log the recovery of a task that had failed."""
        if self._last is not None:
            self._last = None
            self._logger.warning("%s works again", self._task)
