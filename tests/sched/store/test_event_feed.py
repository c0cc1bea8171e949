"""Events are handed on once each, in order, and those that nobody asked for are passed over."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import pytest

from pipollux_sched.store import Store, event_feed
from pipollux_sched.store.event_feed import EventFeed
from tests.extent import first


class Listener:
    def __init__(self, last: int) -> None:
        self.seen: list[int] = []
        self.done = threading.Event()
        self._last = last

    def __call__(self, event: Mapping[str, Any]) -> None:
        self.seen.append(event["data"])
        if event["data"] == self._last:
            self.done.set()


@pytest.mark.parametrize("types", first(1, [("told",), None]))
def test_every_event_once_and_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, types: Collection[str] | None
) -> None:
    """More than one look takes, told before and after the start, among many of another type."""
    monkeypatch.setattr(event_feed, "_BATCH", 50)
    with Store(tmp_path / "pipollux.db", create=True) as store:
        store.add_event("told", {"data": -1})
        listener = Listener(199)
        feed = EventFeed(store, listener, store.last_event(), types)
        for number in range(150):
            store.add_event("told", {"data": number})
        feed.start()
        for number in range(150, 200):
            if types:
                store.add_event("passed over", {"data": -number})
            store.add_event("told", {"data": number})
        assert listener.done.wait(240)
        if types:
            store.add_event("passed over", {"data": -1})
        feed.stop()
        assert listener.seen == list(range(200))


def test_what_was_committed_before_the_end_is_handed_on(tmp_path: Path) -> None:
    with Store(tmp_path / "pipollux.db", create=True) as store:
        listener = Listener(1)
        feed = EventFeed(store, listener, 0, ["told"])
        feed.start()
        store.add_event("told", {"data": 0})
        store.add_event("passed over", {"data": 7})
        store.add_event("told", {"data": 1})
        feed.stop()
        assert listener.seen == [0, 1]
