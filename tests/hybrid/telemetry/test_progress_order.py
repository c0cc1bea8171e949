"""Lines of progress stand before what the script prints next, and the last step is among them."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from pipollux_hybrid.telemetry import progress_bar
from pipollux_hybrid.telemetry.progress_bar import ProgressDisplay
from pipollux_hybrid.telemetry.step_record import StepRecord


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> tuple[ProgressDisplay, io.StringIO]:
    """A display into a file, whose clock stands still: between two lines there is always time."""
    monkeypatch.setattr(progress_bar, "SAY_INTERVAL", 0.0)
    monkeypatch.setattr(progress_bar.time, "time", lambda: 100.0)
    file = io.StringIO()
    return ProgressDisplay(Console(file=file)), file


def point(step: int, time: float) -> StepRecord:
    return StepRecord(
        time=time,
        step=step,
        epoch=0,
        samples=step,
        loss=None,
        batch_size=1,
        atomic_bsz=1,
        accum_steps=0,
        num_replicas=1,
        step_time=1.0,
        predicted_step_time=None,
        goodput=None,
        efficiency=None,
    )


def steps(file: io.StringIO) -> list[int]:
    return [int(line.split(" step ")[1].split()[0]) for line in file.getvalue().splitlines()]


def test_what_a_loop_has_left_behind_is_not_shown(
    shown: tuple[ProgressDisplay, io.StringIO],
) -> None:
    display, file = shown
    display.on_step(point(1, 98.0))
    display.pause()
    display.on_step(point(2, 99.0))  # of the loop that has ended
    assert steps(file) == [1]
    display.on_step(point(3, 101.0))  # of the next one
    assert steps(file) == [1, 3]


@pytest.mark.parametrize("handed", [True, False])
def test_the_last_step_is_shown_once_and_at_once(
    shown: tuple[ProgressDisplay, io.StringIO], handed: bool
) -> None:
    display, file = shown
    display.on_step(point(1, 97.0))
    display.pause()
    last = point(2, 98.0)
    if handed:
        display.on_step(last)
    display.finish(None if handed else last)
    assert steps(file) == [1, 2]
    display.on_step(last)  # the reporting thread comes later
    display.finish(None)
    display.close()
    assert steps(file) == [1, 2]
