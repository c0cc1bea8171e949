"""Standard output kept for results, whatever compiled libraries print."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def libraries_on_stderr() -> Iterator[None]:
    """Send to standard error what is written past Python (HiGHS does), also by processes started.

    Python's own `print` goes there, too, so results are printed afterwards.
    """
    sys.stdout.flush()
    try:
        kept = os.dup(1)
    except OSError:  # there is no standard output, so nothing to keep clean
        yield
        return
    try:
        with suppress(OSError):  # there is no standard error either
            os.dup2(2, 1)
        yield
    finally:
        # C keeps lines back until its buffer is full; they must not come out behind this.
        ctypes.CDLL(None).fflush(None)
        os.dup2(kept, 1)
        os.close(kept)
