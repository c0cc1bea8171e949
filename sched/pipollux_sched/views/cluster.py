"""Views of the cluster; the database counts, sorts and pages, so that answers stay small."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from pipollux_sched.lifecycle import SWEEPING
from pipollux_sched.report.event_text import TELLING_TYPES
from pipollux_sched.store import (
    AttemptRecord,
    Holder,
    JobQuery,
    JobSummary,
    NodeRecord,
    Store,
    StoredForecast,
)

from .devices import Devices, devices_of_node, use_by_job
from .events import event_summary
from .forecasts import current_forecast
from .models import (
    AttemptLine,
    ClusterView,
    DeviceUseView,
    JobLine,
    NodeDetails,
    NodeView,
    UsageView,
)
from .sweeps import with_progress

MOST_JOBS = 500
"""Largest number of jobs per page."""
MOST_ATTEMPTS = 5000
"""Largest number of attempts, more than a chart can show."""
MOST_WORDS = 300
"""Largest number of characters of a job's message; the job's own page has the full message."""

_ATTEMPT = tuple(name for name in AttemptLine.model_fields if name != "number")
_POINT = (
    *("step", "epoch", "num_epochs", "loss", "batch_size", "step_time", "goodput", "efficiency"),
)


def list_nodes(store: Store) -> list[NodeDetails]:
    """Return the nodes, and the jobs that hold their slots: from assignment to process end."""
    held, devices = _held(store.overview.glance().holders), store.devices.latest()
    return [
        NodeDetails(**_node(node, held, devices), spec=dict(node.spec))
        for node in store.nodes().values()
    ]


def node_levels(nodes: Iterable[NodeRecord]) -> list[str]:
    """Return the levels of the network at which any node has a domain, the widest first."""
    topologies = [node.spec.get("topology") or {} for node in nodes]
    named = {level for one in topologies for level, domain in one.items() if domain}
    every = dict.fromkeys(level for one in topologies for level in one)
    return [level for level in every if level in named]


def cluster_view(store: Store, query: JobQuery, num_events: int) -> ClusterView:
    """Return an overview of the cluster, with a page of jobs and the newest events."""
    now, last_event = time.time(), store.last_event()  # first: clients continue from this event
    glance = store.overview.glance(trials=query.trials)
    page = store.overview.jobs(query, now)
    held = _held(glance.holders)
    found = store.latest_events(num_events, types=TELLING_TYPES) if num_events else []
    told = (event_summary(event) for event in found)
    forecasts, devices = store.forecasts.latest(), store.devices.latest()
    use = use_by_job(devices)
    nodes = {name: NodeView(**_node(node, held, devices)) for name, node in store.nodes().items()}
    return ClusterView(
        time=now,
        policy=serving_policy(store),
        nodes=nodes,
        phases=dict(glance.phases),
        goodput=glance.goodput,
        oldest_attempt=glance.oldest_attempt,
        has_teams=store.teams.spec() is not None,
        jobs=[_job(job, forecasts, use) for job in _told(store, page.jobs)],
        num_found=page.num_found,
        events=[event for event in told if event is not None],
        last_event=last_event,
    )


def serving_policy(store: Store) -> str:
    """Return the name of the present or last allocation policy; empty if there was none."""
    served = store.latest_events(1, types=["cluster"])
    # Events hold its class.
    return str(served[-1].get("policy", "")).removesuffix("Policy").lower() if served else ""


def serving_options(store: Store) -> dict[str, Any]:
    """Return the options of the current or last policy that differ from the default."""
    served = store.latest_events(1, types=["cluster"])
    return dict(served[-1].get("policy_options") or {}) if served else {}


def serves_evenly(store: Store) -> bool:
    """Return whether the current or last scheduler places equally many replicas on each node."""
    served = store.latest_events(1, types=["cluster"])
    return bool(served and served[-1].get("even"))


def list_attempts(
    store: Store, since: float, nodes: Collection[str] | None = None
) -> list[AttemptLine]:
    """Return the attempts that held slots after a time, on some nodes or on all."""
    found = store.overview.attempts_since(since, MOST_ATTEMPTS, nodes)
    return [_attempt(record, number) for record, number in found]


def node_usage(store: Store, since: float, num_parts: int) -> UsageView:
    """Return the slot usage of nodes from a time until now; unused nodes are left out."""
    now = time.time()
    begin = min(since, now - 1.0)
    usage = store.overview.node_usage(begin, now, num_parts)
    return UsageView(since=begin, until=now, nodes=usage)


def _held(holders: Iterable[Holder]) -> dict[str, dict[str, int]]:
    held: dict[str, dict[str, int]] = {}
    for holder in holders:
        for node in holder.nodes:
            jobs = held.setdefault(node, {})
            jobs[holder.job] = jobs.get(holder.job, 0) + holder.num_stages
    return held


def _node(node: NodeRecord, held: Mapping[str, dict[str, int]], devices: Devices) -> dict[str, Any]:
    jobs = held.get(node.name, {})
    used = sum(jobs.values())
    return {
        "name": node.name,
        "kind": node.kind,
        "slots": node.slots,
        "used": used,
        "free": max(node.slots - used, 0),  # the node may have shrunk below what its jobs hold
        "jobs": jobs,
        "condition": node.condition,
        "since": node.since,
        "reason": node.reason,
        "devices": devices_of_node(devices, node.name),
    }


def _told(store: Store, jobs: Sequence[JobSummary]) -> Iterator[JobSummary]:
    """Yield jobs; the message of a sweep in progress says how far it has come by now."""
    some = any(job.reason == SWEEPING for job in jobs)
    sweeps = with_progress(store, store.sweeps.active()) if some else ()
    messages = {sweep.name: sweep.state.message for sweep in sweeps}
    for job in jobs:
        told = messages.get(job.name, job.message) if job.reason == SWEEPING else job.message
        yield replace(job, message=told)


def _job(
    job: JobSummary,
    forecasts: Mapping[str, StoredForecast],
    use: Mapping[str, DeviceUseView],
) -> JobLine:
    shown = {} if job.point is None else asdict(job.point)
    return JobLine(
        number=job.number,
        name=job.name,
        phase=job.phase,
        reason=job.reason,
        message=job.message.partition("\n")[0][:MOST_WORDS],
        submitted_at=job.submitted_at,
        ended_at=job.ended_at,
        nodes=list(job.nodes),
        num_stages=job.num_stages,
        attempt=job.attempt,
        intent=job.intent,
        suspended=job.suspended,
        num_restarts=job.num_restarts,
        forecast=current_forecast(
            forecasts,
            job.name,
            job.ended_at is not None or job.suspended,
            job.submitted_at,
            job.attempt,
        ),
        device_use=use.get(job.name),
        **{name: shown.get(name) for name in _POINT},
    )


def _attempt(record: AttemptRecord, number: int) -> AttemptLine:
    return AttemptLine(number=number, **{name: getattr(record, name) for name in _ATTEMPT})
