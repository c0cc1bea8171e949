"""Gantt chart of the slots of a simulated cluster, coloured by application.

A simulation has the nodes of replicas, not their slots, because slots are interchangeable. `blocks`
gives a job the slots that it had before on the node, if they are free, and merges adjacent slots.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from pipollux_sched.report.charts.specs import Axis, Block, Group, TimelineChart, Tip
from pipollux_simulator.engine.job import Interval
from pipollux_simulator.engine.outcome import JobOutcome, SimulationOutcome
from pipollux_utils.text import clean, clock, count

_NODE_GAP = 5.0
_TALL, _FLAT = 12.0, 6.0
"""Height of a slot, in a cluster of up to `_FEW` slots and in a larger one."""
_FEW = 32


class HeldSlots(NamedTuple):
    """Adjacent slots of one node, held by one job."""

    job: JobOutcome
    hold: Interval
    node: str
    first_slot: int
    num_slots: int


def blocks(outcome: SimulationOutcome) -> list[HeldSlots]:
    """Return all holds of slots, in order of their start."""
    nodes = {name: _Slots(number) for name, number in outcome.slots.items()}
    holds = [(hold, job) for job in outcome.jobs for hold in job.history]
    found = []
    for hold, job in sorted(holds, key=lambda pair: (pair[0].start, pair[1].name)):
        for node, replicas in Counter(hold.nodes).items():
            taken = nodes[node].take(job.name, hold, replicas * hold.num_stages)
            found += [HeldSlots(job, hold, node, first, number) for first, number in _runs(taken)]
    return found


class _Slots:
    """The slots of a node: the end of the current hold of each, and its last job."""

    def __init__(self, number: int) -> None:
        self._until = [0.0] * number
        self._owner = [""] * number

    def take(self, job: str, hold: Interval, number: int) -> list[int]:
        """Give a job free slots, preferring its previous ones; return them in order."""
        free = [slot for slot, until in enumerate(self._until) if until <= hold.start]
        taken = sorted(sorted(free, key=lambda slot: self._owner[slot] != job)[:number])
        for slot in taken:
            self._until[slot] = hold.end
            self._owner[slot] = job
        return taken


def _runs(slots: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield (first, number) of adjacent slots."""
    first = 0
    for index in range(1, len(slots) + 1):
        if index == len(slots) or slots[index] != slots[index - 1] + 1:
            yield slots[first], index - first
            first = index


def gantt(outcome: SimulationOutcome, colours: Mapping[str, int], until: float) -> TimelineChart:
    """Return the chart of one simulation; `until` makes the time axes of charts comparable."""
    begin = outcome.begin
    numbers = {node: number for number, node in enumerate(outcome.slots)}
    tips: dict[tuple[str, int], int] = {}
    told: list[Tip] = []
    found = []
    for block in blocks(outcome):
        tip = tips.setdefault((block.job.name, id(block.hold)), len(tips))
        if tip == len(told):
            told.append(_tip(block, begin))
        start, end = (round(moment - begin, 2) for moment in (block.hold.start, block.hold.end))
        found.append(
            Block(
                numbers[block.node],
                block.first_slot,
                block.num_slots,
                colours[block.job.application],
                start,
                start,
                end,
                end,
                words=[clean(block.job.name, 20)],
                tip=tip,
            )
        )
    few = sum(outcome.slots.values()) <= _FEW
    return TimelineChart(
        title=f"GPUs under {clean(outcome.policy)} over time",
        x=Axis("elapsed", 0.0, round(max(until - begin, 1.0), 2)),
        row=_TALL if few else _FLAT,
        gap=_NODE_GAP,
        groups=[Group(clean(node), number) for node, number in outcome.slots.items()],
        blocks=found,
        tips=told,
    )


def _tip(block: HeldSlots, begin: float) -> Tip:
    hold = block.hold
    replicas = count(len(hold.nodes), "replica")
    if hold.num_stages > 1:
        replicas += f" of {hold.num_stages} stages"
    held = f"{clock(hold.start - begin)} to {clock(hold.end - begin)}"
    began: Tip = (("began with", "an elastic resize"),) if hold.elastic else ()
    return clean(block.job.name), ("holds", replicas), ("held", held), *began
