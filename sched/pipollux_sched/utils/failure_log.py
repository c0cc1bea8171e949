"""Failures of a task that is tried again and again: each is logged once, and so is their end."""

from __future__ import annotations

import logging

from pipollux_perfmodel.errors import PipolluxError

__all__ = ["FailureLog"]


class FailureLog:
    """Logs the failures of one task.

    A disk that is full for an hour makes a task fail thousands of times, and all for one reason.

    Args:
        logger: what to log with.
        task: the task, as the subject of a sentence ("the executor").
    """

    def __init__(self, logger: logging.Logger, task: str) -> None:
        self._logger = logger
        self._task = task
        self._last: str | None = None

    def failed(self, error: Exception) -> None:
        """Log a failure, unless it is the same as the last one.

        Of one that a user can act on, its sentence says all; of others, the traceback is logged.
        """
        said = f"{type(error).__name__}: {error}"
        if said == self._last:
            return
        self._last = said
        if isinstance(error, PipolluxError | OSError):
            self._logger.error("%s failed and is tried again: %s", self._task, error)
        else:
            self._logger.error("%s failed and is tried again", self._task, exc_info=error)

    def succeeded(self) -> None:
        """Log that the task works again, where it had failed."""
        if self._last is not None:
            self._last = None
            self._logger.warning("%s works again", self._task)
