"""Summaries of events, and the first event of a period."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from pipollux_sched.report.event_text import event_text
from pipollux_sched.store import Store

from .models import EventSummary


def event_summary(event: Mapping[str, Any]) -> EventSummary | None:
    """Return an event with its summary sentence; None for one that has no summary."""
    sentence = event_text(event)
    if sentence is None:
        return None
    head = {key: event[key] for key in ("id", "time", "type", "job", "attempt")}
    return EventSummary(**head, text=sentence)


def last_event_before(store: Store, seconds: float) -> int:
    """Return the id of the last event that is more than `seconds` old, 0 if there is none."""
    moment = time.time() - seconds
    low, high = 0, store.last_event()
    while low < high:  # ids and times increase together
        middle = (low + high) // 2
        found = store.events(middle, limit=1)
        if found and found[0]["time"] < moment:
            low = middle + 1
        else:
            high = middle
    return low
