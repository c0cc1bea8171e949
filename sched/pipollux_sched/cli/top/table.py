"""The tables of `pipollux top`: their columns and rows, and how they are updated."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple, TypeAlias

from rich.text import Text
from textual.binding import Binding, BindingType
from textual.widgets import DataTable

from pipollux_sched.cli.devices import spell_use
from pipollux_sched.cli.teams import limited
from pipollux_sched.store import JobOrder, ListedPhase
from pipollux_sched.views.models import JobLine, NodeView
from pipollux_utils.text import (
    DASH,
    clean,
    first_line,
    number,
    seconds,
    spell_age,
    spell_moment,
    spell_nodes,
)

from .sparkline import bars
from .view import USAGE_PARTS

if TYPE_CHECKING:
    from pipollux_sched.views.teams import TeamView

COLOURS = (
    *("#2e6ca4", "#b3541e", "#237a64", "#96487c"),
    *("#8a6510", "#5b57b5", "#a63a3a", "#5f6b2a"),
)
"""Colours of jobs, each readable on black and on white."""
PHASE_STYLES = {
    ListedPhase.RUNNING: "green",
    ListedPhase.STOPPING: "yellow",
    ListedPhase.RESTARTING: "yellow",
    ListedPhase.SUSPENDED: "yellow",
    ListedPhase.QUEUED: "cyan",
    ListedPhase.FAILED: "red",
    ListedPhase.CANCELLED: "red",
    ListedPhase.COMPLETE: "dim",
}
CONDITION_STYLES = {"draining": "yellow", "dead": "bold red"}

SOON = 30
"""Number of unread lines below the visible ones at which more rows are read."""

Cell: TypeAlias = Text | str


class TableColumn(NamedTuple):
    """One column."""

    title: str
    right: bool = False
    order: JobOrder | None = None
    descending: bool = False
    """Whether the first click sorts in descending order."""


JOB_COLUMNS = (
    TableColumn("Job", order=JobOrder.NAME),
    TableColumn("Phase", order=JobOrder.PHASE),
    TableColumn("R×K", True, JobOrder.SLOTS, True),
    TableColumn("Nodes", order=JobOrder.NODES),
    TableColumn("Epoch", True, JobOrder.EPOCH, True),
    TableColumn("Step", True, JobOrder.STEP, True),
    TableColumn("Loss", True, JobOrder.LOSS),
    TableColumn("Goodput", True, JobOrder.GOODPUT, True),
    TableColumn("Eff.", True),
    TableColumn("Step time", True),
    TableColumn("GPU", True),
    TableColumn("GPU memory", True),
    TableColumn("Restarts", True, JobOrder.RESTARTS, True),
    TableColumn("Age", True, JobOrder.AGE),
    TableColumn("Message"),
)
NODE_COLUMNS = (
    TableColumn("Node"),
    TableColumn("Used, last hour"),
    TableColumn("Now", True),
    TableColumn("Jobs", True),
    TableColumn("Condition"),
    TableColumn("Reason"),
)
TEAM_COLUMNS = (
    TableColumn("Team"),
    TableColumn("Quota", True),
    TableColumn("Used", True),
    TableColumn("Borrowed", True),
    TableColumn("Lent", True),
    TableColumn("Jobs", True),
    TableColumn("Submitted", True),
    TableColumn("Waiting", True),
    TableColumn("Gives back"),
)


class TableRow(NamedTuple):
    """One row: its cells, and the name that identifies it between updates."""

    key: str
    cells: tuple[Cell, ...]


class LiveTable(DataTable[Cell]):
    """A table that updates in place; the cursor stays with its job or node."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "select_cursor", "open"),
        Binding("j", "cursor_down", show=False),
        Binding("k", "cursor_up", show=False),
        Binding("home", "scroll_top", show=False),
        Binding("end", "scroll_bottom", show=False),
    ]

    def __init__(self, columns: Sequence[TableColumn], id: str) -> None:  # noqa: A002  # Textual's word
        super().__init__(id=id, cursor_type="row", fixed_columns=1, zebra_stripes=True)
        self._titles = columns
        self._told: list[TableRow] = []

    def on_mount(self) -> None:
        """Create the columns."""
        for column in self._titles:
            self.add_column(_head(column, ""), key=column.title)

    def show(self, rows: Iterable[TableRow]) -> None:
        """Show these rows, in this order; lines are reused, because adding one is much slower."""
        wanted = list(rows)
        at = self._told[self.cursor_row].key if 0 < self.cursor_row < len(self._told) else None
        if 2 * len(wanted) < len(self._told):
            self.clear()
            self._told = []
        for line in range(len(self._told), len(wanted), -1):
            self.remove_row(str(line - 1))
        for line, row in enumerate(wanted):
            if line >= len(self._told):
                self.add_row(*row.cells, key=str(line))
            else:
                self._change(line, self._told[line].cells, row.cells)
        self._told = wanted
        line = next((line for line, row in enumerate(wanted) if row.key == at), self.cursor_row)
        if line != self.cursor_row:
            self.move_cursor(row=line, scroll=False)

    def name_at(self, line: int) -> str | None:
        """Return the name of the row on a line; None if there is no such line."""
        return self._told[line].key if 0 <= line < len(self._told) else None

    @property
    def near_end(self) -> bool:
        """Whether the last row is almost visible."""
        seen = max(self.scroll_offset.y + self.size.height, self.cursor_row)
        return seen + SOON >= len(self._told)

    def mark(self, order: JobOrder, *, descending: bool) -> None:
        """Mark the column that the rows are sorted by."""
        for column, shown in zip(self._titles, self.ordered_columns, strict=True):
            sign = (" ↓" if descending else " ↑") if column.order is order else ""
            label = _head(column, sign)
            if shown.label.plain != label.plain:
                shown.label = label
                shown.content_width = max(shown.content_width, label.cell_len)
                self._update_count += 1
                self.refresh()

    def _change(self, line: int, before: Sequence[Cell], after: Sequence[Cell]) -> None:
        for column, old, new in zip(self._titles, before, after, strict=True):
            if old != new:
                self.update_cell(str(line), column.title, new, update_width=True)


def job_row(job: JobLine, now: float) -> tuple[Cell, ...]:
    """Return the cells of a job."""
    holds = bool(job.nodes)
    done = DASH
    if job.epoch is not None:
        epochs = job.epoch + (job.phase is ListedPhase.COMPLETE)  # points count from 0
        done = str(epochs) if job.num_epochs is None else f"{epochs}/{job.num_epochs}"
    badge = ("■ ", COLOURS[(job.number - 1) % len(COLOURS)])
    cells: tuple[str, ...] = (
        f"{len(job.nodes)}×{job.num_stages}" if holds else DASH,
        spell_nodes(sorted(job.nodes)),
        done,
        DASH if job.step is None else str(job.step),
        number(job.loss),
        number(job.goodput) if holds else DASH,
        DASH if job.efficiency is None else f"{100 * job.efficiency:.0f} %",
        DASH if job.step_time is None or not holds else seconds(job.step_time),
        *spell_use(job.device_use),
        str(job.num_restarts),
        spell_age((job.ended_at or now) - job.submitted_at),
        clean(first_line(job.message)),
    )
    return (
        Text.assemble(badge, (clean(job.name), "bold")),
        Text(job.phase.value, style=PHASE_STYLES.get(job.phase, "")),
        *_aligned(JOB_COLUMNS[2:], cells),
    )


def node_row(node: NodeView, usage: Sequence[float]) -> tuple[Cell, ...]:
    """Return the cells of a node; `usage`: its used slots in each interval of the last hour."""
    condition = node.condition.value
    cells = (
        bars(usage, node.slots).ljust(USAGE_PARTS),
        f"{node.used} of {node.slots}",
        str(len(node.jobs)),
    )
    return (
        Text(clean(node.name), style="bold"),
        Text(cells[0], style="blue"),
        *_aligned(NODE_COLUMNS[2:4], cells[1:]),
        Text(condition, style=CONDITION_STYLES.get(condition, "dim")),
        Text(clean(node.full_reason)),
    )


def team_row(team: TeamView) -> tuple[Cell, ...]:
    """Return the cells of a team."""
    cells = (
        str(team.quota),
        str(team.used),
        limited(team.borrowed, team.borrow),
        limited(team.lent, team.lend),
        limited(len(team.running), team.max_jobs),
        limited(team.submitted, team.max_submit_jobs),
        str(len(team.waiting)),
        spell_moment(team.until),
    )
    return (Text(clean(team.name), style="bold"), *_aligned(TEAM_COLUMNS[1:], cells))


def _aligned(columns: Sequence[TableColumn], cells: Sequence[str]) -> list[Cell]:
    return [
        Text(cell, justify="right" if column.right else "left")
        for column, cell in zip(columns, cells, strict=True)
    ]


def _head(column: TableColumn, sign: str) -> Text:
    return Text(column.title + sign, justify="right" if column.right else "left")
