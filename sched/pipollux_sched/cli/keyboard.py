"""Single keys from the terminal, while a command has it for itself."""

from __future__ import annotations

import os
import select
import sys
import termios
import tty
from contextlib import suppress
from types import TracebackType
from typing import Any, Self


class Keyboard:
    """While it is entered, keys come one by one and are not shown; afterwards all is as before.

    Ctrl-C still ends a command; Ctrl-Z does nothing, as it would leave the terminal as it is. Where
    standard input is no terminal there are no keys.
    """

    def __init__(self) -> None:
        self._before: list[Any] | None = None

    def __enter__(self) -> Self:
        with suppress(ValueError, OSError, termios.error):
            if sys.stdin.isatty():
                file = sys.stdin.fileno()
                before = termios.tcgetattr(file)
                tty.setcbreak(file)
                self._before = before
                changed = termios.tcgetattr(file)
                changed[6][termios.VSUSP] = b"\x00"
                termios.tcsetattr(file, termios.TCSADRAIN, changed)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._before is not None:
            termios.tcsetattr(sys.stdin.fileno(), termios.TCSADRAIN, self._before)

    def read(self, timeout: float) -> str:
        """Return what was typed within so many seconds, as soon as there is something."""
        if self._before is None:
            select.select([], [], [], timeout)
            return ""
        file = sys.stdin.fileno()
        if not select.select([file], [], [], timeout)[0]:
            return ""
        typed = os.read(file, 1024)
        return typed.decode("utf-8", "replace") if typed else "q"  # the terminal is gone
