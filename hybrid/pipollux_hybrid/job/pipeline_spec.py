"""How the model of this process is cut and run, as its parts need to know."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from pipollux_perfmodel.timing.params import Checkpoint, ScheduleKind

__all__ = ["PipelineSpec"]


@dataclass
class PipelineSpec:
    """The pipeline of this replica; HybridParallel writes it."""

    num_stages: int = 1
    """K."""
    devices: tuple[torch.device, ...] = ()
    """The devices of the stages."""
    checkpoint_mode: Checkpoint = "never"
    """Which micro-batches are recomputed."""
    schedule: ScheduleKind = "gpipe"
    """The order in which stages work on micro-batches."""
    chunks_per_stage: int = 1
    """V, chunks of layers that each stage has; 1 unless interleaved."""
    microbatches_follow: bool = False
    """Whether M follows the goodput; else the script decides on it."""
    fewest_samples: int = 1
    """Samples that each micro-batch keeps where M is chosen: more where layers normalise over it.
    """
