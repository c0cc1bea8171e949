"""The latest snapshot of a cluster, taken in a separate thread."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from .base import BackendError, ClusterUnavailableError

_LOG = logging.getLogger(__name__)
S = TypeVar("S")


class SnapshotWatch(Generic[S]):
    """Keeps the latest snapshot of a cluster, which may be slow to answer.

    Args:
        read: takes a snapshot; raises `ClusterUnavailableError`, or `BackendError` if the cluster
            rejects that.
        latest: the one before the first.
        on_snapshot: called with each new one, in the thread.
        interval: seconds between two of them.
        hurried: the same after a change.
    """

    def __init__(
        self,
        read: Callable[[], S],
        latest: S,
        on_snapshot: Callable[[S], object],
        *,
        interval: float,
        hurried: float,
    ) -> None:
        self.latest = latest
        """The latest snapshot, which may be old while the cluster does not answer."""
        self._read, self._on_snapshot = read, on_snapshot
        self._hurried = min(hurried, interval)
        self._rest = interval - self._hurried
        self._reading = threading.Lock()
        self._ending = threading.Event()
        self._hurry = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pipollux-snapshots", daemon=True)
        self._error: BackendError | None = None

    def start(self) -> None:
        """Take the first snapshot, as in `refresh`, and start the thread."""
        self.refresh()
        self._thread.start()

    def stop(self) -> None:
        """End the thread; wait a while for a snapshot that is being taken."""
        self._ending.set()
        self._hurry.set()
        if self._thread.ident is not None:
            self._thread.join(5.0)

    def hurry(self) -> None:
        """Take the next snapshot soon, after a change."""
        self._hurry.set()

    def check(self) -> S:
        """Return the latest snapshot; `ClusterUnavailableError`: the last attempt has failed."""
        if self._error is not None:
            raise ClusterUnavailableError(str(self._error)) from self._error
        return self.latest

    def refresh(self) -> S:
        """Take a snapshot, and return it; `BackendError`: the cluster rejects it, or is away."""
        with self._reading:
            try:
                self.latest = self._read()
            except BackendError as error:
                self._error = error
                raise
            self._error = None
            self._on_snapshot(self.latest)
            return self.latest

    def _run(self) -> None:
        while not self._ending.wait(self._hurried):
            self._hurry.wait(self._rest)
            self._hurry.clear()
            if self._ending.is_set():
                return
            try:
                self.refresh()
            except BackendError as error:
                _LOG.debug("%s", error)
            except Exception:  # the cluster's output could not be parsed; the next one may be
                _LOG.exception("a snapshot of the cluster could not be read")
