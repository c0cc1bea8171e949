"""The pipeline's bubble: one measured step above GPipe's ideal time line with the same stage times.

Ideal means `gpipe_schedule` of Huang et al.: a stage works as soon as its input is there. Its stage
times are the means of the measured step, so both do the same work, and what differs is idleness.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

from markupsafe import Markup

from pipollux_perfmodel import StageEvent, bubble_fraction, gpipe_schedule
from pipollux_sched.report.run.records import JobRun, Run, StepTimeline
from pipollux_sched.utils.text import duration, percent, plain

from .axes import Panel, Scale, ticks
from .svg import WIDTH, Drawing, colour_class, text_width

LEFT, RIGHT, ROW = 84.0, 96.0, 30.0


class Bubble(NamedTuple):
    """A measured step beside the ideal one. Bubbles are idle shares of stages × makespan."""

    timeline: StepTimeline
    ideal: list[StageEvent]
    measured_bubble: float
    ideal_bubble: float
    overlap: float
    """Share of the measured work that was done while another stage worked, too."""

    @property
    def ideal_makespan(self) -> float:
        """Seconds the ideal time line takes."""
        return max(e.end for e in self.ideal)


def bubble(job: JobRun) -> Bubble | None:
    """Compare a job's step of median length with the ideal one.

    None when no time line with more than one stage was recorded, or a stage lacks a direction.
    """
    complete = [t for t in job.timelines if t.num_stages > 1 and _complete(t)]
    if not complete:
        return None
    timeline = sorted(complete, key=lambda t: t.makespan)[(len(complete) - 1) // 2]
    stages = range(timeline.num_stages)
    forward = [_mean_time(timeline, k, "forward") for k in stages]
    backward = [_mean_time(timeline, k, "backward") for k in stages]
    ideal = gpipe_schedule(forward, backward, timeline.num_microbatches)
    return Bubble(
        timeline,
        ideal,
        bubble_fraction(timeline.events, timeline.num_stages),
        bubble_fraction(ideal, timeline.num_stages),
        _overlap(timeline.events),
    )


def _complete(timeline: StepTimeline) -> bool:
    wanted = {(k, phase) for k in range(timeline.num_stages) for phase in ("forward", "backward")}
    return timeline.makespan > 0 and wanted <= {(e.stage, e.phase) for e in timeline.events}


def _mean_time(timeline: StepTimeline, stage: int, phase: str) -> float:
    """Return the mean time of a micro-batch; recomputation is an event of its own, and counts."""
    chosen = [e for e in timeline.events if (e.stage, e.phase) == (stage, phase)]
    return sum(e.end - e.start for e in chosen) / len({e.microbatch for e in chosen})


def _overlap(events: Sequence[StageEvent]) -> float:
    """Return the share of all work that was done while some other work was done as well."""
    work = sum(e.end - e.start for e in events)
    edges = sorted([(e.start, 1) for e in events] + [(e.end, -1) for e in events])
    shared, running, since = 0.0, 0, 0.0
    for time, change in edges:
        if running > 1:
            shared += running * (time - since)
        running, since = running + change, time
    return shared / work if work > 0 else 0.0


def verdict(job: JobRun, found: Bubble, run: Run) -> str:
    """Say in words what the two time lines show, and why they differ."""
    timeline = found.timeline
    head = (
        f"The measured step took {duration(timeline.makespan, 3)} and left its stages idle for "
        f"{percent(found.measured_bubble)} of the time; GPipe's ideal with the same stage times "
        f"would take {duration(found.ideal_makespan, 3)} with {percent(found.ideal_bubble)} idle."
    )
    nodes = {n for g in job.generations if g.number == timeline.generation for n in g.nodes}
    kinds = {run.nodes[n].kind for n in nodes if n in run.nodes}
    if found.overlap < 0.02 and "cpu" in kinds:
        return (
            f"{head} The devices here are CPU threads, and torchgpipe drives all stages of a "
            "replica on CPUs from one thread: no two stages ever worked at the same time, so the "
            "pipeline computes the right thing but gains no speed. It is on GPUs that torchgpipe "
            "runs stages side by side."
        )
    if found.overlap < 0.02:
        return f"{head} No two stages worked at the same time: nothing was gained by the pipeline."
    return f"{head} {percent(found.overlap)} of the work was done while another stage worked, too."


def draw_bubble(found: Bubble, index: int) -> Markup:
    """Draw both time lines, stages × time, each block with the number of its micro-batch."""
    timeline = found.timeline
    begin = min(e.start for e in timeline.events)
    measured = [e._replace(start=e.start - begin, end=e.end - begin) for e in timeline.events]
    longest = max(timeline.makespan, found.ideal_makespan)
    block = timeline.num_stages * ROW
    top, gap = 26.0, 44.0
    bottom = top + 2 * block + gap
    x = Scale(0.0, longest, LEFT, WIDTH - RIGHT)
    drawing = Drawing(f"bubble-{index}", bottom + 46, "Measured and ideal time line of one step")
    rows: tuple[tuple[str, Sequence[StageEvent], float, float], ...] = (
        ("measured", measured, found.measured_bubble, top),
        ("ideal GPipe", found.ideal, found.ideal_bubble, top + block + gap),
    )
    for name, events, share, y in rows:
        drawing.text(LEFT, y - 9, name, "label strong")
        _draw_stages(drawing, x, events, timeline.num_stages, y, index)
        end = x(max(e.end for e in events))
        drawing.line(end, y - 4, end, y + block + 4, "axis")
        middle = y + block / 2
        drawing.text(end + 10, middle - 2, percent(share), "label strong")
        drawing.text(end + 10, middle + 14, "bubble", "tick")
    panel = Panel(x, Scale(0, 1, bottom + 6, top))
    step = _unit(longest)
    marks = ticks(0, longest / step[0], 8)
    panel.draw_x(drawing, [m * step[0] for m in marks], lambda v: plain(v / step[0]))
    drawing.text(LEFT - 10, bottom + 24, step[1], "axis-label", at="end")
    return drawing.markup()


def _unit(longest: float) -> tuple[float, str]:
    return (1e-3, "ms") if longest < 2 else (1.0, "s")


def _draw_stages(
    drawing: Drawing,
    x: Scale,
    events: Sequence[StageEvent],
    num_stages: int,
    top: float,
    colour: int,
) -> None:
    shade = colour_class(colour)
    end = x(max(e.end for e in events))
    for stage in range(num_stages):
        y = top + stage * ROW
        drawing.text(LEFT - 10, y + ROW / 2 + 4, f"stage {stage}", "label", at="end")
        drawing.rect(x.first, y + 1.5, end - x.first, ROW - 3, "idle")
    named = _phases_with_room(x, events)
    for event in events:
        y = top + event.stage * ROW + 1.5
        left, width = x(event.start), x(event.end) - x(event.start)
        tip = (
            f"stage {event.stage}, {event.phase} of micro-batch {event.microbatch}: "
            f"{duration(event.end - event.start)}"
        )
        inset = min(0.6, width / 8)
        drawing.rect(
            left + inset, y, width - 2 * inset, ROW - 3, f"{event.phase} {shade}", tip=tip, radius=2
        )
        words = str(event.microbatch)
        if event.phase in named and width >= text_width(words) + 1:
            css = "on-block" if event.phase == "forward" else "label"
            drawing.text(left + width / 2, y + ROW / 2 + 3, words, css, at="middle")


def _phases_with_room(x: Scale, events: Sequence[StageEvent]) -> set[str]:
    """Return the phases whose blocks are wide enough for numbers; all blocks get one, or none."""
    found = set()
    for phase in ("forward", "backward"):
        widths = [x(e.end) - x(e.start) for e in events if e.phase == phase]
        longest = max((str(e.microbatch) for e in events), key=len, default="")
        if widths and fmean(widths) >= text_width(longest) + 4:
            found.add(phase)
    return found


def missing(job: JobRun) -> str:
    """Say why there is no picture of a job's pipeline."""
    if job.timelines:
        return "The recorded time lines lack the forward or the backward of a stage."
    return "No time line of a step was recorded."
