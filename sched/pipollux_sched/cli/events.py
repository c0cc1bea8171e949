"""`pipollux events`: print past events, and follow new ones."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipollux_sched.report.event_text import EVENT_TYPES, TELLING_TYPES, event_text
from pipollux_utils.text import clean
from pipollux_utils.units import parse_duration

from .completion import complete_event_types, complete_jobs
from .console import USAGE, CommandError, LineFormat, print_json_line
from .options import LineOutput, StateDirectory
from .reader import FOLLOWING, reading, tell_unserved

if TYPE_CHECKING:
    from .reader import Reader


def events(
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Print new events as they happen, until Ctrl-C.")
    ] = False,
    job: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Show only the events of this job.",
            show_default=False,
            autocompletion=complete_jobs,
        ),
    ] = None,
    type: Annotated[  # noqa: A002  # the option is called so
        list[str] | None,
        typer.Option(
            "--type",
            metavar="TYPE",
            help="Show only events of this type; may be repeated.",
            show_default="all but the frequent ones",
            autocompletion=complete_event_types,
        ),
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(
            metavar="ID|DURATION",
            help="Show events after this event number, or of a period such as 10m.",
            show_default=False,
        ),
    ] = None,
    last: Annotated[
        int, typer.Option(min=0, help="Number of past events, unless --since is given.")
    ] = 50,
    output: LineOutput = LineFormat.text,
    state_dir: StateDirectory = None,
) -> None:
    """Print events, oldest first, one per line.

    Frequent types are shown only on request with --type: started, stopping,
    waiting_to_join, hints, progress, timeline, cluster. With --output json, "id"
    is the number of an event. Works without a running scheduler.

        pipollux events --follow --job char-lm
        pipollux events --since 2h --type allocated --output json
    """
    types = _checked(type)
    with reading(state_dir) as reader:
        if job is not None:
            reader.job(job)
        if follow:
            tell_unserved(reader, FOLLOWING)
        for event in _events(reader, job, types, since, last, follow):
            _print(event, output)


def _checked(types: list[str] | None) -> Collection[str]:
    for name in types or ():
        if name not in EVENT_TYPES:
            raise CommandError(
                f"--type: there are no events of type {name!r}; give one of: "
                f"{', '.join(sorted(EVENT_TYPES))}",
                USAGE,
            )
    return types or TELLING_TYPES


def _events(
    reader: Reader,
    job: str | None,
    types: Collection[str],
    since: str | None,
    last: int,
    follow: bool,
) -> Iterator[Mapping[str, Any]]:
    if since is None:
        # Read first: events that happen in the meantime are followed, not lost.
        after = reader.last_event()
        begin = reader.latest_events(last, job=job, types=types) if last else []
        after = max([after, *(event["id"] for event in begin)])
        yield from begin
    else:
        after = _after(reader, since)
        while page := reader.events(after, job=job, types=types):
            yield from page
            after = page[-1]["id"]
    if follow:
        yield from reader.follow(after, job=job, types=types)
        raise CommandError(f"the scheduler at {reader.where} has ended")


def _after(reader: Reader, since: str) -> int:
    if re.fullmatch(r"\d{1,18}", since):
        return int(since)
    try:
        seconds = parse_duration(since)
    except ValueError as error:
        raise CommandError(f"--since: {error}, or the number of an event", USAGE) from None
    return reader.last_event_before(seconds or 0.0)


def _print(event: Mapping[str, Any], output: LineFormat) -> None:
    if output is LineFormat.json:
        print_json_line(event)
        return
    moment = datetime.fromtimestamp(event["time"]).strftime("%Y-%m-%d %H:%M:%S")
    whose = f"{event['job']}: " if event["job"] else ""
    typer.echo(f"{moment} {clean(whose + str(event_text(event, every=True)))}")
