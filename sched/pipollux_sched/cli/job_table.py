"""Jobs as a table."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pipollux_sched.lifecycle import Phase
from pipollux_sched.occupancy import holding
from pipollux_sched.store import JobRecord, Point

from .wording import first_line, one_line, spell_age, spell_nodes

PHASE_STYLES = {
    Phase.RUNNING: "green",
    Phase.COMPLETE: "dim",
    Phase.FAILED: "red",
    Phase.RESTARTING: "yellow",
    Phase.SUSPENDED: "yellow",
    Phase.QUEUED: "cyan",
}
"""In which colour each phase is shown."""
_COLUMNS = ("Job", "Phase", "Stages", "Replicas", "Nodes", "Epoch", "Step", "Loss", "Samples/s")
_LATER_COLUMNS = ("Restarts", "Age")
_NUMBERS = ("Stages", "Replicas", "Epoch", "Step", "Loss", "Samples/s", "Restarts")
_LEAST_MESSAGE = 24
"""Columns without which a message says nothing and is left out."""


def job_table(
    jobs: Sequence[JobRecord],
    points: Mapping[str, Point],
    launches: Mapping[str, int],
    console: Console,
) -> Table:
    """Return jobs as a table; the message of each as far as there is room.

    Args:
        jobs: the jobs.
        points: the latest progress of those that have reported any.
        launches: how often each was launched.
        console: where it is to be shown.
    """
    rows = [_row(job, points.get(job.name), launches.get(job.name, 0)) for job in jobs]
    room = console.width - console.measure(_table(rows)).maximum - 2
    messages = [Text(one_line(first_line(job.state.message))) for job in jobs]
    for message in messages:
        message.truncate(max(room, 0), overflow="ellipsis")
    return _table(rows, messages if room >= _LEAST_MESSAGE else None)


def _table(rows: Sequence[Sequence[Text]], messages: Sequence[Text] | None = None) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for header in (*_COLUMNS, *_LATER_COLUMNS):
        table.add_column(header, justify="right" if header in _NUMBERS else "left", no_wrap=True)
    if messages is None:
        for row in rows:
            table.add_row(*row)
        return table
    table.add_column("Message", no_wrap=True)
    for row, message in zip(rows, messages, strict=True):
        table.add_row(*row, message)
    return table


def _row(job: JobRecord, point: Point | None, launches: int) -> list[Text]:
    held, num_stages = holding(job)
    return [
        Text(job.name),
        Text(spell_phase(job), style=PHASE_STYLES.get(job.phase, "")),
        Text(str(num_stages)),
        Text(str(len(held)) if held else "–"),
        Text(spell_nodes(held)),
        Text(_epoch(point, job.phase)),
        Text("–" if point is None else str(point.step)),
        Text("–" if point is None or point.loss is None else f"{point.loss:.3g}"),
        Text(_throughput(point)),
        Text(str(max(launches - 1, 0))),
        Text(spell_age((job.ended_at or time.time()) - job.submitted_at)),
    ]


def spell_phase(job: JobRecord) -> str:
    """Spell a job's phase; one that was cancelled is told from one that failed."""
    cancelled = job.phase is Phase.FAILED and job.state.reason == "Cancelled"
    return "Cancelled" if cancelled else job.phase.value


def _epoch(point: Point | None, phase: Phase) -> str:
    """Spell how many epochs are done."""
    if point is None:
        return "–"
    done = point.epoch + (phase is Phase.COMPLETE)  # points count from 0
    return str(done) if point.num_epochs is None else f"{done}/{point.num_epochs}"


def _throughput(point: Point | None) -> str:
    if point is None or not point.step_time:
        return "–"
    return f"{point.batch_size / point.step_time:.3g}"
