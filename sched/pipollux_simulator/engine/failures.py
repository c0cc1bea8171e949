"""Events of nodes while jobs run: failures, spot preemptions, and recoveries.

Uptimes are exponentially distributed, as for nodes that do not age. Spot nodes are also preempted
by their provider, with or without notice, and return when capacity is available. Each node has a
separate generator, so its events do not depend on other nodes.
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
    """An event of one node, in seconds after the start."""

    time: float
    node: str
    kind: EventKind
    """drain: no new starts, as the node goes soon; lost: it is gone, with all replicas on it; back:
    it is available again, empty."""


@dataclass(frozen=True)
class Outages:
    """Frequency and duration of outages; ValueError if a time is out of range.

    >>> Outages(mean_uptime=30 * 86400, mean_downtime=3600).notice
    0.0
    """

    mean_uptime: float
    """Mean seconds of availability (a failure's MTBF)."""
    mean_downtime: float
    notice: float = 0.0
    """Seconds between a node's drain and its end; 0: no notice."""
    least_downtime: float = 0.0
    """Minimum seconds of an outage, such as a node's start; included in the mean."""

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
(Zhang et al., 2022, section 2.5), one failure in 75 days per node. The repair time is assumed."""

SPOT = Outages(mean_uptime=6 * 3600.0, mean_downtime=1800.0, notice=120.0, least_downtime=120.0)
"""Spot preemptions with AWS's notice of two minutes; the frequency is an assumption."""


def outages(nodes: Sequence[str], duration: float, outage: Outages, seed: int) -> list[NodeEvent]:
    """Return the events of all nodes before `duration` seconds, sorted by time. If a node drains
    before the end and is lost after it, the loss is not included.

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
    """Return the events of several streams as one, sorted by time and consistent for each node. A
    node that several streams take away returns when all give it back; others are omitted.

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
                # It returns, and drains at once for another stream.
                merged.append(event._replace(kind="drain"))
    return merged


def _is_news(event: NodeEvent, index: int, gone: set[int], drains: set[int]) -> bool:
    """Record an event of stream `index`; return whether it changes the node's state."""
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
