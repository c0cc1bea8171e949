"""How many micro-batches a batch is cut into, where the script leaves it open.

Fewer than stages leave devices idle; GPipe finds the bubble negligible from M = 4·K on (Huang et
al., 2019, section 2.3), so that is where a job starts. From there M follows the goodput: many small
micro-batches fill the pipeline and save memory, few large ones keep the devices busy.
"""

from __future__ import annotations

import sys

from pipollux_hybrid.errors import at_least, check_values

from .microbatch import microbatch_sizes

__all__ = ["candidate_microbatches", "chosen_microbatches", "cut_sizes", "initial_microbatches"]

FIRST_PER_STAGE = 4
"""Micro-batches per stage to begin with."""
MOST_PER_STAGE = 16
"""Micro-batches per stage beyond which the bubble is under 6 % and there is nothing to gain."""


FEWEST_NORMALISED = 8
"""Samples that a micro-batch keeps, where M is chosen, if layers normalise over it: statistics of
fewer are mostly noise."""
COUNT = {
    "num_microbatches": at_least(
        1, "a whole number of at least 1, or None to have it chosen, is needed", whole=True
    )
}
"""What the number of micro-batches may be set to."""


def chosen_microbatches(value: int | None, num_stages: int) -> int:
    """Return the micro-batches M that the script asks for; None: the initial number.

    Raises:
        ConfigurationError: It is no number of micro-batches; the message says what is allowed.
    """
    if value is None:
        # A batch of fewer samples is cut into as many micro-batches as it has samples.
        return initial_microbatches(num_stages, sys.maxsize)
    check_values(COUNT, {"num_microbatches": value})
    return value


def cut_sizes(batch_size: int, num_microbatches: int, fewest: int = 1) -> list[int]:
    """Return the sizes of the micro-batches: as many as asked for, if none is too small.

    Args:
        batch_size: Samples of the batch.
        num_microbatches: Micro-batches M asked for.
        fewest: Samples that each has at least, if the batch has as many.

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
    """Return the micro-batches M before anything was measured.

    Args:
        num_stages: Number K of stages; one stage needs no micro-batches.
        atomic_bsz: Samples to be cut.
        fewest: Samples that each keeps.

    Example:
        >>> initial_microbatches(2, 64), initial_microbatches(2, 10), initial_microbatches(1, 64)
        (8, 5, 1)
    """
    wanted = FIRST_PER_STAGE * num_stages if num_stages > 1 else 1
    return possible_microbatches(wanted, atomic_bsz, fewest)


def possible_microbatches(wanted: int, atomic_bsz: int, fewest: int = 1) -> int:
    """Return how many micro-batches there really are when ``wanted`` are asked for.

    Example:
        >>> possible_microbatches(4, 5)
        3
    """
    return len(cut_sizes(atomic_bsz, wanted, fewest))


def candidate_microbatches(
    num_stages: int, largest_atomic_bsz: int, fewest: int = 1
) -> tuple[int, ...]:
    """Return powers of two to choose M from, with at least ``fewest`` samples each.

    Example:
        >>> candidate_microbatches(1, 100), candidate_microbatches(2, 6)
        ((1, 2, 4, 8, 16), (1, 2, 4))
    """
    most = min(MOST_PER_STAGE * num_stages, max(largest_atomic_bsz // fewest, 1))
    return tuple(1 << power for power in range(most.bit_length()))
