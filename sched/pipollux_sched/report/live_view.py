"""Live view of a cluster in a terminal.

On a terminal it keeps a display at the bottom: jobs, nodes with the jobs in their slots, the latest
events; elsewhere it prints plain lines. It prints a table whenever the allocation changes, and a
summary at the end; these stay.

Events may come from any thread. Nothing is printed while the view's own lock is held, because
rich's display draws from another thread, which takes that lock while it holds rich's.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import NamedTuple, Self

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pipollux_sched.report.run.event_log import Event, real, text
from pipollux_sched.report.run.records import FINISHED, AllocationRecord, JobRun, NodeRun, Run
from pipollux_sched.report.run.replay import Recorder
from pipollux_utils.text import DASH, amount, clean, clock, count, duration, grouped, placement

from .event_text import decision_text, event_text
from .facts import epochs, job_row
from .tables import AllocationLine, allocation_table, cell, open_table, plain_spaces

__all__ = ["AllocationLine", "LiveView", "allocation_table"]

COLOURS = ("#2e6ca4", "#c2602a", "#2a8c74", "#a9598b", "#a67c10", "#3d8ab6", "#6d6b67", "#85593d")
"""Colours of jobs, those of the report."""

SLOT_WIDTH = 12
"""Characters of one slot in the display of the nodes."""

NARROW = 108
"""Width below which tables leave out information that the rest of the display shows."""

KEPT_POINTS = 5000


class LiveView:
    """Shows events as they happen; a context manager.

    Args:
        console: where to print; plain lines if it is not a terminal.
        progress_interval: seconds between two plain progress lines of one job.
        num_messages: number of latest events shown on a terminal.

    Example:
        >>> with LiveView(Console(width=80)) as view:
        ...     view.on_event({"time": 0.0, "type": "submitted", "job": "a", "spec": {}})
        [0:00] a: submitted
    """

    def __init__(
        self,
        console: Console | None = None,
        *,
        progress_interval: float = 5.0,
        num_messages: int = 6,
    ) -> None:
        self.console = console if console is not None else _console()
        self._interval = progress_interval
        self._recorder = Recorder(max_points=KEPT_POINTS)
        self._messages: deque[Text] = deque(maxlen=num_messages)
        self._changed: dict[str, AllocationRecord] = {}
        self._begun: list[Text] = []
        self._told: dict[str, float] = {}
        self._last_event = time.monotonic()
        self._state = threading.Lock()
        self._printing = threading.Lock()
        self._live: Live | None = None
        if self.console.is_terminal and not self.console.is_dumb_terminal:
            self._live = Live(
                get_renderable=self._render,
                console=self.console,
                refresh_per_second=4,
                transient=True,
            )
        _tolerate(self.console)

    @property
    def run(self) -> Run:
        """The run as recorded so far."""
        return self._recorder.run

    def start(self) -> None:
        """Start the display."""
        if self._live is not None:
            self._live.start()

    def stop(self) -> None:
        """Remove the display; printed lines stay. Idempotent."""
        with self._state:
            waiting = self._take_allocations()
        with self._printing:
            for renderable in waiting:
                self.console.print(renderable)
        if self._live is not None:
            self._live.stop()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def on_event(self, event: Event) -> None:
        """Record one event and show its effect; thread-safe."""
        with self._printing:
            with self._state:
                lines = self._take(event)
            for renderable in lines:
                if isinstance(renderable, Text):
                    self.console.print(renderable, soft_wrap=True, highlight=False)
                else:
                    self.console.print(renderable)

    def print_summary(self) -> None:
        """Print the outcome of each job."""
        with self._state:
            table = self._summary()
        with self._printing:
            self.console.print(table)

    def _take(self, event: Event) -> list[RenderableType]:
        self._recorder.add(event)
        self._last_event = time.monotonic()
        kind, name = text(event, "type"), text(event, "job")
        out: list[RenderableType] = []
        if kind == "allocated" and name in self.run.jobs:
            self._changed[name] = self.run.jobs[name].allocations[-1]
        elif kind != "changing":
            out += self._take_allocations()
        told = event_text(event, every=kind == "cluster")
        if told is not None:
            line = self._line(event, f"{clean(name)}: {clean(told)}" if name else clean(told))
            self._messages.append(line)
            if self._live is None and kind == "changing":
                self._begun.append(line)
            elif self._live is None and kind != "allocated":
                out.append(line)
        if kind == "progress" and self._live is None and name in self.run.jobs:
            out += self._progress_line(event, self.run.jobs[name])
        return out

    def _line(self, event: Event, words: str) -> Text:
        moment = (real(event, "time") or 0.0) - (self.run.start or 0.0)
        return cell(f"[{clock(moment)}] {words}")

    def _progress_line(self, event: Event, job: JobRun) -> list[RenderableType]:
        now = real(event, "time") or 0.0
        if now - self._told.get(job.name, float("-inf")) < self._interval:
            return []
        self._told[job.name] = now
        cells = _progress(job)
        words = (
            f"{clean(job.name)}: epoch {cells.epoch}, step {cells.step}, loss {cells.loss}, "
            f"{cells.goodput} samples/s goodput, batch size {cells.batch_size}, {cells.where}"
        )
        return [self._line(event, words)]

    def _take_allocations(self) -> list[RenderableType]:
        """Return a changed allocation as a table, and resizes, once a round's events are over."""
        changed, self._changed = self._changed, {}
        begun, self._begun = self._begun, []
        if not changed:
            return [*begun]
        rows = []
        for job in self.run.jobs.values():
            if job.name in changed:
                record = changed[job.name]
                previous = len(record.previous) if record.previous else None
                why = decision_text(record.why, record.why_restart)
                rows.append(_row(record, why, previous))
            elif job.allocations and job.phase not in FINISHED:
                rows.append(_row(job.allocations[-1], "unchanged", None))
        moment = max(a.time for a in changed.values()) - (self.run.start or 0.0)
        return [allocation_table(rows, title=f"allocation at {clock(moment)}"), *begun]

    def _summary(self) -> Table:
        table = open_table(f"after {plain_spaces(duration(self.run.seconds))}")
        table.add_column("job", style="bold", overflow="fold", min_width=8)
        table.add_column("state", overflow="fold", min_width=9)
        wide = self.console.width >= NARROW
        columns = {
            "replicas": "replicas",
            **({"restarts": "restarts", "resizes": "resizes"} if wide else {}),
            "steps": "steps",
            **({"epochs": "epochs"} if wide else {}),
            "loss": "loss",
            "goodput": "goodput\nsamples/s",
            "speedup": "predicted\nspeedup",
        }
        for heading in columns.values():
            table.add_column(heading, justify="right")
        for index, job in enumerate(self.run.jobs.values()):
            row = job_row(job, index)
            state = f"{row.phase}: {row.message}" if row.message else row.phase
            cells = (row.name, state, *(getattr(row, field) for field in columns))
            table.add_row(*map(cell, cells))
        return table

    def _render(self) -> RenderableType:
        with self._state:
            run = self.run
            elapsed = run.seconds + (time.monotonic() - self._last_event if run.start else 0.0)
            policy = f", policy {clean(run.policy)}" if run.policy else ""
            room = self.console.size.height - len(run.nodes) - len(self._messages) - 8
            parts: list[RenderableType] = [
                Text.assemble(("Pipollux", "bold"), (f"  {clock(elapsed)}{policy}", "dim")),
                self._job_table(max(3, room)),
                self._node_lines(),
                Text(),
                *(_dimmed(message) for message in self._messages),
            ]
        return Group(*parts)

    def _job_table(self, most: int) -> RenderableType:
        jobs = list(enumerate(self.run.jobs.values()))
        jobs.sort(key=lambda entry: entry[1].phase in FINISHED)
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, expand=False)
        table.add_column("job", no_wrap=True)
        table.add_column("phase", no_wrap=True)
        narrow = self.console.width < NARROW
        for heading in ("epoch", "step", "loss", "samples/s", "batch" if narrow else "batch size"):
            table.add_column(heading, justify="right", no_wrap=True)
        where = "R × K" if narrow else "replicas × stages"
        table.add_column(where, overflow="ellipsis", no_wrap=True)
        for index, job in jobs[:most]:
            cells = _progress(job, short=narrow)
            name = clean(job.name, 12 if narrow else 24)
            table.add_row(
                Text.assemble(("■ ", _colour(index)), (name, "bold")),
                job.phase,
                *(cells.epoch, cells.step, cells.loss, cells.goodput, cells.batch_size),
                cell(cells.where),
                style="dim" if job.phase in FINISHED else "",
            )
        if len(jobs) <= most:
            return table
        return Group(table, Text(f"and {count(len(jobs) - most, 'more job')}", style="dim"))

    def _node_lines(self) -> RenderableType:
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="bold", no_wrap=True)
        grid.add_column(no_wrap=True)
        for node in self.run.nodes.values():
            grid.add_row(cell(clean(node.name, 20)), self._slots(node))
        return grid

    def _slots(self, node: NodeRun) -> Text:
        """Draw a node's slots: one coloured block per replica, as wide as its stages."""
        line, used = Text(), 0
        for index, job in enumerate(self.run.jobs.values()):
            current = job.current
            stages = current.num_stages if current else 0
            for _ in range(current.nodes.count(node.name) if current else 0):
                width = SLOT_WIDTH * stages + stages - 1
                words = f" {clean(job.name, width - 2)}".ljust(width)
                line.append(words, f"#ffffff on {_colour(index)}").append(" ")
                used += stages
        for _ in range(used, node.slots):
            line.append(" free".ljust(SLOT_WIDTH), "dim on grey15").append(" ")
        return line


class _Cells(NamedTuple):
    epoch: str
    step: str
    loss: str
    goodput: str
    batch_size: str
    where: str


def _progress(job: JobRun, *, short: bool = False) -> _Cells:
    point = job.last_point
    current = job.current
    where = DASH
    if current is not None and short:
        where = f"{current.num_replicas} × {current.num_stages}"
    elif current is not None:
        several = current.num_stages > 1
        stages = f" × {count(current.num_stages, 'stage')}" if several else ""
        replicas = count(current.num_replicas, "replica")
        where = f"{replicas}{stages} on {placement(current.nodes)}"
    if point is None:
        return _Cells(DASH, DASH, DASH, DASH, DASH, where)
    of = f"/{job.num_epochs}" if job.num_epochs else ""
    size = amount(point.batch_size)
    if point.batch_size and point.atomic_bsz and point.num_replicas and not short:
        factors = [point.num_replicas, point.atomic_bsz, (point.accum_steps or 0) + 1]
        size += f" = {'×'.join(str(f) for f in factors)}"
    step = point.step if job.final_step is None else job.final_step
    return _Cells(
        epoch=f"{amount(epochs(job))}{of}",
        step=plain_spaces(amount(step)),
        loss=plain_spaces(grouped(point.loss)),
        goodput=plain_spaces(grouped(point.goodput)),
        batch_size=plain_spaces(size),
        where=where,
    )


def _row(record: AllocationRecord, why: str, previous: int | None) -> AllocationLine:
    return AllocationLine(
        record.job,
        record.num_stages,
        record.nodes,
        record.batch_size,
        record.speedup,
        why,
        previous,
    )


def _dimmed(message: Text) -> Text:
    return Text(message.plain, style="dim", no_wrap=True, overflow="ellipsis")


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def _console() -> Console:
    """Return the console for standard output; for a file, wider than the default 80 columns."""
    console = Console()
    return console if console.is_terminal else Console(width=max(120, console.width))


def _tolerate(console: Console) -> None:
    """Make a stream write a question mark in place of characters it cannot encode."""
    reconfigure = getattr(console.file, "reconfigure", None)
    if reconfigure is not None and not console.encoding.lower().startswith("utf"):
        reconfigure(errors="replace")
