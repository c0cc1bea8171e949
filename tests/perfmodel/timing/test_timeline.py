"""Time lines of GPipe and 1F1B: their length, their order, their bubble."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import FrozenInstanceError
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipollux_perfmodel import StageEvent, bubble_fraction, gpipe_schedule, ideal_schedule
from pipollux_perfmodel.timing.params import ScheduleKind
from pipollux_perfmodel.timing.timeline import Schedule, one_f_one_b_schedule
from tests.extent import examples

times = st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10)), min_size=1, max_size=6)


@examples(150, 600)
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


@pytest.mark.parametrize("make", [gpipe_schedule, one_f_one_b_schedule])
@examples(50, 200)
@given(stages=times, num_microbatches=st.integers(1, 6))
def test_every_dependency_is_kept(
    make: Callable[..., list[StageEvent]], stages: list[tuple[float, float]], num_microbatches: int
) -> None:
    forward, backward = map(list, zip(*stages, strict=True))
    events = make(forward, backward, num_microbatches)
    assert events == sorted(events, key=lambda e: (e.start, e.end, e.stage))
    found = {(e.phase, e.stage, e.microbatch): e for e in events}
    assert len(found) == len(events) == 2 * len(stages) * num_microbatches
    for (phase, stage, microbatch), event in found.items():
        seconds = forward[stage] if phase == "forward" else backward[stage]
        assert event.end - event.start == pytest.approx(seconds)
        before = found.get((phase, stage + (-1 if phase == "forward" else 1), microbatch))
        assert before is None or before.end <= event.start
        if phase == "backward":
            assert found["forward", stage, microbatch].end <= event.start
    for stage in range(len(stages)):
        own = sorted(e for e in events if e.stage == stage)
        own.sort(key=lambda e: (e.start, e.end))
        assert all(one.end <= other.start for one, other in pairwise(own))
    if make is gpipe_schedule:
        turn = max(e.end for e in events if e.phase == "forward")
        assert all(e.start >= turn for e in events if e.phase == "backward")


def drawn(events: list[StageEvent]) -> list[str]:
    """Three stages, twelve slots of a second."""
    rows = [[".."] * 12 for _ in range(3)]
    for event in events:
        rows[event.stage][round(event.start)] = event.phase[0].upper() + str(event.microbatch)
    return [" ".join(row) for row in rows]


def test_three_stages_and_four_micro_batches_are_the_staircase() -> None:
    assert drawn(gpipe_schedule([1, 1, 1], [1, 1, 1], 4)) == [
        "F0 F1 F2 F3 .. .. .. .. B3 B2 B1 B0",
        ".. F0 F1 F2 F3 .. .. B3 B2 B1 B0 ..",
        ".. .. F0 F1 F2 F3 B3 B2 B1 B0 .. ..",
    ]


def test_1f1b_warms_up_alternates_and_drains() -> None:
    assert drawn(one_f_one_b_schedule([1, 1, 1], [1, 1, 1], 4)) == [
        "F0 F1 F2 .. .. B0 F3 B1 .. B2 .. B3",
        ".. F0 F1 .. B0 F2 B1 F3 B2 .. B3 ..",
        ".. .. F0 B0 F1 B1 F2 B2 F3 B3 .. ..",
    ]


def test_1f1b_holds_fewer_micro_batches() -> None:
    ones = (1.0,) * 4
    assert Schedule("gpipe", ones, ones, 8).max_in_flight == (8, 8, 8, 8)
    assert Schedule("1f1b", ones, ones, 8).max_in_flight == (4, 3, 2, 1)
    assert Schedule("1f1b", ones, ones, 3).max_in_flight == (3, 3, 2, 1)


def test_copies_are_machines_of_their_own() -> None:
    schedule = Schedule("gpipe", (1.0, 1.0), (1.0, 1.0), 2, transfer=(0.5,))
    assert schedule.transfers == [
        StageEvent(1, 0, "forward_transfer", 1.0, 1.5),
        StageEvent(1, 1, "forward_transfer", 2.0, 2.5),
        StageEvent(0, 1, "backward_transfer", 4.5, 5.0),
        StageEvent(0, 0, "backward_transfer", 5.5, 6.0),
    ]
    assert schedule.final_times == (7.0, 5.5)
    assert schedule.makespan == 7.0
    assert schedule.bubble_fraction == pytest.approx(6 / 14)
    assert {event.phase for event in schedule.events} == {"forward", "backward"}


def test_copies_occupy_the_receiving_device() -> None:
    schedule = Schedule(
        "gpipe", (1.0, 1.0), (1.0, 1.0), 2, transfer=(0.5,), transfers_overlap=False
    )
    assert schedule.transfers == [
        StageEvent(1, 0, "forward_transfer", 1.0, 1.5),
        StageEvent(1, 1, "forward_transfer", 2.5, 3.0),
        StageEvent(0, 1, "backward_transfer", 5.0, 5.5),
        StageEvent(0, 0, "backward_transfer", 6.5, 7.0),
    ]
    assert schedule.final_times == (8.0, 6.0)
    # A device that copies does not compute.
    assert schedule.bubble_fraction == pytest.approx(0.5)
    both = schedule.events + schedule.transfers
    assert bubble_fraction(both, 2) == pytest.approx(0.5)


def test_copies_are_free_unless_given() -> None:
    schedule = Schedule("gpipe", (1.0, 1.0), (1.0, 1.0), 2)
    assert len(schedule.transfers) == 4
    assert all(event.start == event.end for event in schedule.transfers)
    assert Schedule("gpipe", (1.0,), (1.0,), 2).transfers == []


def test_last_micro_batch_comes_back_first_by_gpipe_and_last_by_1f1b() -> None:
    seconds = ((1.0, 1.0), (2.0, 2.0), 2, (1.0, 1.0))

    def back(schedule: Schedule) -> list[tuple[int, float, float]]:
        chosen = (e for e in schedule.events if (e.phase, e.stage) == ("backward", 1))
        return [(e.microbatch, e.start, e.end) for e in chosen]

    gpipe, other = Schedule("gpipe", *seconds), Schedule("1f1b", *seconds)
    assert back(gpipe) == [(1, 3.0, 4.0), (0, 4.0, 6.0)]
    assert back(other) == [(0, 2.0, 4.0), (1, 5.0, 6.0)]
    assert gpipe.final_times == (8.0, 6.0)
    assert other.final_times == (7.0, 6.0)


def test_a_schedule_is_a_value() -> None:
    schedule = Schedule("gpipe", [1.0, 2.0], [2.0, 3.0], 2)
    same = Schedule("gpipe", (1.0, 2.0), (2.0, 3.0), 2, (2.0, 3.0), (0.0,))
    assert schedule == same
    assert hash(schedule) == hash(same)
    schedule.events.clear()
    assert schedule.events == gpipe_schedule([1.0, 2.0], [2.0, 3.0], 2)
    with pytest.raises(FrozenInstanceError):
        schedule.num_microbatches = 3


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


@pytest.mark.parametrize("kind", ["gpipe", "1f1b"])
def test_the_ideal_of_an_ideal_is_itself(kind: ScheduleKind) -> None:
    """Whatever its stage times, when it began, and whether a backward comes in two pieces."""
    line = Schedule(kind, (3.0, 1.0, 2.0), (1.0, 3.0, 2.5), 5)
    whole = [e._replace(start=e.start + 70.0, end=e.end + 70.0) for e in line.events]
    pieces = [
        event._replace(start=start, end=end)
        for event in whole
        for middle in [event.start + 0.25 * (event.phase == "backward")]
        for start, end in ((event.start, middle), (middle, event.end))
    ]
    for events in (whole, pieces):
        found = ideal_schedule(kind, events, 3)
        assert found is not None
        assert found.makespan == pytest.approx(line.makespan)
        assert found.bubble_fraction == pytest.approx(line.bubble_fraction)
    late = ideal_schedule(kind, [e._replace(end=e.end + 50.0 * (e.stage == 1)) for e in whole], 3)
    assert late is not None
    assert late.forward == pytest.approx((3.0, 51.0, 2.0))


def test_no_ideal_of_half_a_step() -> None:
    events = gpipe_schedule([1.0, 1.0], [1.0, 1.0], 2)
    assert ideal_schedule("gpipe", events, 3) is None
    assert ideal_schedule("gpipe", [e for e in events if e.phase == "forward"], 2) is None
    assert ideal_schedule("gpipe", [], 1) is None


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


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"kind": "gpip"}, "kind is 'gpip'; give 'gpipe', '1f1b' or 'interleaved'"),
        ({"forward": (1.0,)}, "forward has 1 and backward 2 entries"),
        ({"last_backward": (1.0,)}, "last_backward has 1 entries; give one per stage, 2"),
        ({"last_backward": (1.0, -1.0)}, r"last_backward\[1\] is -1.0"),
        ({"transfer": (1.0, 1.0)}, "transfer has 2 entries; give one per boundary.*, 1"),
        ({"transfer": (float("inf"),)}, r"transfer\[0\] is inf; give a finite time"),
        ({"num_microbatches": 0}, "num_microbatches is 0; give at least one"),
    ],
)
def test_bad_schedules_are_refused_by_name(changed: dict[str, Any], message: str) -> None:
    good = {"kind": "1f1b", "forward": (1.0, 1.0), "backward": (1.0, 1.0), "num_microbatches": 1}
    with pytest.raises(ValueError, match=message):
        Schedule(**{**good, **changed})
