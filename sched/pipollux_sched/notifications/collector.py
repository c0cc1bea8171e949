"""From the event log to the outbox, and the events that only time brings about."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from pipollux_sched.lifecycle import Phase
from pipollux_sched.spec.teams import TeamsSpec
from pipollux_sched.store import JobRecord, Store, StoredForecast
from pipollux_sched.store.notifications import NewNotification
from pipollux_sched.views.teams import stored_teams

from .messages import item_of
from .rules import Rules, kind_of, owner_of

_RESETS = ("submitted", "rerun", "suspended", "resumed")
"""Events after which an earlier forecast of a job says nothing any more."""
_TYPES = (
    *("complete", "failed", "cancelled", "allocated", "stopping", "restarting"),
    *("waiting", "forecast_missed"),
    *_RESETS,
)
_BATCH = 500
_WITHOUT_TYPES = 1000
"""Number of other events after which the position in the log is stored."""


class Collector:
    """Puts events into the outbox; safe for use by several threads.

    Args:
        why_waiting: explains what a job without slots waits for.
    """

    def __init__(self, store: Store, why_waiting: Callable[[JobRecord], str | None]) -> None:
        self._store, self._why_waiting = store, why_waiting
        self._lock = threading.Lock()
        # At once: what happens from now on must not be lost if this scheduler is killed.
        self._cursor = self._stored = store.notifications.cursor()
        self._promises: dict[str, StoredForecast] = {}
        """The forecast that each job is held to."""
        self._logged: set[tuple[str, str, float, float]] = set()
        """What is known to be in the log: kind, job, and what tells one from another."""

    def collect(self) -> None:
        """Put all events so far into the outbox, each once."""
        with self._lock:
            while self._collect():
                pass

    def look(self) -> None:
        """Log which jobs wait too long, or miss their forecast, if anyone wants to know."""
        with self._lock:
            rules = Rules.of(stored_teams(self._store), self._store.notifications.rules())
            if not rules.by_owner and not _of_teams(rules.teams):
                return
            jobs = [job for job in self._store.jobs(unfinished=True) if job.trial is None]
            names = {job.name for job in jobs}
            self._logged = {entry for entry in self._logged if entry[1] in names}
            known = self._store.notifications.jobs([job.name for job in jobs])
            for job in jobs:
                if job.name not in known:
                    continue
                wanted = list(rules.destinations(job.name, known[job.name]))
                kinds = {kind for one in wanted for kind in one.spec.events}
                if "waiting" in kinds:
                    limits = {o.spec.waiting_after for o in wanted if "waiting" in o.spec.events}
                    self._look_at_wait(job, limits)
                if "forecast_missed" in kinds:
                    self._look_at_forecast(job)

    def _collect(self) -> bool:
        """Put a batch of events into the outbox; return whether there may be more."""
        records = self._store.notifications
        newest = self._store.last_event()
        if newest <= self._cursor:
            return False
        events = self._store.events(self._cursor, types=_TYPES, limit=_BATCH)
        more = len(events) == _BATCH
        last = events[-1]["id"] if events else 0
        # Also past events that were logged after `newest` was read, or they would be found again.
        cursor = last if more else max(newest, last)
        found = self._notifications(events)
        if events or cursor - self._stored > _WITHOUT_TYPES:
            records.collect(cursor, found)
            self._stored = cursor
        self._cursor = cursor
        return more or self._store.last_event() > cursor

    def _notifications(self, events: list[dict[str, Any]]) -> list[NewNotification]:
        for event in events:
            if event["type"] in _RESETS:
                self._promises.pop(event["job"], None)
        kinds = [(kind_of(event), event) for event in events]
        told = [(kind, event) for kind, event in kinds if kind is not None]
        if not told:
            return []
        jobs = self._store.notifications.jobs({event["job"] for _, event in told})
        owners = {owner_of(job.user) for job in jobs.values()}
        owners |= {f"job:{name}" for name in jobs}
        rules = Rules.of(stored_teams(self._store), self._store.notifications.rules(owners))
        found = []
        for kind, event in told:
            job = jobs.get(event["job"])
            if job is None:
                continue
            if kind == "completed" and any(
                "forecast_missed" in one.spec.events
                for one in rules.destinations(event["job"], job)
            ):
                self._look_at_end(event)
            found += [
                NewNotification(
                    channel=one.key,
                    label=one.label,
                    target=one.target,
                    kind=kind,
                    job=event["job"],
                    item=item_of(kind, event, job.user, job.team),
                )
                for one in rules.for_event(event, kind, job)
            ]
        return found

    def _look_at_wait(self, job: JobRecord, limits: set[float]) -> None:
        state = job.state
        waits = state.phase in (Phase.CREATED, Phase.QUEUED, Phase.SUSPENDED)
        if not waits or state.suspended or state.waits_for or state.running_on:
            return
        since = max(state.condition.time if state.condition else 0.0, state.ready_at or 0.0)
        passed = sorted(
            limit
            for limit in limits
            if self._store.now - since >= limit
            and ("waiting", job.name, since, limit) not in self._logged
        )
        if not passed:  # the reason takes a while to find
            return
        why = self._why_waiting(job) or state.message
        for limit in passed:
            data = {"since": since, "threshold": limit, "why": why}
            self._store.notifications.log_once("waiting", job.name, data, ("since", "threshold"))
            self._logged.add(("waiting", job.name, since, limit))

    def _look_at_forecast(self, job: JobRecord) -> None:
        promise = self._promise(job.name)
        if promise is None or job.state.suspended:
            return
        now, started = self._store.now, self._started_at(job.name, promise)
        if promise.start is not None:
            self._compare(job.name, promise, "start", promise.start, started, now)
        self._compare(job.name, promise, "end", promise.end, None, now)

    def _look_at_end(self, event: Mapping[str, Any]) -> None:
        """Compare the end of a complete job with its forecast."""
        job, promise = event["job"], self._promise(event["job"])
        if promise is None:
            return
        if promise.start is not None:
            started = self._started_at(job, promise)
            self._compare(job, promise, "start", promise.start, started, event["time"])
        self._compare(job, promise, "end", promise.end, event["time"], event["time"])
        self._promises.pop(job, None)

    def _compare(
        self,
        job: str,
        promise: StoredForecast,
        what: str,
        interval: Mapping[str, float | None],
        happened: float | None,
        now: float,
    ) -> None:
        """Log a start or end outside of its interval; `happened` None: it has not happened."""
        low, high, moment = interval["low"], interval["high"], happened or now
        early = happened is not None and low is not None and happened < low
        late = high is not None and moment > high
        known = (what, job, promise.made_at, 0.0)
        if not (early or late) or known in self._logged:
            return
        data = {
            "what": what,
            "low": low,
            "high": high,
            "made_at": promise.made_at,
            "at": happened,
        }
        self._store.notifications.log_once("forecast_missed", job, data, ("what", "made_at"))
        self._logged.add(known)

    def _promise(self, job: str) -> StoredForecast | None:
        """Return the first bounded forecast of a job since it was submitted or resumed."""
        found = self._promises.get(job)
        if found is None:
            found = self._store.forecasts.first_record(job, _RESETS)
            if found is not None and found.end["high"] is not None:
                self._promises[job] = found
        return found

    def _started_at(self, job: str, promise: StoredForecast) -> float | None:
        return self._store.sweeps.started_at(job, promise.made_at)


def _of_teams(teams: TeamsSpec | None) -> bool:
    return teams is not None and any(team.notify for team in teams.teams)
