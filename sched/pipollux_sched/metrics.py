"""Counters of the running scheduler for `GET /metrics`, which are not in the store."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

__all__ = ["SchedulerMetrics"]

POLICY_BUCKETS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""In seconds: the exact policy takes milliseconds, the genetic one up to minutes."""


class SchedulerMetrics:
    """Counters and timers of one scheduler, in a separate registry; safe for any thread.

    Example:
        >>> metrics = SchedulerMetrics()
        >>> with metrics.deciding():
        ...     pass
        >>> metrics.registry.get_sample_value("pipollux_policy_seconds_count")
        1.0
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.policy_seconds = Histogram(
            "pipollux_policy_seconds",
            "Duration of one allocation decision, in seconds.",
            buckets=POLICY_BUCKETS,
            registry=self.registry,
        )
        self.last_decision = Gauge(
            "pipollux_last_decision_timestamp_seconds",
            "Time of the last decision, in seconds since the epoch; 0: none yet.",
            registry=self.registry,
        )
        self.decisions = self._counter("decisions", "Allocations that the policy changed.")
        self.policy_failures = self._counter(
            "policy_failures", "Decisions that failed; the allocations stayed."
        )
        self.hints = self._counter("hints_received", "Hints accepted from jobs.")
        self.reports = self._counter("reports_received", "Progress reports accepted from jobs.")
        self.heartbeats = self._counter("heartbeats_received", "Heartbeats accepted from replicas.")
        self.refused = Counter(
            "pipollux_requests_refused",
            "Refused requests, by reason.",
            ["reason"],
            registry=self.registry,
        )

    @contextmanager
    def deciding(self) -> Iterator[None]:
        """Time one decision, even if it fails."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.policy_seconds.observe(time.perf_counter() - began)
            self.last_decision.set_to_current_time()

    def _counter(self, name: str, words: str) -> Counter:
        return Counter(f"pipollux_{name}", words, registry=self.registry)
