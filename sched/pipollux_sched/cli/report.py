"""`pipollux report`: draw the HTML report of a scheduler's records or of an event log."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from pipollux_sched.report.page import render_report
from pipollux_sched.report.run.event_log import read_events
from pipollux_sched.report.run_events import clipped, of_jobs, report_of
from pipollux_utils.atomic_write import write_output
from pipollux_utils.units import parse_duration

from .completion import complete_jobs
from .console import USAGE, CommandError, OutputFormat, print_data
from .options import StateDirectory, TableOutput
from .reader import reading
from .server_choice import refuse_server


def report(
    events: Annotated[
        Path | None,
        typer.Argument(
            metavar="EVENTS.jsonl",
            help="An event log: one JSON object per line, as pipollux demo writes it.",
            show_default="the scheduler's own records",
        ),
    ] = None,
    job: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Include only this job; may be repeated.",
            show_default=False,
            autocompletion=complete_jobs,
        ),
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(
            metavar="DURATION", help="Length of the last period, such as 2h.", show_default=False
        ),
    ] = None,
    save: Annotated[
        Path, typer.Option("--save", metavar="FILE", help="HTML file to write.")
    ] = Path("report.html"),
    output: TableOutput = OutputFormat.table,
    state_dir: StateDirectory = None,
) -> None:
    """Write the report of a run, from the scheduler's records or an event log.

    The report is one HTML file that works offline. It shows allocations over time
    with their reasons, the loss across restarts, goodput, predicted and measured
    step times, and the pipeline bubble. Long series are thinned evenly.

        pipollux report --since 2h
        pipollux report --job char-lm --save char-lm.html
        pipollux report demo-report/events.jsonl
    """
    seconds = _seconds(since)
    names = job or []
    if events is None:
        with reading(state_dir) as reader:
            page = reader.report(names, seconds)
    else:
        refuse_server("a report of an event log")
        page = _logged(events, names, seconds)
    try:
        write_output(save, page.encode())
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise CommandError(
            f"{save}: cannot write the report ({reason}); "
            "give --save the path of a file that can be written"
        ) from error
    if output is OutputFormat.table:
        typer.echo(f"Wrote {save}")
    else:
        print_data({"report": str(save)}, output)


def _seconds(since: str | None) -> float | None:
    if since is None:
        return None
    try:
        return parse_duration(since)
    except ValueError as error:
        raise CommandError(f"--since: {error}", USAGE) from None


def _logged(path: Path, jobs: Sequence[str], seconds: float | None) -> str:
    found: Sequence[Any] = read_events(path).events
    unknown = set(jobs) - {event.get("job") for event in found}
    if unknown:
        raise CommandError(f"{path}: no event belongs to a job named {min(unknown)!r}")
    if not jobs and seconds is None:
        return render_report(path)
    end = max(event["time"] for event in found)
    return report_of(clipped(of_jobs(found, jobs), None if seconds is None else end - seconds))
