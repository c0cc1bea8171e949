"""Progress of simulations, as bars on standard error."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from pipollux_simulator import Workload
from pipollux_simulator.parallel import Pair, WatchPair
from pipollux_utils.text import clock


@contextmanager
def progress_bars(pairs: Sequence[Pair]) -> Iterator[WatchPair]:
    """Show a bar per running simulation and one for all, on a terminal; yield the callback."""
    console = Console(file=sys.stderr)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("jobs done{task.fields[at]}"),
        TimeElapsedColumn(),
    )
    shown = console.is_terminal
    with Progress(*columns, console=console, disable=not shown, transient=True) as progress:
        everything = progress.add_task("All", total=sum(map(_num_jobs, pairs)), at="")
        tasks = [_add(progress, pair) for pair in pairs]
        finished = [0] * len(pairs)

        def watch(pair: int, now: float, done: int) -> None:
            total = _num_jobs(pairs[pair])
            finished[pair] = done
            if not progress.tasks[tasks[pair]].started:
                progress.start_task(tasks[pair])
            progress.update(
                tasks[pair], completed=done, visible=done < total, at=f" at {clock(now)}"
            )
            progress.update(everything, completed=sum(finished))

        yield watch


def _add(progress: Progress, pair: Pair) -> TaskID:
    workload, policy = pair
    name = f"{workload.name}, {policy}"
    return progress.add_task(name, total=len(workload.jobs), at="", visible=False, start=False)


def _num_jobs(pair: Pair) -> int:
    workload: Workload = pair[0]
    return len(workload.jobs)
