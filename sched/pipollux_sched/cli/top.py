"""`pipollux top`: the cluster on a full screen, as it changes."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live

from pipollux_sched.interruption import Interruption
from pipollux_sched.store import StateDir, Store

from .cluster_view import ClusterView, look
from .console import OutputFormat, output_console, print_data, print_result
from .failure import one_sentence
from .jobs import plain_job
from .keyboard import Keyboard
from .nodes import plain_node
from .options import StateDirectory, TableOutput
from .top_frame import frame

KEY_WAIT = 0.1
"""Seconds between two looks at the keys, the size of the terminal, and signals to end."""
WIDTH_WITHOUT_TERMINAL = 120
HINT = "q quits"


def top(
    interval: Annotated[
        float,
        typer.Option(min=0.1, max=3600.0, help="Seconds between two looks at the cluster."),
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print it once, and end.")] = False,
    output: TableOutput = OutputFormat.table,
    state_dir: StateDirectory = None,
) -> None:
    """Watch the cluster, live: nodes and who holds their slots, jobs, last events.

    Ends with q or Ctrl-C. R×K is replicas × stages; the blocks of a node are its
    slots, each replica with the number of its job; the history tells the slots
    that a job held, a dot where it held none. Where standard output is no
    terminal it is printed once, and so it is with --output json.

    Works without a running scheduler too: then it shows how the last one left
    things.
    """
    directory = StateDir.choose(state_dir)
    console = output_console()
    with one_sentence(), Store(directory.store) as store:
        if output is not OutputFormat.table:
            print_data(_plain(look(store, directory)), output)
        elif once or not console.is_terminal or console.is_dumb_terminal:
            width = console.width if console.is_terminal else WIDTH_WITHOUT_TERMINAL
            print_result(Group(*frame(look(store, directory), width, None)))
        else:
            _watch(store, directory, console, interval)


def _plain(view: ClusterView) -> dict[str, Any]:
    return {
        "time": view.time,
        "served": view.served,
        "policy": view.policy,
        "goodput": view.goodput,
        "nodes": [plain_node(node) for node in view.nodes],
        "phases": {phase.value: number for phase, number in view.phases.items()},
        "jobs": [plain_job(job.record, job.point, len(job.spans)) for job in view.jobs],
        "events": list(view.events),
    }


def _watch(store: Store, directory: StateDir, console: Console, interval: float) -> None:
    """Draw anew at every interval, and when the terminal's size changes, until told to end."""
    with (
        Interruption() as interruption,
        Keyboard() as keyboard,
        Live(console=console, screen=True, auto_refresh=False) as live,
    ):
        view, looked, drawn = None, 0.0, (0, 0)
        while not interruption.count:
            late = time.monotonic() - looked >= interval
            if view is None or late:
                view, looked = look(store, directory), time.monotonic()
            if late or (console.width, console.height) != drawn:
                drawn = (console.width, console.height)
                live.update(Group(*frame(view, *drawn, HINT)), refresh=True)
            if "q" in keyboard.read(KEY_WAIT).lower():
                return
