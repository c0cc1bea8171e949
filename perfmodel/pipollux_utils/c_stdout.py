"""Suppression of standard output from C libraries: HiGHS 1.12 prints regardless of its options.

Redirecting the file descriptor would suppress the output of other threads as well. Python does not
use C's `stdout` stream, so that stream is replaced instead.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache

_LOCK = threading.Lock()
_USERS = 0
_KEPT: int | None = None


@cache
def _library() -> ctypes.CDLL | None:
    """Return the GNU C library; None for other C libraries, whose stream may be a constant."""
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.gnu_get_libc_version.restype = ctypes.c_char_p
        library.fopen.restype = ctypes.c_void_p
        return library
    return None


@cache
def _nowhere(library: ctypes.CDLL) -> int | None:
    stream: int | None = library.fopen(os.devnull.encode(), b"w")
    return stream


@contextmanager
def silent_c_stdout() -> Iterator[None]:
    """Discard the standard output of C libraries; Python's `print` works in every thread.

    >>> with silent_c_stdout():
    ...     print("is seen")
    is seen
    """
    global _USERS, _KEPT
    library = _library()
    if library is None or (nowhere := _nowhere(library)) is None:
        yield
        return
    stream = ctypes.c_void_p.in_dll(library, "stdout")
    with _LOCK:
        if _USERS == 0:
            _KEPT, stream.value = stream.value, nowhere
        _USERS += 1
    try:
        yield
    finally:
        with _LOCK:
            _USERS -= 1
            if _USERS == 0:
                stream.value = _KEPT
