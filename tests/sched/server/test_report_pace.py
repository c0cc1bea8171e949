"""The more jobs report, the less often each of them is asked to."""

from __future__ import annotations

from pipollux_sched.server.report_pace import LEAST, MOST, RATE, ReportPace


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_all_together_report_at_one_rate() -> None:
    clock = Clock()
    pace = ReportPace(clock)
    few = int(RATE)
    assert {pace.note(f"job-{number}") for number in range(few)} == {LEAST}
    assert [pace.note(f"job-{number}") for number in range(20 * few)][-1] == 20.0
    assert pace.note("job-0") == 20.0, "none counts twice"
    for _ in range(3):  # they go on: the count does not begin anew
        clock.now += 20.0
        assert {pace.note(f"job-{number}") for number in range(20 * few)} == {20.0}
    assert [pace.note(f"job-{number}") for number in range(100 * few)][-1] == MOST


def test_those_that_have_ended_are_forgotten() -> None:
    clock = Clock()
    pace = ReportPace(clock)
    for number in range(int(4 * RATE)):
        pace.note(f"job-{number}")
    clock.now += MOST
    assert pace.note("job-0") == 4.0
    clock.now += MOST
    assert pace.note("job-0") == LEAST
    for number in range(int(4 * RATE)):
        pace.note(f"job-{number}")
    clock.now += 3 * MOST
    assert pace.note("job-0") == LEAST
