"""Who held what when: nodes × slots over time.

The events say on which nodes the replicas of a job lay, not in which slots, because a slot is like
the other. `pack` gives each replica the lowest free run of neighbouring slots, and the run that
its job had on that node before when that one is free, so that the picture stays quiet.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from markupsafe import Markup

from pipollux_sched.report.run.records import Generation, JobRun, Run
from pipollux_sched.utils.text import clean, clock, count, duration

from .axes import Panel, Scale, clock_ticks
from .svg import WIDTH, Drawing, colour_class, text_width

LEFT, RIGHT = 108.0, 16.0
NODE_GAP = 16.0
MAX_NAMED = 16
"""Flags with words over the chart; when there are more, their words come by hovering."""
MAX_HOLDS = 5000
"""Blocks that are drawn, the longest: more could not be told apart."""
TOLERANCE = 0.5
"""Seconds by which two holds of a slot may overlap, for events are written one after another."""


class Hold(NamedTuple):
    """One replica's slots on one node, from `start` to `end` (unix times)."""

    job: JobRun
    generation: Generation
    node: str
    first_slot: int
    start: float
    end: float
    open_end: bool


def holds(run: Run) -> list[Hold]:
    """Return every replica's hold of slots, packed."""
    if run.end is None:
        return []
    wanted = []
    for job in run.jobs.values():
        for generation in job.started:
            start = generation.started or 0.0
            end = run.end if generation.ended is None else generation.ended
            for node in generation.nodes:
                hold = Hold(job, generation, node, 0, start, max(start, end), generation.active)
                wanted.append(hold)
    return pack(
        sorted(wanted, key=lambda h: h.start), {n.name: n.slots for n in run.nodes.values()}
    )


def pack(wanted: Sequence[Hold], slots: Mapping[str, int]) -> list[Hold]:
    """Give each hold, in order of their beginnings, the first of its run of slots on its node."""
    placed: list[Hold] = []
    present: dict[str, list[Hold]] = {}
    had: dict[tuple[str, str], list[int]] = {}
    for hold in wanted:
        width = hold.generation.num_stages
        last = max(0, slots.get(hold.node, 0) - width)
        before = had.setdefault((hold.node, hold.job.name), [])
        neighbours = [p for p in present.get(hold.node, ()) if p.end - TOLERANCE > hold.start]
        taken = {
            slot
            for p in neighbours
            for slot in range(p.first_slot, p.first_slot + p.generation.num_stages)
        }
        found = _least_taken([*reversed(before), *range(last + 1)], width, taken)
        put = hold._replace(first_slot=found)
        placed.append(put)
        present[hold.node] = [*neighbours, put]
        if found in before:
            before.remove(found)
        before.append(found)
    return placed


def _least_taken(choices: Sequence[int], width: int, taken: Collection[int]) -> int:
    """Return the first of the slots from which on the fewest of `width` are taken."""
    return min(choices, key=lambda first: sum(first + i in taken for i in range(width)))


class Use(NamedTuple):
    """Shares of the slot-seconds of a run: held by a job in training, held otherwise."""

    training: float
    changing: float


def slot_use(run: Run) -> Use | None:
    """Return how much of the cluster's slot-seconds were used; None when none are known."""
    total = sum(node.slots for node in run.nodes.values()) * run.seconds
    if total <= 0 or run.end is None:
        return None
    training = held = 0.0
    for hold in holds(run):
        stages = hold.generation.num_stages
        begin, end = _training(hold)
        held += (hold.end - hold.start) * stages
        training += max(0.0, end - begin) * stages
    return Use(min(1.0, training / total), max(0.0, min(1.0, (held - training) / total)))


def _training(hold: Hold) -> tuple[float, float]:
    """Return from when to when a hold's job trained; an empty time when it never did."""
    generation = hold.generation
    if generation.first_step is None:
        return hold.end, hold.end
    begin = min(max(generation.first_step, hold.start), hold.end)
    end = hold.end if generation.stopping is None else generation.stopping
    return begin, min(max(begin, end), hold.end)


class _Mark(NamedTuple):
    time: float
    words: str
    job: JobRun


def _marks(run: Run) -> list[_Mark]:
    marks = []
    for job in run.jobs.values():
        name = clean(job.name, 18)
        if job.submitted is not None:
            marks.append(_Mark(job.submitted, f"{name} submitted", job))
        if job.ended is not None:
            marks.append(_Mark(job.ended, f"{name} {job.phase.lower()}", job))
    return sorted(marks, key=lambda m: m.time)


class _Label(NamedTuple):
    x: float
    width: float
    flipped: bool

    def covers(self, x: float) -> bool:
        low, high = self.extent
        return low < x < high

    @property
    def extent(self) -> tuple[float, float]:
        return (self.x - self.width, self.x) if self.flipped else (self.x, self.x + self.width)


def lanes(places: Sequence[tuple[float, float]], right: float) -> list[tuple[int, bool]]:
    """Lay flags (x, width of the label) over a chart so that nothing crosses a label.

    Each flag's pole runs down from its lane, so a label lies above every pole it covers. A label
    that would pass `right`, or cover such a one's pole, is set to the left of its pole.

    Returns:
        lane (0 is next to the chart) and whether it is set to the left, in the order of `places`.
    """
    order = sorted(range(len(places)), key=lambda i: places[i][0], reverse=True)
    labels: dict[int, _Label] = {}
    limit = right
    for i in order:
        x, width = places[i]
        flipped = x + width > limit
        labels[i] = _Label(x, width, flipped)
        if flipped:
            limit = min(limit, x)
    lane: dict[int, int] = {}
    flips = [i for i in reversed(order) if labels[i].flipped]
    for i in [*(i for i in order if not labels[i].flipped), *flips]:
        low, high = labels[i].extent
        below = [
            lane[j]
            for j in lane
            if labels[i].covers(places[j][0])
            or (labels[j].extent[0] < high and low < labels[j].extent[1])
        ]
        lane[i] = 1 + max(below, default=-1)
    return [(lane[i], labels[i].flipped) for i in range(len(places))]


def draw_gantt(run: Run, colours: Mapping[str, int]) -> Markup | None:
    """Draw the chart; None when no slot was held or nothing is known of the nodes."""
    placed = holds(run)
    if not placed or run.start is None or run.end is None:
        return None
    row = 24.0 if sum(n.slots for n in run.nodes.values()) <= 24 else 12.0
    rows = {node.name: max(1, node.slots) for node in run.nodes.values()}
    for hold in placed:
        used = hold.first_slot + hold.generation.num_stages
        rows[hold.node] = max(rows.get(hold.node, 0), used)
    x = Scale(run.start, max(run.end, run.start + 1e-3), LEFT, WIDTH - RIGHT)
    marks = _marks(run)
    named = len(marks) <= MAX_NAMED
    widths = [text_width(m.words) + 20 if named else 0.0 for m in marks]
    flags = lanes([(x(m.time), w) for m, w in zip(marks, widths, strict=True)], WIDTH)
    top = 22.0 + 18.0 * (1 + max((lane for lane, _ in flags), default=-1))
    tops, y = {}, top
    for node, num_slots in rows.items():
        tops[node] = y
        y += num_slots * row + NODE_GAP
    drawing = Drawing("gantt", y + 34, "Who held which slots of which node, over time")
    _draw_nodes(drawing, run, rows, tops, row)
    panel = Panel(x, Scale(0, 1, y - NODE_GAP + 8, top))
    offset = run.start
    drawing_marks = [tick + offset for tick in clock_ticks(0, run.end - offset, 9)]
    panel.draw_x(drawing, drawing_marks, lambda t: clock(t - offset))
    for hold in _longest(placed):
        _draw_hold(drawing, x, tops[hold.node], row, hold, colours[hold.job.name], offset)
    for mark, (lane, flipped) in zip(marks, flags, strict=True):
        height = top - 8 - 18.0 * lane
        shade = colour_class(colours[mark.job.name])
        place = x(mark.time)
        drawing.line(place, height - 9, place, panel.bottom, f"pole {shade}")
        tip = f"{mark.words} at {clock(mark.time - offset)}"
        drawing.circle(place, height - 9, 3.2, f"dot {shade}", tip=tip)
        if named:
            at = "end" if flipped else "start"
            drawing.text(place + (-9 if flipped else 9), height - 4.5, mark.words, "flag", at=at)
    return drawing.markup()


def _longest(placed: Sequence[Hold]) -> list[Hold]:
    """Return the longest holds, in the order they have."""
    if len(placed) <= MAX_HOLDS:
        return list(placed)
    least = sorted((hold.end - hold.start for hold in placed), reverse=True)[MAX_HOLDS - 1]
    return [hold for hold in placed if hold.end - hold.start >= least][:MAX_HOLDS]


def _draw_nodes(
    drawing: Drawing, run: Run, rows: Mapping[str, int], tops: Mapping[str, float], row: float
) -> None:
    for node, num_slots in rows.items():
        y = tops[node]
        kind = run.nodes[node].kind if node in run.nodes else ""
        height = num_slots * row
        drawing.text(0, y + height / 2 - 2, clean(node, 13), "label strong")
        slots = count(num_slots, f"{clean(kind, 6).upper()} slot".strip())
        drawing.text(0, y + height / 2 + 14, slots, "tick")
        for slot in range(num_slots):
            span = WIDTH - RIGHT - LEFT
            drawing.rect(LEFT, y + slot * row + 1, span, row - 2, "free", radius=2)
            if row >= 20:
                middle = y + slot * row + row / 2 + 4
                drawing.text(LEFT - 10, middle, str(slot), "tick faint", at="end")


def _draw_hold(
    drawing: Drawing, x: Scale, top: float, row: float, hold: Hold, colour: int, offset: float
) -> None:
    """Draw one replica's slots as one block: hatched while it starts and stops, else solid."""
    stages = hold.generation.num_stages
    y, height = top + hold.first_slot * row + 1, stages * row - 2
    begin, end = _training(hold)
    shade = colour_class(colour)
    tip = _tip(hold, offset)
    left, width = x(hold.start), max(1.5, x(hold.end) - x(hold.start))
    drawing.rect(left, y, width, height, "change", radius=3, fill=drawing.hatch(colour), tip=tip)
    if end > begin:
        drawing.rect(x(begin), y, x(end) - x(begin), height, f"block {shade}", tip=tip)
    css = f"outline {shade}" + (" open" if hold.open_end else "")
    drawing.rect(left, y, width, height, css, radius=3)
    past_label = _label_hold(drawing, x(begin), x(end), y + height / 2, hold)
    for stage in range(1, stages):
        between = y - 1 + stage * row
        drawing.line(past_label, between, max(past_label, x(end) - 4), between, "seam")


def _label_hold(drawing: Drawing, left: float, right: float, middle: float, hold: Hold) -> float:
    """Write job and number of replicas into a block as far as they fit; return where they end."""
    replicas = f"R = {hold.generation.num_replicas}"
    name = clean(hold.job.name, 20)
    room = right - left - 16
    if text_width(f"{name}  {replicas}") <= room:
        drawing.text(left + 9, middle + 4.5, name, "on-block", tail=replicas)
        return left + 36 + text_width(name + replicas, 15.5)
    if text_width(replicas) <= room + 6:
        drawing.text((left + right) / 2, middle + 4.5, replicas, "on-block", at="middle")
        return right
    return left + 4


def _tip(hold: Hold, offset: float) -> str:
    generation = hold.generation
    parts = [
        f"{clean(hold.job.name)}, generation {generation.number} on {clean(hold.node)}",
        count(generation.num_replicas, "replica"),
        count(generation.num_stages, "stage"),
        f"{clock(hold.start - offset)} to {clock(hold.end - offset)}",
    ]
    if generation.first_step is not None and generation.started is not None:
        parts.append(f"{duration(generation.first_step - generation.started)} to its first step")
    return ", ".join(parts)
