"""Requests about notifications: checks of destinations, and the channels of users."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

from pydantic import SecretStr

from pipollux_sched.spec.job import SpecError
from pipollux_sched.spec.notify import NewChannel, NotifySpec, make_secret, parse_notify
from pipollux_sched.spec.teams import TeamsSpec
from pipollux_sched.store import Store, UnknownChannelError
from pipollux_sched.store.notifications import NewNotification, NotifyRule

from .hosts import PUBLIC, HostRules
from .messages import TEST
from .rules import owner_of

MOST_CHANNELS = 20
"""Largest number of channels of a user."""


class NotificationService:
    """Checks destinations, and manages channels.

    Args:
        hosts: the allowed hosts, as for `HostRules.parse`.
        why_not: explains why Apprise refuses a URL; None: it does not.
        wake: called when there is something new to send.
    """

    def __init__(
        self,
        store: Store,
        hosts: Sequence[str] = (PUBLIC,),
        *,
        why_not: Callable[[str], str | None] = lambda _url: None,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self._store, self._hosts = store, HostRules.parse(hosts)
        self._why_not, self._wake = why_not, wake

    def check_job(self, job: str, entries: Sequence[NotifySpec], user: str | None) -> None:
        """Raise `SpecError` for a destination that is not allowed, or an unknown channel."""
        for index, entry in enumerate(entries):
            place = f"job '{job}': notify[{index}]"
            if entry.channel is None:
                self._check(place, entry)
                continue
            try:
                self._store.notifications.channel(owner_of(user), entry.channel)
            except UnknownChannelError:
                whose = f"of {user}" if user else "for jobs of no user"
                raise SpecError(
                    f"{place}.channel: there is no channel '{entry.channel}' {whose}; add it "
                    f"with: pipollux notify add {entry.channel}"
                ) from None

    def check_teams(self, teams: TeamsSpec) -> None:
        """Raise `SpecError` for a destination of a team that is not allowed."""
        for team in teams.teams:
            for index, entry in enumerate(team.notify):
                self._check(f"team '{team.name}': notify[{index}]", entry)

    def add(self, new: NewChannel) -> tuple[NotifyRule, str | None]:
        """Add a channel; return it with a secret that was made for it, if one was.

        Raises:
            SpecError: its destination is not allowed, or the user has too many channels.
            ChannelExistsError: the user has one of this name.
        """
        self._check(f"channel '{new.name}'", new)
        owner, made = owner_of(new.user), None
        if len(self._store.notifications.channels(owner)) >= MOST_CHANNELS:
            raise SpecError(
                f"channel '{new.name}': there are {MOST_CHANNELS} channels, the most of a user; "
                "remove one with: pipollux notify remove NAME"
            )
        if new.webhook is not None and new.secret is None:
            made = make_secret()
            new = new.model_copy(update={"secret": SecretStr(made)})
        return self._store.notifications.add_channel(owner, new.name, new.revealed()), made

    def remove(self, user: str | None, name: str) -> NotifyRule:
        """Remove a channel, with its undelivered notifications; or raise `UnknownChannelError`."""
        return self._store.notifications.remove_channel(owner_of(user), name)

    def test(self, user: str | None, name: str) -> NotifyRule:
        """Send a notification to a channel; or raise `UnknownChannelError`."""
        rule = self._store.notifications.channel(owner_of(user), name)
        spec = parse_notify(rule.spec)
        item = {
            "kind": TEST,
            "job": name,
            "attempt": None,
            "user": user,
            "team": None,
            "time": self._store.now,
            "event": 0,
            "text": f"This is a test of channel {name}.",
        }
        target = {k: v for k, v in rule.spec.items() if k in ("webhook", "secret", "apprise")}
        label = f"channel {name} ({spec.label})"
        self._store.notifications.put(NewNotification(rule.key, label, target, TEST, "", item))
        self._wake()
        return rule

    def _check(self, place: str, entry: NotifySpec) -> None:
        if self._hosts.empty:
            raise SpecError(
                f"{place}: this scheduler sends no notifications; ask an admin for "
                "serve --notify-host"
            )
        if entry.webhook is not None:
            parts = urlsplit(entry.webhook.get_secret_value())
            host = parts.hostname or ""
            reason = self._hosts.why_not(host)
            if reason is not None:
                raise SpecError(f"{place}.webhook: {reason}")
            if parts.scheme != "https" and not self._hosts.listed(host):
                raise SpecError(
                    f"{place}.webhook: http is for hosts that an admin lists with serve "
                    "--notify-host; give an https URL"
                )
        if entry.apprise is not None:
            reason = self._why_not(entry.apprise.get_secret_value())
            if reason is not None:
                raise SpecError(f"{place}.apprise: {reason}")
