"""`pipollux demo`: everything at work on this machine, and a report of it."""

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
        Path, typer.Option(metavar="DIR", help="Folder for the report and the state.")
    ] = Path("demo-report"),
    examples: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder of the example scripts.",
            show_default="the examples of this package",
        ),
    ] = None,
    seconds_alone: Annotated[
        float, typer.Option(min=0, help="Seconds between the submission of the two jobs.")
    ] = SECONDS_ALONE,
    policy: PolicyName = None,
    output: TableOutput = OutputFormat.table,
) -> None:
    """Train two real jobs under the scheduler on this machine, and write a report.

    A digit classifier trains, and grows while it trains. Then a transformer arrives,
    as a multi-process pipeline of two stages, and the classifier gives back the
    slots that it needs. The numbers of replicas depend on the measured step times.
    The demo takes some minutes on two cores.

    Ctrl-C ends every process; the report then covers the time until then.

    Exit code: 0 all jobs are complete; 1 one is not, or it was interrupted;
    2 a file or an option is wrong.
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
