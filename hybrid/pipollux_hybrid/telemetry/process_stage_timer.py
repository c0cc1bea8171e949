"""The measured timeline of one step in a multi-process pipeline.

At the end of the step the processes of a replica exchange the times of their stages. They run on
one host, so they share a clock. On CUDA devices every record of a timed step synchronizes with the
device, so few steps are timed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from pipollux_hybrid.job.mesh import ProcessMesh
from pipollux_hybrid.pipeline.stage_notes import StageSpan
from pipollux_hybrid.sync.sync_result import GradientTime
from pipollux_perfmodel import StageEvent

from .chrome_trace import TraceSpan

if TYPE_CHECKING:
    from pipollux_hybrid.pipeline.process_engine import ProcessEngine

__all__ = ["GatheredTimes", "ProcessStageTimer"]


class GatheredTimes:
    """A timed step: work of the stages and transfers of their gradients, on one clock."""

    def __init__(self, spans: Sequence[StageSpan], gradients: Sequence[GradientTime]) -> None:
        self._spans, self._gradients = list(spans), list(gradients)
        self._first = min(span.start for span in spans)

    def done(self) -> bool:
        """Return whether :meth:`events` can be read without waiting."""
        return True

    def events(self) -> list[StageEvent]:
        """Return the timeline, in seconds from the first stage's start, sorted by start."""
        events = [
            StageEvent(
                span.stage,
                span.microbatch,
                "forward" if span.work == "forward" else "backward",
                *self._shifted(span),
            )
            for span in self._spans
            if _computes(span)
        ]
        return sorted(events, key=lambda event: event.start)

    def others(self) -> list[TraceSpan]:
        """Return the other work of the stages, on the same timeline."""
        messages = [
            TraceSpan(
                span.stage,
                "sends and receives",
                f"{span.work.replace('_', ' ')} {span.microbatch}",
                *self._shifted(span),
                {"micro-batch": span.microbatch},
            )
            for span in self._spans
            if not _computes(span)
        ]
        sums = [
            TraceSpan(
                gradient.stage,
                f"{name}s",
                f"{name} {number}",
                *self._shifted(gradient),
                {"bytes": gradient.num_bytes},
            )
            for tied, name in ((False, "all-reduce"), (True, "tied gradient"))
            for number, gradient in enumerate(x for x in self._gradients if x.tied == tied)
        ]
        return sorted([*messages, *sums], key=lambda span: span.start)

    def _shifted(self, span: StageSpan | GradientTime) -> tuple[float, float]:
        return span.start - self._first, span.end - self._first


class ProcessStageTimer:
    """Times one step of a pipeline; all processes of a replica time the same ones."""

    def __init__(self, mesh: ProcessMesh, engine: ProcessEngine) -> None:
        self._mesh, self._engine = mesh, engine
        self._notes = engine.notes

    @property
    def running(self) -> bool:
        """Whether a step is being timed."""
        return self._notes.running

    def start(self, _num_recomputed: int) -> None:
        """Time the next forwards and backwards."""
        self._notes.begin(self._clock)

    def gradient_arrived(self, k: int) -> None:
        """Do nothing: forwards and backwards have explicit ends here."""

    def stop(self, gradients: Sequence[GradientTime] = ()) -> GatheredTimes | None:
        """End the step, on all processes of the replica; return its timing with these gradients."""
        mine = json.dumps([self._notes.end(), [*gradients]])
        told = [json.loads(x) for x in self._mesh.gather_from_stages(mine.encode())]
        spans = [StageSpan(*entry) for entries, _ in told for entry in entries]
        sums = [GradientTime(*entry) for _, entries in told for entry in entries]
        return GatheredTimes(spans, sums) if any(map(_computes, spans)) else None

    def cancel(self) -> None:
        """Discard the step being timed."""
        self._notes.end()

    def _clock(self) -> float:
        if self._engine.device.type == "cuda":
            torch.cuda.synchronize(self._engine.device)
        return time.perf_counter()


def _computes(span: StageSpan) -> bool:
    return span.work in ("forward", "backward")
