"""Delivery of committed events to a listener, in order, without blocking the writers."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeAlias

from pipollux_sched.store import Store, StoreError, StoreUnavailableError
from pipollux_sched.utils.vital_thread import VitalThread

_LOG = logging.getLogger(__name__)
_BATCH = 500
PAUSE = 0.1
"""Seconds between two reads: hints come at hundreds per second, and each read has a fixed cost."""

Listener: TypeAlias = Callable[[Mapping[str, Any]], None]


class EventFeed:
    """A thread that calls a listener with every committed event after a given one.

    The listener's errors are logged, and do not stop the delivery. `types` None: all.
    """

    def __init__(
        self, store: Store, listener: Listener, after: int, types: Collection[str] | None = None
    ) -> None:
        self._store = store
        self._types = types
        self._listener = listener
        self._last = after
        self._ending = threading.Event()
        self.thread = VitalThread("events", self._run)

    def start(self) -> None:
        """Start the delivery."""
        self.thread.start()

    def stop(self, timeout: float = 5.0) -> None:
        """Deliver the events committed so far, and stop."""
        self._ending.set()
        self.thread.join(timeout)

    def _run(self) -> None:
        while True:
            ending, version = self._ending.is_set(), self._store.version
            try:
                if self._hand_on():
                    continue
            except StoreUnavailableError as error:
                _LOG.warning("events wait to be handed on: %s", error)
                self._ending.wait(1.0)
            except StoreError as error:
                _LOG.warning("no more events are handed on: %s", error)
                return
            if ending:
                return
            self._store.wait(version, timeout=0.2)
            self._ending.wait(PAUSE)

    def _hand_on(self) -> bool:
        """Deliver a batch of events; return whether there may be more."""
        newest = self._store.last_event()
        if newest == self._last:
            return False
        events = self._store.events(self._last, types=self._types, limit=_BATCH)
        for event in events:
            self._last = event["id"]
            try:
                self._listener(event)
            except Exception:  # an error of the listener must not stop the delivery
                _LOG.exception("the listener failed on event %s", event)
        if len(events) == _BATCH:
            return True
        self._last = max(self._last, newest)  # skip events of other types
        return False
