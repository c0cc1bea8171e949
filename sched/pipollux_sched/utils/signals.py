"""Termination signals as an event to wait for, instead of an exception at any point."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, Self

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interruption:
    """Context, for the main thread, that counts termination signals and can wait for them.

    The signals are SIGINT (Ctrl-C), SIGTERM, and SIGHUP unless it is ignored, as under nohup. The
    handler only counts and writes a byte into a pipe, except within `raising`: it takes no lock, so
    it may run at any time.

    Example:
        >>> with Interruption() as interruption:
        ...     interruption.wait(timeout=0.0)
        False
    """

    def __init__(self) -> None:
        self.count = 0
        self._raises = False
        self._previous: dict[signal.Signals, Any] = {}
        self._pipe = (-1, -1)

    def __enter__(self) -> Self:
        self._pipe = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        for number in SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        for end in self._pipe:
            os.close(end)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait at most `timeout` seconds for a signal; return whether any has arrived yet."""
        if not self.count:
            select.select([self._pipe[0]], [], [], timeout)
        return self.count > 0

    @contextmanager
    def raising(self) -> Iterator[None]:
        """Raise `KeyboardInterrupt` at the first signal, also one that has arrived before.

        For calls that block without waiting for this object. Later signals are only counted, so
        that they do not disturb the release of resources.
        """
        self._raises = True  # before the check, so that no signal arrives between the two
        try:
            if self.count:
                raise KeyboardInterrupt
            yield
        finally:
            self._raises = False

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        self.count += 1
        with suppress(OSError):
            os.write(self._pipe[1], b".")
        if self._raises:
            self._raises = False
            raise KeyboardInterrupt
