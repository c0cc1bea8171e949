"""Measurements of one synchronization of gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class GradientTime(NamedTuple):
    """One transfer of gradients; seconds by ``time.perf_counter``."""

    stage: int
    num_bytes: int
    start: float
    """When they were handed over."""
    end: float
    """When the sums had arrived."""
    tied: bool = False
    """Whether a shared parameter was summed over stages; else a bucket over replicas."""


@dataclass(frozen=True)
class SyncResult:
    """Result of one synchronization."""

    batch_size: int
    """B: samples in the averaged gradients, over all replicas and accumulation steps."""
    num_estimates: int
    """J: independent gradient estimates among them; 0 if they could not be separated."""
    estimate_sqr: float
    """S of :mod:`pipollux_hybrid.optim.gradient_noise_scale`."""
    sync_time: float
    """Seconds of waiting for other replicas after the last gradient was final. On CUDA devices of
    an earlier step: see :class:`~pipollux_hybrid.sync.comm_timer.CommTimer`."""
    times: tuple[GradientTime, ...] = ()
    """All-reduces and exchanges of gradients, in timed steps."""
    exchange_time: float = 0.0
    """Seconds in which stages summed gradients of shared parameters, of an earlier step; else 0."""
