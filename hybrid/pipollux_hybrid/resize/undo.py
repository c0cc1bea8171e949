"""Snapshots of a job's states at the last step boundary."""

from __future__ import annotations

from collections.abc import Callable

from pipollux_hybrid.checkpoint.rng_state import random_state
from pipollux_hybrid.checkpoint.state import States
from pipollux_hybrid.errors import CheckpointError
from pipollux_hybrid.job.context import JobContext


class Undo:
    """Restores every state to the beginning of an iteration that became void."""

    def __init__(self, ctx: JobContext) -> None:
        self._context = ctx
        self._random = random_state(ctx)
        self._remembered: list[Callable[[], None]] | None = None

    @property
    def ready(self) -> bool:
        """Whether there is a snapshot."""
        return self._remembered is not None

    def remember(self) -> None:
        """Take a snapshot of every state at a step boundary."""
        states = self._context.component(States)
        self._remembered = [state.remember() for state in states.values()]

    def forget(self) -> None:
        """Drop the snapshot at the end of a loop."""
        self._remembered = None

    def marks(self) -> tuple[int, ...]:
        """Return checksums that show whether all replicas had equal generators at the boundary."""
        return self._random.marks()

    def put_back(self) -> str:
        """Restore every state; return why one cannot be restored, empty: all are."""
        for put_back in self._remembered or ():
            try:
                put_back()
            except CheckpointError as error:
                return str(error)
        return ""
