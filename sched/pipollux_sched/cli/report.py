"""`pipollux report`: the HTML report of an event log, drawn anew."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pipollux_sched.report import EventLogError, write_report

from .console import USAGE, CommandError, OutputFormat, print_data
from .options import TableOutput


def report(
    events: Annotated[
        Path,
        typer.Argument(
            metavar="EVENTS.jsonl",
            help="The event log: one JSON object per line, as `pipollux demo` writes it.",
            show_default=False,
        ),
    ],
    save: Annotated[
        Path, typer.Option("--save", metavar="FILE", help="The HTML file to write.")
    ] = Path("report.html"),
    output: TableOutput = OutputFormat.table,
) -> None:
    """Draw the report of a run anew from its event log.

    The report is one HTML file that needs no network: who held which slots when,
    the loss over the restarts, goodput, predicted against measured step time, the
    pipeline's bubble, and every allocation with its reason.

        pipollux report demo-report/events.jsonl --save report.html
    """
    try:
        path = write_report(events, save)
    except EventLogError as error:
        raise CommandError(str(error), USAGE) from error
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise CommandError(
            f"{save}: cannot write the report ({reason}); "
            "give --save the path of a file that can be written"
        ) from error
    if output is OutputFormat.table:
        typer.echo(f"Wrote {path}")
    else:
        print_data({"report": str(path)}, output)
