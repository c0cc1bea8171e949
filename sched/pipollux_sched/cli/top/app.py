"""The screen of `pipollux top`: jobs first, below them nodes, teams and the last events."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from rich.text import Text
from textual import on, work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container, VerticalScroll
from textual.widgets import DataTable, Footer, Input, Static, Tab, Tabs

from pipollux_sched.cli.teams import spell_use
from pipollux_sched.errors import SchedulerError
from pipollux_sched.store import JobOrder, JobQuery, ListedPhase
from pipollux_utils.text import clean

from .details import JobScreen, NodeScreen
from .table import (
    JOB_COLUMNS,
    NODE_COLUMNS,
    TEAM_COLUMNS,
    LiveTable,
    TableRow,
    job_row,
    node_row,
    team_row,
)
from .text import headline, spell_slots
from .view import FIRST_JOBS, Look, look

if TYPE_CHECKING:
    from pipollux_sched.cli.reader import Reader
    from pipollux_sched.views.teams import TeamsView

ALL = "all"
REREAD = 5.0
"""Seconds between full updates without events, which update the ages."""


class TopApp(App[None]):
    """Watches a scheduler until the user quits, with an update every `interval` seconds."""

    TITLE = "pipollux top"
    ENABLE_COMMAND_PALETTE = False
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (120, "-wide")]  # noqa: RUF012  # Textual's
    VERTICAL_BREAKPOINTS = [(0, "-low"), (18, "-high")]  # noqa: RUF012  # Textual's
    CSS = """
    #head, .title { height: 1; text-wrap: nowrap; text-overflow: ellipsis; }
    .title { text-style: bold; background: $panel; padding: 0 1; }
    #search { display: none; height: 1; border: none; padding: 0 1; }
    #search.open { display: block; }
    #jobs { height: 3fr; }
    #below { height: 2fr; layout: vertical; }
    .-wide #below { layout: horizontal; }
    .-low #below { display: none; }
    #below > Container { height: 1fr; width: 1fr; }
    #nodes, #teams { height: 1fr; }
    #below > #of-teams { display: none; }
    #below > #of-teams.some { display: block; }
    DataTable, VerticalScroll { scrollbar-size: 1 1; }
    #news { height: 1fr; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "quit"),
        Binding("ctrl+c", "quit", show=False, priority=True),
        # Keys that move the focus are handled before the keys typed behind them are forwarded.
        Binding("slash", "search", "search", key_display="/", priority=True),
        Binding("escape", "clear", "all jobs", show=False, priority=True),
        Binding("enter", "keep_search", show=False, priority=True),
        Binding("p", "phase(1)", "next phase"),
        Binding("P", "phase(-1)", show=False),
        Binding("s", "sort", "sort"),
        Binding("r", "reverse", "reverse"),
        Binding("n", "nodes", "jobs/nodes", priority=True),
    ]

    def __init__(self, reader: Reader, interval: float) -> None:
        super().__init__()
        self._reader, self._interval = reader, interval
        self._wanted = JobQuery(limit=FIRST_JOBS)
        self._seen: tuple[int, JobQuery] | None = None
        self._read_at = 0.0
        self._is_looking = self._look_again = False
        self.view: Look | None = None

    def compose(self) -> ComposeResult:
        """Lay the screen out."""
        yield Static("Pipollux", id="head")
        tabs = [Tab(ALL, id=ALL), *(Tab(phase.value, id=phase.value) for phase in ListedPhase)]
        yield Tabs(*tabs, id="phases")
        yield Input(placeholder="search by name; Enter keeps it, Escape shows all", id="search")
        yield LiveTable(JOB_COLUMNS, id="jobs")
        with Container(id="below"):
            with Container():
                yield Static("Nodes", classes="title", id="slots")
                yield LiveTable(NODE_COLUMNS, id="nodes")
            with Container(id="of-teams"):
                yield Static("Teams", classes="title", id="quotas")
                yield LiveTable(TEAM_COLUMNS, id="teams")
            with Container():
                yield Static("Last events", classes="title")
                with VerticalScroll(id="news"):
                    yield Static("", id="events")
        yield Footer()

    def on_mount(self) -> None:
        """Start updating, and handle signals."""
        self._main = self.screen  # other screens may cover it
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGHUP):
            with suppress(RuntimeError, ValueError):  # signals are the main thread's
                loop.add_signal_handler(number, self.exit)
        self._main.query_one("#jobs").focus()
        self.look()
        self.set_interval(self._interval, self.look)
        self.watch(self._main.query_one("#jobs"), "scroll_y", self.read_on, init=False)

    def look(self) -> None:
        """Read the state, and show it if it has changed."""
        self._look_again = True
        if not self._is_looking:
            self._is_looking = True
            self._keep_looking()

    @work
    async def _keep_looking(self) -> None:
        """Update, one read at a time, until no further update is requested."""
        try:
            while self._look_again:
                self._look_again = False
                await self._look()
        finally:
            self._is_looking = False

    async def _look(self) -> None:
        try:
            view = await asyncio.to_thread(self._read)
        except SchedulerError as error:
            for head in self._main.query("#head").results(Static):  # none once it was left
                head.update(Text(clean(error), style="bold red"))
            return
        if not (self.is_running and self._main.is_attached):
            return  # the app ends, and its widgets go one by one
        if view is not None and view.query == self._wanted:
            self.view = view
            self._show(view)
        elif self.view is not None:
            self._tell_head(self.view, time.time())

    def _read(self) -> Look | None:
        wanted, last = self._wanted, self._reader.last_event()
        late = time.monotonic() - self._read_at > REREAD
        if self._seen == (last, wanted) and not late:
            return None
        view = look(self._reader, wanted)
        self._seen, self._read_at = (last, wanted), time.monotonic()
        return view

    def _show(self, view: Look) -> None:
        cluster = view.cluster
        self._tell_head(view)
        self._show_phases(cluster.phases)
        jobs = self._main.query_one("#jobs", LiveTable)
        jobs.show(TableRow(job.name, job_row(job, cluster.time)) for job in cluster.jobs)
        jobs.mark(self._wanted.order, descending=self._wanted.descending)
        nodes = self._main.query_one("#nodes", LiveTable)
        nodes.show(
            TableRow(name, node_row(node, view.usage.get(name, ())))
            for name, node in cluster.nodes.items()
        )
        self._main.query_one("#slots", Static).update(f"Nodes: {spell_slots(cluster)}")
        self._show_teams(view.teams)
        lines = (clean(event.line) for event in reversed(cluster.events))
        self._main.query_one("#events", Static).update(Text("\n".join(lines)))

    def _show_teams(self, teams: TeamsView | None) -> None:
        self._main.query_one("#of-teams").set_class(teams is not None, "some")
        if teams is None:
            return
        self._main.query_one("#quotas", Static).update(f"Teams: {spell_use(teams)}")
        shown = (TableRow(team.name, team_row(team)) for team in teams.teams)
        self._main.query_one("#teams", LiveTable).show(shown)

    def _tell_head(self, view: Look, now: float | None = None) -> None:
        self._main.query_one("#head", Static).update(Text(headline(view, now)))

    def _show_phases(self, phases: Mapping[ListedPhase, int]) -> None:
        tabs = self._main.query_one("#phases", Tabs)
        counts = {ALL: sum(phases.values())}
        counts |= {phase.value: phases.get(phase, 0) for phase in ListedPhase}
        for name, many in counts.items():
            tab = tabs.query_one(f"#{name}", Tab)
            label = f"{name} {many}"
            if tab.label_text != label:
                tab.label = label
            tab.display = bool(many) or name in (ALL, tabs.active)

    @on(DataTable.RowHighlighted, "#jobs")
    def read_on(self) -> None:
        """Read more jobs when the end of the list comes into view."""
        shown = len(self.view.cluster.jobs) if self.view else 0
        limit = self._wanted.limit or FIRST_JOBS
        near = self._main.query_one("#jobs", LiveTable).near_end
        if self.view is not None and near and limit <= shown < self.view.cluster.num_found:
            self._want(replace(self._wanted, limit=2 * limit))

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Return whether an action is possible now; Textual calls this."""
        if action in ("search", "clear", "nodes", "keep_search"):
            if isinstance(self.screen, JobScreen | NodeScreen):
                return False
            in_search = self.focused is not None and self.focused.id == "search"
            return in_search or action != "keep_search"
        return super().check_action(action, parameters)

    # The selection

    def _want(self, query: JobQuery) -> None:
        self._wanted = query
        self.look()

    def _choose(self, **changes: Any) -> None:
        self._want(replace(self._wanted, limit=FIRST_JOBS, **changes))
        self._main.query_one("#jobs", LiveTable).move_cursor(row=0)

    @on(Tabs.TabActivated, "#phases")
    def choose_phase(self, event: Tabs.TabActivated) -> None:
        """Show the jobs of a phase."""
        name = event.tab.id
        phases = () if name in (None, ALL) else (ListedPhase(name),)
        if phases != self._wanted.phases:
            self._choose(phases=phases)

    def action_phase(self, step: int) -> None:
        """Select the next phase that has jobs, or the previous one."""
        tabs = self._main.query_one("#phases", Tabs)
        shown = [tab.id for tab in tabs.query(Tab) if tab.display]
        at = shown.index(tabs.active) if tabs.active in shown else 0
        tabs.active = shown[(at + step) % len(shown)] or ALL

    def action_search(self) -> None:
        """Open the search field."""
        search = self._main.query_one("#search", Input)
        search.add_class("open")
        self._main.set_focus(search)

    @on(Input.Changed, "#search")
    def search_changed(self, event: Input.Changed) -> None:
        """Show the jobs whose names contain the search text."""
        if event.value.strip() != self._wanted.name:
            self._choose(name=event.value.strip())

    def action_keep_search(self) -> None:
        """Keep the search, and return to the jobs."""
        self._main.set_focus(self._main.query_one("#jobs"))

    def action_clear(self) -> None:
        """Show all jobs again."""
        search = self._main.query_one("#search", Input)
        search.value = ""
        search.remove_class("open")
        self._main.query_one("#phases", Tabs).active = ALL
        self._main.set_focus(self._main.query_one("#jobs"))

    @on(DataTable.HeaderSelected, "#jobs")
    def sort_by_head(self, event: DataTable.HeaderSelected) -> None:
        """Sort by the column whose head was clicked; a second click reverses the order."""
        column = JOB_COLUMNS[event.column_index]
        if column.order is self._wanted.order:
            self.action_reverse()
        elif column.order is not None:
            self._sort(column.order, descending=column.descending)

    def action_sort(self) -> None:
        """Sort by the next column; after the last one, use the default order."""
        columns = [column for column in JOB_COLUMNS if column.order]
        orders = [JobOrder.USUAL, *(column.order for column in columns if column.order)]
        after = orders[(orders.index(self._wanted.order) + 1) % len(orders)]
        down = next((column.descending for column in columns if column.order is after), False)
        self._sort(after, descending=down)

    def action_reverse(self) -> None:
        """Reverse the order."""
        self._sort(self._wanted.order, descending=not self._wanted.descending)

    def _sort(self, order: JobOrder, *, descending: bool) -> None:
        self._choose(order=order, descending=descending)

    def action_nodes(self) -> None:
        """Move the focus between jobs and nodes."""
        to_jobs = self.focused is not None and self.focused.id == "nodes"
        self._main.set_focus(self._main.query_one("#jobs" if to_jobs else "#nodes"))

    @on(DataTable.RowSelected, "#jobs")
    def open_job(self, event: DataTable.RowSelected) -> None:
        """Show the details of a job."""
        name = self._main.query_one("#jobs", LiveTable).name_at(event.cursor_row)
        if name is not None:
            self.push_screen(JobScreen(self._reader, name, self._interval))

    @on(DataTable.RowSelected, "#nodes")
    def open_node(self, event: DataTable.RowSelected) -> None:
        """Show which jobs hold the slots of a node."""
        name = self._main.query_one("#nodes", LiveTable).name_at(event.cursor_row)
        node = self.view.cluster.nodes.get(name or "") if self.view else None
        if node is not None:
            self.push_screen(NodeScreen(node))
