"""`pipollux jobs`: the jobs of a scheduler, as a table."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment

from pipollux_sched.lifecycle import CANCELLED, Phase
from pipollux_sched.store import ListedPhase, Point
from pipollux_sched.views.models import ListedJob
from pipollux_utils.text import DASH, clean, first_line, number, spell_age, spell_nodes

from .console import USAGE, CommandError, OutputFormat, output_console, print_data, print_result
from .forecast_text import short_span
from .options import StateDirectory, TableOutput
from .reader import reading, tell_unserved

if TYPE_CHECKING:
    from .reader import Reader

WATCH_INTERVAL = 1.0

PHASE_STYLES = {
    Phase.RUNNING: "green",
    Phase.COMPLETE: "dim",
    Phase.FAILED: "red",
    Phase.RESTARTING: "yellow",
    Phase.SUSPENDED: "yellow",
    Phase.QUEUED: "cyan",
}
STYLES_BY_WORD = {phase.value: style for phase, style in PHASE_STYLES.items()} | {
    CANCELLED: PHASE_STYLES[Phase.FAILED]
}
_COLUMNS = (
    *("Job", "Phase", "Stages", "Replicas", "Nodes", "Epoch", "Step", "Loss", "Samples/s"),
    *("Restarts", "Age", "Ends in"),
)
_NUMBERS = ("Stages", "Replicas", "Epoch", "Step", "Loss", "Samples/s", "Restarts")
_LEFT_OUT = (
    *("Restarts", "Epoch", "Stages", "Samples/s", "Age", "Ends in", "Nodes", "Loss", "Step"),
    "Replicas",
)
"""Columns that a narrow terminal drops, in this order: a number that is cut is another number."""
_GAP = 2
_LEAST_MESSAGE = 24
"""Smallest width of the Message column; a narrower one is dropped."""


def jobs(
    phase: Annotated[
        list[ListedPhase] | None,
        typer.Option(
            case_sensitive=False,
            help="Show only jobs in this phase; may be repeated. Running excludes Stopping, "
            "Failed excludes Cancelled.",
            show_default=False,
        ),
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Update the list as it changes, until Ctrl-C.")
    ] = False,
    trials: Annotated[
        bool, typer.Option("--trials", help="List the trials of sweeps, too.")
    ] = False,
    output: TableOutput = OutputFormat.table,
    state_dir: StateDirectory = None,
) -> None:
    """List jobs: phase, allocation, progress, forecast.

    Ends in is the forecast of a job's end, as an interval that holds with 80 %.
    Restarts counts all restarts of a job, after changes of its allocation and
    after failures. Without a running scheduler, jobs shows the last recorded state.

        pipollux jobs --phase Running --phase Queued --watch
    """
    with reading(state_dir) as reader:
        if watch:
            _watch(reader, phase or (), output, trials=trials)
            return
        found = reader.jobs(phase or (), trials=trials)
        if output is not OutputFormat.table:
            print_data([job.to_dict() for job in found], output)
            return
        if not found:
            is_any = bool(phase) and bool(reader.jobs())
            typer.echo(
                "No job is in that phase."
                if is_any
                else "No jobs yet; submit some with: pipollux submit FILE"
            )
            return
        console = output_console()
        print_result(job_table(found, console))
        if any(not job.phase.ended for job in found):
            tell_unserved(reader)


class JobTable:
    """A table of jobs as lines of text: rich's takes a millisecond per row."""

    def __init__(self, rows: Sequence[Mapping[str, str]], widths: Mapping[str, int]) -> None:
        self._rows = rows
        self._widths = widths

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the lines."""
        heads = dict.fromkeys(self._widths, "bold")
        yield from self._line({header: header for header in self._widths}, heads, console)
        for row in self._rows:
            yield from self._line(row, {"Phase": STYLES_BY_WORD.get(row["Phase"], "")}, console)

    def _line(
        self, cells: Mapping[str, str], styles: Mapping[str, str], console: Console
    ) -> Iterator[Segment]:
        for header, width in self._widths.items():
            text, style = cells[header], styles.get(header)
            space = " " * (width - cell_len(text))
            shown = space + text if header in _NUMBERS else text + space
            yield Segment(shown, console.get_style(style) if style else None)
            yield Segment(" " * _GAP)
        yield Segment.line()


def job_table(jobs: Sequence[ListedJob], console: Console) -> JobTable:
    """Return jobs as a table; messages are cut to the width of the console."""
    rows = [_row(job) for job in jobs]
    columns = [
        header
        for header in _COLUMNS
        if header != "Ends in" or any(row[header] != DASH for row in rows)
    ]
    widths = {
        header: max([len(header), *(cell_len(row[header]) for row in rows)]) for header in columns
    }
    left_out = list(_LEFT_OUT)
    while left_out and _width(widths) > console.width:
        widths.pop(left_out.pop(0), None)
    room = console.width - _width(widths) - _GAP
    if room >= _LEAST_MESSAGE:
        for job, row in zip(jobs, rows, strict=True):
            row["Message"] = _cut(clean(first_line(job.message)), room)
        widths["Message"] = room
    return JobTable(rows, widths)


def _cut(text: str, room: int) -> str:
    return text if cell_len(text) <= room else set_cell_size(text, room - 1) + "…"


def _width(widths: Mapping[str, int]) -> int:
    return sum(widths.values()) + _GAP * (len(widths) - 1)


def _row(job: ListedJob) -> dict[str, str]:
    held, num_stages = job.holds
    point = job.progress
    now = time.time()
    age = (job.ended_at or now) - job.submitted_at
    return {
        "Job": job.name,
        "Phase": job.listed_phase.value,
        "Stages": str(num_stages),
        "Replicas": str(len(held)) if held else DASH,
        "Nodes": spell_nodes(sorted(held)),
        "Epoch": _epoch(point, job.phase),
        "Step": DASH if point is None else str(point.step),
        "Loss": DASH if point is None or point.loss is None else f"{point.loss:.3g}",
        "Samples/s": _throughput(point),
        "Restarts": str(max(job.num_attempts - 1, 0)),
        "Age": spell_age(age),
        "Ends in": DASH if job.forecast is None else short_span(job.forecast.end, now),
    }


def _epoch(point: Point | None, phase: Phase) -> str:
    if point is None:
        return DASH
    done = point.epoch + (phase is Phase.COMPLETE)  # points count from 0
    return str(done) if point.num_epochs is None else f"{done}/{point.num_epochs}"


def _throughput(point: Point | None) -> str:
    if point is None or not point.step_time:
        return DASH
    return number(point.batch_size / point.step_time)


def _watch(
    reader: Reader, phases: Collection[ListedPhase], output: OutputFormat, *, trials: bool
) -> None:
    from rich.live import Live

    console = output_console()
    if output is not OutputFormat.table or not console.is_terminal:
        raise CommandError(
            "--watch shows a table on a terminal; for programs there is: "
            "pipollux events --follow --output json",
            USAGE,
        )
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            live.update(job_table(reader.jobs(phases, trials=trials), console), refresh=True)
            time.sleep(WATCH_INTERVAL)
