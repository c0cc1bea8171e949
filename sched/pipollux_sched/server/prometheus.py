"""Prometheus metrics for `GET /metrics`: counters, and values read from store and backend."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pipollux_sched.lifecycle import Phase
from pipollux_sched.metrics import SchedulerMetrics
from pipollux_sched.store import NodeCondition, Store
from pipollux_sched.views.cluster import list_nodes

REASONS = {
    401: "token",
    404: "unknown",
    405: "method",
    409: "conflict",
    413: "size",
    422: "invalid",
    429: "rate",
    500: "failure",
    503: "busy",
}
"""Reasons of refusals, by status."""


class RefusedCounter:
    """ASGI middleware: counts the refused requests."""

    def __init__(self, app: ASGIApp, metrics: SchedulerMetrics) -> None:
        self._app = app
        self._refused = metrics.refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] >= 400:
                self._refused.labels(REASONS.get(message["status"], "other")).inc()
            await send(message)

        await self._app(scope, receive, counted)


class SchedulerCollector(Collector):
    """Collects metrics from the store and the backend."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def collect(self) -> Iterable[Metric]:
        """Yield the metric families."""
        yield self._jobs()
        yield from self._nodes()
        yield from self._devices()
        yield self._goodputs()
        yield from self._attempts()
        events = self._store.last_event()
        yield CounterMetricFamily("pipollux_events", "Entries in the event log.", events)
        words = "Size of the store's files, in bytes."
        yield GaugeMetricFamily("pipollux_store_bytes", words, self._store.num_bytes())

    def _jobs(self) -> Metric:
        family = GaugeMetricFamily("pipollux_jobs", "Jobs, by phase.", labels=["phase"])
        found = self._store.overview.jobs_by_phase()
        for phase in Phase:
            family.add_metric([phase.value], found.get(phase.value, 0))
        return family

    def _nodes(self) -> Iterable[Metric]:
        words = "Slots, by node and state: used or free."
        slots = GaugeMetricFamily("pipollux_slots", words, labels=["node", "state"])
        conditions = dict.fromkeys(NodeCondition, 0)
        for node in list_nodes(self._store):
            slots.add_metric([node.name, "used"], node.used)
            slots.add_metric([node.name, "free"], node.free)
            conditions[node.condition] += 1
        yield slots
        nodes = GaugeMetricFamily(
            "pipollux_nodes", "Nodes, by condition: ready, draining or dead.", labels=["condition"]
        )
        for condition, count in conditions.items():
            nodes.add_metric([condition.value], count)
        yield nodes

    def _devices(self) -> Iterable[Metric]:
        labels = ["node", "slot", "id", "job"]
        usable = GaugeMetricFamily(
            "pipollux_device_usable",
            "1: jobs may start on the GPU of a slot; 0: not.",
            labels=labels,
        )
        rates = GaugeMetricFamily(
            "pipollux_device_utilization",
            "Share of the time in which the GPU of a slot computes, from 0 to 1.",
            labels=labels,
        )
        used = GaugeMetricFamily(
            "pipollux_device_memory_used_bytes",
            "Memory in use on the GPU of a slot.",
            labels=labels,
        )
        total = GaugeMetricFamily(
            "pipollux_device_memory_bytes", "Memory of the GPU of a slot.", labels=labels
        )
        for node, devices in self._store.devices.latest().items():
            for device in devices:
                values = [node, str(device["slot"]), device["id"], device["job"] or ""]
                usable.add_metric(values, float(not device["problem"]))
                for family, name in (
                    (rates, "utilization"),
                    (used, "memory_used"),
                    (total, "memory_total"),
                ):
                    if device[name] is not None:
                        family.add_metric(values, device[name])
        yield from (usable, rates, used, total)

    def _goodputs(self) -> Metric:
        words = "Last reported goodput of a running job, in samples per second."
        family = GaugeMetricFamily("pipollux_job_goodput", words, labels=["job"])
        for name, goodput in self._store.overview.goodputs().items():
            family.add_metric([name], goodput)
        return family

    def _attempts(self) -> Iterable[Metric]:
        counts = self._store.overview.attempt_counts()
        for name, words, value in (
            ("restarts", "Attempts of jobs after their first.", counts.restarts),
            (
                "reallocations",
                "Changes of the allocation of running jobs by a restart.",
                counts.reallocations,
            ),
            ("failures", "Attempts that failed.", counts.failures),
            ("resizes", "Elastic resizes.", counts.resizes),
        ):
            yield CounterMetricFamily(f"pipollux_{name}", words, value)


def render(metrics: SchedulerMetrics, collector: SchedulerCollector) -> bytes:
    """Return all metrics in Prometheus text format."""
    read = CollectorRegistry()
    read.register(collector)
    return generate_latest(metrics.registry) + generate_latest(read)
