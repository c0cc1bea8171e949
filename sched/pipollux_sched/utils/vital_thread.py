"""Threads that the scheduler cannot do without: how one ended is known, not only printed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import ExitStack

JOIN_TIMEOUT = 5.0
"""Seconds that a thread has to end."""

_LOG = logging.getLogger(__name__)


class VitalThread(threading.Thread):
    """A daemon thread that keeps what ended it.

    Args:
        name: what it does; its own name is this after ``pipollux-``.
        run: what it runs until the scheduler ends.
    """

    def __init__(self, name: str, run: Callable[[], None]) -> None:
        super().__init__(name=f"pipollux-{name}", daemon=True)
        self._task = run
        self._error: BaseException | None = None
        self._done = False

    def run(self) -> None:
        """Run the task; keep what it raises."""
        try:
            self._task()
        except BaseException as error:  # its owner ends the process
            self._error = error
            _LOG.critical("the thread %s has failed", self.name, exc_info=error)
        finally:
            self._done = True

    @property
    def failure(self) -> str | None:
        """How the thread ended, as a sentence; None while it runs, and before."""
        if not self._done:
            return None
        how = "has ended" if self._error is None else f"has failed ({self._error!r})"
        return f"the thread {self.name} {how}"


class VitalThreads:
    """The threads of one scheduler.

    Args:
        ending: set when they are to end.
    """

    def __init__(self, ending: threading.Event) -> None:
        self._ending = ending
        self._threads: list[VitalThread] = []

    def watch(self, thread: VitalThread) -> None:
        """Look after a thread that somebody else starts and ends."""
        self._threads.append(thread)

    def start(
        self, resources: ExitStack, name: str, run: Callable[[], None], wake: threading.Event
    ) -> None:
        """Start a thread, which `resources` end: told by `ending`, and woken by `wake`."""
        thread = VitalThread(name, run)
        self.watch(thread)
        thread.start()
        resources.callback(thread.join, JOIN_TIMEOUT)
        resources.callback(wake.set)
        resources.callback(self._ending.set)

    @property
    def failure(self) -> str | None:
        """How the first of them that is over ended, as a sentence; None while all run."""
        return next((thread.failure for thread in self._threads if thread.failure), None)
