"""What becomes of a step in which a replica is lost.

Where replicas come and go, those that are left can go on without one that has died. But a script
cannot be interrupted between the collective that fails and the next step boundary. So the failure
is noted, the script goes on to the boundary with gradients of zero, and nothing that it does there
counts: the iteration is *void*.
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
        """Whether those that are left may go on without one that is lost."""
        self.recoverable: Callable[[bool], bool] = lambda _: False
        """Whether they can go on from here, where the iteration under way is void or not; else a
        failure is raised at once."""
        self.hang_up: Callable[[], None] = lambda: None
        """Has the others know, whoever they wait for."""
        self.error: PeerLostError | None = None
        """What has failed; None: nothing."""
        self.void = False
        """Whether the iteration under way does not count."""
        self.noted_at = 0.0
        """When it failed, by the monotonic clock."""

    def note(self, error: PeerLostError, *, voids: bool) -> bool:
        """Note that a collective failed.

        Args:
            error: Why.
            voids: Whether the iteration under way cannot be finished.

        Returns:
            Whether it was noted; else it is to be raised.
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
        """Note a failure within, which is of nothing that the iteration needs."""
        try:
            yield
        except PeerLostError as error:
            if not self.note(error, voids=False):
                raise

    def clear(self) -> None:
        """Go on with those that are left."""
        self.error, self.void = None, False
