"""Numbers that the replicas sum at the end of an iteration, beside the gradients.

These few numbers need every digit, where gradients may travel in 16 bits; and they are known to the
host, where gradients may be on a GPU. So they are one small float64 vector over gloo, which is on
its way together with the last bucket, and takes along what the replicas tell each other at a step
boundary (:mod:`pipollux_hybrid.job.control_plane`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pipollux_hybrid.errors import SynchronizationError
from pipollux_hybrid.job.peers import lost_peers

__all__ = ["IterationTotals", "power_of_two"]


@dataclass(frozen=True, kw_only=True)
class IterationTotals:
    """One replica's numbers, or their sums over all replicas."""

    samples: float
    """Samples of the iteration that count."""
    part_samples: float
    """Those of its last part."""
    estimates: float
    """Independent gradient estimates."""
    sqr: float
    """Σ n²/b |c|² over contributions c of b samples, in parts of n."""
    unmeasurable: float
    """Replicas whose contributions cannot be separated."""
    buffers: Sequence[float]
    """:meth:`~pipollux_hybrid.sync.buffers.BufferSynchronizer.report`, or nothing."""
    late: Sequence[float]
    """For each bucket, replicas where a gradient came after it had been sent."""
    present: Sequence[float]
    """For each parameter, in the order of buckets, replicas with a gradient that counts."""

    def sum_over_replicas(
        self,
        add_up: Callable[[Sequence[float]], list[float]],
        add_up_stage: Callable[[Sequence[float]], list[float]] | None = None,
    ) -> IterationTotals:
        """Return the sums over all replicas, each of which calls this.

        Args:
            add_up: Adds numbers up over the replicas, and all of their processes.
            add_up_stage: Adds them up over the processes that run the same stage, which alone have
                the same parameters; None where all have.

        Raises:
            SynchronizationError: A peer is gone, or takes longer than the group's timeout, or
                sent a summary of other parameters.
        """
        head = [self.samples, self.part_samples, self.estimates, self.sqr, self.unmeasurable]
        tail = [*self.buffers, *self.late, *self.present]
        numbers = [*head, *tail]
        try:
            if add_up_stage is None:
                totals = add_up(numbers)
            else:
                stage_totals = add_up_stage(tail) if tail else []
                totals = [*add_up(head), *stage_totals]
        except SynchronizationError:
            raise  # a replica is elsewhere, which the message says
        except RuntimeError as error:
            # Or one trains other parameters, which gloo says by itself.
            raise lost_peers("while averaging gradients", error) from error
        first, second = len(head) + len(self.buffers), len(numbers) - len(self.present)
        return IterationTotals(
            samples=totals[0],
            part_samples=totals[1],
            estimates=totals[2],
            sqr=totals[3],
            unmeasurable=totals[4],
            buffers=totals[len(head) : first],
            late=totals[first:second],
            present=totals[second:],
        )


def power_of_two(value: float) -> float:
    """Return the largest power of two that is not larger than a positive value."""
    return math.ldexp(1.0, math.frexp(value)[1] - 1)
