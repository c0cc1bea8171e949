"""Where notifications about jobs go: `notify` of a job or team, and the channels of users.

The destinations hold secrets, so that they are `SecretStr`: shown, dumped and logged as stars.
`NotifySpec.revealed` is the only way to the text, for the store and for requests to a scheduler.
"""

from __future__ import annotations

import base64
import binascii
import secrets
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self, get_args
from urllib.parse import urlsplit

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, model_validator

from pipollux_utils.units import parse_duration
from pipollux_utils.validation import problem_at

from .names import Name, UserName

NotifyEvent = Literal["completed", "failed", "cancelled", "waiting", "preempted", "forecast_missed"]
NOTIFY_EVENTS: tuple[NotifyEvent, ...] = get_args(NotifyEvent)
DEFAULT_EVENTS: tuple[NotifyEvent, ...] = ("completed", "failed")
DEFAULT_WAITING = 3600.0
"""Seconds that a job waits for slots before that is an event."""
MOST_ENTRIES = 10
"""Largest number of entries of a job or team."""
_MOST_URL = 4096
_SECRET_PREFIX = "whsec_"  # noqa: S105  # of Standard Webhooks, before the secret
_SECRET_BYTES = (24, 64)


def make_secret() -> str:
    """Return a new secret for the signatures of a webhook."""
    return _SECRET_PREFIX + base64.b64encode(secrets.token_bytes(32)).decode()


def secret_bytes(secret: str) -> bytes:
    """Return the key in a secret; ValueError, without the secret, if it has not the form of one."""
    try:
        if not secret.startswith(_SECRET_PREFIX):
            raise ValueError
        key = base64.b64decode(secret.removeprefix(_SECRET_PREFIX), validate=True)
    except (ValueError, binascii.Error):
        key = b""
    if not _SECRET_BYTES[0] <= len(key) <= _SECRET_BYTES[1]:
        raise ValueError(
            f"is not a webhook's secret; give '{_SECRET_PREFIX}' and {_SECRET_BYTES[0]} to "
            f"{_SECRET_BYTES[1]} bytes in base64"
        )
    return key


def _parse_waiting(value: str | float | None) -> float:
    if value is None:
        raise ValueError("an empty value is not a duration; give one such as 2h")
    return float(parse_duration(value) or 0.0)


class NotifySpec(BaseModel):
    """One destination of notifications, and the events that it is for."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    channel: Name | None = Field(default=None, description="the name of a channel of the user")
    """A channel that the job's user has added with `pipollux notify add`."""
    webhook: SecretStr | None = Field(
        default=None, description="a URL such as https://example.org/hook", repr=False
    )
    """URL that receives signed POST requests."""
    secret: SecretStr | None = Field(
        default=None, description="a text such as whsec_…, in quotes", repr=False
    )
    """Key of the webhook's signatures: `whsec_` and 24 to 64 bytes in base64."""
    apprise: SecretStr | None = Field(
        default=None, description="a URL of Apprise such as mailto://…", repr=False
    )
    """URL of Apprise: mail, Slack, Teams and other services."""
    events: Annotated[tuple[NotifyEvent, ...], Field(strict=False)] = Field(
        default=DEFAULT_EVENTS, description=f"a list of {', '.join(NOTIFY_EVENTS)}"
    )
    """The events to send."""
    waiting_after: Annotated[
        float, BeforeValidator(_parse_waiting, json_schema_input_type=float | str)
    ] = Field(default=DEFAULT_WAITING, description="a duration such as 2h")
    """Time without slots after which the job counts as waiting too long."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        kinds = {"channel": self.channel, "webhook": self.webhook, "apprise": self.apprise}
        given = [name for name, value in kinds.items() if value is not None]
        if len(given) != 1:
            found = " and ".join(given) or "no destination"
            raise problem_at((), f"has {found}; give one of channel, webhook and apprise")
        if self.webhook is not None:
            _check_webhook(self.webhook.get_secret_value())
        if self.apprise is not None:
            _check_apprise(self.apprise.get_secret_value())
        if self.secret is not None:
            if self.webhook is None:
                raise problem_at(("secret",), "is for a webhook; leave it out")
            try:
                secret_bytes(self.secret.get_secret_value())
            except ValueError as error:
                raise problem_at(("secret",), str(error)) from None
        if len(set(self.events)) < len(self.events):
            raise problem_at(("events",), "names an event twice; name each once")
        return self

    @property
    def label(self) -> str:
        """The destination without anything that could be secret."""
        if self.channel is not None:
            return f"channel {self.channel}"
        if self.webhook is not None:
            return f"webhook {urlsplit(self.webhook.get_secret_value()).hostname}"
        scheme = "" if self.apprise is None else self.apprise.get_secret_value()
        return f"apprise {scheme.partition(':')[0].lower()}"

    def revealed(self) -> dict[str, Any]:
        """Return the entry as JSON with its secrets, to be stored or sent to a scheduler."""
        plain = self.model_dump(mode="json", exclude_none=True)
        for name in ("webhook", "secret", "apprise"):
            value: SecretStr | None = getattr(self, name)
            if value is not None:
                plain[name] = value.get_secret_value()
        return plain


class NewChannel(NotifySpec):
    """A channel to add for a user."""

    name: Name = Field(description="a name, as in ops")
    """Unique among the user's channels."""
    user: UserName | None = Field(default=None, description="the name of a user")
    """The user; none: the sender. Jobs that an admin submits for no user have the admin's."""

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        if self.channel is not None:
            raise problem_at(("channel",), "is for job files; give webhook or apprise")
        return self

    def revealed(self) -> dict[str, Any]:
        """Return the destination and its events, without the name and the user."""
        return {k: v for k, v in super().revealed().items() if k not in ("name", "user")}


def check_entries(entries: Sequence[NotifySpec]) -> Sequence[NotifySpec]:
    """Return the entries of a job or team; raise ValueError for too many, or no secret."""
    if len(entries) > MOST_ENTRIES:
        raise ValueError(f"has {len(entries)} entries; at most {MOST_ENTRIES} are allowed")
    for index, entry in enumerate(entries):
        if entry.webhook is not None and entry.secret is None:
            raise problem_at(
                (index, "secret"),
                "is missing; give the key that the receiver checks signatures with: "
                f"'{_SECRET_PREFIX}' and at least {_SECRET_BYTES[0]} bytes in base64",
            )
    return entries


def check_team_entries(entries: Sequence[NotifySpec]) -> Sequence[NotifySpec]:
    """Return the entries of a team; raise ValueError for a channel, which belongs to a user."""
    for index, entry in enumerate(entries):
        if entry.channel is not None:
            raise problem_at((index, "channel"), "is for job files; give webhook or apprise")
    return check_entries(entries)


def parse_notify(data: Mapping[str, Any]) -> NotifySpec:
    """Return a stored entry."""
    return NotifySpec.model_validate(data)


def _check_webhook(url: str) -> None:
    # The messages leave out the URL: its path may be a password, as those of chat services are.
    wrong = _why_no_request(url)
    if wrong is not None:
        raise problem_at(
            ("webhook",),
            f"is not a URL for POST requests: {wrong}; give one such as https://example.org/hook",
        )
    parts = urlsplit(url)
    if parts.username is not None or parts.fragment:
        raise problem_at(
            ("webhook",), "has a user or a fragment; leave it out, requests are signed"
        )


def _why_no_request(url: str) -> str | None:
    if len(url) > _MOST_URL:
        return f"it has {len(url)} characters, at most {_MOST_URL} are allowed"
    if not (url.isascii() and url.isprintable()) or " " in url:
        return "it has spaces, or characters that are not ASCII"
    scheme, separator, _ = url.partition("://")
    if not separator:
        return "it does not begin with https:// or http://"
    if scheme.lower() not in ("http", "https"):
        return f"its scheme is {scheme[:20]}, not https or http"
    try:
        parts = urlsplit(url)
    except ValueError:
        return "its host is not valid"
    if not parts.hostname:
        return "it has no host"
    try:
        valid = parts.port != 0
    except ValueError:
        valid = False
    port = parts.netloc.rpartition(":")[2]
    shown = f"{port}, " if port.isdigit() else ""
    return None if valid else f"its port is {shown}not a number from 1 to 65535"


def _check_apprise(url: str) -> None:
    scheme, separator, rest = url.partition("://")
    good = scheme.isascii() and scheme.replace("+", "").isalnum()
    if not (separator and good and rest) or len(url) > _MOST_URL or not url.isprintable():
        raise problem_at(
            ("apprise",), "is not a URL of Apprise; give one such as mailto://user:password@host"
        )
