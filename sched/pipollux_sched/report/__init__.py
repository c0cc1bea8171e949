"""A run's event log as one HTML file: who held what when, and what came of it.

    from pipollux_sched.report import write_report

    write_report("demo-report/events.jsonl", "demo-report/report.html")

`Recorder` and the records it builds also serve whoever follows a log while it is written.
"""

from pipollux_sched.report.run.event_log import Event, EventLog, EventLogError, read_events
from pipollux_sched.report.run.records import (
    AllocationRecord,
    Generation,
    JobRecord,
    NodeRecord,
    Point,
    Run,
    StepTimeline,
)
from pipollux_sched.report.run.replay import Recorder
from pipollux_sched.utils.text import clean, clock, count, duration, number, percent, placement

from .page import render_report, write_report

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
