"""The stages, devices and schedule of this process's pipeline."""

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
    chunks_per_stage: int = 1
    """V, chunks of layers that each stage has; 1 unless interleaved."""

    def __str__(self) -> str:
        several = self.chunks_per_stage > 1
        return f"{self.schedule} (V={self.chunks_per_stage})" if several else self.schedule


@dataclass
class PipelineSpec:
    """The pipeline of this replica; HybridParallel writes it."""

    num_stages: int = 1
    devices: tuple[torch.device, ...] = ()
    checkpoint_mode: Checkpoints = "never"
    """Which micro-batches recompute their activations."""
    schedule: ScheduleKind = "gpipe"
    chunks_per_stage: int = 1
    """V; 1 unless interleaved."""
    shards_optimizer: bool = False
    """Whether the processes of a stage shard its optimizer state."""
    microbatches_follow: bool = False
    """Whether goodput chooses M; else the script does."""
    fewest_samples: int = 1
    """Fewest samples per micro-batch where M is chosen; above 1 if layers normalise over it."""

    @property
    def order(self) -> PipelineSchedule:
        """The schedule with its chunks."""
        return PipelineSchedule(self.schedule, self.chunks_per_stage)
