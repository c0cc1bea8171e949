"""Threads that the scheduler depends on; the error that ended a thread is kept."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import ExitStack

JOIN_TIMEOUT = 5.0
"""Seconds that a thread has to end."""

_LOG = logging.getLogger(__name__)


class VitalThread(threading.Thread):
    """A daemon thread that keeps the error that ended it; its name begins with ``pipollux-``."""

    def __init__(self, name: str, run: Callable[[], None]) -> None:
        super().__init__(name=f"pipollux-{name}", daemon=True)
        self._task = run
        self._error: BaseException | None = None
        self._done = False

    def run(self) -> None:
        """Run the task; keep the error that it raises."""
        try:
            self._task()
        except BaseException as error:  # the owner ends the process
            self._error = error
            _LOG.critical("the thread %s has failed", self.name, exc_info=error)
        finally:
            self._done = True

    @property
    def failure(self) -> str | None:
        """How the thread ended, as a sentence; None before and while it runs."""
        if not self._done:
            return None
        how = "has ended" if self._error is None else f"has failed ({self._error!r})"
        return f"the thread {self.name} {how}"


class VitalThreads:
    """The threads of one scheduler; `ending` is set when they must end."""

    def __init__(self, ending: threading.Event) -> None:
        self._ending = ending
        self._threads: list[VitalThread] = []

    def watch(self, thread: VitalThread) -> None:
        """Watch a thread whose start and end are managed elsewhere."""
        self._threads.append(thread)

    def start(
        self, resources: ExitStack, name: str, run: Callable[[], None], wake: threading.Event
    ) -> None:
        """Start a thread; closing `resources` sets `ending` and `wake`, and joins it."""
        thread = VitalThread(name, run)
        self.watch(thread)
        thread.start()
        resources.callback(thread.join, JOIN_TIMEOUT)
        resources.callback(wake.set)
        resources.callback(self._ending.set)

    @property
    def failure(self) -> str | None:
        """How the first ended thread ended, as a sentence; None while all threads run."""
        return next((thread.failure for thread in self._threads if thread.failure), None)
