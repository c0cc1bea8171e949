"""Between which batch sizes the goodput model may choose."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import ConfigurationError
from .sampler import BatchShape

__all__ = ["BatchSizeLimits"]


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

    def check(self, num_replicas: int) -> None:
        """Refuse bounds that nothing can satisfy.

        Raises:
            ConfigurationError: Names the bound, its value and what is allowed.
        """
        if isinstance(self.max_batch_size, bool) or not isinstance(self.max_batch_size, int):
            raise ConfigurationError(
                f"max_batch_size={self.max_batch_size!r}: a whole number is needed"
            )
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
