"""One frame of `pipollux top`, laid out for a terminal of any size."""

from __future__ import annotations

from datetime import datetime

from rich.text import Text

from pipollux_sched.lifecycle import Phase
from pipollux_sched.store import NodeCondition

from .cluster_view import ClusterView
from .top_parts import event_lines, fit, job_lines, node_lines
from .wording import count, number

_WORDS = (
    ("running", (Phase.RUNNING,)),
    ("restarting", (Phase.RESTARTING,)),
    ("waiting", (Phase.CREATED, Phase.QUEUED)),
    ("suspended", (Phase.SUSPENDED,)),
    ("complete", (Phase.COMPLETE,)),
    ("failed", (Phase.FAILED,)),
)
LEAST_EVENTS = 3
EVENTS_WHERE_UNLIMITED = 10


def frame(view: ClusterView, width: int, height: int | None, hint: str = "") -> list[Text]:
    """Lay out what is shown.

    Args:
        view: what is shown.
        width: columns of the terminal.
        height: its lines, each of which is then one line of the frame; None: as many as it takes.
        hint: what the last line says, such as which key ends it; empty: there is no such line.

    Returns:
        Lines of at most `width` columns.
    """
    if height is None:
        nodes = node_lines(view, width, len(view.nodes) or 1)
        jobs = job_lines(view, width, len(view.jobs) + 1)
        events = event_lines(view, width, EVENTS_WHERE_UNLIMITED)
        return _stack(view, width, nodes, jobs, events)
    room = height - 4 - bool(hint)  # the head and three titles
    nodes = node_lines(view, width, max(min(len(view.nodes), room // 3), 1))
    least = min(LEAST_EVENTS, len(view.events))
    jobs = job_lines(view, width, max(room - len(nodes) - least, 2))
    events = event_lines(view, width, max(room - len(nodes) - len(jobs), 0))
    lines = _stack(view, width, nodes, jobs, events)
    last = [fit(Text(hint, style="dim"), width)] if hint else []
    body = [line if line.cell_len <= width else fit(line, width) for line in lines]
    body = body[: height - len(last)]
    return [*body, *(Text() for _ in range(height - len(body) - len(last))), *last]


def _stack(
    view: ClusterView, width: int, nodes: list[Text], jobs: list[Text], events: list[Text]
) -> list[Text]:
    return [
        _head(view, width),
        _title("Nodes", _slots(view), width),
        *nodes,
        _title("Jobs", _phases(view), width),
        *jobs,
        _title("Last events", "", width),
        *events,
    ]


def _head(view: ClusterView, width: int) -> Text:
    clock = datetime.fromtimestamp(view.time).strftime("%H:%M:%S")
    left = Text("Pipollux", style="bold")
    if view.policy:
        left.append(f"  policy {view.policy}", style="not bold")
    if view.goodput is not None:
        left.append(f"  goodput {number(view.goodput)} samples/s", style="not bold")
    right = (
        Text.assemble(("● ", "green"), clock)
        if view.served
        else Text.assemble(("○ no scheduler runs ", "bold red"), clock)
    )
    return fit(left, width - right.cell_len - 1).append(" ").append_text(right)


def _title(title: str, about: str, width: int) -> Text:
    """Draw a line across, with a title at the left and a few words at the right."""
    words = f" {about} ──" if about else ""
    line = Text.assemble(("── ", "dim"), (title, "bold"), " ")
    filling = width - line.cell_len - len(words)
    if filling < 1:
        return fit(line.append("─" * width, style="dim"), width)
    return line.append("─" * filling, style="dim").append(words, style="dim")


def _slots(view: ClusterView) -> str:
    used = sum(node.used for node in view.nodes)
    slots = sum(node.node.slots for node in view.nodes)
    away = sum(node.node.condition is not NodeCondition.READY for node in view.nodes)
    not_ready = f", {count(away, 'node')} not ready" if away else ""
    return f"{used} of {count(slots, 'slot')} used{not_ready}"


def _phases(view: ClusterView) -> str:
    counts = ((word, sum(view.phases[phase] for phase in phases)) for word, phases in _WORDS)
    return ", ".join(f"{how_many} {word}" for word, how_many in counts if how_many)
