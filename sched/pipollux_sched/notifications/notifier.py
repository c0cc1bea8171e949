"""The scheduler's thread for notifications: it fills the outbox, and lets it be delivered."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from pipollux_sched.store import JobRecord, Notification, Store
from pipollux_sched.utils.failure_log import FailureLog
from pipollux_utils.text import count

from .collector import Collector
from .courier import LIMIT, Answer, Couriers
from .hosts import PUBLIC
from .messages import body_of, text_of, title_of
from .signature import signed_headers

_LOG = logging.getLogger(__name__)
_USER_AGENT = "pipollux"
_PAUSE = 0.5
_LOOK_INTERVAL = 10.0
_MOST_PAUSE = 3600.0


@dataclass(frozen=True)
class NotifyOptions:
    """Options of the scheduler about notifications."""

    hosts: Sequence[str] = (PUBLIC,)
    """Hosts that they may be sent to: names, `*.` and a domain, addresses, networks, `public` for
    the public internet, `none`."""
    retries: Sequence[float] = (5.0, 30.0, 120.0, 600.0, 1800.0, 3600.0, 7200.0, 14400.0)
    """Seconds between attempts; the last entry repeats."""
    give_up: float = 86400.0
    """Seconds after which a notification is given up."""
    limit: float = LIMIT
    """Seconds for one attempt."""
    look_interval: float = _LOOK_INTERVAL
    """Seconds between two checks of waits and forecasts."""
    most_at_once: int = 4
    """Number of destinations that are served at the same time."""


class Notifier:
    """Fills and delivers the outbox of a store.

    A slow or dead receiver holds up its own channel alone: each channel has one notification under
    way at most, in order, and a channel that failed waits before its next attempt.

    Args:
        why_waiting: explains what a job without slots waits for.
        ending: set when the scheduler ends.
        couriers: send the notifications; None: its own, by the options.
    """

    def __init__(
        self,
        store: Store,
        options: NotifyOptions,
        why_waiting: Callable[[JobRecord], str | None],
        ending: threading.Event,
        couriers: Couriers | None = None,
    ) -> None:
        self._store, self._options, self._ending = store, options, ending
        self.collector = Collector(store, why_waiting)
        self._own_couriers = couriers is None
        self.couriers = couriers or Couriers(options.hosts, options.limit)
        self._pool = ThreadPoolExecutor(options.most_at_once, "pipollux-notify-send")
        self._busy: set[str] = set()
        self._lock = threading.Lock()
        self._woken = threading.Event()
        self._chance = random.Random()  # noqa: S311  # spreads retries

    def run(self) -> None:
        """Collect and deliver until the scheduler ends; log failures, and try again."""
        failures, look_at = FailureLog(_LOG, "the sending of notifications"), 0.0
        while not self._ending.is_set():
            try:
                if time.monotonic() >= look_at:
                    self.collector.look()
                    look_at = time.monotonic() + self._options.look_interval
                self.collector.collect()
                self.deliver()
                self.couriers.tidy()
                failures.succeeded()
            except Exception as error:  # the store may be unavailable for a while
                if self._ending.is_set():
                    return
                failures.failed(error)
            self._woken.wait(_PAUSE)
            self._woken.clear()

    def wake(self) -> None:
        """Look at the outbox at once."""
        self._woken.set()

    def deliver(self) -> None:
        """Begin to deliver what is due."""
        with self._lock:
            busy = set(self._busy)
            room = self._options.most_at_once - len(busy)
        if room <= 0:
            return
        for found in self._store.notifications.due(busy, room):
            with self._lock:
                self._busy.add(found.channel)
            self._pool.submit(self._send, found)

    def close(self) -> None:
        """End what is under way; it is delivered by the next scheduler."""
        self._ending.set()
        self.wake()
        if self._own_couriers:
            self.couriers.close()
        self._pool.shutdown(cancel_futures=True)

    @property
    def busy(self) -> bool:
        """Whether a notification is under way."""
        with self._lock:
            return bool(self._busy)

    def send(self, request: Mapping[str, Any]) -> Answer:
        """Send one notification that is not in the outbox: see `Couriers.send`."""
        return self.couriers.send(request)

    def why_not(self, url: str) -> str | None:
        """Explain why Apprise refuses a URL; None: it does not."""
        return self.couriers.send({"apprise": url, "check": True}).error

    def _send(self, due: Notification) -> None:
        try:
            found = self._store.notifications.begin(due.id)
            if found is None or found.target is None:
                return
            answer = self.couriers.send(_request(found, found.target, self._store.now))
            if self._ending.is_set() and answer.error is not None:
                return  # the next scheduler tries again
            self._keep(found, answer)
        except Exception as error:  # the next attempt comes by itself
            if not self._ending.is_set():
                _LOG.error(
                    "a notification for %s was not sent: %s", due.label, type(error).__name__
                )
        finally:
            with self._lock:
                self._busy.discard(due.channel)
            self.wake()

    def _keep(self, found: Notification, answer: Answer) -> None:
        records, now = self._store.notifications, self._store.now
        if answer.error is None:
            records.finish(found.id, None)
            return
        retries = self._options.retries
        pause = retries[min(found.attempts, len(retries)) - 1] * self._chance.uniform(0.9, 1.1)
        due_at = now + max(pause, min(answer.retry_after, _MOST_PAUSE))
        if answer.final or due_at > found.created_at + self._options.give_up:
            _LOG.warning(
                "a notification for %s was given up after %s: %s",
                found.label,
                count(found.attempts, "attempt"),
                answer.error,
            )
            records.finish(found.id, answer.error)
        else:
            records.postpone(found.id, due_at, answer.error)


def _request(found: Notification, target: Mapping[str, Any], now: float) -> dict[str, Any]:
    if "apprise" in target:
        return {"apprise": target["apprise"], "title": title_of(found), "text": text_of(found)}
    body = body_of(found)
    headers = {"content-type": "application/json", "user-agent": _USER_AGENT}
    headers |= signed_headers(target["secret"], found.message, int(now), body.encode())
    return {"webhook": target["webhook"], "headers": headers, "body": body}
