"""What happens to nodes while jobs run: failures, spot preemptions, and nodes that come back.

A node is up for an exponentially distributed time, as nodes that do not age are, then fails and is
repaired; a spot node is besides taken away by its provider, with a notice or without one, and comes
back when there is capacity again. Each node draws from its own generator, of the seed and the
node's name, so other nodes and their order change nothing.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

EventKind = Literal["drain", "lost", "back"]


class NodeEvent(NamedTuple):
    """What happens to one node."""

    time: float
    """Seconds after the simulation's start."""
    node: str
    """Name of the node."""
    kind: EventKind
    """drain: it goes soon, nothing new may start there; lost: it is gone, with all that ran there;
    back: it is there again, empty."""


@dataclass(frozen=True)
class Outages:
    """How often nodes go, and for how long.

    Example:
        >>> Outages(mean_uptime=30 * 86400, mean_downtime=3600).notice
        0.0

    Raises:
        ValueError: when a time is out of range; it names the field.
    """

    mean_uptime: float
    """Seconds from being there to going, on average (a failure's MTBF)."""
    mean_downtime: float
    """Seconds from going to being back, on average."""
    notice: float = 0.0
    """Seconds between a node's drain and its end; 0: it is lost without a notice."""
    least_downtime: float = 0.0
    """Seconds that each outage takes at least, as a node's start does; part of the mean."""

    def __post_init__(self) -> None:
        for field in ("mean_uptime", "mean_downtime"):
            if not (math.isfinite(getattr(self, field)) and getattr(self, field) > 0):
                raise ValueError(f"{field}: {getattr(self, field)} must be finite seconds > 0")
        if not (math.isfinite(self.notice) and self.notice >= 0):
            raise ValueError(f"notice: {self.notice} must be finite seconds >= 0")
        if not 0 <= self.least_downtime <= self.mean_downtime:
            raise ValueError(
                f"least_downtime: {self.least_downtime} must be between 0 and "
                f"mean_downtime = {self.mean_downtime}"
            )


FAILURES = Outages(mean_uptime=75 * 86400.0, mean_downtime=6 * 3600.0, least_downtime=600.0)
"""Node failures: training OPT-175B cycled over 100 of its 124 hosts of eight GPUs in two months
(Zhang et al., 2022, section 2.5), so one in 75 days per node. The repair time is an assumption."""

SPOT = Outages(mean_uptime=6 * 3600.0, mean_downtime=1800.0, notice=120.0, least_downtime=120.0)
"""Spot preemptions with two minutes of notice, as AWS gives it; how often is an assumption."""


def outages(nodes: Sequence[str], duration: float, outage: Outages, seed: int) -> list[NodeEvent]:
    """Return the events of all nodes before `duration` seconds, sorted by time.

    A node that drains before the end may be lost after it; that loss is not an event.

    Args:
        nodes: names, each once.
        duration: seconds.
        outage: how often and how long.
        seed: of the generators.

    Raises:
        ValueError: when a name comes twice, or duration is not finite and >= 0.

    Example:
        >>> events = outages(["n0", "n1"], 86400.0, SPOT, seed=1)
        >>> events[0].kind
        'drain'
    """
    _check(nodes, duration)
    events: list[NodeEvent] = []
    for node in nodes:
        for event in _of_node(node, outage, _generator(seed, node)):
            if event.time >= duration:
                break
            events.append(event)
    return sorted(events)


def merge_events(*streams: Sequence[NodeEvent]) -> list[NodeEvent]:
    """Return the events of several streams as one, sorted by time and consistent for each node.

    A node that one stream took away stays away until all that took it give it back; what happens to
    it meanwhile is left out.

    Example:
        >>> failure = [NodeEvent(5.0, "n0", "lost"), NodeEvent(9.0, "n0", "back")]
        >>> spot = [NodeEvent(6.0, "n0", "lost"), NodeEvent(20.0, "n0", "back")]
        >>> [(event.time, event.kind) for event in merge_events(failure, spot)]
        [(5.0, 'lost'), (20.0, 'back')]
    """
    away: dict[str, set[int]] = {}
    draining: dict[str, set[int]] = {}
    merged: list[NodeEvent] = []
    tagged = sorted((event, index) for index, stream in enumerate(streams) for event in stream)
    for event, index in tagged:
        gone = away.setdefault(event.node, set())
        drains = draining.setdefault(event.node, set())
        if _is_news(event, index, gone, drains):
            merged.append(event)
            if event.kind == "back" and drains:
                # It comes back only to go again.
                merged.append(event._replace(kind="drain"))
    return merged


def _is_news(event: NodeEvent, index: int, gone: set[int], drains: set[int]) -> bool:
    """Note an event of stream `index`; tell whether the node changes by it."""
    if event.kind == "drain":
        news = not gone and not drains
        drains.add(index)
        return news
    drains.discard(index)
    if event.kind == "lost":
        news = not gone
        gone.add(index)
        return news
    gone.discard(index)
    return not gone


def _of_node(node: str, outage: Outages, rng: np.random.Generator) -> Iterator[NodeEvent]:
    """Yield the events of one node, without end."""
    now = 0.0
    spare = outage.mean_downtime - outage.least_downtime
    while True:
        now += float(rng.exponential(outage.mean_uptime))
        if outage.notice:
            yield NodeEvent(now, node, "drain")
            now += outage.notice
        yield NodeEvent(now, node, "lost")
        now += outage.least_downtime + float(rng.exponential(spare))
        yield NodeEvent(now, node, "back")


def _generator(seed: int, node: str) -> np.random.Generator:
    digest = hashlib.blake2b(node.encode(), digest_size=8).digest()
    return np.random.default_rng((seed, int.from_bytes(digest, "big")))


def _check(nodes: Sequence[str], duration: float) -> None:
    if len(set(nodes)) < len(nodes):
        twice = next(node for index, node in enumerate(nodes) if node in nodes[:index])
        raise ValueError(f"nodes: {twice!r} comes twice; give each name once")
    if not (math.isfinite(duration) and duration >= 0):
        raise ValueError(f"duration: {duration} must be finite seconds >= 0")
