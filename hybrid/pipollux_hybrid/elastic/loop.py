"""The base class of elastic loops over data.

A loop has a position that survives restarts, and an adaptive batch shape. Subclasses
(:mod:`~pipollux_hybrid.elastic.loader`, :mod:`~pipollux_hybrid.elastic.bptt`) provide the batches
of a *segment*, a sequence of iterations with one batch shape.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, Generic, TypeVar

import torch

from pipollux_hybrid.checkpoint.manager import load_state
from pipollux_hybrid.checkpoint.rng_state import random_state
from pipollux_hybrid.checkpoint.state import State, States
from pipollux_hybrid.errors import CheckpointError, ConfigurationError
from pipollux_hybrid.job.batch import BatchShape, BatchSizeLimits, BatchSlice, MicroStep
from pipollux_hybrid.job.context import JobContext, context, from_scratch
from pipollux_hybrid.job.control_plane import ControlMessage
from pipollux_hybrid.job.membership import JobPlace
from pipollux_hybrid.pipeline.num_microbatches import initial_microbatches, possible_microbatches
from pipollux_hybrid.push_pull.component import learner_of
from pipollux_hybrid.push_pull.learner import Learner
from pipollux_hybrid.resize.elastic_membership import elastic_membership
from pipollux_hybrid.telemetry.metrics import Metrics

from .epoch import epoch_state
from .step_boundary import IterationEnd, StepBoundary

T = TypeVar("T")
KIND = "loader"
LOG = logging.getLogger(__name__)


class LoopState(State):
    """Position and batch shape of a loop; the position is invalid for other data (``identity``)."""

    takes_over = False

    def __init__(self, ctx: JobContext, identity: dict[str, Any]) -> None:
        super().__init__(numbered_name(ctx, KIND, "json"))
        self.identity = identity
        self.index = 0
        """Samples (of text: tokens) of the epoch that all replicas together have taken."""
        self.details: dict[str, Any] = {}
        """Further state of a subclass, as JSON."""
        self.atomic_bsz = 0
        """Current atomic batch size; 0 before one was chosen. It is not saved."""
        self.accum_steps = 0

    def save(self, fileobj: BinaryIO) -> None:
        """Write the position as JSON."""
        content = {"index": self.index, "details": self.details, "identity": self.identity}
        fileobj.write(json.dumps(content).encode())

    def load(self, fileobj: BinaryIO) -> None:
        """Read the output of :meth:`save`."""
        content = json.load(fileobj)
        index, identity = int(content["index"]), content["identity"]
        if index > 0 and identity != self.identity:
            raise CheckpointError(
                f"the last run stopped at sample {index} of an epoch over {identity}, but the "
                f"script now has {self.identity}: give it the same data until the epoch is over, "
                f"or {from_scratch()}"
            )
        self.index, self.details = index, content["details"]

    def remember(self) -> Callable[[], None]:
        """The position is that of the last step that counts."""
        return _nothing

    def rejoined(self) -> None:
        """Reset the batch shape, which is then chosen again."""
        self.atomic_bsz = self.accum_steps = 0

    def rewind(self) -> None:
        """Go back to the beginning of an epoch."""
        self.index, self.details = 0, {}


class ElasticLoop(Generic[T]):
    """A loop over data that any number of replicas share."""

    def _prepare(self, batch_size: int, identity: dict[str, Any]) -> None:
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise ConfigurationError(
                f"batch_size={batch_size!r}: a whole number of at least 1 is needed"
            )
        self._init_batch_size = batch_size
        size = identity.get("samples", identity.get("tokens"))
        self._epoch_size = size if isinstance(size, int) else 0
        # Positions in a text count tokens, of which a sample is a window.
        self._sample_length = int(identity.get("bptt_len", 1))
        self._context = context()
        self._metrics = self._context.component(Metrics)
        refuse_inside_loop(self._context, type(self).__name__)
        self._epochs = epoch_state(self._context)
        self._boundary = StepBoundary(self._context)
        self._membership = elastic_membership(self._context)
        self._learner: Learner | None = None
        """Of the loop under way, if servers hand out its positions."""
        self._limits: BatchSizeLimits | None = None
        self._outside = 0
        """Loops with gradients outside of a loop over epochs."""
        self._random = random_state(self._context)
        self._state = LoopState(self._context, identity)
        self._state.common = self._description()
        load_state(self._state)

    def _segment(self) -> Iterator[tuple[BatchSlice, T]]:
        """Yield parts and batches from the current position on, in the current shape."""
        raise NotImplementedError

    def autoscale_batch_size(
        self,
        max_batch_size: int,
        local_bsz_bounds: tuple[int | None, int | None] | None = None,
        gradient_accumulation: bool = False,
    ) -> None:
        """Choose the batch size from ``batch_size`` up to ``max_batch_size`` by goodput.

        Args:
            max_batch_size: Largest batch size over all replicas.
            local_bsz_bounds: Smallest and largest atomic batch size, that is, samples of one
                replica in one forward and backward; the largest is limited by its devices' memory.
                None for either: unbounded.
            gradient_accumulation: Whether accumulation steps may be used to reach larger batches.

        Raises:
            ConfigurationError: The bounds are invalid or cannot be satisfied, or another loader is
                autoscaled already.
        """
        batch = self._context.batch
        if batch.limits is not None and self._limits is None:
            raise ConfigurationError(
                "autoscale_batch_size was called on two loaders: a job has one batch size, so call "
                "it on the loader of the training samples only"
            )
        limits = BatchSizeLimits.of(
            self._init_batch_size, max_batch_size, local_bsz_bounds, gradient_accumulation
        )
        limits.check(self._context.env.num_replicas)
        self._limits = batch.limits = limits
        self._state.common = self._description()

    @property
    def current_index(self) -> int:
        """Samples of this epoch that all replicas together have taken so far."""
        return self._state.index

    @property
    def current_batch_size(self) -> int:
        """Current batch size: samples of one optimizer step over all replicas."""
        return self._shape().batch_size

    @property
    def current_local_bsz(self) -> int:
        """Current atomic batch size."""
        return self._shape().atomic_bsz

    @property
    def accumulation_steps(self) -> int:
        """Current number of accumulation steps before each optimizer step."""
        return self._shape().accum_steps

    def __iter__(self) -> Iterator[T]:
        """Iterate over this replica's atomic batches, from the position of the last attempt."""
        ctx = self._context
        refuse_inside_loop(ctx, type(self).__name__)
        self._note_pass()
        if self._is_skipped() or self._is_over_for_joining() or self._is_over_on_servers():
            return
        self._random.restore_once()
        batch = ctx.batch
        batch.loop = self
        try:
            yield from self._iterations()
        except GeneratorExit:
            if self._learner is not None:
                self._learner.left_loop()
            raise
        finally:
            # Also after a `break`, which completes the loop.
            batch.micro_step = batch.loop = None
            if self._membership is not None:
                self._membership.recovery.forget()
            self._state.rewind()
            self._epochs.loops_done += 1
            self._epochs.trainings += self._learner is not None
            self._metrics.interrupt_steps()
            self._metrics.pause_progress()
        # The loop is recorded as done before the job may stop.
        self._boundary.settle()

    def _note_pass(self) -> None:
        """Log once that the script trains several epochs which it does not count with
        :func:`~pipollux_hybrid.elastic.epoch.remaining_epochs_until`.
        """
        if self._epochs.entered or not torch.is_grad_enabled():
            return
        self._outside += 1
        env = self._context.env
        if self._outside == 2 and env.leads and env.checkpoint_dir is not None:
            LOG.warning(
                "a loader is looped over again outside of remaining_epochs_until: after a restart "
                "the code around its loops runs again for those that are over, such as "
                "scheduler.step(), and shuffle=True gives the same order in each; write for epoch "
                "in pipollux.remaining_epochs_until(…)"
            )

    def _iterations(self) -> Iterator[T]:
        current, metrics, losses = self._context.batch, self._metrics, self._context.control.losses
        self._begin()
        while True:
            self._choose_configuration()
            self._remember()
            metrics.begin_segment(self._epoch_size, self._sample_length)
            is_first = True
            learner = self._learner
            for part, batch in self._segment():
                if is_first:
                    self._boundary.announce(self._place(part), adapts=self._limits is not None)
                micro_step = MicroStep(part.num_samples, part.is_optimizer_step)
                current.begin_pass(micro_step, is_first=is_first)
                is_first = part.is_optimizer_step
                metrics.start_step(self._shape(), part)
                yield batch
                if not losses.void:
                    if part.is_optimizer_step:
                        current.check_backwards()
                    metrics.commit_step(part, self._epochs.epoch, self._epochs.num_epochs)
                current.micro_step = None
                if part.is_optimizer_step:
                    ended = self._boundary.end_iteration()
                    if ended is not IterationEnd.VOID:
                        self._state.index = part.next_index
                        self._iteration_done(part)
                        if part.is_last:
                            return
                        void = learner is not None and learner.step_done()
                        if learner is not None:
                            metrics.note_exchange(learner.exchanged)
                        agreed = self._boundary.settle()
                        if void:
                            self._begin()
                            break
                    if ended is not IterationEnd.DONE:
                        self._begin()
                        break
                    if self._change_replicas(agreed) or self._adopt(agreed):
                        break
                    self._remember()
            else:
                if learner is None or not learner.finish(self._shape().batch_size):
                    return
                self._begin()

    def _remember(self) -> None:
        if self._membership is not None:
            self._membership.recovery.remember()

    def _job_place(self) -> JobPlace:
        return JobPlace(self._epochs.epoch, self._epochs.loops_done)

    def _is_skipped(self) -> bool:
        skipped, learner = self._epochs.skip_loop(), learner_of(self._context)
        self._epochs.trainings += skipped and learner is not None and learner.trains()
        return skipped

    def _is_over_for_joining(self) -> bool:
        if self._membership is None:
            return False
        forget_finished_epochs(self._context)
        if self._membership.arrive(self._job_place(), self._description()):
            return False
        self._epochs.loops_done += 1
        return True

    def _is_over_on_servers(self) -> bool:
        """Begin a loop of the training at the servers, if there are any; return whether it is over
        there. A loop for evaluation is each replica's own, over all samples.
        """
        learner, self._learner = learner_of(self._context), None
        if learner is None or not learner.trains():
            return False
        if self._order() is None:
            raise ConfigurationError(
                f"{type(self).__name__} with synchronization=PushPull(…): servers hand out "
                "positions of a map-style data set, which this is none; use an AdaptiveDataLoader "
                "over one"
            )
        place = (self._epochs.epoch, self._epochs.trainings)
        if self._limits is not None and self._limits.max_batch_size > self._init_batch_size:
            raise ConfigurationError(
                "autoscale_batch_size with synchronization=PushPull(…): a replica keeps its batch "
                f"size; set max_batch_size={self._init_batch_size}, or leave one of the two out"
            )
        if learner.open(place, self._epoch_size, self._shape().batch_size, self._description()):
            self._epochs.loops_done += 1
            self._epochs.trainings += 1
            return True
        self._learner = learner
        return False

    def _order(self) -> torch.Tensor | None:
        """Return the order of the samples in this epoch; None: they come as a stream."""
        return None

    def _change_replicas(self, agreed: ControlMessage | None) -> bool:
        if self._membership is None or not self._membership.is_due(agreed):
            return False
        forget_finished_epochs(self._context)
        if not self._membership.change(self._job_place(), self._description()):
            return False
        self._begin()
        return True

    def _iteration_done(self, part: BatchSlice) -> None:
        """Handle a completed iteration; subclasses advance their position."""

    def _place(self, part: BatchSlice) -> str:
        if self._context.env.world_size == 1:
            return ""  # no peers to compare with
        end = " and the epoch's last" if part.is_last else ""
        return (
            f"samples {self._state.index} to {part.next_index}{end} of loop "
            f"{self._epochs.loops_done} in epoch {self._epochs.epoch}"
        )

    def _begin(self) -> None:
        """Check that all replicas begin the same loop; the first loop chooses the batch shape."""
        ctx, epochs = self._context, self._epochs
        agreed = self._boundary.begin_loop(
            f"the beginning of loop {epochs.loops_done} in epoch {epochs.epoch}, over "
            f"{self._description()}",
            self._first_choice,
        )
        self._random.agree_root()
        if self._chooses():
            self._metrics.shape_chosen = True
            self._state.atomic_bsz = agreed.atomic_bsz
            self._state.accum_steps = agreed.accum_steps
            ctx.batch.proposed_microbatches = agreed.num_microbatches

    def _chooses(self) -> bool:
        return self._limits is not None and not self._metrics.shape_chosen

    def _first_choice(self) -> ControlMessage:
        """Return the best shape of the goodput model, if it has one, else the initial shape."""
        chooses = self._chooses() and self._context.env.leads
        atomic_bsz, accum_steps, num_microbatches = (
            self._metrics.best_shape() if chooses else None
        ) or (0, 0, 0)
        return ControlMessage(
            atomic_bsz=atomic_bsz, accum_steps=accum_steps, num_microbatches=num_microbatches
        )

    def _description(self) -> str:
        """Return a description of the loop that must be equal on all replicas."""
        data = ", ".join(f"{name}={value!r}" for name, value in self._state.identity.items())
        limits = "" if self._limits is None else f", autoscaled by {self._limits}"
        return f"{type(self).__name__}({data}, batch_size={self._init_batch_size}){limits}"

    def _choose_configuration(self) -> None:
        batch, pipeline = self._context.batch, self._context.pipeline
        batch.scale = self._shape().batch_size / self._init_batch_size
        if pipeline.microbatches_follow:
            wanted, fewest = batch.proposed_microbatches, pipeline.fewest_samples
            atomic_bsz = self._shape().atomic_bsz
            batch.num_microbatches = (
                possible_microbatches(wanted, atomic_bsz, fewest)
                if wanted
                else initial_microbatches(pipeline.num_stages, atomic_bsz, fewest)
            )

    def _adopt(self, agreed: ControlMessage | None) -> bool:
        """Apply an agreed message; return whether a new segment has to begin."""
        if agreed is None or agreed.atomic_bsz == 0 or self._limits is None:
            return False
        before, ctx = self._shape(), self._context
        self._state.atomic_bsz = agreed.atomic_bsz
        self._state.accum_steps = agreed.accum_steps
        ctx.batch.proposed_microbatches = agreed.num_microbatches
        if self._shape() != before:
            return True
        self._choose_configuration()
        return False

    def _shape(self) -> BatchShape:
        num_replicas = self._context.env.num_replicas
        if self._limits is None:
            return BatchShape(self._init_batch_size, num_replicas, 0)
        atomic_bsz, accum_steps = self._state.atomic_bsz, self._state.accum_steps
        if atomic_bsz == 0:
            return self._limits.initial_shape(num_replicas)
        return BatchShape(num_replicas * atomic_bsz * (accum_steps + 1), num_replicas, accum_steps)


def _nothing() -> None:
    pass


def refuse_inside_loop(ctx: JobContext, what: str) -> None:
    """Raise a ConfigurationError if ``what`` is created or run inside a loop over a loader."""
    if ctx.batch.loop is not None:
        raise ConfigurationError(
            f"{what} was made or looped over inside the body of a loop over "
            f"{type(ctx.batch.loop).__name__}, which a restart does not run again: do it "
            "before or after that loop (or use a plain torch DataLoader there)"
        )


def numbered_name(ctx: JobContext, kind: str, suffix: str) -> str:
    """Return a name for the next state of a kind, the same in every attempt of the script."""
    forget_finished_epochs(ctx)
    prefix = f"{kind}-{epoch_state(ctx).phase}-"
    return f"{prefix}{sum(name.startswith(prefix) for name in ctx.component(States))}.{suffix}"


def forget_finished_epochs(ctx: JobContext) -> None:
    """Drop states created in completed epochs from checkpoints."""
    epochs, states = epoch_state(ctx), ctx.component(States)
    for name in list(states):
        phase = name.split("-")[1] if name.count("-") == 2 else ""
        number = phase.removeprefix("epoch")
        if phase != number and number.isdecimal() and int(number) < epochs.epoch:
            del states[name]
