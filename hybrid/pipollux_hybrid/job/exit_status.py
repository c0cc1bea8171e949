"""The exit status of a process whose last checkpoint was not written.

The script runs to its end first: its own ``torch.save`` may be the only remaining copy of the
training. But it must not exit with 0, or a scheduler would take the job for complete. Python cannot
change the status of a script that returns, so an :mod:`atexit` function ends child processes,
flushes logs and streams, and ends the process with :func:`os._exit`. It is registered when this
package is imported, so it runs after all functions registered later; functions registered before
the import are not called in this case.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing.util
import os
import sys
from contextlib import suppress

from pipollux_protocol.exit_statuses import CHECKPOINT_LOST

__all__ = ["fail_at_exit", "forget_failure"]

_failure: tuple[int, str] | None = None


def fail_at_exit(reason: str) -> None:
    """Make this process exit with :data:`CHECKPOINT_LOST`; print the reason now and at the end."""
    global _failure
    _failure = os.getpid(), reason  # a fork of this process has written no checkpoint
    print(
        f"pipollux: the last checkpoint was not written: {reason}. The script runs to its end; the "
        f"process then ends with status {CHECKPOINT_LOST}",
        file=sys.stderr,
        flush=True,
    )


def forget_failure() -> None:
    """Forget the failure after a later checkpoint was written."""
    global _failure
    _failure = None


def _end() -> None:
    if _failure is None or _failure[0] != os.getpid():
        return
    print(
        f"pipollux: exit status {CHECKPOINT_LOST}, as the last checkpoint was not written: "
        f"{_failure[1]}",
        file=sys.stderr,
    )
    multiprocessing.util._exit_function()  # type: ignore[attr-defined]  # as its own processes do
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # closed, or none at all
            stream.flush()
    os._exit(CHECKPOINT_LOST)


atexit.register(_end)
