"""Who held which slots of a simulated cluster when, coloured by application.

A simulation says on which nodes replicas lay, not in which slots, because a slot is like the other.
`blocks` lays a job into the slots of a node that it had before where these are free, and what lies
side by side becomes one block.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from markupsafe import Markup

from pipollux_sched.report.charts.axes import Panel, Scale, clock_ticks
from pipollux_sched.report.charts.svg import WIDTH, Drawing, colour_class
from pipollux_sched.simulator.engine.job import Interval
from pipollux_sched.simulator.engine.outcome import JobOutcome, SimulationOutcome
from pipollux_sched.utils.text import clean, clock, count

_LEFT, _RIGHT = 108.0, 16.0
_NODE_GAP = 5.0
_TALL, _FLAT = 12.0, 6.0
"""Height of a slot, in a cluster of up to `_FEW` slots and in a larger one."""
_FEW = 32


class Block(NamedTuple):
    """Neighbouring slots of one node, held by one job."""

    job: JobOutcome
    hold: Interval
    node: str
    first_slot: int
    num_slots: int


def blocks(outcome: SimulationOutcome) -> list[Block]:
    """Return all that was held, in order of its beginning."""
    nodes = {name: _Slots(number) for name, number in outcome.slots.items()}
    holds = [(hold, job) for job in outcome.jobs for hold in job.history]
    found = []
    for hold, job in sorted(holds, key=lambda pair: (pair[0].start, pair[1].name)):
        for node, replicas in Counter(hold.nodes).items():
            taken = nodes[node].take(job.name, hold, replicas * hold.num_stages)
            found += [Block(job, hold, node, first, number) for first, number in _runs(taken)]
    return found


class _Slots:
    """The slots of a node: until when each is held, and whose it was last."""

    def __init__(self, number: int) -> None:
        self._until = [0.0] * number
        self._owner = [""] * number

    def take(self, job: str, hold: Interval, number: int) -> list[int]:
        """Give a job free slots, those that it had first; returns them in order."""
        free = [slot for slot, until in enumerate(self._until) if until <= hold.start]
        taken = sorted(sorted(free, key=lambda slot: self._owner[slot] != job)[:number])
        for slot in taken:
            self._until[slot] = hold.end
            self._owner[slot] = job
        return taken


def _runs(slots: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield (first, number) of neighbouring slots."""
    first = 0
    for index in range(1, len(slots) + 1):
        if index == len(slots) or slots[index] != slots[index - 1] + 1:
            yield slots[first], index - first
            first = index


def draw_gantt(
    outcome: SimulationOutcome, colours: Mapping[str, int], until: float, name: str
) -> Markup:
    """Draw who held what.

    Args:
        outcome: of one workload under one policy.
        colours: by application.
        until: end of the time axis, so that charts can be compared.
        name: of the drawing, unique in the page.
    """
    height = _TALL if sum(outcome.slots.values()) <= _FEW else _FLAT
    tops, y = {}, 8.0
    for node, number in outcome.slots.items():
        tops[node] = y
        y += number * height + _NODE_GAP
    drawing = Drawing(name, y + 42, f"Who held which GPUs under {outcome.policy}, over time")
    begin = outcome.begin
    x = Scale(begin, max(until, begin + 1.0), _LEFT, WIDTH - _RIGHT)
    for node, number in outcome.slots.items():
        drawing.text(0, tops[node] + number * height / 2 + 4, clean(node, 14), "tick")
        drawing.rect(x.first, tops[node], x.last - x.first, number * height, "free")
    for block in blocks(outcome):
        _draw_block(drawing, x, tops[block.node], height, block, colours, begin)
    marks = [mark + begin for mark in clock_ticks(0.0, x.high - begin)]
    panel = Panel(x, Scale(0.0, 1.0, y, 8.0))
    panel.draw_x(drawing, marks, lambda moment: clock(moment - begin), label="time")
    return drawing.markup()


def _draw_block(
    drawing: Drawing,
    x: Scale,
    top: float,
    height: float,
    block: Block,
    colours: Mapping[str, int],
    begin: float,
) -> None:
    hold = block.hold
    replicas = len(hold.nodes)
    tip = f"{block.job.name}: {count(replicas, 'replica')}"
    if hold.num_stages > 1:
        tip += f" of {hold.num_stages} stages"
    tip += f", {clock(hold.start - begin)} to {clock(hold.end - begin)}"
    drawing.rect(
        x(hold.start),
        top + block.first_slot * height,
        x(hold.end) - x(hold.start),
        block.num_slots * height,
        f"hold {colour_class(colours[block.job.application])}",
        tip=tip,
    )
