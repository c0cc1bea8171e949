"""Numbers that the replicas sum at the end of an iteration, beside the gradients.

These few numbers need every digit, where gradients may travel in 16 bits; and they are known to the
host, where gradients may be on a GPU. So they are one small float64 vector over gloo, which is on
its way together with the last bucket, and takes along what the replicas tell each other at a step
boundary (:mod:`pipollux_hybrid.job.control_plane`).

Where each stage has a process the vector comes last. Whoever has its sum then knows that all others
have come to it, with everything that the iteration takes of other replicas. So it is what decides
whether the iteration counts, should a replica die in it: for all stages of a replica alike.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pipollux_hybrid.errors import PeerLostError, SynchronizationError
from pipollux_hybrid.job.control_plane import ControlPlane
from pipollux_hybrid.job.mesh import ProcessMesh
from pipollux_hybrid.job.peers import lost_peers

__all__ = ["IterationTotals", "power_of_two"]


@dataclass(frozen=True, kw_only=True)
class IterationTotals:
    """One replica's numbers, or their sums over all replicas."""

    samples: float
    """Samples of the iteration that count."""
    weight: float
    """What sums of the loss are divided by: samples, or the weights of the loss."""
    part_samples: float
    """Those of its last part."""
    estimates: float
    """Independent gradient estimates."""
    sqr: float
    """Σ n²/b |c|² over contributions c of b samples, in parts of n."""
    unmeasurable: float
    """Replicas whose contributions cannot be separated."""
    nonfinite: float
    """Processes in which a loss was not finite."""
    parameters: Sequence[float]
    """:meth:`~pipollux_hybrid.sync.parameter_check.ParameterCheck.report`, or nothing."""
    differing: float = 0.0
    """Of sums: processes whose stage has other parameters on other replicas."""
    buffers: Sequence[float]
    """:meth:`~pipollux_hybrid.sync.buffers.BufferSynchronizer.report`, or nothing."""
    late: Sequence[float]
    """For each bucket, replicas where a gradient came after it had been sent."""
    present: Sequence[float]
    """For each parameter, in the order of buckets, replicas with a gradient that counts."""

    def sum_over_replicas(
        self,
        control: ControlPlane,
        mesh: ProcessMesh | None,
        settle: Callable[[Sequence[float], Sequence[float]], None],
        differs: Callable[[Sequence[float]], bool],
    ) -> IterationTotals:
        """Return the sums over all replicas, each of which calls this.

        Args:
            control: Adds numbers up over all processes.
            mesh: Adds them up over those that run the same stage, which alone have the same
                parameters; None where all have.
            settle: Called with the sums of ``late`` and ``buffers`` where there is a mesh: does
                what else needs other replicas in this iteration.
            differs: Called with the sums of ``parameters``: whether they are those of replicas that
                differ.

        Raises:
            SynchronizationError: A peer is gone, or takes longer than the group's timeout, or
                sent a summary of other parameters.
        """
        head = [self.samples, self.weight, self.part_samples, self.estimates, self.sqr]
        head += [self.unmeasurable, self.nonfinite]
        tail = [*self.parameters, *self.buffers, *self.late, *self.present]
        ends = list(itertools.accumulate(map(len, (self.parameters, self.buffers, self.late))))
        parameters, buffers, late, present = itertools.starmap(
            slice, itertools.pairwise([0, *ends, None])
        )
        failure: PeerLostError | None = None
        try:
            if mesh is None:
                totals = control.ride([*head, *tail])
                tail = totals[len(head) :]
                totals = [*totals[: len(head)], float(differs(tail[parameters]))]
            else:
                try:
                    tail = mesh.sum_over_replicas(tail) if tail else []
                    settle(tail[late], tail[buffers])
                except PeerLostError as error:
                    failure = error
                differing = failure is None and differs(tail[parameters])
                totals = control.ride([*head, float(differing)], failure)
        except SynchronizationError:
            raise  # a replica is elsewhere, which the message says
        except RuntimeError as error:
            # Or one trains other parameters, which gloo says by itself.
            raise lost_peers("while averaging gradients", error) from error
        return IterationTotals(
            samples=totals[0],
            weight=totals[1],
            part_samples=totals[2],
            estimates=totals[3],
            sqr=totals[4],
            unmeasurable=totals[5],
            nonfinite=totals[6],
            parameters=tail[parameters],
            differing=totals[7],
            buffers=tail[buffers],
            late=tail[late],
            present=tail[present],
        )


def power_of_two(value: float) -> float:
    """Return the largest power of two that is not larger than a positive value."""
    return math.ldexp(1.0, math.frexp(value)[1] - 1)
