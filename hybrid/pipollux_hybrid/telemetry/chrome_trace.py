"""The time line of a step as a file for Perfetto (https://ui.perfetto.dev) or chrome://tracing.

One row per stage; the gaps in a row are GPipe's bubble. The format is the Trace Event Format's JSON
object: complete events (``"ph": "X"``), times in microseconds.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from pipollux_hybrid.job.context import JobContext
from pipollux_perfmodel import StageEvent

__all__ = ["Tracer", "bubble", "trace_events"]

LOG = logging.getLogger(__name__)
TRACE_INTERVAL = 30.0
"""Seconds between two traces in ``PIPOLLUX_TRACE_DIR``."""
KEPT = 20
"""Traces of a replica kept there."""
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
"""Names that chrome://tracing has colours for, one per micro-batch in turn; Perfetto goes by the
events' names."""


class Tracer:
    """Writes time lines to the requested files.

    Args:
        ctx: The job's context; its environment has the directory and this replica's rank.
    """

    def __init__(self, ctx: JobContext) -> None:
        self._context = ctx
        self._path: Path | None = None
        self._next = 0.0

    @property
    def wanted(self) -> bool:
        """Whether the coming step is to be timed, even out of turn."""
        return self._path is not None

    def request(self, path: str | os.PathLike[str]) -> None:
        """Write the next time line to a file."""
        self._path = Path(path)

    def take(
        self, step: int, events: Sequence[StageEvent], devices: Sequence[torch.device]
    ) -> None:
        """Take a timed step. A file that cannot be written causes a warning, no error."""
        rank, directory = self._context.env.rank, self._context.env.trace_dir
        if self._path is not None:
            path, self._path = self._path, None
            self._write(path, step, events, devices)
        first = self._context.env.stage == 0  # of the processes of a replica
        if first and directory is not None and time.monotonic() >= self._next:
            self._next = time.monotonic() + TRACE_INTERVAL
            name = f"replica-{rank}-step-{step:08d}.json"
            if not self._write(directory / name, step, events, devices):
                self._next = math.inf
            for old in sorted(directory.glob(f"replica-{rank}-step-*"))[:-KEPT]:
                old.unlink(missing_ok=True)

    def _write(
        self, path: Path, step: int, events: Sequence[StageEvent], devices: Sequence[torch.device]
    ) -> bool:
        try:
            write_trace(path, step, self._context.env.rank, events, devices)
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
) -> None:
    """Write a time line to a file, atomically.

    Raises:
        OSError: The file cannot be written.
    """
    content = {
        "traceEvents": trace_events(events, devices, rank),
        "displayTimeUnit": "ms",
        "otherData": {"step": step, "replica": rank, "bubble": bubble(events, len(devices))},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(json.dumps(content), encoding="utf-8")
    aside.replace(path)


def trace_events(
    events: Sequence[StageEvent], devices: Sequence[torch.device], rank: int = 0
) -> list[dict[str, Any]]:
    """Return the entries of ``traceEvents``; in a row none overlaps another.

    Args:
        events: The time line, times in seconds.
        devices: The device of each stage.
        rank: This replica's rank, which is the process of the trace.
    """
    rows = [_name(rank, None, "process_name", f"replica {rank}")]
    for k, device in enumerate(devices):
        rows.append(_name(rank, k, "thread_name", f"stage {k} ({device})"))
        rows.append(_entry("thread_sort_index", "M", rank, k, args={"sort_index": k}))
        for name, event in _row(events, k):
            start, end = _microseconds(event.start), _microseconds(event.end)
            rows.append(
                _entry(
                    f"{name} {event.microbatch}",
                    "X",
                    rank,
                    k,
                    ts=start,
                    dur=round(end - start, 3),
                    cat=event.phase,
                    cname=COLORS[event.microbatch % len(COLORS)],
                    args={"micro-batch": event.microbatch},
                )
            )
    return rows


def bubble(events: Sequence[StageEvent], num_stages: int) -> float:
    """Return the share of the stages' time in which they wait, in [0, 1].

    With K equally fast stages that all run side by side it is (K - 1) / (M + K - 1), GPipe's own.
    """
    rows = [event for k in range(num_stages) for _, event in _row(events, k)]
    if not rows:
        return 0.0
    span = max(event.end for event in rows) - min(event.start for event in rows)
    worked = sum(event.end - event.start for event in rows)
    return 1.0 - worked / (num_stages * span) if span > 0.0 else 0.0


def _row(events: Sequence[StageEvent], k: int) -> list[tuple[str, StageEvent]]:
    """Return a stage's events in order, each with its name and ended where the next begins.

    What precedes the gradient in a backward is recomputation, and noted as a backward of its own.
    """
    ordered = sorted((e for e in events if e.stage == k), key=lambda event: event.start)
    backwards = [event.microbatch for event in ordered if event.phase == "backward"]
    row, seen = [], set()
    for event, after in zip(ordered, [*ordered[1:], None], strict=True):
        name: str = event.phase
        if event.phase == "backward" and event.microbatch not in seen:
            seen.add(event.microbatch)
            if backwards.count(event.microbatch) > 1:
                name = "recomputation"
        end = event.end if after is None else min(event.end, after.start)
        row.append((name, event._replace(end=end)))
    return row


def _name(rank: int, k: int | None, kind: str, name: str) -> dict[str, Any]:
    return _entry(kind, "M", rank, k or 0, args={"name": name})


def _entry(name: str, phase: str, rank: int, k: int, **more: Any) -> dict[str, Any]:
    return {"name": name, "ph": phase, "pid": rank, "tid": k, **more}


def _microseconds(seconds: float) -> float:
    return round(1e6 * seconds, 3)
