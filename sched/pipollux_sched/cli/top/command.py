"""`pipollux top`: the cluster on a full screen, as it changes, or once, as text."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from pipollux_sched.cli.console import OutputFormat, output_console, print_data
from pipollux_sched.cli.failure import one_sentence
from pipollux_sched.cli.jobs import plain_job
from pipollux_sched.cli.nodes import plain_node
from pipollux_sched.cli.options import StateDirectory, TableOutput
from pipollux_sched.lifecycle import Phase
from pipollux_sched.store import JobQuery, StateDir, Store
from pipollux_sched.store.slot_usage import occupancy

MOST_JOBS = 200
"""Jobs that are printed once; `pipollux jobs` has all."""


def top(
    interval: Annotated[
        float,
        typer.Option(min=0.1, max=3600.0, help="Seconds between two looks at the cluster."),
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print it once, and end.")] = False,
    output: TableOutput = OutputFormat.table,
    state_dir: StateDirectory = None,
) -> None:
    """Watch the cluster, live: jobs, nodes and how full they are, last events.

    Scroll with the arrow keys or the mouse; / searches by name, p goes to the
    next phase, a click on a column's head or s sorts by it, Enter opens a job
    or a node, q quits. Where standard output is no terminal it is printed
    once, and so it is with --output json.

    Works without a running scheduler too: then it shows how the last one left
    things.
    """
    directory = StateDir.choose(state_dir)
    console = output_console()
    with one_sentence(), Store(directory.store) as store:
        if output is not OutputFormat.table:
            print_data(_plain(store, directory), output)
        elif once or not console.is_terminal or console.is_dumb_terminal:
            from .text import print_once

            print_once(store, directory)
        else:
            from .app import TopApp  # what draws it takes longer to import than all the rest

            TopApp(store, directory, interval).run()


def _plain(store: Store, directory: StateDir) -> dict[str, Any]:
    from .view import look

    view = look(store, directory, JobQuery(limit=MOST_JOBS))
    records = {record.name: record for record in store.jobs()}
    phases = [record.phase for record in records.values()]
    return {
        "time": view.time,
        "served": view.served,
        "policy": view.policy,
        "goodput": view.goodput,
        "nodes": [plain_node(node) for node in occupancy(store.nodes(), records.values()).values()],
        "phases": {phase.value: phases.count(phase) for phase in Phase},
        "jobs": [
            plain_job(records[job.name], job.point, job.generation)
            for job in view.jobs.jobs
            if job.name in records
        ],
        "events": list(view.events),
    }
