"""The batch under way: how it is cut, what it may become, and what the loop body works on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from pipollux_hybrid.errors import (
    Allowed,
    ConfigurationError,
    check_values,
    is_sequence,
    is_whole,
    switch,
)

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "BatchConfig",
    "BatchShape",
    "BatchSizeLimits",
    "BatchSlice",
    "MicroStep",
    "num_parts",
    "split_evenly",
]


@dataclass(frozen=True)
class BatchShape:
    """How many samples an iteration takes, and in how many parts.

    ``batch_size`` samples over ``num_replicas * (accum_steps + 1)`` parts; with adaptive batch
    sizes each part is the atomic batch size exactly.
    """

    batch_size: int
    num_replicas: int
    accum_steps: int

    @property
    def num_steps(self) -> int:
        """Forwards and backwards of a full iteration: accumulation steps and the optimizer step."""
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
    """What one replica does in one accumulation step of one iteration."""

    indices: Sequence[int]
    """Indices into the data set, or positions in a stream of samples; never empty."""
    num_samples: int
    """How many of them count: all, or none when the batch only keeps step with its peers."""
    is_optimizer_step: bool
    """Whether this is the last part of its iteration."""
    is_full: bool
    """Whether the iteration takes a whole batch, as all do but the last of an epoch."""
    next_index: int
    """Position in the epoch after this iteration."""
    is_last: bool
    """Whether the epoch ends with this iteration."""


def num_parts(num_samples: int, shape: BatchShape) -> int:
    """Return the parts of one replica in a whole epoch."""
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
"""What the arguments of ``autoscale_batch_size`` may be."""


@dataclass(frozen=True, kw_only=True)
class BatchSizeLimits:
    """Bounds of the batch size, over all replicas and for one replica."""

    init_batch_size: int
    """Batch size that the learning rate was chosen for."""
    max_batch_size: int
    """Largest batch size over all replicas."""
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
        """Return the limits that a script asks for; None for a bound is as wide as can be.

        Raises:
            ConfigurationError: An argument is of another kind.
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
        """Return what ``dataclasses.asdict`` and JSON made of limits; None of None."""
        if content is None:
            return None
        bounds = content["local_bsz_bounds"]
        return cls(**{**content, "local_bsz_bounds": tuple(bounds) if bounds else None})

    def check(self, num_replicas: int) -> None:
        """Refuse bounds that nothing can satisfy.

        Raises:
            ConfigurationError: Names the bound, its value and what is allowed.
        """
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
        if smallest * num_replicas > self.max_batch_size:
            raise ConfigurationError(
                f"local_bsz_bounds={self.local_bsz_bounds}: {num_replicas} replicas of at least "
                f"{smallest} samples exceed max_batch_size={self.max_batch_size}; lower the "
                "smallest local batch size or ask for fewer replicas"
            )
        if largest * num_replicas < self.init_batch_size and not self.gradient_accumulation:
            raise ConfigurationError(
                f"local_bsz_bounds={self.local_bsz_bounds}: {num_replicas} replicas of at most "
                f"{largest} samples do not reach batch_size={self.init_batch_size}; pass "
                "gradient_accumulation=True or raise the largest local batch size"
            )

    def initial_shape(self, num_replicas: int) -> BatchShape:
        """Return the initial batch size in the fewest parts that the bounds allow.

        It is kept to the sample, as the learning rate was chosen for it; only where replicas
        have a smallest local batch size is it raised to what they need together.
        """
        smallest, largest = self.local_bsz_bounds or (1, self.max_batch_size)
        batch_size = max(self.init_batch_size, smallest * num_replicas)
        return BatchShape(batch_size, num_replicas, -(-batch_size // (largest * num_replicas)) - 1)


@dataclass(frozen=True)
class MicroStep:
    """The part of an iteration that one pass of the user's loop body works on."""

    num_samples: int
    """Samples of this replica that count; 0 when the batch only keeps step with its peers."""
    is_optimizer_step: bool
    """Whether gradients are synchronised and the optimizer steps after this one."""


@dataclass
class BatchConfig:
    """What the loop over a loader works on; the loop writes it, unless it says otherwise."""

    micro_step: MicroStep | None = None
    """What the loop body works on just now; None outside of an AdaptiveDataLoader."""
    loop: object | None = None
    """The loader that is looped over just now."""
    limits: BatchSizeLimits | None = None
    """What the goodput may choose from; None: nothing."""
    scale: float = 1.0
    """Batch size over initial batch size, which the learning rate follows."""
    num_microbatches: int = 1
    """Micro-batches M; the script's own number is written by HybridParallel."""
    proposed_microbatches: int = 0
    """M that the goodput model proposed last; 0 before it did."""
    loss_scale: Tensor | None = None
    """What a GradScaler, which writes it, multiplied the loss of the coming backward by."""

    @property
    def accumulates(self) -> bool:
        """Whether the loop body works on an accumulation step, where the optimizer stands still."""
        return self.micro_step is not None and not self.micro_step.is_optimizer_step
