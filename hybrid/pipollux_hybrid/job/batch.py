"""The current batch: its shape, the bounds of its size, and the current micro-step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from pipollux_hybrid.errors import (
    Allowed,
    ConfigurationError,
    SynchronizationError,
    check_values,
    is_sequence,
    is_whole,
    switch,
)
from pipollux_utils.text import count

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class BatchShape:
    """The number of samples of an iteration, and of the parts they are divided into: ``num_replicas
    * (accum_steps + 1)``, with adaptive batch sizes exactly the atomic batch size each.
    """

    batch_size: int
    num_replicas: int
    accum_steps: int

    @property
    def num_steps(self) -> int:
        """Number of micro-steps of a full iteration: accumulation steps and the optimizer step."""
        return self.accum_steps + 1

    @property
    def num_parts(self) -> int:
        """Parts of a full iteration."""
        return self.num_replicas * self.num_steps

    @property
    def atomic_bsz(self) -> int:
        """Samples of the largest part."""
        return -(-self.batch_size // self.num_parts)


class BatchSlice(NamedTuple):
    """The part of one replica in one micro-step of an iteration."""

    indices: Sequence[int]
    """Indices into the data set, or positions in a stream of samples; never empty."""
    num_samples: int
    """Number of samples that count: all, or 0 for padding that keeps the replicas in step."""
    is_optimizer_step: bool
    """Whether this is the last micro-step of its iteration."""
    is_full: bool
    """Whether the iteration has a whole batch; only the last one of an epoch may not."""
    next_index: int
    """Position in the epoch after this iteration."""
    is_last: bool
    """Whether the epoch ends with this iteration."""


def num_parts(num_samples: int, shape: BatchShape) -> int:
    """Return the number of parts per replica in a whole epoch."""
    full, rest = divmod(num_samples, shape.batch_size)
    of_rest = min(-(-rest // (shape.num_replicas * shape.atomic_bsz)), shape.accum_steps + 1)
    return full * (shape.accum_steps + 1) + of_rest


def split_evenly(count: int, num_parts: int) -> list[int]:
    """Return ``num_parts`` sizes that sum to ``count``, the larger first, at most 1 apart."""
    small, larger = divmod(count, num_parts)
    return [small + 1] * larger + [small] * (num_parts - larger)


def _is_bounds(value: Any) -> bool:
    pair = is_sequence(value) and len(value) == 2
    return value is None or (pair and all(end is None or is_whole(end) for end in value))


AUTOSCALING = {
    "max_batch_size": Allowed(is_whole, "a whole number is needed"),
    "local_bsz_bounds": Allowed(
        _is_bounds,
        "(smallest, largest) of one replica in one forward and backward is needed, whole numbers "
        "or None for either, as in (8, 64), or None for no bounds",
    ),
    "gradient_accumulation": switch(),
}


@dataclass(frozen=True, kw_only=True)
class BatchSizeLimits:
    """Bounds of the batch size, over all replicas and per replica."""

    init_batch_size: int
    """Batch size that the learning rate was chosen for."""
    max_batch_size: int
    local_bsz_bounds: tuple[int, int] | None = None
    """Smallest and largest atomic batch size."""
    gradient_accumulation: bool = False
    """Whether accumulation steps may be used."""

    @classmethod
    def of(
        cls,
        init_batch_size: int,
        max_batch_size: int,
        local_bsz_bounds: tuple[int | None, int | None] | None,
        gradient_accumulation: bool,
    ) -> BatchSizeLimits:
        """Return the limits for the arguments of a script; a bound of None is as wide as possible.
        Raises a ConfigurationError for an argument of the wrong type.
        """
        values = {
            "max_batch_size": max_batch_size,
            "local_bsz_bounds": local_bsz_bounds,
            "gradient_accumulation": gradient_accumulation,
        }
        check_values(AUTOSCALING, values)
        smallest, largest = local_bsz_bounds or (None, None)
        smallest = 1 if smallest is None else smallest
        largest = max_batch_size if largest is None else largest
        return cls(
            init_batch_size=init_batch_size,
            max_batch_size=max_batch_size,
            local_bsz_bounds=None if local_bsz_bounds is None else (smallest, largest),
            gradient_accumulation=gradient_accumulation,
        )

    @classmethod
    def from_json(cls, content: dict[str, Any] | None) -> BatchSizeLimits | None:
        """Return limits from the JSON form of ``dataclasses.asdict``."""
        if content is None:
            return None
        bounds = content["local_bsz_bounds"]
        return cls(**{**content, "local_bsz_bounds": tuple(bounds) if bounds else None})

    def check(self, num_replicas: int) -> None:
        """Raise a ConfigurationError, with allowed values, if no batch size meets the bounds."""
        if self.max_batch_size < self.init_batch_size:
            raise ConfigurationError(
                f"max_batch_size={self.max_batch_size}: must be at least "
                f"batch_size={self.init_batch_size}"
            )
        if self.local_bsz_bounds is None:
            return
        smallest, largest = self.local_bsz_bounds
        if not 1 <= smallest <= largest:
            raise ConfigurationError(
                f"local_bsz_bounds={self.local_bsz_bounds}: (smallest, largest) with "
                "1 <= smallest <= largest is needed"
            )
        replicas = count(num_replicas, "replica")
        if smallest * num_replicas > self.max_batch_size:
            raise ConfigurationError(
                f"local_bsz_bounds={self.local_bsz_bounds}: at least {smallest} samples per "
                f"replica on {replicas} exceed max_batch_size={self.max_batch_size}; lower the "
                "smallest local batch size or ask for fewer replicas"
            )
        if largest * num_replicas < self.init_batch_size and not self.gradient_accumulation:
            raise ConfigurationError(
                f"local_bsz_bounds={self.local_bsz_bounds}: at most {largest} samples per "
                f"replica on {replicas} do not reach batch_size={self.init_batch_size}; pass "
                "gradient_accumulation=True or raise the largest local batch size"
            )

    def initial_shape(self, num_replicas: int) -> BatchShape:
        """Return the initial batch size in the fewest parts that the bounds allow.

        The size is exact, as the learning rate was chosen for it, unless the smallest local batch
        size of all replicas together exceeds it.
        """
        smallest, largest = self.local_bsz_bounds or (1, self.max_batch_size)
        batch_size = max(self.init_batch_size, smallest * num_replicas)
        return BatchShape(batch_size, num_replicas, -(-batch_size // (largest * num_replicas)) - 1)


@dataclass(frozen=True)
class MicroStep:
    """The part of an iteration that one pass of the loop body processes."""

    num_samples: int
    """Samples of this replica that count; 0 for padding that keeps the replicas in step."""
    is_optimizer_step: bool
    """Whether gradients are synchronized and the optimizer steps after this one."""


@dataclass
class BatchConfig:
    """State of the current loop over a loader; written by the loop unless stated otherwise."""

    micro_step: MicroStep | None = None
    """None outside of an AdaptiveDataLoader."""
    loop: object | None = None
    limits: BatchSizeLimits | None = None
    """Bounds within which goodput chooses the batch size; None: it is fixed."""
    scale: float = 1.0
    """Batch size over initial batch size, which scales the learning rate."""
    num_microbatches: int = 1
    """Number M of micro-batches; HybridParallel writes the script's own number."""
    proposed_microbatches: int = 0
    """M that the goodput model proposed last; 0 before its first proposal."""
    loss_scale: Tensor | None = None
    """Factor of the loss of the next backward, written by GradScaler."""
    passes: int = 0
    """Passes of the loop body in the current iteration so far."""
    trained: list[MicroStep] = field(default_factory=list)
    """Those of them with a backward, written by HybridParallel."""

    def begin_pass(self, micro_step: MicroStep, *, is_first: bool) -> None:
        """Begin a pass of the loop body."""
        if is_first:
            self.passes = 0
            self.trained.clear()
        self.micro_step, self.passes = micro_step, self.passes + 1

    def note_backward(self) -> None:
        """Record a backward of the current pass."""
        part = self.micro_step
        if part is not None and not any(part is other for other in self.trained):
            self.trained.append(part)

    def check_backwards(self) -> None:
        """Raise a SynchronizationError if only some passes of the iteration had a backward."""
        trained = len(self.trained)
        if self.micro_step is not None and 0 < trained < self.passes:
            raise SynchronizationError(
                f"the loop body ran a backward in {trained} of {self.passes} passes over one batch "
                "(accumulation steps), so the gradient would be that of a part of the batch: run "
                "it in all of them or in none, as by multiplying the loss by zero, or train with "
                "model.train_step and skip optimizer.step() where its loss is not finite"
            )

    @property
    def accumulates(self) -> bool:
        """Whether the current micro-step is an accumulation step, without an optimizer step."""
        return self.micro_step is not None and not self.micro_step.is_optimizer_step
