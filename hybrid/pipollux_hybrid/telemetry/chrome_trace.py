"""Timelines of steps as files for Perfetto (https://ui.perfetto.dev) or chrome://tracing.

One row per stage; the gaps in a row are the bubble. In a multi-process pipeline, rows below show
each stage's messages to other stages, all-reduces of its gradients, and the exchange of gradients
of shared parameters. The format is the Trace Event Format's JSON object: complete events (``"ph":
"X"``), times in microseconds, and flows from each forward to the next stage's and from each
backward to the previous one's (``"ph": "s"``, ``"f"``).
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from pipollux_hybrid.job.context import JobContext
from pipollux_perfmodel import StageEvent, ideal_schedule
from pipollux_perfmodel.timing.params import ScheduleKind

__all__ = ["TraceSpan", "Tracer", "bubble", "trace_events"]

LOG = logging.getLogger(__name__)
TRACE_INTERVAL = 30.0
"""Seconds between traces in ``PIPOLLUX_TRACE_DIR``."""
KEPT = 20
"""Most traces of a replica in that directory."""
RECOMPUTATION = "recomputation"
COLORS = (
    "thread_state_running",
    "rail_response",
    "rail_animation",
    "cq_build_passed",
    "rail_load",
    "thread_state_iowait",
    "vsync_highlight_color",
    "thread_state_uninterruptible",
)
"""Names with predefined colours in chrome://tracing, one per micro-batch in turn."""


class TraceSpan(NamedTuple):
    """Work of a stage other than forwards and backwards; in seconds on their timeline."""

    stage: int
    row: str
    name: str
    start: float
    end: float
    args: dict[str, int]
    """Arguments shown with the span."""


class Tracer:
    """Writes timelines to the requested files."""

    def __init__(self, ctx: JobContext) -> None:
        self._context = ctx
        self._path: Path | None = None
        self._next = 0.0

    @property
    def wanted(self) -> bool:
        """Whether the next step must be timed, even out of turn."""
        return self._path is not None

    def request(self, path: str | os.PathLike[str]) -> None:
        """Write the next timeline to a file."""
        self._path = Path(path)

    def take(
        self,
        step: int,
        events: Sequence[StageEvent],
        devices: Sequence[torch.device],
        others: Sequence[TraceSpan] = (),
    ) -> None:
        """Write the trace of a timed step if one is due; log a warning if it cannot be written."""
        rank, directory = self._context.env.rank, self._context.env.trace_dir
        if self._path is not None:
            path, self._path = self._path, None
            self._write(path, step, events, devices, others)
        first = self._context.env.stage == 0  # of the processes of a replica
        if first and directory is not None and time.monotonic() >= self._next:
            self._next = time.monotonic() + TRACE_INTERVAL
            name = f"replica-{rank}-step-{step:08d}.json"
            if not self._write(directory / name, step, events, devices, others):
                self._next = math.inf
            for old in sorted(directory.glob(f"replica-{rank}-step-*"))[:-KEPT]:
                old.unlink(missing_ok=True)

    def _write(
        self,
        path: Path,
        step: int,
        events: Sequence[StageEvent],
        devices: Sequence[torch.device],
        others: Sequence[TraceSpan],
    ) -> bool:
        schedule = self._context.pipeline.schedule
        try:
            write_trace(path, step, self._context.env.rank, events, devices, schedule, others)
        except OSError as error:
            LOG.warning("the time line of step %d cannot be written: %s", step, error)
            return False
        return True


def write_trace(
    path: Path,
    step: int,
    rank: int,
    events: Sequence[StageEvent],
    devices: Sequence[torch.device],
    schedule: ScheduleKind = "gpipe",
    others: Sequence[TraceSpan] = (),
) -> None:
    """Write a timeline to a file, atomically; raise an OSError if it cannot be written."""
    ideal = ideal_schedule(schedule, events, len(devices))
    content = {
        "traceEvents": trace_events(events, devices, rank, others),
        "displayTimeUnit": "ms",
        "otherData": {
            "step": step,
            "replica": rank,
            "schedule": schedule,
            "bubble": bubble(events, len(devices)),
            "schedule_bubble": ideal.bubble_fraction if ideal is not None else None,
        },
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(json.dumps(content), encoding="utf-8")
    aside.replace(path)


def trace_events(
    events: Sequence[StageEvent],
    devices: Sequence[torch.device],
    rank: int = 0,
    others: Sequence[TraceSpan] = (),
) -> list[dict[str, Any]]:
    """Return the entries of ``traceEvents`` for events in seconds; entries of one row do not
    overlap, and ``others`` have rows below. The process of the trace is this replica's rank.
    """
    entries = [_name(rank, None, "process_name", f"replica {rank}")]
    pieces: list[_Piece] = []
    for k, device in enumerate(devices):
        entries += _head(rank, k, f"stage {k} ({device})")
        row = _row(events, k)
        interleaved = any(piece.chunk for piece in row)
        for name, chunk, event in row:
            args = {"micro-batch": event.microbatch} | ({"chunk": chunk} if interleaved else {})
            title = f"{name} {event.microbatch}" + (f" of chunk {chunk}" if interleaved else "")
            color = COLORS[event.microbatch % len(COLORS)]
            entry = _complete(title, rank, k, event, args)
            entries.append(entry | {"cat": event.phase, "cname": color})
        pieces += row
    for number, (title, spans) in enumerate(_lanes(others), start=len(devices)):
        entries += _head(rank, number, title)
        entries += [_complete(x.name, rank, number, x, x.args) | {"cat": x.row} for x in spans]
    return entries + _flows(pieces, len(devices), rank)


def _lanes(others: Sequence[TraceSpan]) -> list[tuple[str, list[TraceSpan]]]:
    """Return rows as (title, spans), with as many rows of a kind as there are concurrent spans."""
    lanes: list[tuple[str, list[TraceSpan]]] = []
    for stage, kind in sorted({(span.stage, span.row) for span in others}):
        ours: list[list[TraceSpan]] = []
        for span in sorted(others, key=lambda span: span.start):
            if (span.stage, span.row) != (stage, kind):
                continue
            free = next((lane for lane in ours if lane[-1].end <= span.start), None)
            if free is None:
                ours.append([span])
            else:
                free.append(span)
        for number, lane in enumerate(ours):
            title = f"stage {stage}: {kind}" + (f" ({number + 1})" if number else "")
            lanes.append((title, lane))
    return lanes


def _flows(pieces: Sequence[_Piece], num_stages: int, rank: int) -> list[dict[str, Any]]:
    places = {
        (piece.event.phase, piece.chunk * num_stages + piece.event.stage, piece.event.microbatch): (
            piece
        )
        for piece in pieces
        if piece.name != RECOMPUTATION
    }
    flows: list[dict[str, Any]] = []
    for (phase, place, microbatch), giver in places.items():
        taker = places.get((phase, place + (1 if phase == "forward" else -1), microbatch))
        if taker is None:
            continue
        alike = {"pid": rank, "id": len(flows), "cat": phase, "name": f"{phase} {microbatch}"}
        for kind, end in (("s", giver.event), ("f", taker.event)):
            flows.append(alike | {"ph": kind, "tid": end.stage, "ts": _microseconds(end.start)})
        flows[-1]["bp"] = "e"
    return flows


def bubble(events: Sequence[StageEvent], num_stages: int) -> float:
    """Return the share of the stages' time in which they wait, in [0, 1]: for K equally fast, fully
    overlapping stages GPipe's (K - 1) / (M + K - 1).
    """
    rows = [piece.event for k in range(num_stages) for piece in _row(events, k)]
    if not rows:
        return 0.0
    span = max(event.end for event in rows) - min(event.start for event in rows)
    worked = sum(event.end - event.start for event in rows)
    return 1.0 - worked / (num_stages * span) if span > 0.0 else 0.0


class _Piece(NamedTuple):
    name: str
    chunk: int
    """The chunk of layers; interleaved stages have several."""
    event: StageEvent


def _row(events: Sequence[StageEvent], k: int) -> list[_Piece]:
    """Return a stage's events in order, each truncated at the start of the next. Recomputation
    before the gradient arrives is a separate backward event. If a micro-batch has several forwards,
    they and its backwards are of several chunks.
    """
    ordered = sorted((e for e in events if e.stage == k), key=lambda event: event.start)
    count = Counter((event.phase, event.microbatch) for event in ordered)
    row: list[_Piece] = []
    seen: Counter[tuple[str, int]] = Counter()
    for event, after in zip(ordered, [*ordered, None][1:], strict=True):
        key = event.phase, event.microbatch
        number, several = seen[key], count["forward", event.microbatch]
        seen[key] += 1
        name, chunk = str(event.phase), 0
        if several > 1:
            chunk = number if event.phase == "forward" else several - 1 - number
        elif event.phase == "backward" and number == 0 and count[key] > 1:
            name = RECOMPUTATION
        end = event.end if after is None else min(event.end, after.start)
        row.append(_Piece(name, chunk, event._replace(end=end)))
    return row


def _head(rank: int, row: int, title: str) -> list[dict[str, Any]]:
    order = _entry("thread_sort_index", "M", rank, row, args={"sort_index": row})
    return [_name(rank, row, "thread_name", title), order]


def _complete(
    name: str, rank: int, row: int, span: StageEvent | TraceSpan, args: dict[str, int]
) -> dict[str, Any]:
    start, end = _microseconds(span.start), _microseconds(span.end)
    return _entry(name, "X", rank, row, ts=start, dur=round(end - start, 3), args=args)


def _name(rank: int, k: int | None, kind: str, name: str) -> dict[str, Any]:
    return _entry(kind, "M", rank, k or 0, args={"name": name})


def _entry(name: str, phase: str, rank: int, k: int, **more: Any) -> dict[str, Any]:
    return {"name": name, "ph": phase, "pid": rank, "tid": k, **more}


def _microseconds(seconds: float) -> float:
    return round(1e6 * seconds, 3)
