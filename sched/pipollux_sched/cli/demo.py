"""`pipollux demo`: everything at work on this machine, and a report of it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from pipollux_sched.cli.demo_run import STEPS_ALONE, Demo

from .console import FAILED, OutputFormat, print_data
from .options import PolicyName, TableOutput


def demo(
    folder: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder for the report and the state.")
    ] = Path("demo-report"),
    examples: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Folder of the example scripts.", show_default="the project's own"
        ),
    ] = None,
    steps_alone: Annotated[
        int, typer.Option(min=1, help="Steps of the first job before the second one arrives.")
    ] = STEPS_ALONE,
    policy: PolicyName = None,
    output: TableOutput = OutputFormat.table,
) -> None:
    """Train two real jobs under the scheduler on this machine, and write a report.

    A transformer learns to write Python as a pipeline of two stages; a digit
    classifier arrives, takes its share and finishes; the transformer grows to
    two pipeline replicas, and the first of them trains on meanwhile. It takes
    some minutes on two cores.

    Ctrl-C ends every process, and what was done so far is still reported.

    Exit code: 0 all jobs are complete; 1 one is not, or it was interrupted;
    2 a file or an option is wrong.
    """
    for_people = output is OutputFormat.table
    stream = sys.stdout if for_people else sys.stderr
    console = Console(stderr=not for_people, width=None if stream.isatty() else 120)
    demonstration = Demo(folder, console, examples, steps_alone, policy)
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
