"""`pipollux demo`: train two jobs under the scheduler on this machine, and write a report."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from pipollux_sched.cli.demo_run import SECONDS_ALONE, Demo

from .console import FAILED, OutputFormat, print_data
from .options import PolicyName, TableOutput


def demo(
    folder: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder of the report and the scheduler's state.")
    ] = Path("demo-report"),
    examples: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Folder of the example scripts.", show_default="the project's own"
        ),
    ] = None,
    seconds_alone: Annotated[
        float, typer.Option(min=0, help="Seconds between the start of the first and second job.")
    ] = SECONDS_ALONE,
    policy: PolicyName = None,
    output: TableOutput = OutputFormat.table,
) -> None:
    """Train two real jobs under a scheduler on this machine, and write a report.

    A digit classifier trains and grows. Then a language model for Python code
    arrives as a multi-process pipeline of two stages; the classifier releases
    slots for it and keeps training on the rest. The allocations depend on the
    measurements. The demo takes a few minutes on two cores.

    Ctrl-C ends all processes; the report then covers the run up to that point.

    Exit code: 0 all jobs are complete; 1 a job is not complete, or the demo was
    interrupted; 2 a file or an option is invalid.
    """
    for_people = output is OutputFormat.table
    stream = sys.stdout if for_people else sys.stderr
    console = Console(stderr=not for_people, width=None if stream.isatty() else 120)
    demonstration = Demo(folder, console, examples, seconds_alone, policy)
    complete = demonstration.run()
    if for_people:
        console.print(f"Report: {demonstration.report}", soft_wrap=True, highlight=False)
        console.print(f"Events: {demonstration.events}", soft_wrap=True, highlight=False)
        console.print(
            f"State:  pipollux jobs --state-dir {folder / 'state'}", soft_wrap=True, highlight=False
        )
    else:
        places = {
            "report": demonstration.report,
            "events": demonstration.events,
            "state_dir": folder / "state",
        }
        told = {name: str(place) for name, place in places.items()}
        print_data({"complete": complete, **told}, output)
    if not complete:
        raise typer.Exit(FAILED)
