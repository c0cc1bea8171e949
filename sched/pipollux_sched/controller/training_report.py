"""Conversion of jobs' training reports to the store's records."""

from __future__ import annotations

from pipollux_protocol.messages import TrainingReport
from pipollux_sched.store import Point, Timeline


def stored_points(report: TrainingReport) -> list[Point]:
    """Return the points of a report."""
    return [Point(**point.__dict__, num_epochs=report.num_epochs) for point in report.points]


def stored_timeline(report: TrainingReport) -> Timeline | None:
    """Return the timeline of a report, if it has one."""
    found = report.timeline
    return None if found is None else Timeline(**{**found.__dict__, "events": tuple(found.events)})
