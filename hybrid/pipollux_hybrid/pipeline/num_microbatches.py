"""The number of micro-batches of a batch, if the script does not set it.

Fewer micro-batches than stages leave devices idle; GPipe finds the bubble negligible from M = 4·K
on (Huang et al., 2019, section 2.3), the initial number of a job. From there M follows the goodput:
many small micro-batches fill the pipeline and save memory, few large ones use the devices
efficiently.
"""

from __future__ import annotations

import sys

from pipollux_hybrid.errors import at_least, check_values

from .microbatch import microbatch_sizes

__all__ = ["candidate_microbatches", "chosen_microbatches", "cut_sizes", "initial_microbatches"]

FIRST_PER_STAGE = 4
"""Initial micro-batches per stage."""
MOST_PER_STAGE = 16
"""Maximum micro-batches per stage; beyond, the bubble is under 6 %."""


FEWEST_NORMALISED = 8
"""Minimum samples of a chosen micro-batch if layers normalize over it; fewer are mostly noise."""
COUNT = {
    "num_microbatches": at_least(
        1, "a whole number of at least 1, or None to have it chosen, is needed", whole=True
    )
}


def chosen_microbatches(value: int | None, num_stages: int) -> int:
    """Return M as set by the script, or the initial M; ConfigurationError if it is invalid."""
    if value is None:
        # A smaller batch is cut into as many micro-batches as it has samples.
        return initial_microbatches(num_stages, sys.maxsize)
    check_values(COUNT, {"num_microbatches": value})
    return value


def cut_sizes(batch_size: int, num_microbatches: int, fewest: int = 1) -> list[int]:
    """Return the sizes of the requested micro-batches; fewer if one had less than ``fewest``
    samples.

    Example:
        >>> cut_sizes(9, 8), cut_sizes(9, 8, fewest=2)
        ([2, 2, 2, 2, 1], [3, 3, 3])
    """
    for count in range(min(num_microbatches, max(batch_size // fewest, 1)), 1, -1):
        sizes = microbatch_sizes(batch_size, count)
        if sizes[-1] >= fewest:
            return sizes
    return [batch_size]


def initial_microbatches(num_stages: int, atomic_bsz: int, fewest: int = 1) -> int:
    """Return the micro-batches M before any measurement; one stage needs no micro-batches.

    Example:
        >>> initial_microbatches(2, 64), initial_microbatches(2, 10), initial_microbatches(1, 64)
        (8, 5, 1)
    """
    wanted = FIRST_PER_STAGE * num_stages if num_stages > 1 else 1
    return possible_microbatches(wanted, atomic_bsz, fewest)


def possible_microbatches(wanted: int, atomic_bsz: int, fewest: int = 1) -> int:
    """Return the actual number of micro-batches when ``wanted`` are requested.

    Example:
        >>> possible_microbatches(4, 5)
        3
    """
    return len(cut_sizes(atomic_bsz, wanted, fewest))


def candidate_microbatches(
    num_stages: int, largest_atomic_bsz: int, fewest: int = 1
) -> tuple[int, ...]:
    """Return powers of two as candidates of M, with at least ``fewest`` samples each.

    Example:
        >>> candidate_microbatches(1, 100), candidate_microbatches(2, 6)
        ((1, 2, 4, 8, 16), (1, 2, 4))
    """
    most = min(MOST_PER_STAGE * num_stages, max(largest_atomic_bsz // fewest, 1))
    return tuple(1 << power for power in range(most.bit_length()))
