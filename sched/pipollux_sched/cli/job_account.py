"""The explanation of a job's allocation, in words for a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from pipollux_sched.planning.explain import Alternative, Standing
from pipollux_sched.store import JobRecord
from pipollux_sched.store.slot_usage import holding

from .wording import DASH, count, first_line, one_line, spell_moment, spell_nodes


def account_text(
    job: JobRecord, found: Standing, decision: Mapping[str, Any] | None
) -> RenderableType:
    """Return the account of a job for a terminal."""
    parts: list[RenderableType] = [Text(_has(job, decision))]
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


def _has(job: JobRecord, decision: Mapping[str, Any] | None) -> str:
    where, num_stages = holding(job)
    if job.phase.ended:
        return _had(job, decision)
    if not where:
        return f"{job.name} holds nothing."
    replicas = f"{count(len(where), 'replica')} of {count(num_stages, 'stage')}"
    moving = " and makes way" if job.state.running_on and job.state.intent else ""
    return f"{job.name} has {replicas} on {spell_nodes(where)}{moving}."


def _had(job: JobRecord, decision: Mapping[str, Any] | None) -> str:
    """Say what a job that has ended was given last."""
    nodes = decision["nodes"] if decision is not None else ()
    if decision is None or not nodes:
        return f"{job.name} held nothing when it ended."
    stages = decision["num_stages"] or job.spec.get("num_stages", 1)
    replicas = f"{count(len(nodes), 'replica')} of {count(stages, 'stage')}"
    return f"{job.name} had {replicas} on {spell_nodes(nodes)} at last."


def _decision(decision: Mapping[str, Any]) -> Text:
    lines = [f"{spell_moment(decision['time'])}: {one_line(decision['why'])}"]
    after, before = decision["speedup"], decision.get("previous_speedup")
    if not decision["nodes"]:
        return Text(lines[0])
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
    allocation = job.state.assigned
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
