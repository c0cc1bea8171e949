"""Silence for what C libraries print on standard output.

HiGHS 1.12 prints a line of its own now and then, whatever its options say. To redirect the file
descriptor would take away what other threads print meanwhile; C's own stream, which Python does not
use, can be exchanged for one that goes nowhere.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache

__all__ = ["silent_c_stdout"]

_LOCK = threading.Lock()
_USERS = 0
_KEPT: int | None = None


@cache
def _library() -> ctypes.CDLL | None:
    """Return the GNU C library; None where there is another, whose stream may be a constant."""
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.gnu_get_libc_version.restype = ctypes.c_char_p
        library.fopen.restype = ctypes.c_void_p
        return library
    return None


@cache
def _nowhere(library: ctypes.CDLL) -> int | None:
    """Return a stream that goes nowhere; it stays open."""
    stream: int | None = library.fopen(os.devnull.encode(), b"w")
    return stream


@contextmanager
def silent_c_stdout() -> Iterator[None]:
    """Drop what C libraries print meanwhile; Python's `print` works as usual in every thread.

    Example:
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
