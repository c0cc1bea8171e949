"""`reference/metrics.md`, from the metrics of an idle scheduler."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from pipollux_protocol.reference import table
from pipollux_sched.metrics import SchedulerMetrics
from pipollux_sched.server.prometheus import REASONS, SchedulerCollector
from pipollux_sched.store import Store

from .notes import Notes


def page() -> str:
    """Return the page, as Markdown."""
    notes = Notes("metrics")
    text = "\n".join(_lines(notes)) + "\n"
    notes.close()
    return text


def _lines(notes: Notes) -> Iterator[str]:
    yield "# Metrics"
    yield ""
    yield "<!-- Generated from the metrics of pipollux_sched by `make reference`. -->"
    yield from notes.lines("introduction")
    with tempfile.TemporaryDirectory() as folder:
        stored = CollectorRegistry()
        with Store(Path(folder) / "store.db", create=True) as store:
            stored.register(SchedulerCollector(store))
            of_store = [_row(family) for family in stored.collect()]
    metrics = SchedulerMetrics()
    metrics.refused.labels("other")  # before its first value a counter says nothing of its labels
    own = [_row(family) for family in metrics.registry.collect()]
    for heading, rows in (("From the store", of_store), ("Of the process", own)):
        yield ""
        yield f"## {heading}"
        yield from notes.lines(heading)
        yield ""
        yield from table(("metric", "type", "labels", "meaning"), rows)
    yield ""
    yield "## Reasons of refusals"
    yield ""
    reasons = [(f"`{reason}`", str(status)) for status, reason in REASONS.items()]
    yield from table(("`reason`", "HTTP status"), [*reasons, ("`other`", "any other")])
    yield from notes.lines("alerts")


def _row(family: Metric) -> tuple[str, str, str, str]:
    name = family.name + ("_total" if family.type == "counter" else "")
    found = {label for sample in family.samples for label in sample.labels} - {"le"}
    found |= {*getattr(family, "_labelnames", ())}  # of a family without samples
    labels = ", ".join(f"`{label}`" for label in sorted(found))
    return f"`{name}`", family.type, labels, family.documentation
