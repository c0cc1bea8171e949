"""The details that `pipollux top` shows of one job or one node."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, ClassVar

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import Screen
from textual.widgets import Footer, Static

from pipollux_sched.cli.describe import job_sections
from pipollux_sched.cli.devices import device_table
from pipollux_sched.errors import SchedulerError
from pipollux_sched.views.models import NodeView
from pipollux_utils.text import clean, count, spell_age, spell_moment

from .sparkline import Span, sparkline, window_for

if TYPE_CHECKING:
    from pipollux_sched.cli.reader import Reader

HISTORY = 60


class _Details(Screen[None]):
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "app.pop_screen", "back"),
        Binding("backspace", "app.pop_screen", show=False),
        Binding("q", "app.quit", "quit"),
    ]

    def compose(self) -> ComposeResult:
        with VerticalScroll():
            yield Static("", id="details")
        yield Footer()

    def tell(self, content: RenderableType) -> None:
        for shown in self.query("#details").results(Static):  # gone once the screen was closed
            shown.update(content)


class JobScreen(_Details):
    """The details of a job as `pipollux describe` prints them, updated periodically."""

    def __init__(self, reader: Reader, name: str, interval: float) -> None:
        super().__init__()
        self._reader, self._job, self._interval = reader, name, interval

    def on_mount(self) -> None:
        """Start updating."""
        self.look()
        self.set_interval(self._interval, self.look)

    @work(exclusive=True, exit_on_error=True)
    async def look(self) -> None:
        """Read the job, and show it."""
        try:
            found = await asyncio.to_thread(self._read)
        except SchedulerError as error:
            found = Text(clean(error), style="bold red")
        self.tell(found)

    def _read(self) -> RenderableType:
        found = self._reader.job(self._job)
        now = time.time()
        end = found.ended_at or now
        spans = [
            Span(entry.created_at, entry.ended_at or now, len(entry.nodes) * entry.num_stages)
            for entry in found.attempts
        ]
        window = window_for(end - found.submitted_at)
        most = max((span.slots for span in spans), default=1)
        drawn = sparkline(spans, (found.submitted_at, end), end - window, end, HISTORY, most)
        title = f"Slots held, the last {spell_age(window)}, up to {most}"
        return Group(job_sections(found, now), Text(), Text(title, style="bold"), Text(drawn))


class NodeScreen(_Details):
    """The jobs that hold the slots of a node when the screen was opened."""

    def __init__(self, node: NodeView) -> None:
        super().__init__()
        self._shown = node

    def on_mount(self) -> None:
        """Show the node."""
        node = self._shown
        table = Table(box=None, header_style="dim", pad_edge=False)
        table.add_column("Job")
        table.add_column("Slots", justify="right")
        for job, slots in node.jobs.items():
            table.add_row(Text(clean(job)), str(slots))
        reason = f": {clean(node.reason)}" if node.reason else ""
        about = f"{node.condition.value}{reason}, since {spell_moment(node.since)}"
        devices = device_table(node.devices)
        self.tell(
            Group(
                Text(node.name, style="bold"),
                Text(f"{count(node.slots, 'slot')} of kind {node.kind}, {node.free} free; {about}"),
                Text(),
                table if node.jobs else Text("No job holds a slot of it.", style="dim"),
                Text(),
                devices or Text(),
            )
        )
