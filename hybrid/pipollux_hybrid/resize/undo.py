"""What the states of a job were at the last step boundary."""

from __future__ import annotations

from collections.abc import Callable

from pipollux_hybrid.checkpoint.rng_state import random_state
from pipollux_hybrid.checkpoint.state import States
from pipollux_hybrid.errors import CheckpointError
from pipollux_hybrid.job.context import JobContext

__all__ = ["Undo"]


class Undo:
    """Puts every state back to the beginning of an iteration that has turned out to be void.

    Args:
        ctx: The job's context.
    """

    def __init__(self, ctx: JobContext) -> None:
        self._context = ctx
        self._random = random_state(ctx)
        self._remembered: list[Callable[[], None]] | None = None

    @property
    def ready(self) -> bool:
        """Whether there is something to go back to."""
        return self._remembered is not None

    def remember(self) -> None:
        """Note what every state is, at a step boundary."""
        states = self._context.component(States)
        self._remembered = [state.remember() for state in states.values()]

    def forget(self) -> None:
        """Note that the loop has ended: what comes now is not done again."""
        self._remembered = None

    def marks(self) -> tuple[int, ...]:
        """Return what tells whether all replicas had the same random numbers at the boundary."""
        return self._random.marks()

    def put_back(self) -> str:
        """Put every state back; return why one cannot be, empty: all are."""
        for put_back in self._remembered or ():
            try:
                put_back()
            except CheckpointError as error:
                return str(error)
        return ""
