"""A run's event log as one HTML file: who held what when, and what came of it.

    from pipollux_sched.report import write_report

    write_report("demo-report/events.jsonl", "demo-report/report.html")

`Recorder` and the records it builds also serve whoever follows a log while it is written.
"""

from .history import Recorder
from .log import Event, EventLog, EventLogError, read_events
from .page import render_report, write_report
from .records import (
    AllocationRecord,
    Generation,
    JobRecord,
    NodeRecord,
    Point,
    Run,
    StepTimeline,
)
from .words import clean, clock, count, duration, number, percent, placement

__all__ = [
    "AllocationRecord",
    "Event",
    "EventLog",
    "EventLogError",
    "Generation",
    "JobRecord",
    "NodeRecord",
    "Point",
    "Recorder",
    "Run",
    "StepTimeline",
    "clean",
    "clock",
    "count",
    "duration",
    "number",
    "percent",
    "placement",
    "read_events",
    "render_report",
    "write_report",
]
