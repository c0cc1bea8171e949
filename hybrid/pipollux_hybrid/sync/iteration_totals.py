"""Numbers that the replicas sum at the end of an iteration, besides the gradients.

They need every digit, where gradients may travel in 16 bits, and the host knows them, where
gradients may be on a GPU. So they form one small float64 vector over gloo, sent together with the
last bucket and the messages of a step boundary (:mod:`pipollux_hybrid.job.control_plane`).

A multi-process pipeline sends it last. A process with its sum knows that all others have completed
the iteration, so it decides for all stages alike whether the iteration counts if a replica dies.
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

NUM_HEAD = 7
"""Numbers that every process sends, before those of its parameters."""


@dataclass(frozen=True, kw_only=True)
class IterationTotals:
    """One replica's numbers, or their sums over all replicas."""

    samples: float
    """Samples of the iteration that count."""
    weight: float
    """Denominator of the loss: samples, or the weights of the loss."""
    part_samples: float
    """Samples of its last part."""
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
    """In sums: processes whose stage's parameters differ between replicas."""
    buffers: Sequence[float]
    """:meth:`~pipollux_hybrid.sync.buffers.BufferSynchronizer.report`, or nothing."""
    late: Sequence[float]
    """For each bucket, replicas where a gradient came after it had been sent."""
    present: Sequence[float]
    """For each parameter, in bucket order, replicas with a gradient that counts."""

    def sum_over_replicas(
        self,
        control: ControlPlane,
        mesh: ProcessMesh | None,
        settle: Callable[[Sequence[float], Sequence[float]], None],
        differs: Callable[[Sequence[float]], bool],
    ) -> IterationTotals:
        """Return the sums over all replicas, each of which calls this.

        Args:
            control: Sums over all processes.
            mesh: Sums over the processes with the same parameters; None where all have the same.
            settle: With a mesh, communicates the rest, given sums of ``late`` and ``buffers``.
            differs: Whether these sums of ``parameters`` show that replicas differ.

        Raises:
            SynchronizationError: A peer is gone, is slower than the timeout, or has other
                parameters.
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
            raise  # its message names the replica at another point
        except RuntimeError as error:
            # A peer may also train other parameters, which gloo's error shows.
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
