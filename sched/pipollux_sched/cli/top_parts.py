"""The parts of a frame of `pipollux top`: the slots of nodes, the lines of jobs and of events."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from rich.style import Style
from rich.text import Text

from pipollux_sched.event_line import event_text
from pipollux_sched.lifecycle import Phase
from pipollux_sched.occupancy import NodeOccupancy
from pipollux_sched.store import NodeCondition

from .cluster_view import ClusterView, JobView
from .job_table import PHASE_STYLES, shown_phase
from .quantities import seconds
from .sparkline import sparkline, window_for
from .wording import DASH, first_line, number, one_line, spell_nodes

COLOURS = (
    *("#2e6ca4", "#b3541e", "#237a64", "#96487c"),
    *("#8a6510", "#5b57b5", "#a63a3a", "#5f6b2a"),
)
"""Colours of jobs: white words can be read on each, and each stands out on black and on white."""

MOST_CELL = 24
"""Columns of one slot at most."""
LEAST_CELL = 3
_CONDITION_STYLES = {NodeCondition.DRAINING: "yellow", NodeCondition.DEAD: "bold red"}


def colour(job_number: int) -> str:
    """Return the colour of the job that came as this one."""
    return COLOURS[(job_number - 1) % len(COLOURS)]


def fit(text: Text, width: int, *, right: bool = False) -> Text:
    """Cut or fill up a line to exactly so many columns."""
    line = text.copy()
    line.truncate(max(width, 0), overflow="ellipsis")
    line.align("right" if right else "left", max(width, 0))
    return line


# Nodes


def node_lines(view: ClusterView, width: int, most: int) -> list[Text]:
    """Draw every slot of every node: a block a replica, as wide as its stages.

    Args:
        view: what is shown.
        width: columns that there are.
        most: lines that there may be; nodes lie side by side where they are more.
    """
    if not view.nodes:
        return [Text("No nodes yet; a scheduler brings them.", style="dim")]
    names = min(max(len(node.node.name) for node in view.nodes), 20)
    told = max((len(_condition(node)) for node in view.nodes), default=0)
    slots = max(node.node.slots for node in view.nodes)
    side = told + 1 if told else 0
    columns = 1
    while (
        math.ceil(len(view.nodes) / columns) > most
        and (width // (columns + 1)) >= names + 3 + slots * LEAST_CELL + side
    ):
        columns += 1
    block = (width - 2 * (columns - 1)) // columns
    cell = max(min((block - names - 1 - side) // slots, MOST_CELL), 1)
    rows = math.ceil(len(view.nodes) / columns)
    shown = rows if rows <= most else most - 1
    lines = []
    for row in range(shown):
        line = Text()
        for column in range(columns):
            index = column * rows + row
            if index < len(view.nodes):
                line.append("  " if column else "")
                line.append_text(fit(_node(view, view.nodes[index], names, cell), block))
        lines.append(fit(line, width))
    if shown < rows:
        hidden = [
            view.nodes[column * rows + row]
            for column in range(columns)
            for row in range(shown, rows)
            if column * rows + row < len(view.nodes)
        ]
        free = sum(node.free for node in hidden)
        lines.append(Text(f"and {len(hidden)} more nodes, {free} slots free", style="dim"))
    return lines


def _node(view: ClusterView, node: NodeOccupancy, names: int, cell: int) -> Text:
    line = fit(Text(node.node.name, style="bold"), names)
    line.append(" ")
    gap = 1 if cell > 1 else 0
    for replica in node.replicas:
        width = replica.num_stages * cell - gap
        job_number = view.numbers.get(replica.job, 1)
        label = f" {job_number} {replica.job}" if width >= 6 else str(job_number).center(width)
        style = Style(color="#ffffff", bgcolor=colour(job_number), bold=True)
        line.append_text(fit(Text(label, style=style), width)).append(" " * gap)
    for _ in range(node.free):
        empty = "free".center(cell - gap) if cell >= 8 else "·".center(cell - gap)
        line.append(empty, style=Style(dim=True)).append(" " * gap)
    missing = (node.node.slots - node.used - node.free) * cell
    line.append(" " * max(missing, 0))
    condition = _condition(node)
    if condition:
        line.append(" ").append(condition, style=_CONDITION_STYLES.get(node.node.condition, ""))
    return line


def _condition(node: NodeOccupancy) -> str:
    return "" if node.node.condition is NodeCondition.READY else node.node.condition.value


# Jobs


@dataclass(frozen=True)
class Column:
    """One column of the table of jobs."""

    title: str
    width: int
    right: bool = False
    least: int = 0
    """Columns that the terminal must have for this one to be shown."""


_COLUMNS = (
    Column("#", 3, right=True),
    Column("Job", 14),
    Column("Phase", 10),
    Column("R×K", 5, right=True),
    Column("Nodes", 22, least=150),
    Column("Epoch", 7, right=True, least=110),
    Column("Step", 8, right=True, least=100),
    Column("Loss", 7, right=True),
    Column("Goodput", 7, right=True),
    Column("Eff.", 5, right=True),
    Column("Step time", 9, right=True),
)
_NAMING = _COLUMNS[:3]
"""What is told of every job; the others are for those that hold something, or are complete."""
_HISTORY_LEAST, _HISTORY_MOST = 9, 48


def job_lines(view: ClusterView, width: int, most: int) -> list[Text]:
    """Return the table of jobs: its head, and a line for each as far as there is room.

    Args:
        view: what is shown.
        width: columns that there are.
        most: lines that there may be, with the head.
    """
    if not view.jobs:
        return [Text("No jobs yet; submit some with: pipollux submit FILE", style="dim")]
    columns, history = _layout(view, width)
    shown = view.jobs[: max(most - 1, 0)]
    everything = sum(view.phases.values())
    if len(shown) < everything:
        shown = shown[:-1]
    window = _window(view, shown)
    top = max((span.slots for job in shown for span in job.spans), default=1)
    head = Text()
    for column in columns:
        head.append_text(fit(Text(column.title), column.width, right=column.right)).append(" ")
    last = f"Slots, last {_spell_window(window)}"
    titles = (f"{last}, up to {top}", last, "Slots")
    title = next((one for one in titles if len(one) <= history), "")
    head.append_text(fit(Text(title), history))
    head.stylize("bold")
    lines = [fit(head, width)]
    for job in shown:
        line = _job(job, columns)
        alive = (job.record.submitted_at, job.record.ended_at or view.time)
        drawn = sparkline(job.spans, alive, view.time - window, view.time, history, top)
        line.append_text(Text(drawn, style=colour(job.number)))
        if job.record.phase.ended:
            line.stylize("dim")
        lines.append(fit(line, width))
    if len(shown) < everything:
        lines.append(Text(f"and {everything - len(shown)} more jobs", style="dim"))
    return lines


def _layout(view: ClusterView, width: int) -> tuple[list[Column], int]:
    """Return the columns that there is room for, and the width of the history."""
    chosen = [column for column in _COLUMNS if column.least <= width]
    taken = sum(column.width + 1 for column in chosen)
    longest = max(len(job.name) for job in view.jobs)
    spare = width - taken - _HISTORY_LEAST
    name = 14 + max(min(longest - 14, spare // 2, 26), min(spare, 0))
    widths = {"Job": max(name, 4)}
    history = spare - (name - 14) + _HISTORY_LEAST
    if history > _HISTORY_MOST:
        widths["Nodes"] = 22 + min(history - _HISTORY_MOST, 40)
        history = _HISTORY_MOST
    chosen = [replace(one, width=widths.get(one.title, one.width)) for one in chosen]
    return chosen, max(history, 0)


def _job(job: JobView, columns: Sequence[Column]) -> Text:
    point, record = job.point, job.record
    phase = record.phase
    epochs = DASH
    if point is not None:
        done = point.epoch + (phase is Phase.COMPLETE)
        epochs = str(done) if point.num_epochs is None else f"{done}/{point.num_epochs}"
    held = job.num_replicas
    values = {
        "Job": Text(one_line(job.name), style="bold"),
        "Phase": Text(shown_phase(record).value, style=PHASE_STYLES.get(phase, "")),
        "R×K": Text(f"{held}×{job.num_stages}" if held else DASH),
        "Nodes": Text(spell_nodes(record.state.launched or record.state.allocation)),
        "Epoch": Text(epochs),
        "Step": Text(DASH if point is None else str(point.step)),
        "Loss": Text(DASH if point is None else number(point.loss)),
        "Goodput": Text(DASH if point is None or not held else number(point.goodput)),
        "Eff.": Text(
            DASH if point is None or point.efficiency is None else f"{100 * point.efficiency:.0f} %"
        ),
        "Step time": Text(DASH if point is None or not held else seconds(point.step_time)),
    }
    line = Text()
    told = 0 if held or phase is Phase.COMPLETE else len(_NAMING)
    for column in columns[: told or len(columns)]:
        if column.title == "#":
            badge = Text(f"{job.number} ".rjust(column.width))
            badge.stylize(Style(color="#ffffff", bgcolor=colour(job.number), bold=True))
            line.append_text(badge).append(" ")
        else:
            line.append_text(fit(values[column.title], column.width, right=column.right))
            line.append(" ")
    if told:  # of a job that holds nothing there is more to say than numbers
        room = sum(column.width + 1 for column in columns[told:]) - 1
        message = one_line(first_line(record.state.message))
        line.append_text(fit(Text(message, style="italic"), room)).append(" ")
    return line


def _window(view: ClusterView, jobs: Sequence[JobView]) -> float:
    """Return the length of time that shows all of the jobs that have not ended."""
    begun = [job.record.submitted_at for job in jobs if not job.record.phase.ended]
    begun = begun or [job.record.submitted_at for job in jobs]
    return window_for(view.time - min(begun, default=view.time))


def _spell_window(window: float) -> str:
    hours, minutes = window / 3600, window / 60
    if hours >= 24:
        return f"{hours / 24:.0f} d"
    return f"{hours:.0f} h" if hours >= 1 else f"{minutes:.0f} min"


# Events


def event_lines(view: ClusterView, width: int, most: int) -> list[Text]:
    """Return the last events, the newest at the bottom."""
    lines = []
    for event in view.events[-most:] if most > 0 else ():
        moment = datetime.fromtimestamp(event["time"]).strftime("%H:%M:%S")
        line = Text.assemble((moment, "dim"), " ")
        if event["job"]:
            line.append("■ ", style=colour(view.numbers.get(event["job"], 1)))
            line.append(one_line(event["job"]), style="bold").append(" ")
        line.append(one_line(event_text(event) or ""))
        lines.append(fit(line, width))
    return lines
