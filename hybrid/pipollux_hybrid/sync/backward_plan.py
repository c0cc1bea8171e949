"""The plan of a backward, made when its forward runs.

A script may run several forwards before a backward, evaluate in between, or never call a backward.
So a forward changes no state: it leaves a plan with its output, which takes effect when that
output's gradient arrives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from pipollux_hybrid.job.batch import MicroStep

__all__ = ["BackwardPlan", "plan_backward"]


@dataclass(kw_only=True, eq=False)
class BackwardPlan:
    """How the gradients of one forward arrive, and how they are weighted.

    Recomputed micro-batches deliver a gradient each, the last one first, and so do those kept
    apart. All others share one pass, which comes first.
    """

    sizes: Sequence[int]
    """Rows of each micro-batch."""
    num_separate: int
    """How many of them, from the first, deliver a gradient each."""
    num_samples: int
    """Samples of this replica that count; 0 if the batch only keeps step with its peers."""
    synchronize: bool
    weighted: bool
    """Whether accumulation steps are averaged by their samples (else summed, as in PyTorch)."""
    measured: bool
    """Whether norms are taken for gradient noise; the same throughout an iteration."""
    apart: bool = False
    """Whether micro-batches have separate graphs, and the last is run first."""
    timed: bool = False
    """Whether arrivals of gradients are recorded for the stages' timeline."""
    in_order: bool = False
    """Whether the first micro-batch's gradient comes first, as in multi-process pipelines."""
    part: object | None = None
    """The part of an iteration that it belongs to; another backward of it adds no samples."""
    loss_weight: float | None = None
    """Weight of the loss, once known, where it is not the number of samples."""

    @property
    def counted(self) -> bool:
        """Whether the samples count."""
        return self.num_samples > 0

    @property
    def weight(self) -> float:
        """Denominator of the loss: its weight if it has one, else its samples."""
        own = self.loss_weight if self.counted else None
        return float(self.num_samples) if own is None else own

    @property
    def shares_a_pass(self) -> bool:
        """Whether some micro-batches deliver one gradient together."""
        return self.num_separate < len(self.sizes)

    @property
    def passes(self) -> int:
        """Number of gradients that each parameter receives."""
        return self.num_separate + self.shares_a_pass

    @cached_property
    def samples_by_pass(self) -> list[float]:
        """Samples behind each gradient, in the order of arrival."""
        rest = sum(self.sizes[self.num_separate :])
        separate = list(self.sizes[: self.num_separate])
        rows = ([rest] if rest else []) + (separate if self.in_order else separate[::-1])
        # A row may be part of a sample, or combine several.
        return [count * self.num_samples / sum(self.sizes) for count in rows]


def plan_backward(
    sizes: Sequence[int],
    micro_step: MicroStep | None,
    *,
    synchronize: bool,
    measured: bool,
    timed: bool,
    num_recomputed: int,
    one_graph: bool,
    one_by_one: bool = False,
    one_stage: bool = False,
) -> BackwardPlan:
    """Return the plan of a backward.

    Args:
        sizes: Samples of each micro-batch.
        micro_step: The micro-step of the loop body; None outside of an adaptive loader.
        synchronize: Whether it ends the iteration.
        measured: Whether to measure gradient noise, where possible.
        timed: Whether the stages are timed.
        num_recomputed: Micro-batches that are recomputed, each in a backward of its own.
        one_graph: Whether the micro-batches must stay parts of one graph.
        one_by_one: Whether each micro-batch has a backward of its own, the first one first.
        one_stage: Whether one stage has the gradients of all micro-batches at once.
    """
    measured = measured and micro_step is not None
    # Noise is measured by the gradients of micro-batches, recomputed or not.
    separate = measured and len(sizes) > 1 and not num_recomputed and not one_graph
    # Else one would be recomputed while another still holds all of its activations.
    ordered = one_stage and 0 < num_recomputed < len(sizes) and not one_graph
    apart, separate = separate or ordered, separate or one_by_one
    return BackwardPlan(
        sizes=sizes,
        num_separate=len(sizes) if separate else num_recomputed,
        num_samples=sum(sizes) if micro_step is None else micro_step.num_samples,
        synchronize=synchronize,
        weighted=micro_step is not None,
        measured=measured,
        apart=apart and not one_by_one,
        timed=timed,
        in_order=one_by_one,
        part=micro_step,
    )
