"""The cluster: its nodes and who holds them, all at a glance, generations, how full nodes were.

What is answered has a size of its own, whatever the number of jobs: the database counts, sorts and
cuts.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict
from typing import Any

from pipollux_sched.report.event_text import TELLING_TYPES
from pipollux_sched.store import (
    GenerationRecord,
    Holder,
    JobQuery,
    JobSummary,
    NodeRecord,
    Store,
)

from .events import event_summary
from .models import ClusterView, GenerationLine, JobLine, NodeDetails, NodeView, UsageView

MOST_JOBS = 500
"""Jobs of a page."""
MOST_GENERATIONS = 5000
"""Launches of all jobs together: more than a picture has room for."""
MOST_WORDS = 300
"""Characters of a job's message; the job's own page has all of it."""

_GENERATION = tuple(name for name in GenerationLine.model_fields if name != "number")
_POINT = (
    *("step", "epoch", "num_epochs", "loss", "batch_size", "step_time", "goodput", "efficiency"),
)


def list_nodes(store: Store) -> list[NodeDetails]:
    """Describe the nodes, and who holds their slots.

    A replica holds its slots from its start until its process has ended; one that was promised
    slots and is yet to be started holds those.
    """
    held = _held(store.overview.glance().holders)
    return [
        NodeDetails(**_node(node, held), spec=dict(node.spec)) for node in store.nodes().values()
    ]


def cluster_view(store: Store, query: JobQuery, num_events: int) -> ClusterView:
    """Describe the cluster, and the jobs of a page.

    Args:
        store: what is known.
        query: which jobs.
        num_events: so many of the last events that people are told of.
    """
    now, last_event = time.time(), store.last_event()  # first: who listens on from there
    glance, page = store.overview.glance(), store.overview.jobs(query, now)
    held = _held(glance.holders)
    found = store.latest_events(num_events, types=TELLING_TYPES) if num_events else []
    told = (event_summary(event) for event in found)
    return ClusterView(
        time=now,
        policy=serving_policy(store),
        nodes={name: NodeView(**_node(node, held)) for name, node in store.nodes().items()},
        phases=dict(glance.phases),
        goodput=glance.goodput,
        oldest_generation=glance.oldest_generation,
        jobs=[_job(job) for job in page.jobs],
        num_found=page.num_found,
        events=[event for event in told if event is not None],
        last_event=last_event,
    )


def serving_policy(store: Store) -> str:
    """Return the name of the policy that serves, or served last; empty where none ever did."""
    served = store.latest_events(1, types=["cluster"])
    # Events tell its class.
    return str(served[-1].get("policy", "")).removesuffix("Policy").lower() if served else ""


def list_generations(
    store: Store, since: float, nodes: Collection[str] | None = None
) -> list[GenerationLine]:
    """Describe the generations that held something after a moment, on some nodes or on all."""
    found = store.overview.generations_since(since, MOST_GENERATIONS, nodes)
    return [_generation(record, number) for record, number in found]


def node_usage(store: Store, since: float, num_parts: int) -> UsageView:
    """Describe how full nodes were from a moment until now; a node nobody held is not told of."""
    now = time.time()
    begin = min(since, now - 1.0)
    usage = store.overview.node_usage(begin, now, num_parts)
    return UsageView(since=begin, until=now, nodes=usage)


def _held(holders: Iterable[Holder]) -> dict[str, dict[str, int]]:
    """Return the slots that each job holds, by node."""
    held: dict[str, dict[str, int]] = {}
    for holder in holders:
        for node in holder.nodes:
            jobs = held.setdefault(node, {})
            jobs[holder.job] = jobs.get(holder.job, 0) + holder.num_stages
    return held


def _node(node: NodeRecord, held: Mapping[str, dict[str, int]]) -> dict[str, Any]:
    jobs = held.get(node.name, {})
    used = sum(jobs.values())
    return {
        "name": node.name,
        "kind": node.kind,
        "slots": node.slots,
        "used": used,
        "free": max(node.slots - used, 0),  # it may have become smaller than what it holds
        "jobs": jobs,
        "condition": node.condition,
        "since": node.since,
        "reason": node.reason,
    }


def _job(job: JobSummary) -> JobLine:
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
        generation=job.generation,
        intent=job.intent,
        suspended=job.suspended,
        num_restarts=job.num_restarts,
        **{name: shown.get(name) for name in _POINT},
    )


def _generation(record: GenerationRecord, number: int) -> GenerationLine:
    return GenerationLine(number=number, **{name: getattr(record, name) for name in _GENERATION})
