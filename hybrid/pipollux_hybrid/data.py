"""A data loader whose batch size follows the goodput, and whose position outlives restarts.

Names are AdaptDL's. The loader is also where step boundaries are, so it is here that the replicas
agree to stop, to save, or to change the batch size.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sized
from dataclasses import replace
from typing import Any, BinaryIO, TypeVar, cast

from torch.utils.data import DataLoader, Dataset

from . import interrupt
from .checkpoint import State, load_state, save_all_states, write_stop_marker
from .context import MicroStep, context
from .control import ControlMessage
from .epoch import epoch_state
from .errors import CheckpointError, ConfigurationError
from .limits import BatchSizeLimits
from .rng import random_state
from .sampler import BatchShape, ElasticSampler, Part

__all__ = ["AdaptiveDataLoader"]

T = TypeVar("T")


class LoaderState(State):
    """Position of a loader, and the batch shape it runs with."""

    def __init__(self, number: int) -> None:
        super().__init__(f"loader-{number}.json")
        self.index = 0
        """Samples of the epoch's order that all replicas together have taken."""
        self.atomic_bsz = 0
        """Atomic batch size in use; 0 before one was chosen. Every run chooses anew."""
        self.accum_steps = 0
        """Accumulation steps in use."""

    def save(self, fileobj: BinaryIO) -> None:
        """Write the position as JSON."""
        fileobj.write(json.dumps({"index": self.index}).encode())

    def load(self, fileobj: BinaryIO) -> None:
        """Read what :meth:`save` wrote."""
        self.index = int(json.load(fileobj)["index"])


class AdaptiveDataLoader(DataLoader[T]):
    """A :class:`torch.utils.data.DataLoader` over the replicas of a job.

    Every sample is taken exactly once an epoch, whatever stops, restarts and changes of replicas
    or batch size lie in between. Each pass of the loop body works on one atomic batch; gradients
    are kept on accumulation steps and synchronised on the last one, without a change to the loop.

    Example::

        loader = AdaptiveDataLoader(dataset, batch_size=64, shuffle=True)
        loader.autoscale_batch_size(1024, local_bsz_bounds=(16, 128), gradient_accumulation=True)
        for epoch in remaining_epochs_until(30):
            for inputs, targets in loader:
                optimizer.zero_grad()
                loss_function(model(inputs), targets).backward()
                optimizer.step()

    Args:
        dataset: A map-style data set (with ``__len__`` and ``__getitem__``).
        batch_size: Samples of one optimizer step over ALL replicas; with autoscaling the
            initial one.
        shuffle: Whether each epoch has an order of its own.
        seed: Seed of these orders; the same on all replicas.
        **options: Handed to :class:`torch.utils.data.DataLoader` (``num_workers``, ``collate_fn``,
            ``pin_memory``, …); ``sampler``, ``batch_sampler`` and ``drop_last`` are this class's
            own business.

    Raises:
        ConfigurationError: An argument is out of range, or the data set has no length.
    """

    def __init__(
        self,
        dataset: Dataset[T],
        batch_size: int = 1,
        shuffle: bool = False,
        *,
        seed: int = 0,
        **options: Any,
    ) -> None:
        for name in ("sampler", "batch_sampler", "drop_last"):
            if options.pop(name, None):
                raise ConfigurationError(
                    f"AdaptiveDataLoader takes no {name}: it shares the samples out itself, each "
                    "exactly once an epoch; use shuffle=True or a torch.utils.data.Subset"
                )
        if not isinstance(dataset, Sized):
            raise ConfigurationError(
                f"{type(dataset).__name__} has no length: AdaptiveDataLoader needs a map-style "
                "data set"
            )
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise ConfigurationError(
                f"batch_size={batch_size!r}: a whole number of at least 1 is needed"
            )
        # Elements are fetched by the loaders of _segment; this one carries the options.
        super().__init__(dataset, batch_size=batch_size, shuffle=False, **options)
        self._options = options
        self._context = context()
        self._epochs = epoch_state(self._context)
        self._sampler = ElasticSampler(len(dataset), shuffle=shuffle, seed=seed)
        number = sum(isinstance(state, LoaderState) for state in self._context.states.values())
        self._state = LoaderState(number)
        load_state(self._state)
        self._limits: BatchSizeLimits | None = None
        self._random = random_state(self._context)

    def autoscale_batch_size(
        self,
        max_batch_size: int,
        local_bsz_bounds: tuple[int, int] | None = None,
        gradient_accumulation: bool = False,
    ) -> None:
        """Let the goodput choose the batch size from ``batch_size`` up to ``max_batch_size``.

        Args:
            max_batch_size: Largest batch size over all replicas.
            local_bsz_bounds: Smallest and largest atomic batch size, that is, samples of one
                replica in one forward and backward; the largest is what fits its devices' memory.
            gradient_accumulation: Whether accumulation steps may be used to get further.

        Raises:
            ConfigurationError: A bound is below 1 or below its lower end, or above what can be met.
        """
        assert self.batch_size is not None  # noqa: S101  # checked in __init__
        self._limits = BatchSizeLimits(
            init_batch_size=self.batch_size,
            max_batch_size=max_batch_size,
            local_bsz_bounds=local_bsz_bounds,
            gradient_accumulation=gradient_accumulation,
        )
        self._limits.check(self._context.env.num_replicas)
        self._context.metrics.limits = self._limits

    @property
    def current_index(self) -> int:
        """Samples of this epoch that all replicas together have taken so far."""
        return self._state.index

    @property
    def current_batch_size(self) -> int:
        """Samples of one optimizer step over all replicas, as it is now."""
        return self._shape().batch_size

    @property
    def current_local_bsz(self) -> int:
        """Atomic batch size, as it is now."""
        return self._shape().atomic_bsz

    @property
    def accumulation_steps(self) -> int:
        """Accumulation steps before each optimizer step, as they are now."""
        return self._shape().accum_steps

    def __len__(self) -> int:
        """Batches of this replica in a whole epoch at the present batch size."""
        shape = self._shape()
        parts = self._sampler.parts(epoch=0, index=0, shape=shape, rank=0)
        return sum(1 for _ in parts)

    def __iter__(self) -> Iterator[T]:  # type: ignore[override]  # base: a private type
        """Iterate over this replica's atomic batches, from where the last run stopped."""
        if self._epochs.skip_loop():
            return
        self._random.restore_once()
        try:
            yield from self._iterations()
        except GeneratorExit:
            # The script left its loop with `break`: to it, the loop is done.
            self._context.micro_step = None
            self._end_loop()
            raise
        self._end_loop()
        # The loop is recorded as done before anybody may stop.
        self._boundary()

    def _iterations(self) -> Iterator[T]:
        state, metrics = self._state, self._context.metrics
        while state.index < self._sampler.num_samples:
            # A segment is a stretch of iterations of one batch shape.
            for part, batch in self._segment():
                self._context.micro_step = MicroStep(part.num_samples, part.is_optimizer_step)
                metrics.start_step(self._shape(), part)
                yield batch
                metrics.commit_step(part, self._epochs)
                self._context.micro_step = None
                if part.is_optimizer_step:
                    state.index = part.next_index
                    if state.index < self._sampler.num_samples and self._boundary():
                        break

    def _end_loop(self) -> None:
        self._state.index = 0
        self._epochs.loops_done += 1
        self._context.metrics.interrupt_steps()

    def _segment(self) -> Iterator[tuple[Part, T]]:
        """Parts and batches from the present position on, fetched ahead by the workers."""
        self._choose_initial_shape()
        self._context.metrics.begin_segment(self._sampler.num_samples)
        self._context.scale = self._scale()
        # One pass gives the workers their indices, a second one tells this loop what they mean.
        ahead = (part.indices for part in self._parts())
        batches = DataLoader(
            self.dataset,
            batch_sampler=cast("Any", _Lists(ahead)),
            **{"generator": self._sampler.generator(self._epochs.epoch), **self._options},
        )
        return zip(self._parts(), batches, strict=True)

    def _parts(self) -> Iterator[Part]:
        return self._sampler.parts(
            epoch=self._epochs.epoch,
            index=self._state.index,
            shape=self._shape(),
            rank=self._context.env.rank,
        )

    def _boundary(self) -> bool:
        """Between two iterations: agree with the other replicas on what happens next.

        Returns:
            Whether the batch shape changed.
        """
        ctx, metrics = self._context, self._context.metrics
        agreed = ctx.control.collect()
        metrics.record_agreed(agreed)
        ctx.control.launch(self._message())
        if agreed is None:
            return False
        if agreed.stop:
            self._stop()
        if agreed.save:
            self._save_periodically()
        return self._adopt(agreed)

    def _message(self) -> ControlMessage:
        metrics = self._context.metrics
        message = metrics.loss_message()
        if self._context.env.rank == 0:
            atomic_bsz, accum_steps = metrics.take_proposal()
            message = replace(
                message,
                save=metrics.checkpoint_due(),
                atomic_bsz=atomic_bsz,
                accum_steps=accum_steps,
            )
        return replace(message, stop=interrupt.stop_requested())

    def _stop(self) -> None:
        """Save once and leave, all replicas at this very step."""
        ctx = self._context
        ctx.metrics.flush()
        save_all_states()
        write_stop_marker(ctx.metrics.step)
        ctx.control.barrier()
        if ctx.env.rank == 0:
            hint = "" if ctx.env.checkpoint_dir else "; set PIPOLLUX_CHECKPOINT_DIR to go on later"
            print(f"pipollux: stopped at step {ctx.metrics.step} as asked{hint}", file=sys.stderr)
        sys.exit(interrupt.exit_code())

    def _save_periodically(self) -> None:
        self._context.metrics.interrupt_steps()
        try:
            save_all_states(background=self._context.env.checkpoint_background)
        except CheckpointError as error:
            # Training goes on; the next one is tried after the same interval.
            print(f"pipollux: {error}", file=sys.stderr)

    def _adopt(self, agreed: ControlMessage) -> bool:
        if agreed.atomic_bsz == 0 or self._limits is None:
            return False
        before = self._shape()
        self._state.atomic_bsz = agreed.atomic_bsz
        self._state.accum_steps = agreed.accum_steps
        return self._shape() != before

    def _choose_initial_shape(self) -> None:
        """At the start of a run: what the goodput model knows, else the initial batch size."""
        if self._limits is None or self._context.metrics.shape_chosen:
            return
        metrics = self._context.metrics
        atomic_bsz, accum_steps = metrics.best_shape() or (0, 0)
        agreed = self._context.control.exchange(
            ControlMessage(atomic_bsz=atomic_bsz, accum_steps=accum_steps)
            if self._context.env.rank == 0
            else ControlMessage()
        )
        self._state.atomic_bsz = agreed.atomic_bsz
        self._state.accum_steps = agreed.accum_steps
        metrics.shape_chosen = True

    def _shape(self) -> BatchShape:
        num_replicas = self._context.env.num_replicas
        assert self.batch_size is not None  # noqa: S101  # checked in __init__
        if self._limits is None:
            return BatchShape(self.batch_size, num_replicas, 0)
        atomic_bsz, accum_steps = self._state.atomic_bsz, self._state.accum_steps
        if atomic_bsz == 0:
            return self._limits.initial_shape(num_replicas)
        return BatchShape(num_replicas * atomic_bsz * (accum_steps + 1), num_replicas, accum_steps)

    def _scale(self) -> float:
        assert self.batch_size is not None  # noqa: S101  # checked in __init__
        return self._shape().batch_size / self.batch_size


class _Lists:
    """A batch sampler over an iterator of index lists."""

    def __init__(self, lists: Iterator[list[int]]) -> None:
        self._lists = lists

    def __iter__(self) -> Iterator[list[int]]:
        return self._lists
