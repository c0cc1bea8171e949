"""`pipollux explain`: explain a job's allocation in words."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from pipollux_sched.lifecycle import SWEEPING
from pipollux_sched.views.explanation import Alternative, ExplanationView, NetworkCost
from pipollux_utils.text import DASH, clean, count, first_line, spell_moment, spell_nodes

from .console import TextFormat, print_data, print_result
from .forecast_text import forecast_lines
from .options import JobName, StateDirectory, TextOutput
from .reader import reading, tell_unserved


def explain(
    name: JobName, output: TextOutput = TextFormat.text, state_dir: StateDirectory = None
) -> None:
    """Explain a job's allocation, or why it is queued.

    Shows the last decision about the job, the predicted speedup with one replica
    more or fewer, and what limits its allocation. Predictions use the job's
    measurements (hints); speedups are relative to one replica.

    Without a running scheduler, explain shows the last recorded state.
    """
    with reading(state_dir) as reader:
        found = reader.explanation(name)
        tell_unserved(reader)
    if output is TextFormat.text:
        print_result(explanation_text(found))
    else:
        print_data(found.to_dict(), output)


def explanation_text(found: ExplanationView) -> RenderableType:
    """Return an explanation for a terminal."""
    parts: list[RenderableType] = [Text(_has(found))]
    parts.append(Text(f"{found.phase.value}: {clean(first_line(found.message))}"))
    if found.planned_by is not None:
        parts.append(Text(_planned_by(found.planned_by)))
    if found.synchronization is not None:
        parts.append(Text(found.synchronization))
    if found.last_decision is not None:
        decision = _decision(found.last_decision)
        parts += [Text(), Text("Last decision", style="bold"), _inset(decision)]
    if changes := list(_changes(found)):
        parts += [Text(), Text("Changes", style="bold"), _inset(Text("\n".join(changes)))]
    if found.waits_for is not None:
        parts += [Text(), Text("Waits for", style="bold"), _inset(Text(clean(found.waits_for)))]
    if found.forecast is not None:
        told = [f"{title}: {text}" for title, text in forecast_lines(found.forecast, time.time())]
        parts += [Text(), Text("Forecast", style="bold"), _inset(Text("\n".join(told)))]
    if found.more is not None:
        title = "Alternatives"
        parts += [Text(), Text(title, style="bold"), _inset(_alternatives(found))]
    if network := list(_network(found.network)):
        parts += [Text(), Text("Network", style="bold"), _inset(Text("\n".join(network)))]
    if found.limits:
        lines = "\n".join(clean(limit.text) for limit in found.limits)
        parts += [Text(), Text("Limits", style="bold"), _inset(Text(lines))]
    return Group(*parts)


def _inset(content: RenderableType) -> RenderableType:
    return Padding(content, (0, 0, 0, 2))


def _has(found: ExplanationView) -> str:
    if found.phase.ended:
        return _had(found)
    if found.reason == SWEEPING:
        return f"{found.name} is a sweep: only its trials hold slots."
    if not found.nodes:
        return f"{found.name} holds no slots."
    replicas = f"{count(len(found.nodes), 'replica')} of {count(found.num_stages, 'stage')}"
    moving = " and is being stopped" if found.intent else ""
    return f"{found.name} has {replicas} on {spell_nodes(sorted(found.nodes))}{moving}."


def _had(found: ExplanationView) -> str:
    decision = found.last_decision or {"nodes": ()}
    nodes = decision["nodes"]
    if not nodes:
        return f"{found.name} held no slots when it ended."
    stages = decision["num_stages"] or found.num_stages
    replicas = f"{count(len(nodes), 'replica')} of {count(stages, 'stage')}"
    return f"{found.name} had {replicas} on {spell_nodes(sorted(nodes))} when it ended."


def _changes(found: ExplanationView) -> Iterator[str]:
    """Describe a change in progress, and whether the next change needs a restart."""
    if found.changing is not None:
        yield f"Changing: {clean(found.changing)}."
    following = found.next_change
    if following is not None and following.why_restart is not None:
        yield f"A change would be a restart: {clean(first_line(following.why_restart))}."
    elif following is not None:
        yield (
            "A change would be an elastic resize: replicas join and leave while the others train, "
            "if one replica stays where it is and the number of stages stays the same."
        )


def _network(costs: Sequence[NetworkCost]) -> Iterator[str]:
    """Describe what each level of the network costs compared with the next lower one."""
    for near, far in pairwise(costs):
        size = f"{count(near.num_replicas, 'replica')} on {count(near.num_nodes, 'node')}"
        place = f"one {clean(near.within)}"
        several = f"several {clean(near.within)}s"
        now = " (now)" if near.here else ""
        then = " (now)" if far.here else ""
        if not near.speedup > far.speedup * (1 + 1e-9):
            yield f"{size}: {place}{now} is predicted to be no faster than {several}{then}."
        elif far.speedup <= 0:
            yield f"{size}: only {place}{now} allows them a batch size, {several}{then} do not."
        else:
            ratio = near.speedup / far.speedup
            yield (f"{size}: {place}{now} gives {ratio:.2f} times the goodput of {several}{then}.")


def _planned_by(predecessor: str) -> str:
    return (
        "It has measured nothing yet, and is planned with the measurements of job "
        f"{clean(predecessor)} of its family."
    )


def _decision(decision: Mapping[str, Any]) -> Text:
    lines = [f"{spell_moment(decision['time'])}: {clean(decision['why'])}"]
    if decision.get("why_restart"):
        lines.append(f"A restart: {clean(first_line(decision['why_restart']))}.")
    elif decision.get("elastic"):
        lines.append("An elastic resize: the others train while replicas join or leave.")
    after, before = decision["speedup"], decision.get("previous_speedup")
    if not decision["nodes"]:
        return Text("\n".join(lines))
    if after is None:
        lines.append("Its speedup was not predicted: nothing had been measured yet.")
    else:
        had = "it held no slots before" if before is None else f"{before:.2f} before"
        size = decision["batch_size"]
        batch = "" if size is None else f", at a batch size of {size}"
        lines.append(f"Predicted speedup {after:.2f}, {had}{batch}.")
    return Text("\n".join(lines))


def _alternatives(found: ExplanationView) -> Table:
    table = Table(box=None, header_style="dim", pad_edge=False)
    for header in ("", "Replicas", "Where", "Speedup", "Batch size", ""):
        number_column = header in {"Replicas", "Speedup", "Batch size"}
        table.add_column(header, justify="right" if number_column else "left", no_wrap=True)
    nodes = tuple(found.assigned)
    now = Alternative(nodes, len(nodes), found.speedup, found.batch_size, fits=True)
    for title, one in (("one fewer", found.fewer), ("it has", now), ("one more", found.more)):
        if one is not None:
            table.add_row(
                title,
                str(one.num_replicas),
                spell_nodes(sorted(one.nodes)),
                "not known" if one.speedup is None else f"{one.speedup:.2f}",
                DASH if one.batch_size is None else str(one.batch_size),
                "" if one.fits else "no room now",
                style="bold" if one is now else "",
            )
    return table
