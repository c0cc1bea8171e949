"""Gantt chart of slots: nodes × slots over time.

Events name the nodes of a job's replicas, not their slots, as slots are interchangeable. `pack`
gives each replica the slots that its job had on that node before, if they are free, and otherwise
the lowest free run of neighbouring slots, so that jobs keep their rows.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from pipollux_sched.report.run.records import Attempt, JobRun, Run
from pipollux_utils.text import clean, clock, count, duration

from .specs import Axis, Block, Flag, Group, TimelineChart

NODE_GAP = 16.0
FEW_SLOTS = 24
"""Number of slots up to which each has a high row with its number."""
MAX_HOLDS = 5000
"""Number of blocks drawn, the longest ones; more could not be distinguished."""
TOLERANCE = 0.5
"""Tolerated overlap of two holds of a slot, in seconds, because events are written in sequence."""


class Hold(NamedTuple):
    """One replica's slots on one node, from `start` to `end` (unix times)."""

    job: JobRun
    attempt: Attempt
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
        for attempt in job.started:
            end = run.end if attempt.ended is None else attempt.ended
            for node, start in _starts(attempt):
                hold = Hold(job, attempt, node, 0, start, max(start, end), attempt.active)
                wanted.append(hold)
    return pack(
        sorted(wanted, key=lambda h: h.start), {n.name: n.slots for n in run.nodes.values()}
    )


def _starts(attempt: Attempt) -> list[tuple[str, float]]:
    """Return the node of each replica, and the time from which it held its slots there."""
    begin = attempt.started or 0.0
    if len(attempt.replicas) != len(attempt.nodes):
        return [(node, begin) for node in attempt.nodes]
    arrivals = attempt.arrivals if attempt.elastic else {}
    both = zip(attempt.nodes, attempt.replicas, strict=True)
    return [(node, min(arrivals.get(replica, begin), begin)) for node, replica in both]


def pack(wanted: Sequence[Hold], slots: Mapping[str, int]) -> list[Hold]:
    """Assign each hold, in order of start, the first slot of its run on its node."""
    placed: list[Hold] = []
    present: dict[str, list[Hold]] = {}
    had: dict[tuple[str, str], list[int]] = {}
    for hold in wanted:
        width = hold.attempt.num_stages
        last = max(0, slots.get(hold.node, 0) - width)
        before = had.setdefault((hold.node, hold.job.name), [])
        neighbours = [p for p in present.get(hold.node, ()) if p.end - TOLERANCE > hold.start]
        taken = {
            slot
            for p in neighbours
            for slot in range(p.first_slot, p.first_slot + p.attempt.num_stages)
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
    """Return the first slot of the run of `width` slots with the fewest taken."""
    return min(choices, key=lambda first: sum(first + i in taken for i in range(width)))


class Use(NamedTuple):
    """Shares of a run's slot-seconds: held by a job in training, and held otherwise."""

    training: float
    changing: float


def slot_use(run: Run) -> Use | None:
    """Return how much of the cluster's slot-seconds were used; None if unknown."""
    total = sum(node.slots for node in run.nodes.values()) * run.seconds
    if total <= 0 or run.end is None:
        return None
    training = held = 0.0
    for hold in holds(run):
        stages = hold.attempt.num_stages
        begin, end = _training(hold)
        held += (hold.end - hold.start) * stages
        training += max(0.0, end - begin) * stages
    return Use(min(1.0, training / total), max(0.0, min(1.0, (held - training) / total)))


def _training(hold: Hold) -> tuple[float, float]:
    """Return the interval in which a hold's job trained; empty if it did not train."""
    attempt = hold.attempt
    if attempt.first_step is None:
        return hold.end, hold.end
    begin = min(max(attempt.first_step, hold.start), hold.end)
    end = hold.end if attempt.stopping is None else attempt.stopping
    return begin, min(max(begin, end), hold.end)


def _flags(run: Run, colours: Mapping[str, int], begin: float) -> list[Flag]:
    flags = []
    last = round((run.end or begin) - begin, 3)
    for job in run.jobs.values():
        name = clean(job.name, 18)
        for moment, what in ((job.submitted, "submitted"), (job.ended, job.phase.lower())):
            if moment is not None:
                at = min(round(moment - begin, 2), last)
                flags.append(Flag(at, f"{name} {what}", colours[job.name]))
    return sorted(flags, key=lambda flag: flag.at)


def gantt(run: Run, colours: Mapping[str, int]) -> TimelineChart | None:
    """Return the chart; None if no slot was held or the nodes are unknown."""
    placed = holds(run)
    if not placed or run.start is None or run.end is None:
        return None
    rows = {node.name: max(1, node.slots) for node in run.nodes.values()}
    for hold in placed:
        used = hold.first_slot + hold.attempt.num_stages
        rows[hold.node] = max(rows.get(hold.node, 0), used)
    numbers = {name: number for number, name in enumerate(rows)}
    tips: dict[tuple[str | tuple[str, str], ...], int] = {}
    blocks = []
    for hold in _longest(placed):
        tip = tips.setdefault(_tip(hold, run.start), len(tips))
        blocks.append(_block(hold, numbers[hold.node], colours[hold.job.name], tip, run.start))
    return TimelineChart(
        title="Slots of the nodes over time",
        x=Axis("elapsed", 0.0, round(max(run.end - run.start, 1e-3), 3)),
        row=24.0 if sum(rows.values()) <= FEW_SLOTS else 12.0,
        gap=NODE_GAP,
        groups=[_group(run, name, number) for name, number in rows.items()],
        blocks=blocks,
        tips=list(tips),
        flags=_flags(run, colours, run.start),
        seams=True,
    )


def _longest(placed: Sequence[Hold]) -> list[Hold]:
    if len(placed) <= MAX_HOLDS:
        return list(placed)
    least = sorted((hold.end - hold.start for hold in placed), reverse=True)[MAX_HOLDS - 1]
    return [hold for hold in placed if hold.end - hold.start >= least][:MAX_HOLDS]


def _group(run: Run, name: str, num_slots: int) -> Group:
    kind = run.nodes[name].kind if name in run.nodes else ""
    note = count(num_slots, f"{clean(kind, 6).upper()} slot".strip())
    return Group(clean(name), num_slots, note, labels=[str(slot) for slot in range(num_slots)])


def _block(hold: Hold, group: int, colour: int, tip: int, offset: float) -> Block:
    """Return one replica's slots as one block: hatched while it starts and stops, else solid."""
    moments = (hold.start, *_training(hold), hold.end)
    start, begin, end, to = (round(moment - offset, 2) for moment in moments)
    replicas = f"R = {hold.attempt.num_replicas}"
    return Block(
        group,
        hold.first_slot,
        hold.attempt.num_stages,
        colour,
        start,
        begin,
        end,
        to,
        words=(f"{clean(hold.job.name, 20)}  {replicas}", replicas),
        tip=tip,
        style="open" if hold.open_end else "",
    )


def _tip(hold: Hold, offset: float) -> tuple[str | tuple[str, str], ...]:
    attempt = hold.attempt
    lines = (
        f"{clean(hold.job.name)}, {attempt.title} on {clean(hold.node)}",
        ("replicas", str(attempt.num_replicas)),
        ("stages", str(attempt.num_stages)),
        ("held", f"{clock(hold.start - offset)} to {clock(hold.end - offset)}"),
    )
    if attempt.first_step is None or attempt.started is None:
        return lines
    if not attempt.elastic:
        return (*lines, ("to its first step", duration(attempt.first_step - attempt.started)))
    pause = ("pause of surviving replicas", duration(attempt.pause_seconds))
    if hold.start == attempt.started:
        return (*lines, pause)
    return (*lines, ("on its way", duration(attempt.started - hold.start)), pause)
