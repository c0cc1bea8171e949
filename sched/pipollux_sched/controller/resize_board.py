"""Exchange between the replicas of a job during elastic resizes, through the scheduler.

Each replica reports its position with its heartbeats, and the responses contain the positions of
the others and the pending membership. State that must survive the scheduler is in the store; the
rest is kept here, and reported again with the next heartbeats.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import NamedTuple

from pipollux_protocol.messages import ElasticStatus, StoreAddress
from pipollux_sched.lifecycle import (
    ChangeRefused,
    ChangeStage,
    ElasticReady,
    Event,
    JobState,
    Survived,
    Switched,
    WaitingToJoin,
)

SOON = 0.25
"""Seconds between two heartbeats of the replicas in a resize, if they are few."""
MOST_SOON = 8
"""Most replicas with that interval; for more it is longer, to keep the rate of a job constant."""
CHANGING_RATE = 200.0
"""Most heartbeats per second of all replicas in resizes, while no interval exceeds `LATEST`."""
LATEST = 15.0
"""Longest interval in seconds: replicas that form groups wait 60 s for each other."""
LEADERS_INTERVAL = 1.0
"""Seconds between two heartbeats of replica 0, whose responses announce resizes."""
LEADERS_RATE = 100.0
"""Most heartbeats per second of all replicas 0 together."""


class ScriptPlace(NamedTuple):
    """The position of a job in its script, and the partition of its model."""

    attempt: int
    epoch: int
    loop: int
    balance: tuple[int, ...]
    """Layers per stage."""
    schedule: str


class ReplicaAnswer(NamedTuple):
    """The response to a heartbeat."""

    again: float | None
    """Seconds until the next heartbeat; None: the default."""
    forming: bool
    """Whether the replica should form the groups of the pending membership."""
    place: ScriptPlace | None
    store: StoreAddress | None
    """The rendezvous of the pending membership."""


class ResizeBoard:
    """The last reports of replicas; every method may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._places: dict[str, ScriptPlace] = {}
        self._stores: dict[str, tuple[int, StoreAddress]] = {}
        self._changing: dict[str, int] = {}
        self._num_changing = 0

    def note(self, job: str, state: JobState, replica: int, word: ElasticStatus) -> list[Event]:
        """Record a replica's report; return the resulting events of its job."""
        membership = state.membership
        with self._lock:
            if replica == membership.replicas[0] and word.balance:
                cut = word.balance, word.schedule
                self._places[job] = ScriptPlace(state.attempt, word.epoch, word.loop, *cut)
            if word.store is not None:
                self._stores[job] = state.attempt, word.store
        return list(_events(state, replica, word))

    def answer(self, job: str, state: JobState, replica: int) -> ReplicaAnswer:
        """Return the response to a replica's heartbeat."""
        membership, change = state.membership, state.membership.change
        taking_part = (
            max(len(membership.replicas), len(change.replicas)) if change is not None else 0
        )
        with self._lock:
            place, known = self._places.get(job), self._stores.get(job)
            leaders = max(LEADERS_INTERVAL, len(self._places) / LEADERS_RATE)
            self._count(job, taking_part)
            changing = min(self._num_changing / CHANGING_RATE, LATEST)
        leads = replica == membership.replicas[0] and membership.why_not is None
        again = leaders if leads else None
        if change is not None:
            again = max(SOON * max(1.0, membership.num_ids / MOST_SOON), changing)
        forming = change is not None and change.stage is ChangeStage.FORMING
        store = known[1] if known is not None and known[0] == state.attempt else None
        here = place if place is not None and place.attempt == state.attempt else None
        joins = replica not in membership.replicas
        return ReplicaAnswer(again, forming, here if joins else None, store)

    def forget(self, job: str) -> None:
        """Forget a job that has ended."""
        with self._lock:
            self._places.pop(job, None)
            self._stores.pop(job, None)
            self._count(job, 0)

    def _count(self, job: str, replicas: int) -> None:
        """Record a lower bound on the replicas of a job in a resize."""
        self._num_changing += replicas - self._changing.pop(job, 0)
        if replicas:
            self._changing[job] = replicas


def _events(state: JobState, replica: int, word: ElasticStatus) -> Iterator[Event]:
    attempt, membership, change = state.attempt, state.membership, state.membership.change
    if replica == membership.replicas[0] and word.balance and word.cannot != membership.why_not:
        yield ElasticReady(attempt, word.cannot, word.fixed)
    if change is not None:
        if (
            word.waiting_to_join
            and replica not in change.waiting_to_join
            and replica in dict(membership.joining)
        ):
            yield WaitingToJoin(attempt, (replica,))
        if word.refused == change.number:
            yield ChangeRefused(attempt, change.number, word.why, word.for_good)
    # Replica 0 reports for all.
    if word.membership <= membership.number or word.replicas[:1] != (replica,):
        return
    now = set(word.replicas)
    changed = change is not None and bool(now & {replica for replica, _ in membership.joining})
    if change is not None and (word.replicas == change.replicas or changed):
        yield Switched(attempt, change.number, word.step, word.seconds)
    if change is None or word.replicas != change.replicas:
        yield Survived(attempt, word.membership, word.replicas, word.step, word.seconds)
