"""What can go wrong with a scheduler or its state, as one sentence instead of a traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pipollux_sched.errors import SchedulerError

from .console import CommandError


@contextmanager
def one_sentence() -> Iterator[None]:
    """Turn errors that the user can do something about into `CommandError`."""
    try:
        yield
    except SchedulerError as error:
        raise CommandError(str(error)) from error
