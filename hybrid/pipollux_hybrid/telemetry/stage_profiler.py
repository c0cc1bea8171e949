"""Selection of steps whose stages are timed, and delivery of their timelines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pipollux_hybrid.job.context import JobContext
from pipollux_hybrid.pipeline.engine import PipelineEngine
from pipollux_hybrid.sync.sync_result import GradientTime

from .chrome_trace import Tracer
from .metrics import Metrics
from .process_stage_timer import GatheredTimes, ProcessStageTimer
from .stage_timer import Recording, StageTimer, stage_times

if TYPE_CHECKING:
    from pipollux_hybrid.pipeline.process_engine import ProcessEngine

__all__ = ["StageProfiler"]

TIMED_EVERY = 10
"""Iterations between timed backwards."""
FIRST_TIMED = 3
"""First timed iteration, after a warm-up."""
PATIENCE = 4
"""Maximum noise-measuring iterations by which a timing is delayed."""


class StageProfiler:
    """Times the stages of some steps.

    On GPUs a timeline is read once the devices are done with it, one or two steps later, so that
    nothing waits for it.
    """

    def __init__(self, ctx: JobContext, engine: PipelineEngine | ProcessEngine) -> None:
        self._metrics = ctx.component(Metrics)
        self._tracer = ctx.component(Tracer)
        self._devices = list(engine.devices)
        self._timer: StageTimer | ProcessStageTimer
        if not isinstance(engine, PipelineEngine):
            assert ctx.mesh is not None  # noqa: S101  # the engine is made of it
            self._timer = ProcessStageTimer(ctx.mesh, engine)
        else:
            self._timer = StageTimer(engine.stages, engine.devices)
        # Processes of a replica time the same steps, but a trace may be requested in one only.
        self._out_of_turn = ctx.mesh is None
        self._countdown = FIRST_TIMED
        self._recording: Recording | GatheredTimes | None = None
        self._step = 0

    def gradient_arrived(self, stage: int) -> None:
        """Record that a parameter of the stage received its gradient."""
        self._timer.gradient_arrived(stage)

    def cancel(self) -> None:
        """Cancel the timing, as another forward follows."""
        self._timer.cancel()

    def begin(self, num_recomputed: int, *, measures_noise: bool) -> bool:
        """Start the last forward of an iteration; return whether it is timed. Iterations that
        measure the noise delay a timing.
        """
        if not self._is_due(measures_noise):
            return False
        self._timer.start(num_recomputed)
        return True

    def end(self, gradients: Sequence[GradientTime] = ()) -> None:
        """End the iteration's last backward, with the transfers of its gradients."""
        if self._timer.running:
            if isinstance(self._timer, ProcessStageTimer):
                self._recording = self._timer.stop(gradients)
            else:
                self._recording = self._timer.stop()
            self._step = self._metrics.step + 1
            self._metrics.note_timed()

    def read(self) -> None:
        """Deliver the last timed step, once its devices are done with it."""
        if self._recording is None or not self._recording.done():
            return
        recording, self._recording = self._recording, None
        events = recording.events()
        others = recording.others() if isinstance(recording, GatheredTimes) else []
        self._tracer.take(self._step, events, self._devices, others)
        count = max(event.microbatch for event in events) + 1
        self._metrics.add_timeline(events, *stage_times(events, len(self._devices), count))

    def _is_due(self, measures_noise: bool) -> bool:
        self._countdown -= 1
        if self._out_of_turn and self._tracer.wanted and self._recording is None:
            return True
        # Avoids iterations that measure the noise, but with a limited delay.
        measuring = measures_noise and self._countdown > -PATIENCE
        if self._countdown > 0 or measuring or self._recording is not None:
            return False
        self._countdown = TIMED_EVERY
        return True
