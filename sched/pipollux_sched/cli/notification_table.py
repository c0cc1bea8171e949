"""Notifications and channels as tables."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from pipollux_sched.store import DeliveryState
from pipollux_sched.views.models import NotificationView
from pipollux_utils.text import clean, count, spell_age


def notification_table(found: Sequence[NotificationView], now: float) -> Table:
    """Return notifications, with what became of each."""
    table = Table(box=None, header_style="dim", pad_edge=False)
    for header in ("Event", "Job", "To", "Since", "State"):
        table.add_column(header, no_wrap=header != "State", overflow="fold")
    for one in found:
        number = f" (×{one.count})" if one.count > 1 else ""
        table.add_row(
            f"{one.kind}{number}",
            clean(one.job or ""),
            Text(clean(one.to)),
            f"{spell_age(now - one.created_at)} ago",
            Text(delivery_text(one, now)),
        )
    return table


def delivery_text(one: NotificationView, now: float) -> str:
    """Return what became of a notification, in words."""
    times = count(one.attempts, "attempt")
    if one.state is DeliveryState.DELIVERED:
        return "delivered" if one.attempts == 1 else f"delivered after {times}"
    error = "" if one.error is None else f": {clean(one.error)}"
    if one.state is DeliveryState.FAILED:
        return f"given up after {times}{error}"
    wait = max((one.due_at or now) - now, 0.0)
    if not one.attempts:
        return "about to be sent" if wait < 1 else f"is sent in {spell_age(wait)}"
    return f"tried again in {spell_age(wait)}, after {times}{error}"
