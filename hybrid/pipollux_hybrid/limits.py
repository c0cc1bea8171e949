"""Between which batch sizes the goodput model may choose."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .allowed import Allowed, check_values, is_sequence, is_whole, switch
from .errors import ConfigurationError
from .sampler import BatchShape

__all__ = ["BatchSizeLimits"]


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
        """The limits that a script asks for; None for a bound is as wide as can be.

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
        """The initial batch size in the fewest parts that the bounds allow.

        It is kept to the sample, as the learning rate was chosen for it; only where replicas
        have a smallest local batch size is it raised to what they need together.
        """
        smallest, largest = self.local_bsz_bounds or (1, self.max_batch_size)
        batch_size = max(self.init_batch_size, smallest * num_replicas)
        return BatchShape(batch_size, num_replicas, -(-batch_size // (largest * num_replicas)) - 1)
