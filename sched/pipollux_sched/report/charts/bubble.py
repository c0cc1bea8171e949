"""The pipeline bubble: one measured step above its schedule's ideal with the same stage times.

In the ideal step, a stage works as soon as it has its input, in the order of the job's schedule:
GPipe, 1F1B or interleaved 1F1B. The stage times are the means of the measured step, so only the
idle times differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from pipollux_perfmodel import StageEvent, bubble_fraction, ideal_schedule
from pipollux_perfmodel.timing.params import ScheduleKind
from pipollux_sched.report.run.records import JobRun, Run, StepTimeline
from pipollux_utils.text import duration, percent

from .specs import Axis, Block, Group, TimelineChart, Tip

ROW = 30.0
NAMES: dict[ScheduleKind, str] = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "interleaved 1F1B",
}


class Bubble(NamedTuple):
    """A measured step and the ideal one. Bubbles are the idle share of stages × makespan."""

    timeline: StepTimeline
    ideal: list[StageEvent]
    measured_bubble: float
    ideal_bubble: float
    overlap: float
    """Share of the measured work that overlapped with another stage's work."""

    @property
    def ideal_makespan(self) -> float:
        """Duration of the ideal step, in seconds."""
        return max(e.end for e in self.ideal)


def bubble(job: JobRun) -> Bubble | None:
    """Compare a job's step of median length with the ideal one; None without a full timeline."""
    pairs = [
        (timeline, ideal)
        for timeline in job.timelines
        if timeline.num_stages > 1 and timeline.makespan > 0
        if (ideal := ideal_schedule(timeline.schedule, timeline.events, timeline.num_stages))
    ]
    if not pairs:
        return None
    timeline, ideal = sorted(pairs, key=lambda pair: pair[0].makespan)[(len(pairs) - 1) // 2]
    return Bubble(
        timeline,
        [event._replace(stage=event.stage % ideal.num_devices) for event in ideal.events],
        bubble_fraction(timeline.events, timeline.num_stages),
        ideal.bubble_fraction,
        _overlap(timeline.events),
    )


def _overlap(events: Sequence[StageEvent]) -> float:
    work = sum(e.end - e.start for e in events)
    edges = sorted([(e.start, 1) for e in events] + [(e.end, -1) for e in events])
    shared, running, since = 0.0, 0, 0.0
    for time, change in edges:
        if running > 1:
            shared += running * (time - since)
        running, since = running + change, time
    return shared / work if work > 0 else 0.0


def verdict(job: JobRun, found: Bubble, run: Run) -> str:
    """Describe the two timelines and their difference."""
    timeline = found.timeline
    head = (
        f"The measured step took {duration(timeline.makespan, 3)} and left its stages idle for "
        f"{percent(found.measured_bubble)} of the time; {NAMES[timeline.schedule]}'s ideal with "
        "the same stage times "
        f"would take {duration(found.ideal_makespan, 3)} with {percent(found.ideal_bubble)} idle."
    )
    nodes = {n for g in job.attempts if g.number == timeline.attempt for n in g.nodes}
    kinds = {run.nodes[n].kind for n in nodes if n in run.nodes}
    if found.overlap < 0.02 and "cpu" in kinds and timeline.schedule == "gpipe":
        return (
            f"{head} The devices here are CPU threads, and torchgpipe drives all stages of a "
            "replica on CPUs from one thread: no two stages ever worked at the same time, so the "
            "pipeline computes the right thing but gains no speed. It is on GPUs that torchgpipe "
            "runs stages side by side."
        )
    if found.overlap < 0.02:
        return f"{head} No two stages worked at the same time: nothing was gained by the pipeline."
    return f"{head} {percent(found.overlap)} of the work was done while another stage worked, too."


def bubble_chart(found: Bubble, colour: int) -> TimelineChart:
    """Return both timelines, stages × time; each block has the number of its micro-batch."""
    timeline = found.timeline
    begin = min(e.start for e in timeline.events)
    measured = [e._replace(start=e.start - begin, end=e.end - begin) for e in timeline.events]
    scale, unit = _unit(max(timeline.makespan, found.ideal_makespan))
    groups: list[Group] = []
    blocks: list[Block] = []
    tips: list[Tip] = []
    rows: tuple[tuple[str, Sequence[StageEvent], float], ...] = (
        ("measured", measured, found.measured_bubble),
        (f"ideal {NAMES[timeline.schedule]}", found.ideal, found.ideal_bubble),
    )
    for name, events, share in rows:
        for event in events:
            blocks.append(_block(event, len(groups), colour, len(tips), scale))
            length = duration(event.end - event.start)
            what = f"{event.phase} of micro-batch {event.microbatch}"
            tips.append((f"stage {event.stage}, {what}", ("takes", length)))
        groups.append(
            Group(
                "",
                timeline.num_stages,
                title=name,
                labels=[f"stage {stage}" for stage in range(timeline.num_stages)],
                until=max(e.end for e in events) * scale,
                ending=(percent(share), "bubble"),
            )
        )
    return TimelineChart(
        title="Measured and ideal time line of one step",
        x=Axis("number", 0.0, max(group.until or 0.0 for group in groups), unit),
        row=ROW,
        gap=22.0,
        groups=groups,
        blocks=blocks,
        tips=tips,
        right=72.0,
    )


def _unit(longest: float) -> tuple[float, str]:
    return (1e3, "ms") if longest < 2 else (1.0, "s")


def _block(event: StageEvent, group: int, colour: int, tip: int, scale: float) -> Block:
    begin, end = event.start * scale, event.end * scale
    style: Literal["forward", "backward"] = "forward" if event.phase == "forward" else "backward"
    words = [str(event.microbatch)]
    return Block(group, event.stage, 1, colour, begin, begin, end, end, words, tip, style)


def missing(job: JobRun) -> str:
    """Return the reason that a job has no chart of its pipeline."""
    if job.timelines:
        return "The recorded time lines lack the forward or the backward of a stage."
    return "No time line of a step was recorded."
