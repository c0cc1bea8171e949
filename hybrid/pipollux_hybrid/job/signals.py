"""The stop request: a flag set by a signal and checked by the training loop.

A signal may arrive in the middle of a backward, so its handler only sets the flag. The replicas
agree on it at the next step boundary (:mod:`pipollux_hybrid.job.control_plane`). A second Ctrl-C
interrupts at once.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType

__all__ = ["exit_code", "install_handlers", "request_stop", "reset", "stop_requested"]

_requested: int | None = None
_on_request: Callable[[int], None] | None = None
_previous: dict[int, object] = {}


def install_handlers(on_request: Callable[[int], None] | None = None) -> None:
    """Turn SIGTERM and SIGINT into stop requests; has no effect outside the main thread.
    ``on_request`` is called with the signal in the main thread, after the flag is set.
    """
    global _on_request
    _on_request = on_request
    if threading.current_thread() is not threading.main_thread():
        return
    for number in (signal.SIGTERM, signal.SIGINT):
        if number not in _previous:
            _previous[number] = signal.signal(number, _remember)


def request_stop(signal_number: int = signal.SIGTERM) -> None:
    """Request a stop at the next step boundary, as a signal would."""
    global _requested
    _requested = int(signal_number)


def stop_requested() -> bool:
    """Return whether this process was asked to stop."""
    return _requested is not None


def exit_code() -> int:
    """Return the exit status after an agreed stop: 128 + the signal; 143 by default."""
    return 128 + (_requested if _requested is not None else int(signal.SIGTERM))


def reset() -> None:
    """Clear the stop request and restore the previous signal handlers."""
    global _requested, _on_request
    _requested = _on_request = None
    if threading.current_thread() is threading.main_thread():
        for number, handler in _previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # a result of signal()
    _previous.clear()


def _remember(number: int, _frame: FrameType | None) -> None:
    request_stop(number)
    if number == signal.SIGINT:
        signal.signal(number, signal.default_int_handler)
    if _on_request is not None:
        _on_request(number)
