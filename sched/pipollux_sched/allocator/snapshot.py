"""A consistent snapshot of a scheduler's store, in the form for decisions.

A job whose attempt has not taken its first step, or is being stopped, is pinned: otherwise it would
be moved without new measurements, and soon moved again. The number of replicas of a job is limited
to a multiple of those that its step time was measured on (`job_infos.replica_cap`), because the
model is optimistic about unmeasured allocations.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

from pipollux_perfmodel import HintsError, SchedHints
from pipollux_policies import (
    DEFAULT_RESCALE_SECONDS,
    DEFAULT_RESTART_SECONDS,
    Contention,
    NodeInfo,
)
from pipollux_policies.allocations.allocation import network_level
from pipollux_policies.teams.team import Teams
from pipollux_sched.lifecycle import NO_ROOM, JobState, Phase
from pipollux_sched.spec.cluster import NodeSpec
from pipollux_sched.spec.job import JobSpec, parse_job
from pipollux_sched.store import JobRecord, NodeCondition, NodeRecord, Store
from pipollux_sched.views.teams import stored_teams

from .inherited_hints import HeirReader, WarmStart, without_rows
from .job_infos import hints_worth, job_info, node_info, one_of_each
from .learned_lengths import LearnedLengths, declared_lengths, family_name
from .strategy import SchedulableJob

_LOG = logging.getLogger(__name__)
MOST_UNREPORTED = 300.0
"""Seconds of training after its last hints for which a job is assumed to have made progress."""
_READING = threading.Lock()
_READERS: WeakKeyDictionary[Store, SnapshotReader] = WeakKeyDictionary()
"""The readers of `Snapshot.read`, so that the next call parses only changes."""


@dataclass(frozen=True)
class Snapshot:
    """The state of a scheduler at one moment."""

    candidates: tuple[SchedulableJob, ...]
    """Jobs that neither ended, nor end, nor are suspended by users, in the order of submission."""
    nodes: Mapping[str, NodeInfo]
    """Nodes that are not dead; some may drain."""
    busy: frozenset[str] = frozenset()
    teams: Teams | None = None
    """Quotas and limits; None: there are no teams."""
    notices: Mapping[str, float] = field(default_factory=dict)
    """Jobs with a notice to return slots, and when, in seconds since the epoch."""
    time: float = 0.0

    @classmethod
    def read(cls, store: Store) -> Snapshot:
        """Read a snapshot as the present or last scheduler would, or raise `SpecError`."""
        served = store.latest_events(1, types=["cluster"])
        seconds = served[0].get("restart_seconds") if served else None
        known = float(seconds) if isinstance(seconds, int | float) else DEFAULT_RESTART_SECONDS
        with _READING:
            reader = _READERS.get(store)
            if reader is None or reader.restart_seconds != known:
                reader = _READERS[store] = SnapshotReader(store, restart_seconds=known)
            return reader.read()

    def candidate(self, name: str) -> SchedulableJob | None:
        """Return a candidate by name; None if the job cannot be decided on."""
        return next((job for job in self.candidates if job.name == name), None)


class SnapshotReader:
    """Reads snapshots; parses only specs and hints that have changed since the last one.

    Args:
        store: of the scheduler.
        restart_seconds: assumed cost of a restart until a job's own is measured.
        clock: returns the time.
        latest_gradients: whether new jobs have the latest gradients of their predecessors, as
            forecasts need, instead of those with which these began: see `HeirReader`.
    """

    def __init__(
        self,
        store: Store,
        *,
        restart_seconds: float,
        clock: Callable[[], float] = time.time,
        latest_gradients: bool = False,
    ) -> None:
        self._store = store
        self.restart_seconds = restart_seconds
        self._clock = clock
        self._parsed: dict[str, tuple[Any, str | None, JobSpec, SchedHints | None]] = {}
        self._doubted: dict[str, str] = {}
        self._lengths = LearnedLengths(store)
        self._latest_gradients = latest_gradients
        self._warm_starts = HeirReader(store, latest=latest_gradients)

    def read(self, leaving: Collection[str] = ()) -> Snapshot:
        """Read the current state, or raise `SpecError`; nodes that are `leaving` drain."""
        store = self._store
        hints, attempts = store.hint_texts(), store.num_attempts(unfinished=True)
        service, costs = store.attained_service(unfinished=True), store.restart_costs()
        pauses, changes = store.pause_costs(), store.num_changes()
        # Jobs that wait for other jobs do not compete for slots yet, and sweeps never do.
        unended = store.jobs(unfinished=True)
        jobs = [job for job in unended if not (job.state.waits_for or job.is_sweep)]
        shares = _shares(unended)
        unfinished, moments = mean_jobs(store, jobs, self._clock()), store.hint_moments()
        teams, history = stored_teams(store), self._lengths.read()
        notices, now = {} if teams is None else store.teams.notices(), self._clock()
        overdue = {name for name, due in notices.items() if due <= now}
        warm_starts = self._warm_starts.read(
            {job.name: job.spec for job in jobs if job.name not in hints}
        )
        parsed = [self._parse(job.name, job.spec, hints.get(job.name)) for job in jobs]
        declared = declared_lengths(parsed)
        present = present_nodes(store.nodes())
        candidates, kinds = [], one_of_each(present)
        for job, (spec, believed) in zip(jobs, parsed, strict=True):
            if job.state.suspended:
                continue
            name = job.name
            warm_start = _usable(warm_starts.get(name), spec, believed)
            if name in shares:
                most = max(min(spec.max_replicas, shares[name]), spec.min_replicas)
                spec = spec.model_copy(update={"max_replicas": most, "requested_replicas": None})
            told = believed or spec.hints or (warm_start.hints if warm_start else None)
            self._note_doubt(name, hints_worth(spec, told).doubt)
            info = job_info(
                spec,
                told,
                age=max(self._clock() - job.ready_at, 0.0),
                created=job.ready_at,
                num_restarts=max(attempts.get(name, 0) - 1, 0),
                restart_seconds=costs.get(name, self.restart_seconds),
                rescale_seconds=_rescale_seconds(job.state, pauses.get(name)),
                num_rescales=changes.get(name, 0),
                attained_service=service.get(name, 0.0),
                mean_jobs=unfinished.get(name),
                num_stages=job.state.num_stages if job.state.assigned else None,
                trained_on=job.state.running_on,
                trained_seconds=_seconds_since_hints(job.state, moments.get(name), now),
                teams=teams,
                history=history,
                has_trained=believed is not None,
                relatives=declared.get(family_name(spec), ()),
                nodes=kinds,
            )
            may_be_ended = name in overdue and _may_be_ended(job.state)
            candidates.append(
                SchedulableJob(
                    name,
                    info,
                    job.state.assigned,
                    pinned=is_pinned(job.state) and not may_be_ended,
                    suspended=job.phase is Phase.SUSPENDED,
                    num_stages=job.state.num_stages,
                    is_new=job.phase is Phase.CREATED,
                    # Resumed jobs and those of an earlier scheduler are queued without a decision.
                    unexplained=job.phase is Phase.CREATED
                    or (job.phase is Phase.QUEUED and job.state.reason != NO_ROOM),
                    warm_start=warm_start,
                    message=job.state.message,
                )
            )
        for gone in self._parsed.keys() - {job.name for job in jobs}:
            del self._parsed[gone]
        nodes = {
            name: replace(node, draining=node.draining or name in leaving)
            for name, node in present.items()
        }
        return Snapshot(
            # Pinned without nodes: it is stopping, and becomes a candidate when it has stopped.
            tuple(
                replace(job, network_level=network_level(job.allocation, nodes))
                for job in candidates
                if job.allocation or not job.pinned
            ),
            nodes,
            frozenset(node for job in jobs for node in job.state.nodes_in_use),
            None if teams is None else teams.for_policy(),
            notices,
            now,
        )

    def new_jobs(self, specs: Sequence[JobSpec]) -> list[SchedulableJob]:
        """Return jobs as if they were submitted now; earlier ones of their names left hints."""
        if not specs:
            return []
        store, now = self._store, self._clock()
        reader = HeirReader(store, latest=self._latest_gradients)
        heirs = reader.read({spec.name: spec.model_dump(mode="json") for spec in specs})
        jobs = store.jobs(unfinished=True)
        hints = store.hint_texts()
        parsed = [self._parse(job.name, job.spec, hints.get(job.name)) for job in jobs]
        lengths, teams, history = (
            declared_lengths(parsed),
            stored_teams(store),
            self._lengths.read(),
        )
        nodes, found = present_nodes(store.nodes()), []
        for spec in specs:
            believed = _believed(spec.name, hints.get(spec.name) or store.hint_text(spec.name))
            warm_start = _usable(heirs.get(spec.name), spec, believed)
            info = job_info(
                spec,
                believed or spec.hints or (warm_start.hints if warm_start else None),
                age=0.0,
                created=now,
                restart_seconds=self.restart_seconds,
                teams=teams,
                history=history,
                has_trained=believed is not None,
                relatives=lengths.get(family_name(spec), ()),
                nodes=nodes,
            )
            found.append(SchedulableJob(spec.name, info, is_new=True, warm_start=warm_start))
        return found

    def _note_doubt(self, job: str, doubt: str | None) -> None:
        if doubt is None:
            self._doubted.pop(job, None)
        elif self._doubted.get(job) != doubt:
            self._doubted[job] = doubt
            _LOG.warning("the hints of job %s %s; they are ignored", job, doubt)

    def _parse(
        self, job: str, spec: Mapping[str, Any], hints: str | None
    ) -> tuple[JobSpec, SchedHints | None]:
        known = self._parsed.get(job)
        if known is None or known[0] != spec or known[1] != hints:
            same = known is not None and known[0] == spec
            parsed = known[2] if known is not None and same else parse_job(spec)
            known = self._parsed[job] = (spec, hints, parsed, _believed(job, hints))
        return known[2], known[3]


def _shares(jobs: Sequence[JobRecord]) -> dict[str, int]:
    """Return the replicas that each trial may have of those that its sweep may have in total."""
    limits = {
        job.name: (job.spec["sweep"] or {}).get("max_replicas") for job in jobs if job.is_sweep
    }
    trials = [job for job in jobs if job.trial is not None and limits.get(job.sweep or "")]
    numbers = Counter(job.sweep for job in trials)
    return {job.name: (limits[job.sweep or ""] or 0) // numbers[job.sweep] for job in trials}


def present_nodes(records: Mapping[str, NodeRecord]) -> dict[str, NodeInfo]:
    """Return nodes as policies see them, without dead ones; others may drain."""
    found = {}
    for name, record in records.items():
        if record.condition is not NodeCondition.DEAD:
            node = node_info(NodeSpec.model_validate(record.spec), record.slots)
            draining = node.draining or record.condition is NodeCondition.DRAINING
            found[name] = replace(node, draining=draining)
    return found


def is_pinned(state: JobState) -> bool:
    """Return whether a job keeps its allocation: it starts, changes, stops, or waits to retry."""
    if state.phase is Phase.RESTARTING or state.intent is not None:
        return True
    if state.membership.change is not None:
        return True
    return bool(state.running_on) and not state.training


def _seconds_since_hints(state: JobState, moment: tuple[int, float] | None, now: float) -> float:
    """Return for how long a job has trained since its last hints; at most `MOST_UNREPORTED`."""
    attempt, told_at = moment or (0, now)
    if not state.training or attempt != state.attempt:  # others are of the end of an attempt
        return 0.0
    return min(max(now - told_at, 0.0), MOST_UNREPORTED)


def _may_be_ended(state: JobState) -> bool:
    """Return whether a pinned job is only starting, or waiting for a restart after a failure.

    It has to return slots when its notice is over: one that fails repeatedly never trains.
    """
    return state.intent is None and state.membership.change is None


def _usable(
    warm_start: WarmStart | None, spec: JobSpec, believed: SchedHints | None
) -> WarmStart | None:
    """Return inherited hints unless the job has its own, or they predict nothing."""
    if warm_start is None or believed or spec.hints:
        return None
    return warm_start if hints_worth(spec, warm_start.hints).speedups else None


def _rescale_seconds(state: JobState, measured: float | None) -> float | None:
    """Return the cost of an elastic resize of a job; None: it cannot be resized."""
    if not state.running_on or state.membership.why_not is not None:
        return None
    return DEFAULT_RESCALE_SECONDS if measured is None else measured


def _believed(job: str, hints: str | None) -> SchedHints | None:
    """Parse hints; ignore those of an older version that this one cannot read."""
    told = json.loads(hints) if hints else None
    try:
        return without_rows(SchedHints.from_json_object(told)) if told else None
    except HintsError as error:
        _LOG.warning("the hints of job %s are ignored: %s", job, error)
        return None


def mean_jobs(store: Store, jobs: Sequence[JobRecord], now: float) -> dict[str, float]:
    """Return the number of unfinished jobs, averaged over the life of each of `jobs` so far.

    It is computed from submission and end times, so it survives a restart of the scheduler. Deleted
    jobs do not count, and jobs that were submitted at this moment are left out.
    """
    if not jobs:
        return {}
    lives = [(job.ready_at, max(job.ready_at, now)) for job in jobs]
    lives += store.overview.ended_since(min(begin for begin, _ in lives))
    return Contention(lives).means({job.name: job.ready_at for job in jobs}, now)
