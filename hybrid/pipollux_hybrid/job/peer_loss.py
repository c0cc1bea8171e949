"""State of an iteration in which a replica is lost.

An elastic job can continue without a replica that has died. But a script cannot be interrupted
between the failed collective and the next step boundary. So the failure is recorded, the script
continues to the boundary with gradients of zero, and the iteration is *void*: nothing in it counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pipollux_hybrid.errors import PeerLostError, ReplicaBrokenError

__all__ = ["PeerLoss"]


class PeerLoss:
    """Whether replicas were lost since the membership began, and whether the iteration is void."""

    def __init__(self) -> None:
        self.expected = False
        """Whether surviving replicas may continue without a lost one."""
        self.recoverable: Callable[[bool], bool] = lambda _: False
        """Whether they can continue from this point, given whether the iteration is void; else a
        failure is raised at once."""
        self.hang_up: Callable[[], None] = lambda: None
        """Makes the collectives of the other replicas fail, too."""
        self.error: PeerLostError | None = None
        """The first failure."""
        self.void = False
        """Whether the current iteration does not count."""
        self.noted_at = 0.0
        """Time of the failure, by the monotonic clock."""

    def note(self, error: PeerLostError, *, voids: bool) -> bool:
        """Record that a collective failed; return False if the caller must raise the error.
        ``voids``: the failure makes the current iteration impossible to finish.
        """
        if isinstance(error, ReplicaBrokenError) or not self.recoverable(voids):
            return False
        if self.error is None:
            self.error, self.noted_at = error, time.monotonic()
            self.hang_up()
        self.void = self.void or voids
        return True

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Record a failure within, which does not affect the iteration."""
        try:
            yield
        except PeerLostError as error:
            if not self.note(error, voids=False):
                raise

    def clear(self) -> None:
        """Continue with the surviving replicas."""
        self.error, self.void = None, False
