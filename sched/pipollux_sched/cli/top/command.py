"""`pipollux top`: the cluster on a full screen, or once as text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipollux_sched.cli.console import OutputFormat, output_console, print_data
from pipollux_sched.cli.options import StateDirectory, TableOutput
from pipollux_sched.cli.reader import reading
from pipollux_sched.lifecycle import Phase
from pipollux_sched.report.event_text import TELLING_TYPES
from pipollux_sched.store import JobQuery

if TYPE_CHECKING:
    from pipollux_sched.cli.reader import Reader


def top(
    interval: Annotated[
        float, typer.Option(min=0.1, max=3600.0, help="Seconds between updates.")
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print the state once, and exit.")] = False,
    output: TableOutput = OutputFormat.table,
    state_dir: StateDirectory = None,
) -> None:
    """Watch jobs, teams, nodes and events on a full screen.

    Scroll with the arrow keys or the mouse. / searches by name, p selects the next
    phase, s or a click on a column header sorts, Enter opens a job or a node, q
    quits. The state is printed once if standard output is not a terminal, and with
    --output json.

    Without a running scheduler, top shows the last recorded state.
    """
    console = output_console()
    with reading(state_dir) as reader:
        if output is not OutputFormat.table:
            print_data(_plain(reader), output)
        elif once or not console.is_terminal or console.is_dumb_terminal:
            from .text import print_once

            print_once(reader)
        else:
            from .app import TopApp  # slower to import than all the rest

            TopApp(reader, interval).run()


def _plain(reader: Reader) -> dict[str, Any]:
    from .text import MOST_JOBS
    from .view import MOST_EVENTS

    cluster, jobs = reader.cluster(JobQuery(limit=MOST_JOBS)), reader.jobs()
    records = {job.name: job for job in jobs}
    phases = [job.phase for job in jobs]
    return {
        "time": cluster.time,
        "served": reader.served,
        "policy": cluster.policy,
        "goodput": cluster.goodput,
        "nodes": [node.to_dict() for node in reader.nodes()],
        "teams": reader.teams().to_dict()["teams"] if cluster.has_teams else [],
        "phases": {phase.value: phases.count(phase) for phase in Phase},
        "jobs": [records[job.name].to_dict() for job in cluster.jobs if job.name in records],
        "events": reader.latest_events(MOST_EVENTS, types=TELLING_TYPES),
    }
