"""Draws docs/images/pipeline.svg, two time lines of the same pipeline: GPipe's and 1F1B's.

    python docs/images/pipeline.py

The third of four stages is the slowest. What is not coloured is the bubble; below GPipe's stages
stand their all-reduces, each from when its stage's gradients are final.
"""

from __future__ import annotations

from pathlib import Path

from pipollux_perfmodel import Schedule
from pipollux_perfmodel.timing.gpipe import network_end

FORWARD = (1.0, 1.0, 1.4, 0.9)
BACKWARD = (2.0, 1.8, 2.6, 1.8)
NUM_MICROBATCHES = 6
ALL_REDUCE = (3.0, 3.0, 3.0, 3.0)

LEFT, TOP, ROW, UNIT, GAP = 96, 54, 26, 21.0, 74
COLOURS = {"forward": "#7fb2e5", "backward": "#f0b37e"}
FONT = 'font-family="system-ui, sans-serif"'


def main() -> None:
    """Write the picture beside this script."""
    Path(__file__).with_suffix(".svg").write_text(draw(), encoding="utf-8")


def draw() -> str:
    """Return the picture as SVG."""
    gpipe = Schedule("gpipe", FORWARD, BACKWARD, NUM_MICROBATCHES)
    other = Schedule("1f1b", FORWARD, BACKWARD, NUM_MICROBATCHES)
    end = float(network_end(gpipe.final_times, ALL_REDUCE, True))
    num_stages = len(FORWARD)
    parts = [*time_line(gpipe, "GPipe", TOP)]
    y = TOP + num_stages * ROW
    parts += all_reduces(gpipe, y)
    y += ROW + GAP
    parts += time_line(other, "1F1B", y)
    height, width = y + num_stages * ROW + 24, LEFT + end * UNIT + 24
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" {FONT}>',
            f'<rect width="{width:.0f}" height="{height}" fill="#ffffff"/>',
            *parts,
            "</svg>\n",
        ]
    )


def time_line(schedule: Schedule, name: str, y: float) -> list[str]:
    """Return the stages of a schedule as rows of boxes, below a line that says how long it is."""
    held = ", ".join(map(str, schedule.max_in_flight))
    title = (
        f"{name}: {schedule.makespan:.1f} time units, bubble {schedule.bubble_fraction:.0%}, "
        f"micro-batches held {held}"
    )
    parts = [text(LEFT, y - 12, title, 14)]
    for stage in range(schedule.num_stages):
        top = y + stage * ROW
        parts.append(text(12, top + 17, f"stage {stage}", 13))
        parts.append(box(LEFT, top, schedule.makespan * UNIT, "#f1f1f1"))
    for event in schedule.events:
        x, width = LEFT + event.start * UNIT, (event.end - event.start) * UNIT
        parts.append(box(x, y + event.stage * ROW, width, COLOURS[event.phase]))
        parts.append(
            text(x + width / 2, y + event.stage * ROW + 17, str(event.microbatch), 12, True)
        )
    return parts


def all_reduces(schedule: Schedule, y: float) -> list[str]:
    """Return the all-reduces over one link, last stage first, as a row of boxes."""
    parts = [text(12, y + 17, "all-reduce", 13)]
    end = 0.0
    for stage in reversed(range(schedule.num_stages)):
        start = max(end, float(schedule.final_times[stage]))
        end = start + ALL_REDUCE[stage]
        parts.append(box(LEFT + start * UNIT, y, ALL_REDUCE[stage] * UNIT, "#a8d5a2"))
        x = LEFT + (start + ALL_REDUCE[stage] / 2) * UNIT
        parts.append(text(x, y + 17, f"stage {stage}", 12, True))
    return parts


def box(x: float, y: float, width: float, colour: str) -> str:
    """Return a box of one row's height."""
    return (
        f'<rect x="{x:.1f}" y="{y + 1:.1f}" width="{width:.1f}" height="{ROW - 2}" '
        f'fill="{colour}" stroke="#ffffff"/>'
    )


def text(x: float, y: float, content: str, size: int, centred: bool = False) -> str:
    """Return a piece of text."""
    anchor = ' text-anchor="middle"' if centred else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="#222222"{anchor}>{content}</text>'
    )


if __name__ == "__main__":
    main()
