"""The text and payload of notifications, from the sentences of the event log."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from pipollux_sched.report.event_text import event_text
from pipollux_sched.store.notifications import Notification
from pipollux_utils.text import clean, count, listing

TEST = "test"


def item_of(
    kind: str, event: Mapping[str, Any], user: str | None, team: str | None
) -> dict[str, Any]:
    """Return an event as it is sent."""
    text = event_text(event, every=True) or ""
    return {
        "kind": kind,
        "job": event["job"],
        "attempt": event["attempt"],
        "user": user,
        "team": team,
        "time": event["time"],
        "event": event["id"],
        "text": clean(text),
    }


def title_of(found: Notification) -> str:
    """Return the subject: the job and what happened, or the number of events."""
    if found.count == 1:
        item = found.items[0]
        return f"Pipollux: {item['job']} {_verb(item['kind'])}"
    if found.job is not None:
        return f"Pipollux: {found.job} {_verb(found.kind)} {found.count} times"
    return f"Pipollux: {count(found.count, 'event')}"


def text_of(found: Notification) -> str:
    """Return the message: a line per event."""
    lines = [_line(item) for item in found.items]
    left = found.count - len(found.items)
    if left > 0:
        lines.insert(0, f"{count(left, 'earlier event')}")
    if found.count > 1:
        numbers = Counter(item["kind"] for item in found.items)
        kinds = listing([f"{number} {_verb(kind)}" for kind, number in numbers.items()])
        lines.insert(0, f"{count(found.count, 'event')}; of the last {len(found.items)}: {kinds}")
    return "\n".join(lines)


def body_of(found: Notification) -> str:
    """Return the JSON body of a webhook."""
    if found.count == 1:
        item = found.items[0]
        data: Mapping[str, Any] = {k: v for k, v in item.items() if k not in ("kind", "time")}
        return _body(f"job.{item['kind']}", item["time"], data)
    data = {"count": found.count, "events": [_event(item) for item in found.items]}
    return _body("jobs.digest", found.items[-1]["time"], data)


def _event(item: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"type": f"job.{item['kind']}", **item, "time": _moment(item["time"])}


def _body(kind: str, time: float, data: Mapping[str, Any]) -> str:
    return json.dumps({"type": kind, "timestamp": _moment(time), "data": data}, ensure_ascii=False)


def _line(item: Mapping[str, Any]) -> str:
    return f"{_moment(item['time'])} {item['job']}: {item['text']}"


def _moment(time: float) -> str:
    return datetime.fromtimestamp(time, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def _verb(kind: str) -> str:
    return {"waiting": "waiting", "forecast_missed": "missed its forecast", TEST: "test"}.get(
        kind, kind
    )
