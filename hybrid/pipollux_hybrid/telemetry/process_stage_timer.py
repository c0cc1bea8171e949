"""The measured time line of one step where each stage has a process of its own.

Every process notes when its stage works on which micro-batch, and at the end of the step those of a
replica tell each other. They are on one host, whose clock they share. On a CUDA device a timed
step waits for the device at each note, which is why few steps are timed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

import torch

from pipollux_hybrid.job.mesh import ProcessMesh
from pipollux_hybrid.pipeline.process_engine import ProcessEngine
from pipollux_perfmodel import StageEvent

__all__ = ["GatheredTimes", "ProcessStageTimer"]


class GatheredTimes:
    """A step that was timed.

    Args:
        events: Of all stages, by one clock.
    """

    def __init__(self, events: Sequence[StageEvent]) -> None:
        self._events = list(events)

    def done(self) -> bool:
        """Return whether :meth:`events` can be read without waiting."""
        return True

    def events(self) -> list[StageEvent]:
        """Return the time line, in seconds from its first event, sorted by start."""
        first = min(event.start for event in self._events)
        shifted = (e._replace(start=e.start - first, end=e.end - first) for e in self._events)
        return sorted(shifted, key=lambda event: event.start)


class ProcessStageTimer:
    """Times one step of a pipeline; all processes of a replica time the same ones.

    Args:
        mesh: The groups of this process.
        engine: Which runs its stage.
    """

    def __init__(self, mesh: ProcessMesh, engine: ProcessEngine) -> None:
        self._mesh, self._engine = mesh, engine
        self._spans: list[tuple[int, str, float, float]] = []

    @property
    def running(self) -> bool:
        """Whether a step is being timed."""
        return self._engine.stage_process.observer is not None

    def start(self, _num_recomputed: int) -> None:
        """Time the coming forwards and backwards."""
        self.cancel()
        stage = self._engine.stage_process
        stage.clock = self._clock
        stage.observer = lambda *span: self._spans.append(span)

    def gradient_arrived(self, k: int) -> None:
        """Do nothing: forwards and backwards have ends here."""

    def stop(self) -> GatheredTimes | None:
        """End the step and return its timing; all processes of the replica do."""
        spans = list(self._spans)
        self.cancel()
        told = self._mesh.gather_from_stages(json.dumps(spans).encode())
        events = [
            StageEvent(stage, microbatch, phase, start, end)
            for stage, content in enumerate(told)
            for microbatch, phase, start, end in json.loads(content)
        ]
        return GatheredTimes(events) if events else None

    def cancel(self) -> None:
        """Forget the step being timed."""
        self._spans.clear()
        self._engine.stage_process.observer = None

    def _clock(self) -> float:
        if self._engine.device.type == "cuda":
            torch.cuda.synchronize(self._engine.device)
        return time.perf_counter()
