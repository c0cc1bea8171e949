"""The explanation of a job's allocation, from the store, as data for programs and pages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from pipollux_sched.allocator.snapshot import Snapshot
from pipollux_sched.allocator.strategy import free_of
from pipollux_sched.spec.job import JobSpec, parse_job
from pipollux_sched.store import JobRecord, Store
from pipollux_sched.store.slot_usage import holding

from .explain import (
    Alternative,
    Limit,
    LimitKind,
    ReplicaBounds,
    Standing,
    pinned_because,
    standing,
)


def find_standing(store: Store, job: JobRecord) -> Standing:
    """Explain the allocation of a job in a store.

    Raises:
        SpecError: the store holds a node or a job that this version cannot read.
    """
    if job.phase.ended:
        return Standing(None, None, None, None, (), None)
    pin = pinned_because(job.state)
    live = Snapshot.read(store)
    candidate = live.candidate(job.name)
    if candidate is None:
        waits = (
            f"its user: pipollux resume {job.name}"
            if pin is not None and pin.kind is LimitKind.SUSPENDED
            else "its processes to end"
        )
        limits: tuple[Limit, ...] = () if pin is None else (pin,)
        return Standing(None, None, None, None, limits, waits)
    spec = parse_job(job.spec)
    measured = _measured(store.hints().get(job.name), spec)
    free = free_of(live.nodes, live.candidates)
    return standing(candidate, live.nodes, free, ReplicaBounds(spec.max_replicas, measured), pin)


def _measured(hints: Mapping[str, Any] | None, spec: JobSpec) -> int:
    """Return the most replicas that a job's step time was measured on."""
    if hints:
        return int(hints.get("maxProfiledReplicas", 0))
    return spec.hints.max_profiled_replicas if spec.hints else 0


def account_object(
    job: JobRecord, found: Standing, decision: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the account of a job as plain data; `decision` is the last `allocated` event."""
    where, num_stages = holding(job)
    return {
        "name": job.name,
        "phase": job.phase.value,
        "reason": job.state.reason,
        "message": job.state.message,
        "nodes": list(where),
        "num_stages": num_stages,
        "speedup": found.speedup,
        "batch_size": found.batch_size,
        "last_decision": None if decision is None else dict(decision),
        "more": _plain_alternative(found.more),
        "fewer": _plain_alternative(found.fewer),
        "limits": [{"kind": limit.kind.value, "text": limit.text} for limit in found.limits],
        "waits_for": found.waits_for,
    }


def _plain_alternative(found: Alternative | None) -> dict[str, Any] | None:
    return None if found is None else {**asdict(found), "nodes": list(found.nodes)}
