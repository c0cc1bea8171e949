"""Progress and measurements of the running job, all part of checkpoints.

So a job restarted with other replicas predicts its goodput from all previous measurements.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from pipollux_hybrid.checkpoint.manager import CheckpointManager, load_state
from pipollux_hybrid.checkpoint.state import State
from pipollux_hybrid.job.batch import BatchShape, BatchSizeLimits, BatchSlice
from pipollux_hybrid.job.context import JobContext
from pipollux_hybrid.job.control_plane import ControlMessage
from pipollux_hybrid.job.pipeline_spec import PipelineSchedule
from pipollux_hybrid.optim.gradient_noise_scale import GradientNoiseScale
from pipollux_hybrid.optim.scaling_rules import ScalingState
from pipollux_hybrid.sync.sync_result import SyncResult
from pipollux_perfmodel import StageEvent

from .autotuner import Autotuner
from .inheritance import ModelTraits, inherit
from .step_profile import StepConfiguration
from .step_record import StepRecord

if TYPE_CHECKING:
    from .reporter import Reporter

__all__ = ["Metrics", "StepRecord"]


class DoneStep(NamedTuple):
    """Values recorded for every optimizer step, from which a point is made if one is due."""

    time: float
    step: int
    samples: int
    epoch: int
    num_epochs: int | None
    part: BatchSlice
    shape: BatchShape
    num_microbatches: int
    step_time: float
    rate_factor: float


class MetricsState(State):
    """The part of :class:`Metrics` in checkpoints."""

    def __init__(self, metrics: Metrics) -> None:
        super().__init__("metrics.json")
        self._metrics = metrics

    def save(self, fileobj: BinaryIO) -> None:
        """Write counters, measurements, noise and the fitted model as JSON."""
        from pipollux_perfmodel import perf_params_to_json  # imports pydantic

        m = self._metrics
        content = {
            "step": m.step,
            "samples": m.samples,
            "progress": m.progress,
            "noise": m.noise.to_json() if m.noise else None,
            "perf_params": perf_params_to_json(m.perf_params) if m.perf_params else None,
            "profile": m.profile.to_json(),
            "inherited": m.profile.inherited_to_json(),
            "traits": m.traits,
            "overlap": m.overlap,
            "order": m.order,
            "limits": asdict(m.limits) if m.limits is not None else None,
        }
        fileobj.write(json.dumps(content).encode())

    def remember(self) -> Callable[[], None]:
        """Do nothing: a void step is not counted."""
        return lambda: None

    def load(self, fileobj: BinaryIO) -> None:
        """Read what :meth:`save` wrote."""
        from pipollux_perfmodel import perf_params_from_json  # imports pydantic

        m, content = self._metrics, json.load(fileobj)
        m.step = int(content["step"])
        m.samples = int(content["samples"])
        m.progress = float(content["progress"])
        if content["noise"]:
            m.restore_noise(GradientNoiseScale.from_json(content["noise"]))
        if content["perf_params"]:
            m.perf_params = perf_params_from_json(content["perf_params"])
        m.profile.load_json(content["profile"])
        m.profile.load_inherited(content.get("inherited", ()))
        m.traits = ModelTraits.from_json(content["traits"]) if content.get("traits") else None
        m.overlap = content.get("overlap")
        m.order_before = PipelineSchedule(*content["order"]) if content.get("order") else None
        m.limits_before = BatchSizeLimits.from_json(content.get("limits"))


class Metrics(Autotuner):
    """Progress and measurements of one job, from the view of one replica."""

    def __init__(self, ctx: JobContext) -> None:
        super().__init__(ctx)
        self._checkpoints = ctx.component(CheckpointManager)
        self._reporter: Reporter | None = None
        self.step = 0
        self.samples = 0
        """Samples trained on by all replicas."""
        self.rate_factor = 1.0
        """Factor of the learning rate in the last step."""
        self.epoch_size = 0
        """Samples (of text: tokens) of the current loader, over all replicas."""
        self.sample_length = 1
        """Length of one sample in that unit."""
        self._shape: BatchShape | None = None
        self._part: BatchSlice | None = None
        self._part_started = 0.0
        self._part_ended: float | None = None
        self._disturbed = False
        self._timed: tuple[StepConfiguration, int] | None = None
        self._step_time = 0.0
        self._waited: tuple[float, float] | None = None
        self._losses: list[tuple[Any, int]] = []
        self._done: DoneStep | None = None
        self._launched: DoneStep | None = None
        self._last_save = time.monotonic()
        load_state(MetricsState(self))
        self.traits = self.traits or inherit(ctx, self.profile)
        self._checkpoints.saved_step = self.step

    @property
    def step(self) -> int:
        """Optimizer steps of the whole training."""
        return self._context.step or 0

    @step.setter
    def step(self, value: int) -> None:
        self._context.step = value

    @property
    def reporter(self) -> Reporter:
        """The reporter of progress and hints, created on first use."""
        if self._reporter is None:
            from .reporter import Reporter  # imports httpx

            self._reporter = self._context.component(Reporter)
            self._reporter.send_hints_of(self.fit_and_hint)
        return self._reporter

    def pause_progress(self) -> None:
        """Pause the progress bar at the end of a loop over a loader."""
        if self._reporter is not None:
            self._reporter.pause_progress()

    def finish_progress(self) -> None:
        """Finish the progress bar at the end of a loop over epochs."""
        if self._reporter is not None:
            self._reporter.finish_progress()

    # --- the training thread -----------------------------------------------------------------

    def start_step(self, shape: BatchShape, part: BatchSlice) -> None:
        """Start a step: the loop body is about to process a part of an iteration.

        Its time begins at the end of the previous part, as it includes the loader and the step
        boundary; for the first part, or after an interruption, it begins now.
        """
        self._shape = shape
        self._waited = None
        now, self._disturbed = time.perf_counter(), False
        self._part_started = now if self._part_ended is None else self._part_ended
        self._part_ended = None
        self._part = part

    def begin_segment(self, epoch_size: int, sample_length: int = 1) -> None:
        """Start iterations of one batch shape in an epoch of ``epoch_size`` samples or tokens."""
        self.epoch_size, self.sample_length = epoch_size, sample_length
        self.interrupt_steps()

    def interrupt_steps(self) -> None:
        """Exclude the time from the last step to the next, such as a save, from step times."""
        self._part_ended = None

    def note_forward(self, *, disturbed: bool) -> None:
        """Record a forward, and whether it also measures the noise or times the stages."""
        self._disturbed |= disturbed

    def note_timed(self) -> None:
        """Record that the stages of the current step were timed; :meth:`add_timeline` follows."""
        full = self._shape is not None and self._part is not None and self._part.is_full
        loops = self._context.batch.micro_step is not None
        self._timed = (
            (self.configuration(self._shape.atomic_bsz), self.step)
            if self._shape is not None and full and loops
            else None
        )

    def note_backward(self, result: SyncResult | None) -> None:
        """Record the end of a backward, and its waiting time if it averaged the gradients."""
        self._waited = (result.sync_time, result.exchange_time) if result else (0.0, 0.0)

    def note_step(self, batch_size: int, scale: float) -> None:
        """Record an optimizer step and its batch size."""
        self.step += 1
        ctx = self._context
        self.samples += batch_size * ctx.num_replicas // ctx.env.num_replicas
        whole = scale * ctx.num_replicas / ctx.env.num_replicas
        self.progress += self.noise.gain(whole) if self.noise else 1.0

    def scaling_state(self, last_batch_size: int) -> ScalingState:
        """Return the input of the learning rate rule for the next step; ``last_batch_size`` stands
        for the initial batch size if that is not set.
        """
        batch = self._context.batch
        return ScalingState(
            scale=batch.scale,
            gain=self.gain,
            progress=self.progress,
            step=self.step,
            init_batch_size=(
                max(last_batch_size, 1) if batch.limits is None else batch.limits.init_batch_size
            ),
        )

    def note_loss(self, loss: Any) -> None:
        """Record the mean loss that the script reported."""
        micro_step = self._context.batch.micro_step
        self._losses.append((loss, micro_step.num_samples if micro_step else 1))

    def commit_step(self, part: BatchSlice, epoch: int, num_epochs: int | None) -> None:
        """Commit the step: the loop body has processed its part."""
        now = time.perf_counter()
        elapsed, self._step_time = (
            now - self._part_started,
            self._step_time + now - self._part_started,
        )
        self._part_ended = now
        assert self._shape is not None  # noqa: S101  # start_step came before
        if self._waited is None:
            self._step_time = 0.0  # no backward: an evaluation loop
            return
        self._training_shape = self._shape
        if part.is_full:
            self._add_step(self._shape, elapsed, part.is_optimizer_step)
        if part.is_optimizer_step:
            self.samples_left = self._samples_left(part, epoch, num_epochs)
            self._done = self._note_done(part, epoch, num_epochs)
            self._step_time = 0.0

    def note_exchange(self, seconds: float) -> None:
        """Record the time after a step in which this replica pushed and pulled; it is part of the
        next step's time, but not of what the model takes for a step's compute.
        """
        if self._part_ended is not None:
            self._part_ended += seconds
            self._step_time += seconds

    def _add_step(self, shape: BatchShape, elapsed: float, optimizer: bool) -> None:
        """Add a step to the profile; of push and pull, as if a whole one had followed."""
        there = self._context.at_servers
        waited, exchange = self._waited or (0.0, 0.0)
        if there is not None and optimizer and len(there.replicas) > 1:
            if there.sync_time == 0.0:
                return  # not measured yet
            elapsed, waited = elapsed + there.sync_time, there.sync_time
        self.profile.add_step(
            self.configuration(shape.atomic_bsz),
            elapsed,
            waited,
            exchange,
            optimizer=optimizer,
            disturbed=self._disturbed,
        )

    def add_timeline(
        self, events: list[StageEvent], forward: list[float], backward: list[float]
    ) -> None:
        """Add the stage times of the last timed step: mean seconds per micro-batch, [K]."""
        if self._timed is None:
            return
        (configuration, step), self._timed = self._timed, None
        self.profile.add_stages(configuration, forward, backward)
        if self._context.env.reports:
            self.reporter.add_timeline(
                step, configuration.num_stages, configuration.num_microbatches, events
            )

    def take_loss(self) -> tuple[float, int]:
        """Return this replica's share of the loss since the last call, and its samples."""
        losses, self._losses = self._losses, []
        if self._context.env.stage > 0:
            losses = []  # the replica's first process reports the same
        self._launched, self._done = self._done, None
        return (
            sum(float(loss) * samples for loss, samples in losses),
            sum(samples for _, samples in losses),
        )

    def record_agreed(self, agreed: ControlMessage | None) -> None:
        """Report the step whose losses the replicas have exchanged."""
        done, self._launched = self._launched, None
        if agreed is None or done is None or not self._context.env.reports:
            return
        loss = agreed.loss_sum / agreed.loss_samples if agreed.loss_samples > 0 else None
        # Made lazily: most points are never shown, and predictions take longer than a small step.
        reporter = self.reporter
        reporter.note_loss(done.step, loss)
        reporter.add_point(done.time, partial(self._make_point, done, loss))

    def drop_losses(self) -> None:
        """Discard the losses of a void iteration."""
        self._losses, self._launched, self._step_time = [], None, 0.0

    def flush(self) -> None:
        """Exchange pending losses; every replica calls it at the same boundary."""
        control = self._context.control
        self.record_agreed(control.collect())
        loss_sum, loss_samples = self.take_loss()
        message = ControlMessage(loss_sum=loss_sum, loss_samples=loss_samples)
        self.record_agreed(control.exchange(message))

    def checkpoint_due(self) -> bool:
        """Return whether a periodic checkpoint is due; True restarts the interval."""
        saving, now = self._checkpoints.saver, time.monotonic()
        if saving.busy:
            return False
        saving.say_failure()
        if now - self._last_save < self._context.env.checkpoint_interval:
            return False
        self._last_save = now
        return self._context.env.checkpoint_dir is not None

    def _samples_left(self, part: BatchSlice, epoch: int, num_epochs: int | None) -> float | None:
        if num_epochs is None or not self.epoch_size:
            return None
        to_come = max(num_epochs - epoch - 1, 0) * self.epoch_size
        left = to_come + max(self.epoch_size - part.next_index, 0)
        return left / self.sample_length

    def _note_done(self, part: BatchSlice, epoch: int, num_epochs: int | None) -> DoneStep:
        assert self._shape is not None  # noqa: S101  # commit_step looked
        return DoneStep(
            time.time(),
            self.step,
            self.samples,
            epoch,
            num_epochs,
            part,
            self._shape,
            self._context.batch.num_microbatches,
            self._step_time,
            self.rate_factor,
        )

    def _make_point(self, done: DoneStep, loss: float | None) -> StepRecord:
        """Return the record of a step, with the prediction of the current model."""
        ctx, shape, is_full = self._context, done.shape, done.part.is_full
        batch_size = shape.batch_size * ctx.num_replicas // ctx.env.num_replicas
        predicted = goodput = efficiency = None
        goodput_fn = self.goodput_function()
        if goodput_fn is not None and is_full:
            predicted = float(
                goodput_fn.step_time(
                    ctx.num_nodes,
                    ctx.num_replicas,
                    shape.atomic_bsz,
                    shape.accum_steps,
                    done.num_microbatches,
                ).total
            )
        if goodput_fn is not None and batch_size >= goodput_fn.init_batch_size:
            efficiency = float(goodput_fn.efficiency(batch_size))
            goodput = batch_size / done.step_time * efficiency if is_full else None
        return StepRecord(
            time=done.time,
            step=done.step,
            epoch=done.epoch,
            samples=done.samples,
            loss=loss,
            batch_size=batch_size,
            atomic_bsz=shape.atomic_bsz,
            accum_steps=shape.accum_steps,
            num_replicas=ctx.num_replicas,
            step_time=done.step_time,
            predicted_step_time=predicted,
            goodput=goodput,
            efficiency=efficiency,
            num_microbatches=done.num_microbatches,
            schedule=str(ctx.pipeline.order) if ctx.mesh else "",
            epoch_samples=min(done.part.next_index, self.epoch_size),
            epoch_size=self.epoch_size,
            num_epochs=done.num_epochs,
            noise_scale=self.noise_scale(),
            rate_factor=done.rate_factor,
        )
