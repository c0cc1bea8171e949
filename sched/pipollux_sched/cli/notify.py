"""`pipollux notify`: the channels of a user, and what was sent to them."""

from __future__ import annotations

import sys
import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipollux_sched.spec.notify import DEFAULT_EVENTS, DEFAULT_WAITING, NOTIFY_EVENTS, NewChannel
from pipollux_utils.text import clean, spell_duration
from pipollux_utils.text_file import read_text_file

from .console import USAGE, CommandError, OutputFormat, print_data, print_result
from .options import StateDirectory, TableOutput
from .reader import asking

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from pipollux_sched.views.notifications import ChannelView, NotificationsView


_OPTIONS = {
    "webhook": "--webhook",
    "apprise": "--apprise",
    "secret": "--secret-file",
    "events": "--on",
    "waiting_after": "--waiting-after",
    "user": "--user",
}
"""Option of each field of a channel; the name is an argument."""


class NotifyAction(StrEnum):
    """Actions on channels."""

    list = "list"
    add = "add"
    test = "test"
    remove = "remove"


def notify(
    action: Annotated[
        NotifyAction, typer.Argument(metavar="[list|add|test|remove]", show_default=False)
    ] = NotifyAction.list,
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME]", help="Name of the channel.", show_default=False),
    ] = None,
    webhook: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="URL for signed POST requests; -: read it from standard input."
        ),
    ] = None,
    apprise: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="URL of Apprise, as for mail; -: read it from standard input."
        ),
    ] = None,
    secret_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="File with the key of the webhook's signatures.",
            show_default="a new key, which is printed",
        ),
    ] = None,
    on: Annotated[
        list[str] | None,
        typer.Option(
            metavar="EVENT",
            help=f"Event to send, repeatable: {', '.join(NOTIFY_EVENTS)}; none: only those that "
            "job files ask for.",
            show_default=", ".join(DEFAULT_EVENTS),
        ),
    ] = None,
    waiting_after: Annotated[
        str,
        typer.Option(metavar="DURATION", help="Time without slots that is an event, as in 2h."),
    ] = f"{DEFAULT_WAITING:.0f}s",
    user: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="User whose channel it is; for admins.", show_default="the sender"
        ),
    ] = None,
    output: TableOutput = OutputFormat.table,
    state_dir: StateDirectory = None,
) -> None:
    """List, add, test and remove the channels that notifications about your jobs are sent to.

    A channel is a webhook or a URL of Apprise, and the events of all your jobs that
    are sent to it. Destinations and keys are secret: they are never shown again.

        pipollux notify add ops --webhook https://example.org/hook --on failed
        pipollux notify test ops
        pipollux notify remove ops

    Exit code: 0 done; 1 refused; 2 an option is invalid.
    """
    if (name is None) != (action is NotifyAction.list):
        wanted = "takes no NAME" if name else "needs the NAME of a channel"
        raise CommandError(f"pipollux notify {action} {wanted}", USAGE)
    new = None
    if action is NotifyAction.add and name is not None:
        new = _new(name, webhook, apprise, secret_file, on, waiting_after, user)
    with asking(state_dir) as client:
        if name is None:
            _print(client.notifications(), output)
        elif new is not None:
            made = client.add_channel(new)
            text = f"{name}: notifications go to {made.channel.to}."
            if made.secret is not None:
                typer.echo(f"{text} Its key, shown only now:", err=True)
                text = made.secret
            _tell(text, made.to_dict(), output)
        elif action is NotifyAction.test:
            tried = client.test_channel(name, user)
            text = f"{name}: a test is sent to {tried.to}; see: pipollux notify"
            _tell(text, tried.to_dict(), output)
        else:
            gone = client.remove_channel(name, user)
            _tell(f"{name}: the channel is removed.", gone.to_dict(), output)


def _new(
    name: str,
    webhook: str | None,
    apprise: str | None,
    secret_file: Path | None,
    on: Sequence[str] | None,
    waiting_after: str,
    user: str | None,
) -> NewChannel:
    from pydantic import ValidationError

    from pipollux_utils.validation import problems

    if (webhook is None) == (apprise is None):
        has = "no destination" if webhook is None else "two destinations"
        raise CommandError(
            f"pipollux notify add has {has}; give one of --webhook URL and --apprise URL", USAGE
        )
    given = {"webhook": _read(webhook), "apprise": _read(apprise), "user": user}
    if secret_file is not None:
        given["secret"] = read_text_file(
            secret_file, lambda text: CommandError(text, USAGE)
        ).strip()
    unknown = next((one for one in on or () if one not in (*NOTIFY_EVENTS, "none")), None)
    if unknown is not None:
        raise CommandError(
            f"--on: {unknown!r} is not an event; give one of {', '.join(NOTIFY_EVENTS)} and none, "
            "and --on again for each further event",
            USAGE,
        )
    events = DEFAULT_EVENTS if on is None else [one for one in on if one != "none"]
    fields = {key: value for key, value in given.items() if value is not None}
    try:
        return NewChannel.model_validate(
            {"name": name, "events": events, "waiting_after": waiting_after, **fields}
        )
    except ValidationError as error:
        found = problems(error.errors(include_url=False), NewChannel)
        said = [f"{_OPTIONS.get(str(*one.place[:1]), 'NAME')}: {one.text}" for one in found]
        raise CommandError("; ".join(map(clean, said)), USAGE) from None


def _read(url: str | None) -> str | None:
    return sys.stdin.readline().strip() if url == "-" else url


def _tell(text: str, data: dict[str, object], output: OutputFormat) -> None:
    if output is OutputFormat.table:
        typer.echo(text)
    else:
        print_data(data, output)


def _print(found: NotificationsView, output: OutputFormat) -> None:
    if output is not OutputFormat.table:
        print_data(found.to_dict(), output)
        return
    from .notification_table import notification_table

    if found.channels:
        print_result(_channels(found.channels))
    else:
        typer.echo("No channels; add one with: pipollux notify add NAME --webhook URL")
    if found.notifications:
        typer.echo("")
        print_result(notification_table(found.notifications, time.time()))


def _channels(channels: Sequence[ChannelView]) -> Table:
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    for header in ("Channel", "User", "To", "Events"):
        table.add_column(header)
    for one in channels:
        events = [
            f"waiting {spell_duration(one.waiting_after)}" if kind == "waiting" else kind
            for kind in one.events
        ]
        table.add_row(one.name, one.user or "—", one.to, ", ".join(events) or "as in job files")
    return table
