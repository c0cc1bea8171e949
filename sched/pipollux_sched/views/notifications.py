"""Views of notifications: channels without their secrets, and deliveries."""

from __future__ import annotations

from typing import Self

from pipollux_sched.spec.notify import parse_notify
from pipollux_sched.store import DeliveryState, Notification, NotifyRule, Store

from .models import NotificationView, View

MOST_SHOWN = 100
"""Number of last notifications that are listed."""


class ChannelView(View):
    """A channel of a user; `to` is its destination without what may be secret.

    `user`: null for jobs of no user.
    """

    name: str
    user: str | None
    to: str
    events: list[str]
    waiting_after: float
    created_at: float

    @classmethod
    def of(cls, rule: NotifyRule) -> Self:
        """Return the view of a channel."""
        spec = parse_notify(rule.spec)
        return cls(
            name=rule.name,
            user=rule.owner.removeprefix("user:") or None,
            to=spec.label,
            events=list(spec.events),
            waiting_after=spec.waiting_after,
            created_at=rule.created_at,
        )


class MadeChannel(View):
    """A new channel; `secret` is the key of its signatures if one was made, shown only here."""

    channel: ChannelView
    secret: str | None


class NotificationsView(View):
    """The channels and the last notifications that a user may see, oldest first."""

    channels: list[ChannelView]
    notifications: list[NotificationView]


def notification_view(found: Notification) -> NotificationView:
    """Return the view of a notification."""
    return NotificationView(
        message=found.message,
        job=found.job,
        kind=found.kind,
        count=found.count,
        to=found.label,
        text=str(found.items[-1]["text"]),
        state=found.state,
        created_at=found.created_at,
        attempts=found.attempts,
        due_at=found.due_at if found.state is DeliveryState.PENDING else None,
        finished_at=found.finished_at,
        error=found.error,
    )


def list_notifications(store: Store, user: str | None, *, all_users: bool) -> NotificationsView:
    """Return channels and notifications: of a user, or of all users."""
    owner = None if all_users else f"user:{user or ''}"
    recent = store.notifications.recent(MOST_SHOWN, user=None if all_users else user)
    return NotificationsView(
        channels=[ChannelView.of(rule) for rule in store.notifications.channels(owner)],
        notifications=[notification_view(one) for one in recent],
    )
