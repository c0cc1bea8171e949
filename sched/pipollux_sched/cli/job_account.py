"""Why a job has what it has: found in the store, told in words or as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from pipollux_sched.live_state import LiveState
from pipollux_sched.occupancy import holding
from pipollux_sched.spec import JobSpec, parse_job
from pipollux_sched.standing import (
    Alternative,
    Bounds,
    Limit,
    LimitKind,
    Standing,
    pinned_because,
    standing,
)
from pipollux_sched.store import JobRecord, Store
from pipollux_sched.strategy import free_of

from .wording import DASH, count, first_line, one_line, spell_moment, spell_nodes


def find_standing(store: Store, job: JobRecord) -> Standing:
    """Say why a job of a store has what it has.

    Raises:
        SpecError: the store holds a node or a job that this version cannot read.
    """
    if job.phase.ended:
        return Standing(None, None, None, None, (), None)
    pin = pinned_because(job.state)
    live = LiveState.read(store)
    candidate = live.candidate(job.name)
    if candidate is None:
        waits = (
            f"its user: pipollux resume {job.name}"
            if pin is not None and pin.kind is LimitKind.HELD
            else "its processes to end"
        )
        limits: tuple[Limit, ...] = () if pin is None else (pin,)
        return Standing(None, None, None, None, limits, waits)
    spec = parse_job(job.spec)
    measured = _measured(store.hints().get(job.name), spec)
    free = free_of(live.nodes, live.candidates)
    return standing(candidate, live.nodes, free, Bounds(spec.max_replicas, measured), pin)


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


def account_text(
    job: JobRecord, found: Standing, decision: Mapping[str, Any] | None
) -> RenderableType:
    """Return the account of a job for a terminal."""
    parts: list[RenderableType] = [Text(_has(job))]
    parts.append(Text(f"{job.phase.value}: {one_line(first_line(job.state.message))}"))
    if decision is not None:
        parts += [Text(), Text("Last decision", style="bold"), _inset(_decision(decision))]
    if found.waits_for is not None:
        parts += [Text(), Text("Waits for", style="bold"), _inset(Text(one_line(found.waits_for)))]
    if found.more is not None:
        title = "What it has, and what it would have"
        parts += [Text(), Text(title, style="bold"), _inset(_alternatives(job, found))]
    if found.limits:
        lines = "\n".join(one_line(limit.text) for limit in found.limits)
        parts += [Text(), Text("What limits it", style="bold"), _inset(Text(lines))]
    return Group(*parts)


def _inset(content: RenderableType) -> RenderableType:
    return Padding(content, (0, 0, 0, 2))


def _has(job: JobRecord) -> str:
    where, num_stages = holding(job)
    if job.phase.ended or not where:
        return f"{job.name} holds nothing."
    replicas = f"{count(len(where), 'replica')} of {count(num_stages, 'stage')}"
    moving = " and makes way" if job.state.launched and job.state.intent else ""
    return f"{job.name} has {replicas} on {spell_nodes(where)}{moving}."


def _decision(decision: Mapping[str, Any]) -> Text:
    lines = [f"{spell_moment(decision['time'])}: {one_line(decision['why'])}"]
    after, before = decision["speedup"], decision.get("previous_speedup")
    if after is None:
        lines.append("Its speedup was not predicted: nothing had been measured yet.")
    else:
        had = "it held nothing before" if before is None else f"{before:.2f} before"
        size = decision["batch_size"]
        batch = "" if size is None else f", at a batch size of {size}"
        lines.append(f"Predicted speedup {after:.2f}, {had}{batch}.")
    return Text("\n".join(lines))


def _alternatives(job: JobRecord, found: Standing) -> Table:
    table = Table(box=None, header_style="dim", pad_edge=False)
    for header in ("", "Replicas", "Where", "Speedup", "Batch size", ""):
        number_column = header in {"Replicas", "Speedup", "Batch size"}
        table.add_column(header, justify="right" if number_column else "left", no_wrap=True)
    allocation = job.state.allocation
    now = Alternative(allocation, len(allocation), found.speedup, found.batch_size, fits=True)
    for title, one in (("one fewer", found.fewer), ("it has", now), ("one more", found.more)):
        if one is not None:
            table.add_row(
                title,
                str(one.num_replicas),
                spell_nodes(one.nodes),
                "not known" if one.speedup is None else f"{one.speedup:.2f}",
                DASH if one.batch_size is None else str(one.batch_size),
                "" if one.fits else "no room now",
                style="bold" if one is now else "",
            )
    return table
