"""Select the events for a report: of some jobs, since a time, and not too many.

Life-cycle events are all kept. The database thins periodic reports, so that a report of a store
with a million events takes seconds.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from pipollux_sched.errors import SchedulerError
from pipollux_sched.store import Store

from .event_text import EVENT_TYPES
from .page import render_report

Event: TypeAlias = Mapping[str, Any]

MOST_POINTS = 1000
"""Maximum points of one job's curves."""
POINTS = 60_000
"""Maximum points of all jobs together, besides a few per job."""
_FEWEST = 20
_TOLD = ("progress", "hints", "timeline")
_ENDS = ("complete", "failed", "cancelled")
_CHANGES = ("changing", "waiting_to_join", "change_abandoned")
_MEMBERSHIP = ("membership", "nodes", "replicas", "num_replicas", "num_stages")


class NothingToReportError(SchedulerError):
    """The events selected for a report contain no job."""


def kept_report(store: Store, jobs: Collection[str] = (), seconds: float | None = None) -> str:
    """Return the report of jobs (empty: all) in a store, over the last `seconds`, as HTML.

    Raises:
        NothingToReportError: no selected event belongs to a job.
        UnknownJobError: a job does not exist.
    """
    since = None if seconds is None else time.time() - seconds
    return report_of(store_events(store, jobs, since))


def report_of(events: Sequence[Event]) -> str:
    """Return the report of events as HTML; raise `NothingToReportError` if they have no job."""
    if not any(event.get("job") for event in events):
        raise NothingToReportError("there is nothing to report: no job has events in this period")
    return render_report(events)


def store_events(
    store: Store, jobs: Collection[str] = (), since: float | None = None
) -> list[Event]:
    """Return the thinned events of jobs (empty: all) since a time, or raise `UnknownJobError`."""
    for name in jobs:
        store.job(name)
    lived = store.events(types=[kind for kind in EVENT_TYPES if kind not in _TOLD])
    names = set(jobs) or {event["job"] for event in lived if event["job"]}
    most = min(max(POINTS // max(len(names), 1), _FEWEST), MOST_POINTS)
    told = store.overview.progress_events(most, jobs, since)
    events = [*of_jobs(lived, jobs), *told, *store.overview.last_timelines(jobs)]
    events.sort(key=lambda event: int(event["id"]))
    return clipped(events, since)


def of_jobs(events: Iterable[Event], jobs: Collection[str]) -> list[Event]:
    """Return the events of some jobs (all if `jobs` is empty), and those of no job."""
    return [event for event in events if not (jobs and event.get("job")) or event["job"] in jobs]


def clipped(events: Sequence[Event], since: float | None) -> list[Event]:
    """Return the events from a time on, without those of jobs that had ended by then.

    An allocation held at that time, with its elastic resizes, is dated at that time, so that the
    report shows it from its left edge.
    """
    if since is None:
        return list(events)
    before = [event for event in events if event["time"] < since]
    after = [event for event in events if event["time"] >= since]
    clusters = [event for event in before if event["type"] == "cluster"]
    then: dict[str, list[Event]] = {}
    for event in before:
        name, kind = event.get("job"), event["type"]
        if not name or kind in _TOLD:
            continue
        if kind in (*_ENDS, "deleted"):
            then.pop(name, None)
        elif kind in ("stopped", "restarting"):
            kept = then.get(name, [])
            waiting = event.get("attempt")
            then[name] = [one for one in kept if one["type"] == "submitted" or _later(one, waiting)]
        elif kind in ("changed", "survived"):
            then[name] = _taken_over(then.get(name, []), event)
        else:
            then.setdefault(name, []).append(event)
    begun = {event.get("job") for event in after if event["type"] in ("submitted", "rerun")}
    ended = {event["job"] for event in before if event["type"] in _ENDS} - then.keys() - begun
    begins = [*clusters[-1:], *(event for held in then.values() for event in held)]
    lived = [event for event in after if event.get("job") not in ended]
    return [*({**event, "time": since} for event in begins), *lived]


def _taken_over(held: Sequence[Event], changed: Event) -> list[Event]:
    """Return the events of a job's allocation after a resize, as if it began with that one."""
    number = changed.get("attempt")
    allocated = [one for one in held if _is_of(one, "allocated", number)]
    rest = [one for one in held if one not in allocated and one["type"] not in _CHANGES]
    told = {name: changed[name] for name in _MEMBERSHIP if name in changed}
    first = {**(allocated or [changed])[-1], "type": "allocated", "elastic": False, **told}
    begun = [one["type"] == "submitted" for one in rest].count(True)
    return [*rest[:begun], first, *rest[begun:]]


def _is_of(event: Event, kind: str, attempt: int | None) -> bool:
    return event["type"] == kind and event.get("attempt") == attempt


def _later(event: Event, attempt: int | None) -> bool:
    """Return whether an event is of an attempt after one that has ended."""
    number = event.get("attempt")
    return number is not None and attempt is not None and number > attempt
