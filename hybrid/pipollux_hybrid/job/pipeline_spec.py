"""How the model of this process is cut and run, as its parts need to know."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

    from pipollux_perfmodel.timing.params import Checkpoints, ScheduleKind

__all__ = ["PipelineSchedule", "PipelineSpec"]


class PipelineSchedule(NamedTuple):
    """The order in which stages work on micro-batches.

    Example:
        >>> str(PipelineSchedule("1f1b")), str(PipelineSchedule("interleaved", 2))
        ('1f1b', 'interleaved (V=2)')
    """

    schedule: ScheduleKind
    """Its name."""
    chunks_per_stage: int = 1
    """V, chunks of layers that each stage has; 1 unless interleaved."""

    def __str__(self) -> str:
        """Return the name, with V where there are several chunks."""
        several = self.chunks_per_stage > 1
        return f"{self.schedule} (V={self.chunks_per_stage})" if several else self.schedule


@dataclass
class PipelineSpec:
    """The pipeline of this replica; HybridParallel writes it."""

    num_stages: int = 1
    """K."""
    devices: tuple[torch.device, ...] = ()
    """The devices of the stages."""
    checkpoint_mode: Checkpoints = "never"
    """Which micro-batches are recomputed, in all stages or in each."""
    schedule: ScheduleKind = "gpipe"
    """The order in which stages work on micro-batches."""
    chunks_per_stage: int = 1
    """V, chunks of layers that each stage has; 1 unless interleaved."""
    shards_optimizer: bool = False
    """Whether the replicas' processes of a stage divide its state of the optimizer."""
    microbatches_follow: bool = False
    """Whether M follows the goodput; else the script decides on it."""
    fewest_samples: int = 1
    """Samples that each micro-batch keeps where M is chosen: more where layers normalise over it.
    """

    @property
    def order(self) -> PipelineSchedule:
        """The schedule with its chunks."""
        return PipelineSchedule(self.schedule, self.chunks_per_stage)
