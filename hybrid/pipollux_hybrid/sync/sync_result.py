"""What one synchronisation of gradients measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["GradientTime", "SyncResult"]


class GradientTime(NamedTuple):
    """Gradients on their way; seconds by ``time.perf_counter``."""

    stage: int
    num_bytes: int
    start: float
    """When they were handed over."""
    end: float
    """When the sums were there."""
    tied: bool = False
    """Whether they are a shared parameter's, added up over stages; else a bucket's, over replicas.
    """


@dataclass(frozen=True)
class SyncResult:
    """What one synchronisation measured."""

    batch_size: int
    """B: samples behind the averaged gradients, over all replicas and accumulation steps."""
    num_estimates: int
    """J: independent gradient estimates among them; 0 if they could not be separated."""
    estimate_sqr: float
    """S of :mod:`pipollux_hybrid.optim.gradient_noise_scale`."""
    sync_time: float
    """Seconds waited for other replicas after the last gradient was final. On CUDA devices that of
    an earlier step: see :class:`~pipollux_hybrid.sync.comm_timer.CommTimer`."""
    times: tuple[GradientTime, ...] = ()
    """All-reduces and exchanges of gradients, where the step was timed."""
    exchange_time: float = 0.0
    """Seconds in which stages added up gradients of the parameters that they share, of an earlier
    step; 0 where they share none."""
