"""GPipe's time line: its length, its order, its bubble."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipollux_perfmodel import StageEvent, bubble_fraction, gpipe_schedule

times = st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10)), min_size=1, max_size=6)


@settings(derandomize=True, deadline=None, max_examples=300)
@given(times, st.integers(1, 10))
def test_makespan_is_the_closed_form(
    stages: list[tuple[float, float]], num_microbatches: int
) -> None:
    forward, backward = map(list, zip(*stages, strict=True))
    events = gpipe_schedule(forward, backward, num_microbatches)
    assert len(events) == 2 * len(stages) * num_microbatches
    expected = sum(
        sum(phase) + (num_microbatches - 1) * max(phase) for phase in (forward, backward)
    )
    assert max(event.end for event in events) == pytest.approx(expected)
    assert min(event.start for event in events) == 0.0


@settings(derandomize=True, deadline=None, max_examples=100)
@given(times, st.integers(1, 6))
def test_every_dependency_is_kept(stages: list[tuple[float, float]], num_microbatches: int) -> None:
    forward, backward = map(list, zip(*stages, strict=True))
    events = gpipe_schedule(forward, backward, num_microbatches)
    found = {(e.phase, e.stage, e.microbatch): e for e in events}
    for (phase, stage, microbatch), event in found.items():
        seconds = forward[stage] if phase == "forward" else backward[stage]
        assert event.end - event.start == pytest.approx(seconds)
        before = found.get((phase, stage + (-1 if phase == "forward" else 1), microbatch))
        assert before is None or before.end <= event.start
    for stage in range(len(stages)):
        own = sorted(e for e in events if e.stage == stage)
        own.sort(key=lambda e: (e.start, e.end))
        assert all(one.end <= other.start for one, other in pairwise(own))
    turn = max(e.end for e in events if e.phase == "forward")
    assert all(e.start >= turn for e in events if e.phase == "backward")


def test_three_stages_and_four_micro_batches_are_the_staircase() -> None:
    events = gpipe_schedule([1, 1, 1], [1, 1, 1], 4)
    rows = [[".."] * 12 for _ in range(3)]
    for event in events:
        rows[event.stage][round(event.start)] = event.phase[0].upper() + str(event.microbatch)
    assert [" ".join(row) for row in rows] == [
        "F0 F1 F2 F3 .. .. .. .. B3 B2 B1 B0",
        ".. F0 F1 F2 F3 .. .. B3 B2 B1 B0 ..",
        ".. .. F0 F1 F2 F3 B3 B2 B1 B0 .. ..",
    ]


@pytest.mark.parametrize("num_stages", [1, 2, 4, 8])
@pytest.mark.parametrize("num_microbatches", [1, 2, 4, 32])
def test_bubble_of_equal_stages_is_gpipes(num_stages: int, num_microbatches: int) -> None:
    events = gpipe_schedule([0.1] * num_stages, [0.2] * num_stages, num_microbatches)
    expected = (num_stages - 1) / (num_microbatches + num_stages - 1)
    assert bubble_fraction(events, num_stages) == pytest.approx(expected)


def test_bubble_of_little() -> None:
    assert bubble_fraction([], 3) == 0.0
    assert bubble_fraction([StageEvent(0, 0, "forward", 5.0, 5.0)], 1) == 0.0
    assert bubble_fraction([StageEvent(1, 0, "forward", 5.0, 6.0)], 4) == pytest.approx(0.75)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], [], 1), "forward has 0"),
        (([1.0], [1.0, 2.0], 1), "forward has 1 and backward 2"),
        (([1.0, -1.0], [1.0, 1.0], 1), r"forward\[1\] is -1"),
        (([1.0], [float("nan")], 1), r"backward\[0\] is nan"),
        (([1.0], [1.0], 0), "num_microbatches is 0"),
    ],
)
def test_bad_arguments_are_refused_by_name(
    arguments: tuple[list[float], list[float], int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        gpipe_schedule(*arguments)


def test_events_of_unknown_stages_are_refused() -> None:
    with pytest.raises(ValueError, match="an event is of stage 2; num_stages is 2"):
        bubble_fraction([StageEvent(2, 0, "forward", 0.0, 1.0)], 2)
