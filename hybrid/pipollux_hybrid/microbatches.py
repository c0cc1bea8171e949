"""How many micro-batches a batch is cut into, where the script leaves it open.

Fewer than stages leave devices idle; GPipe finds the bubble negligible from M = 4·K on (Huang et
al., 2019, section 2.3), so that is where a job starts. From there M follows the goodput: many small
micro-batches fill the pipeline and save memory, few large ones keep the devices busy.
"""

from __future__ import annotations

from .engine import microbatch_sizes

__all__ = ["candidate_microbatches", "initial_microbatches"]

FIRST_PER_STAGE = 4
"""Micro-batches per stage to begin with."""
MOST_PER_STAGE = 16
"""Micro-batches per stage beyond which the bubble is under 6 % and there is nothing to gain."""


def initial_microbatches(num_stages: int, atomic_bsz: int) -> int:
    """Micro-batches M before anything was measured.

    Args:
        num_stages: Number K of stages; one stage needs no micro-batches.
        atomic_bsz: Samples to be cut.

    Example:
        >>> initial_microbatches(2, 64), initial_microbatches(2, 10), initial_microbatches(1, 64)
        (8, 5, 1)
    """
    return possible_microbatches(FIRST_PER_STAGE * num_stages if num_stages > 1 else 1, atomic_bsz)


def possible_microbatches(wanted: int, atomic_bsz: int) -> int:
    """How many micro-batches there really are when ``wanted`` are asked for.

    Example:
        >>> possible_microbatches(4, 5)
        3
    """
    return len(microbatch_sizes(atomic_bsz, min(wanted, atomic_bsz)))


def candidate_microbatches(num_stages: int, largest_atomic_bsz: int) -> tuple[int, ...]:
    """Powers of two to choose M from, with at least one sample each.

    Example:
        >>> candidate_microbatches(1, 100), candidate_microbatches(2, 6)
        ((1, 2, 4, 8, 16), (1, 2, 4))
    """
    most = min(MOST_PER_STAGE * num_stages, max(largest_atomic_bsz, 1))
    return tuple(1 << power for power in range(most.bit_length()))
