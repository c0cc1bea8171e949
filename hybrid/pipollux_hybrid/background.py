"""Saving beside the training: a thread writes what was copied at a step boundary.

One save is under way at a time. What goes wrong in it is printed, as for every periodic save, and
training goes on; the next one is tried after the same interval.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path

from .errors import CheckpointError

__all__ = ["BackgroundSave"]

SAVE_TIMEOUT = 1800.0
"""Seconds that a stop waits for the save under way, as long as replicas wait for a silent peer."""


class BackgroundSave:
    """The thread that writes checkpoints, at most one at a time."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._failure: str | None = None

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, write: Callable[[], Path]) -> None:
        """Write a checkpoint; waits for the one before, should it be under way."""
        self.wait()
        # Not a daemon: an interpreter that ends waits for it, whatever the script does.
        self._thread = threading.Thread(
            target=self._run, args=(write,), name="pipollux-checkpoint", daemon=False
        )
        self._thread.start()

    def wait(self) -> None:
        """Return when nothing is under way.

        Raises:
            CheckpointError: The disk hangs.
        """
        if self._thread is not None:
            self._thread.join(SAVE_TIMEOUT)
            if self._thread.is_alive():
                raise CheckpointError(
                    f"the checkpoint under way was not written within {SAVE_TIMEOUT:.0f} s: the "
                    "storage of PIPOLLUX_CHECKPOINT_DIR hangs"
                )
            self._thread = None
        self.say_failure()

    def say_failure(self) -> None:
        """Print why the last save failed, once; called at step boundaries."""
        failure, self._failure = self._failure, None
        if failure is not None:
            print(f"pipollux: {failure}", file=sys.stderr, flush=True)

    def _run(self, write: Callable[[], Path]) -> None:
        try:
            write()
        except Exception as error:  # a thread's exception would be lost; the boundary says it
            self._failure = str(error)
