"""The exit status of a process whose last checkpoint was not written.

The script runs to its end first, as what it does there (its own ``torch.save``, say) may be all
that is left of the training. But it must not end as if all were well: a scheduler would take the
job for complete. Python has no way to choose the status of a script that returns, so a function of
:mod:`atexit` ends the process with :func:`os._exit`. It does what the interpreter would have done
besides, the way multiprocessing ends its own processes: child processes are ended, logs and streams
flushed. It is registered when this package is imported, so it runs after all that was registered
later; what was registered before the import, by another library, is not called then.
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
    """Make this process end with :data:`CHECKPOINT_LOST`, whenever it ends.

    Args:
        reason: Why, one sentence; it is printed now, and once more at the end.
    """
    global _failure
    _failure = os.getpid(), reason  # a fork of this process has written no checkpoint
    print(
        f"pipollux: the last checkpoint was not written: {reason}. The script runs to its end; the "
        f"process then ends with status {CHECKPOINT_LOST}",
        file=sys.stderr,
        flush=True,
    )


def forget_failure() -> None:
    """Forget the failure, as a later checkpoint was written."""
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
