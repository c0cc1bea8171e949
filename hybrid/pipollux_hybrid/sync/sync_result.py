"""What one synchronisation of gradients measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["BucketTime", "SyncResult"]


class BucketTime(NamedTuple):
    """One bucket of gradients on its way; seconds by ``time.perf_counter``."""

    stage: int
    num_bytes: int
    start: float
    """When it was handed over."""
    end: float
    """When the sums over all replicas were there."""


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
    buckets: tuple[BucketTime, ...] = ()
    """The all-reduces of gradients, where the step was timed and there are several replicas."""
