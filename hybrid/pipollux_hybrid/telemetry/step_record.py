"""One optimizer step in reports: to the scheduler, to TensorBoard, on the terminal."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from pipollux_protocol.messages import Point

__all__ = ["StepListener", "StepRecord"]


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One optimizer step."""

    time: float
    """Seconds since 1970."""
    step: int
    epoch: int
    samples: int
    """Samples processed since the start of the training."""
    loss: float | None
    batch_size: int
    atomic_bsz: int
    accum_steps: int
    num_replicas: int
    step_time: float
    """Seconds of the whole iteration."""
    predicted_step_time: float | None
    goodput: float | None
    efficiency: float | None
    num_microbatches: int = 1
    schedule: str = ""
    """Schedule of a multi-process pipeline."""
    epoch_samples: int = 0
    """Samples of the epoch processed so far."""
    epoch_size: int = 0
    """Samples of an epoch; 0 if unknown."""
    num_epochs: int | None = None
    noise_scale: float | None = None
    """Batch size at which the gradient is half noise: initial batch size · var / sqr, samples."""
    rate_factor: float = 1.0
    """Factor by which the learning rate follows the batch size."""

    @property
    def throughput(self) -> float:
        """Samples per second."""
        return self.batch_size / self.step_time if self.step_time > 0.0 else 0.0

    def point(self) -> Point:
        """Return the fields for the scheduler; numbers that are not finite become None."""
        from pipollux_protocol.messages import Point

        # Not validated: an invalid number must not end the training.
        return Point.model_construct(
            **{name: _finite(getattr(self, name)) for name in Point.model_fields}
        )


class StepListener(Protocol):
    """Shows or records points; called only by the reporting thread of rank 0."""

    def on_step(self, point: StepRecord) -> None:
        """Process the record of a step; steps in quick succession are thinned."""

    def close(self) -> None:
        """Close: no more points follow."""


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
