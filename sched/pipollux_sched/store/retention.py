"""Retention: the store thins old events, so that it does not grow without bound.

Life-cycle events are kept. Periodic events are thinned as they age, per job and type: all of the
last hour are kept, then the last of every minute; after a day the last of every ten minutes, after
30 days of every hour. Timelines and hints are large and soon out of date: after a week only the
last timeline of a job is kept, after 30 days only the last hints. The last event is always kept.

An event is superfluous if the next one of its job and type is in the same interval. This is decided
per event, so the log is scanned in small transactions, once per rule, which store their position.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import NamedTuple

from sqlalchemy import delete, select
from sqlalchemy.orm import Session, aliased

from .database import Database
from .tables import EventRow, MetaRow, PointRow

_HOUR, _DAY = 3600.0, 86400.0


class Rule(NamedTuple):
    """From an age on, one event of the given types is kept per interval."""

    name: str
    """Name for the stored position of the scan."""
    types: tuple[str, ...]
    age: float
    """Age in seconds."""
    stretch: float
    """Interval in seconds; infinite: only the last event is kept."""


RULES = (
    Rule("minutes", ("progress", "hints", "timeline"), _HOUR, 60.0),
    Rule("ten minutes", ("progress", "hints", "timeline"), _DAY, 600.0),
    Rule("the last timeline", ("timeline",), 7 * _DAY, math.inf),
    Rule("hours", ("progress",), 30 * _DAY, _HOUR),
    Rule("the last hints", ("hints",), 30 * _DAY, math.inf),
)
"""The rules, in the order of age."""

BATCH = 100
"""Number of events examined per transaction."""

PATIENCE = 1.0
"""Time limit in seconds, after which the rest is left for the next call."""


def prune(database: Database, now: float, patience: float = PATIENCE) -> int:
    """Delete superfluous events for `patience` seconds at most; return their number."""
    deadline = time.monotonic() + patience
    deleted = 0
    for rule in RULES:
        while _is_due(database, rule, now):
            began = time.monotonic()
            with database.write() as session:
                deleted += _prune_batch(session, rule, now)
            if time.monotonic() > deadline:
                return deleted
            # Leaves half of the time to other writers.
            time.sleep(time.monotonic() - began)
    return deleted


def _is_due(database: Database, rule: Rule, now: float) -> bool:
    """Return whether there is anything to scan, without the writers' lock."""
    with database.read() as session:
        query = select(EventRow.time).where(EventRow.id > _place(session, rule))
        following = session.scalar(query.order_by(EventRow.id).limit(1))
    return following is not None and not _is_young(following, rule, now)


def _is_young(event_time: float, rule: Rule, now: float) -> bool:
    # An event from the future means that the clock was set back; it must not block the scan.
    return now - rule.age < event_time <= now


def _same_stretch(event_time: float, next_time: float | None, rule: Rule) -> bool:
    return next_time is not None and event_time // rule.stretch == next_time // rule.stretch


def _place(session: Session, rule: Rule) -> int:
    row = session.get(MetaRow, f"thinned to {rule.name}")
    return int(row.value) if row else 0


def _prune_batch(session: Session, rule: Rule, now: float) -> int:
    following = aliased(EventRow)
    next_time = (
        select(following.time)
        .where(
            following.job == EventRow.job,
            following.type == EventRow.type,
            following.id > EventRow.id,
        )
        .order_by(following.id)
        .limit(1)
        .scalar_subquery()
    )
    query = (
        select(EventRow.id, EventRow.type, EventRow.time, next_time.label("next_time"))
        .where(EventRow.id > _place(session, rule))
        .order_by(EventRow.id)
        .limit(BATCH)
    )
    place, superfluous = None, []
    for row in session.execute(query):
        if _is_young(row.time, rule, now):
            break
        place = row.id
        if row.type in rule.types and _same_stretch(row.time, row.next_time, rule):
            superfluous.append(row.id)
    if place is not None:
        session.merge(MetaRow(key=f"thinned to {rule.name}", value=str(place)))
    delete_events(session, superfluous)
    return len(superfluous)


def delete_events(session: Session, ids: Sequence[int]) -> None:
    """Delete events, and their rows of progress."""
    if ids:
        session.execute(delete(PointRow).where(PointRow.event.in_(ids)))
        session.execute(delete(EventRow).where(EventRow.id.in_(ids)))
