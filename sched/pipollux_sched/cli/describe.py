"""`pipollux describe`: the details of a job, in sections."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from pipollux_sched.lifecycle import CANCELLED
from pipollux_sched.report.event_text import event_line
from pipollux_sched.store import ListedPhase, Point
from pipollux_sched.views.models import AttemptView, ConditionView, JobDetails, SweepDetails
from pipollux_utils.text import (
    DASH,
    clean,
    count,
    first_line,
    number,
    seconds,
    spell_age,
    spell_moment,
    spell_nodes,
)

from .console import TextFormat, print_data, print_result
from .devices import device_table
from .forecast_text import forecast_lines
from .jobs import PHASE_STYLES
from .notification_table import notification_table
from .options import JobName, StateDirectory, TextOutput
from .reader import reading, tell_unserved
from .sweeps import best_first, trial_table

SHOWN_TRIALS = 10
"""Number of best trials that are listed."""
SHOWN_ATTEMPTS = 10
"""Number of latest attempts that are listed one by one."""


def describe(
    name: JobName, output: TextOutput = TextFormat.text, state_dir: StateDirectory = None
) -> None:
    """Show a job: its spec, state, attempts, progress, hints and last events.

    Without a running scheduler, describe shows the last recorded state.
    """
    with reading(state_dir) as reader:
        found = reader.job(name)
        is_sweep = found.sweep == found.name
        sweep = reader.sweep(name) if is_sweep and output is TextFormat.text else None
        tell_unserved(reader)
    if sweep is not None:
        print_result(Group(job_sections(found), *_trials(sweep)))
    elif output is TextFormat.text:
        print_result(job_sections(found))
    else:
        print_data(found.to_dict(), output)


def _trials(sweep: SweepDetails) -> list[RenderableType]:
    best = best_first(sweep)[:SHOWN_TRIALS]
    title = "Best trials" if len(best) < len(sweep.trials) else "Trials"
    left = f"all trials: pipollux sweeps {sweep.name}"
    shown = Group(trial_table(sweep, best), Text(left, style="dim"))
    return _section(title, shown if best else Text(f"no values yet; {left}", style="dim"))


def job_sections(job: JobDetails, now: float | None = None) -> RenderableType:
    """Return the details of a job, for a terminal, with ages relative to `now`."""
    now = time.time() if now is None else now
    parts: list[RenderableType] = [_head(job, now)]
    for title, rows in (
        ("Spec", _spec(job.spec)),
        ("Progress", (*_progress(job.progress, now), *_pipeline(job), *_synchronization(job))),
        ("Hints", (*_hints(job.hints), *_planned_by(job.planned_by))),
    ):
        parts += _section(title, _pairs(rows))
    devices = device_table(job.devices)
    parts += [] if devices is None else _section("GPUs", devices)
    parts[1:1] = _section("Conditions", _conditions(job.conditions, now))
    parts += _section("Attempts", _attempts(job.attempts))
    if job.notifications:
        parts += _section("Notifications", notification_table(job.notifications, now))
    lines = [clean(event_line(event) or "") for event in job.events]
    return Group(*parts, *_section("Last events", Text("\n".join(lines)) if lines else None))


def _section(title: str, content: RenderableType | None) -> list[RenderableType]:
    inside = Text("none yet", style="dim") if content is None else content
    return [Text(), Text(title, style="bold"), Padding(inside, (0, 0, 0, 2))]


def _pairs(rows: Iterable[tuple[str, str | Text]]) -> Table | None:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, value if isinstance(value, Text) else Text(value))
    return table if table.row_count else None


def _head(job: JobDetails, now: float) -> RenderableType:
    cancelled = job.listed_phase is ListedPhase.CANCELLED
    rows: list[tuple[str, str | Text]] = [
        (
            "Phase",
            Text(
                CANCELLED if cancelled else job.phase.value, style=PHASE_STYLES.get(job.phase, "")
            ),
        ),
        ("Why", clean(first_line(job.message))),
        ("Allocation", _where(job.assigned, job.num_stages)),
    ]
    if job.running_on != job.assigned:
        stages = job.running_stages or job.spec.get("num_stages", 1)
        label = "Still runs on" if job.changing is None else "Trains on"
        rows.append((label, _where(job.running_on, stages)))
    if job.changing is not None:
        rows.append(("Changing", clean(job.changing)))
    if job.membership is not None and job.membership.replicas != list(range(len(job.running_on))):
        both = zip(job.membership.replicas, job.running_on, strict=True)
        told = [f"{replica} on {clean(node)}" for replica, node in both]
        rows.append(("Replicas", ", ".join(told)))
    if job.intent:
        rows.append(("Stopping for", str(job.intent)))
    rows += [
        ("Attempt", str(job.attempt)),
        ("Failures", _failures(job.failures, job.max_restarts)),
        ("Submitted", spell_moment(job.submitted_at, now)),
    ]
    if job.ended_at is not None:
        rows.append(("Ended", spell_moment(job.ended_at, now)))
    if job.forecast is not None:
        rows += forecast_lines(job.forecast, now)
    if job.deadline_at is not None:
        rows.append(("Deadline", spell_moment(job.deadline_at, now)))
    return Group(Text(clean(job.name), style="bold"), Padding(_pairs(rows) or "", (0, 2)))


def _where(nodes: Sequence[str], num_stages: int) -> str:
    if not nodes:
        return DASH
    what = f"{count(len(nodes), 'replica')} of {count(num_stages, 'stage')}"
    return f"{what} on {spell_nodes(sorted(nodes))}"


def _spec(spec: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in spec.items():
        if value in (None, [], (), {}, "") or name in ("name", "hints", "assigned"):
            continue
        if isinstance(value, Mapping):
            told = ", ".join(f"{key}={clean(v)}" for key, v in value.items() if v)
        elif isinstance(value, list | tuple):
            told = " ".join(clean(_entry(entry)) for entry in value)
        else:
            told = str(value).lower() if isinstance(value, bool) else clean(value)
        if told:
            yield name, told


def _entry(entry: object) -> object:
    """Return an entry of a list; a dependency is spelled as in `submit --after`."""
    return ":".join(map(str, entry.values())) if isinstance(entry, Mapping) else entry


def _conditions(conditions: Sequence[ConditionView], now: float) -> Table:
    table = _table("Type", "Status", "Since", "Reason", "Message")
    for entry in sorted(conditions, key=lambda one: one.time):
        holds = entry.status
        table.add_row(
            entry.type.value,
            str(holds),
            f"{spell_age(now - entry.time)} ago",
            clean(entry.reason),
            Text(clean(first_line(entry.message))),
            style="" if holds else "dim",
        )
    return table


def _attempts(attempts: Sequence[AttemptView]) -> RenderableType | None:
    if not attempts:
        return None
    changed = any(entry.membership > 1 for entry in attempts)
    more = ("Membership", "Pause") if changed else ()
    table = _table(
        *("Attempt", *more[:1], "Where", "Created", "Restart", *more[1:]),
        *("First step", "Outcome"),
    )
    for entry in attempts[-SHOWN_ATTEMPTS:]:
        table.add_row(
            *(str(entry.attempt), *([str(entry.membership)] if changed else [])),
            Text(_where(entry.nodes, entry.num_stages)),
            spell_moment(entry.created_at).partition(" (")[0],
            _length(entry.restart_seconds),
            *([_length(entry.pause_seconds)] if changed else []),
            DASH if entry.first_step is None else str(entry.first_step),
            _outcome(entry.outcome, entry.intent),
        )
    left = len(attempts) - SHOWN_ATTEMPTS
    return table if left <= 0 else Group(Text(f"{left} earlier ones", style="dim"), table)


def _length(taken: float | None) -> str:
    return DASH if taken is None else seconds(taken)


def _progress(point: Point | None, now: float) -> Iterator[tuple[str, str]]:
    if point is None:
        return
    of = "" if point.num_epochs is None else f" of {point.num_epochs}"
    steps = point.accum_steps + 1
    size = f"{point.num_replicas} × {point.atomic_bsz} × {steps}"
    yield "Step", f"{point.step}, {point.samples} samples, epochs done: {point.epoch}{of}"
    yield "Loss", number(point.loss, 4)
    yield "Batch size", f"{point.batch_size} = {size} (replicas × atomic × steps)"
    predicted = point.predicted_step_time
    foretold = "" if predicted is None else f", predicted {seconds(predicted)}"
    yield "Step time", f"{seconds(point.step_time)}{foretold}"
    efficiency = point.efficiency
    worth = "" if efficiency is None else f" at an efficiency of {100 * efficiency:.0f} %"
    yield "Goodput", f"{number(point.goodput)} samples/s{worth}" if point.goodput else DASH
    yield "Reported", spell_moment(point.time, now)


def _pipeline(job: JobDetails) -> Iterator[tuple[str, str]]:
    hints = job.hints or {}
    params = hints.get("perfParams")
    if job.progress is None or not params:
        return
    stages = count(hints.get("numStages") or 1, "stage")
    parts = count(hints.get("numMicrobatches") or 1, "micro-batch", "micro-batches")
    several = params.get("chunks_per_stage", 1)
    chunks = f", {several} chunks to a stage" if several > 1 else ""
    yield "Pipeline", f"{stages}, {parts}, {params.get('schedule', 'gpipe')}{chunks}"


def _synchronization(job: JobDetails) -> Iterator[tuple[str, str]]:
    if job.synchronization is not None:
        yield "Synchronization", job.synchronization


def _hints(hints: Mapping[str, Any] | None) -> Iterator[tuple[str, str]]:
    for name, value in (hints or {}).items():
        if value is None or name == "version":
            continue
        if name == "layers":
            layers = value.get("layers", value) if isinstance(value, Mapping) else value
            yield name, f"{count(len(layers), 'entry').replace('entrys', 'entries')} measured"
        elif name == "stepProfile":
            rows = value.get("rows", ()) if isinstance(value, Mapping) else ()
            yield name, f"{count(len(rows), 'configuration')} for other jobs of the family"
        elif isinstance(value, Mapping):
            yield name, ", ".join(f"{key}={_short(v)}" for key, v in value.items())
        else:
            yield name, _short(value)


def _planned_by(predecessor: str | None) -> Iterator[tuple[str, str]]:
    if predecessor is not None:
        yield "planned with", f"those of job {clean(predecessor)} of its family"


def _outcome(outcome: str | None, intent: str | None) -> str:
    """Spell the outcome of an attempt; a stopped attempt did not fail, even if it did not save."""
    if intent is None:
        return outcome or "runs"
    return f"{'ended unsaved' if outcome == 'failed' else outcome or 'runs'} ({intent})"


def _short(value: object) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_short, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    return number(value) if isinstance(value, float) else clean(value)


def _table(*headers: str) -> Table:
    table = Table(box=None, header_style="dim", pad_edge=False)
    for header in headers:
        wide = header in ("Message", "Where")
        table.add_column(header, no_wrap=not wide, overflow="fold")
    return table


def _failures(failures: int, allowed: int) -> str:
    """Describe the failures next to the allowed restarts; the last failure has no restart."""
    if failures > allowed:
        return f"{failures} (max_restarts is {allowed})"
    return f"{failures} of {allowed} restarts used"
