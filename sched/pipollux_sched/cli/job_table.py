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

from .wording import DASH, first_line, one_line, spell_age, spell_nodes

PHASE_STYLES = {
    Phase.RUNNING: "green",
    Phase.COMPLETE: "dim",
    Phase.FAILED: "red",
    Phase.RESTARTING: "yellow",
    Phase.SUSPENDED: "yellow",
    Phase.QUEUED: "cyan",
}
"""In which colour each phase is shown."""
_COLUMNS = (
    *("Job", "Phase", "Stages", "Replicas", "Nodes", "Epoch", "Step", "Loss", "Samples/s"),
    *("Restarts", "Age"),
)
_NUMBERS = ("Stages", "Replicas", "Epoch", "Step", "Loss", "Samples/s", "Restarts")
_LEFT_OUT = ("Restarts", "Epoch", "Stages", "Samples/s", "Age", "Nodes")
"""What a terminal that is too narrow for all does without, the first one first."""
_GAP = 2
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
    widths = {
        header: max([len(header), *(row[header].cell_len for row in rows)]) for header in _COLUMNS
    }
    left_out = list(_LEFT_OUT)
    while left_out and _width(widths) > console.width:
        del widths[left_out.pop(0)]
    room = console.width - _width(widths) - _GAP
    if room >= _LEAST_MESSAGE:
        for job, row in zip(jobs, rows, strict=True):
            row["Message"] = Text(one_line(first_line(job.state.message)))
            row["Message"].truncate(room, overflow="ellipsis")
        widths["Message"] = room
    table = Table(box=None, header_style="bold", pad_edge=False)
    for header in widths:
        table.add_column(header, justify="right" if header in _NUMBERS else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(row[header] for header in widths))
    return table


def _width(widths: Mapping[str, int]) -> int:
    return sum(widths.values()) + _GAP * (len(widths) - 1)


def _row(job: JobRecord, point: Point | None, launches: int) -> dict[str, Text]:
    held, num_stages = holding(job)
    age = (job.ended_at or time.time()) - job.submitted_at
    return {
        "Job": Text(job.name),
        "Phase": Text(spell_phase(job), style=PHASE_STYLES.get(job.phase, "")),
        "Stages": Text(str(num_stages)),
        "Replicas": Text(str(len(held)) if held else DASH),
        "Nodes": Text(spell_nodes(held)),
        "Epoch": Text(_epoch(point, job.phase)),
        "Step": Text(DASH if point is None else str(point.step)),
        "Loss": Text(DASH if point is None or point.loss is None else f"{point.loss:.3g}"),
        "Samples/s": Text(_throughput(point)),
        "Restarts": Text(str(max(launches - 1, 0))),
        "Age": Text(spell_age(age)),
    }


def spell_phase(job: JobRecord) -> str:
    """Spell a job's phase; one that was cancelled is told from one that failed."""
    cancelled = job.phase is Phase.FAILED and job.state.reason == "Cancelled"
    return "Cancelled" if cancelled else job.phase.value


def _epoch(point: Point | None, phase: Phase) -> str:
    """Spell how many epochs are done."""
    if point is None:
        return DASH
    done = point.epoch + (phase is Phase.COMPLETE)  # points count from 0
    return str(done) if point.num_epochs is None else f"{done}/{point.num_epochs}"


def _throughput(point: Point | None) -> str:
    if point is None or not point.step_time:
        return DASH
    return f"{point.batch_size / point.step_time:.3g}"
