"""What a job's reporter sends, and what it does when nobody listens or takes it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import pytest

from pipollux_hybrid.job import context as contexts
from pipollux_hybrid.job.context import context
from pipollux_hybrid.telemetry import reporter as reporter_module
from pipollux_hybrid.telemetry.metrics import Metrics
from pipollux_hybrid.telemetry.reporter import MAX_POINTS, Reporter
from pipollux_hybrid.telemetry.step_record import StepRecord
from pipollux_perfmodel import SchedHints, StageEvent

from .reporting import Supervisor, environment, record, tell, until


@pytest.fixture
def reporting(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Supervisor, Reporter]]:
    """A reporter in this process, ten times as quick as usual, and its scheduler, away as yet."""
    supervisor = Supervisor()
    for name, value in environment(supervisor.url).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("pipollux_hybrid.telemetry.reporter.REPORT_INTERVAL", 0.05)
    monkeypatch.setattr("pipollux_hybrid.telemetry.reporter.MAX_BACKOFF", 0.2)
    contexts.reset()
    metrics = context().component(Metrics)
    monkeypatch.setattr(metrics, "hints", lambda: SchedHints(init_batch_size=16))
    yield supervisor, context().component(Metrics).reporter
    contexts.reset()
    supervisor.stop()


def test_a_scheduler_that_dies_and_comes_back(
    reporting: tuple[Supervisor, Reporter], caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is lost that there is room for, nothing comes twice, hints come again."""
    supervisor, reporter = reporting
    for step in (1, 2):
        tell(reporter, step)
    until(lambda: "the next attempt is in" in caplog.text)
    supervisor.start()
    until(lambda: supervisor.steps() == [1, 2])
    until(lambda: supervisor.bodies("PUT"))
    supervisor.stop()
    warnings = len(caplog.records)
    for step in range(3, 3 + MAX_POINTS + 5):
        tell(reporter, step)
    until(lambda: len(caplog.records) > warnings)
    supervisor.heard.clear()
    supervisor.start()
    until(lambda: supervisor.steps())
    assert supervisor.steps() == list(range(8, 3 + MAX_POINTS + 5)), "the latest, the oldest went"
    reporter.close()
    assert 16 in [body["initBatchSize"] for body in supervisor.bodies("PUT")]


def test_a_listener_that_cannot_write_says_so_in_a_sentence(
    reporting: tuple[Supervisor, Reporter], caplog: pytest.LogCaptureFixture
) -> None:
    """A defect of one is told with its traceback."""

    class Full:
        def __init__(self, error: Exception) -> None:
            self.error = error

        def on_step(self, _point: StepRecord) -> None:
            raise self.error

        def close(self) -> None:
            pass

    _, reporter = reporting
    for error in (FileNotFoundError(2, "No such file or directory", "/proc/x"), ValueError("oh")):
        reporter.listen(Full(error))
    tell(reporter, 1)
    until(lambda: caplog.text.count("switched off") == 2)
    told = [entry for entry in caplog.records if "switched off" in entry.message]
    assert [entry.exc_info is None for entry in told] == [True, False]
    assert told[0].message == (
        "Full cannot write, and is switched off: [Errno 2] No such file or directory: '/proc/x'"
    )


def test_a_scheduler_that_fails_is_asked_again(reporting: tuple[Supervisor, Reporter]) -> None:
    supervisor, reporter = reporting
    supervisor.status = 500
    supervisor.start()
    tell(reporter, 1)
    until(lambda: len(supervisor.steps()) > 1)
    supervisor.status = 204
    supervisor.heard.clear()
    until(lambda: supervisor.steps())
    tell(reporter, 2)
    until(lambda: 2 in supervisor.steps())
    assert supervisor.steps().count(2) == 1


def test_a_scheduler_of_many_jobs_gets_fewer_reports_of_fewer_points(
    reporting: tuple[Supervisor, Reporter], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gets as many points in a long while as others do in a short one, and the last one."""
    monkeypatch.setattr("pipollux_hybrid.telemetry.reporter.MAX_BACKOFF", 1000.0)
    supervisor, reporter = reporting
    supervisor.again = 500.0
    supervisor.start()
    tell(reporter, 1)
    until(lambda: supervisor.steps() == [1])
    gap = 500.0 / (reporter_module.POINTS_PER_SECOND * reporter_module.REPORT_INTERVAL)
    for step in range(2, 43):
        reporter.add_point(step * gap / 4, partial(record, step, step * gap / 4))
    reporter.close()
    assert supervisor.steps() == [1, *range(2, 43, 4)]


def test_hints_that_always_fail_do_not_hold_up_reports(
    reporting: tuple[Supervisor, Reporter],
) -> None:
    supervisor, reporter = reporting
    supervisor.failing = {"PUT"}
    supervisor.start()
    tell(reporter, 1)
    until(lambda: len(supervisor.bodies("PUT")) > 1)
    tell(reporter, 2)
    until(lambda: 2 in supervisor.steps())


@pytest.mark.parametrize("status", [401, 403])
def test_a_token_refused_is_said_once(
    reporting: tuple[Supervisor, Reporter], caplog: pytest.LogCaptureFixture, status: int
) -> None:
    supervisor, reporter = reporting
    supervisor.status = status
    supervisor.start()
    for step in range(1, 20):
        tell(reporter, step)
    until(lambda: supervisor.heard)
    until(lambda: caplog.records)
    tell(reporter, 20)
    reporter.close()
    assert len(supervisor.heard) == 1
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1
    assert f"status {status}" in said[0]
    assert "PIPOLLUX_TOKEN" in said[0]


def test_a_loss_that_is_no_number_is_a_gap(
    reporting: tuple[Supervisor, Reporter], capsys: pytest.CaptureFixture[str]
) -> None:
    """It is said once, and neither points nor hints end with it."""
    supervisor, reporter = reporting
    supervisor.start()
    losses = [1.0, math.nan, math.nan, 0.5, math.inf, -math.inf, 0.25]
    for step, loss in enumerate(losses, 1):
        tell(reporter, step, loss=loss, goodput=math.nan)
    until(lambda: 7 in supervisor.steps())
    until(lambda: supervisor.bodies("PUT"))
    sent = {point["step"]: point["loss"] for point in supervisor.points()}
    assert sent == dict(enumerate([1.0, None, None, 0.5, None, None, 0.25], 1))
    assert all(point["goodput"] is None for point in supervisor.points())
    assert capsys.readouterr().err.splitlines() == [
        "pipollux: loss is NaN since step 2; it is reported as a gap, training goes on",
        "pipollux: loss is finite again at step 4; it was not since step 2",
        "pipollux: loss is infinite since step 5; it is reported as a gap, training goes on",
        "pipollux: loss is finite again at step 7; it was not since step 5",
    ]


def test_a_fault_in_the_reporting_thread_is_said_and_does_not_end_it(
    reporting: tuple[Supervisor, Reporter],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    supervisor, reporter = reporting
    supervisor.start()

    def broken() -> None:
        raise RuntimeError("nobody has thought of this")

    monkeypatch.setattr(context().component(Metrics), "fit", broken)
    monkeypatch.setattr(reporter, "_next_hints", 0.0)
    tell(reporter, 1)
    until(lambda: "nobody has thought of this" in caplog.text)
    tell(reporter, 2)
    until(lambda: supervisor.steps() == [1, 2])
    said = [record for record in caplog.records if "reporting failed" in record.getMessage()]
    assert len(said) == 1, "once, however often it is tried"


def test_what_cannot_be_sent_does_not_stand_in_the_way(
    reporting: tuple[Supervisor, Reporter], caplog: pytest.LogCaptureFixture
) -> None:
    supervisor, reporter = reporting
    supervisor.start()
    reporter.add_timeline(1, 1, 1, [StageEvent(0, 0, "forward", 0.0, math.nan)])
    tell(reporter, 1)
    until(lambda: "reports cannot be sent" in caplog.text)
    reporter.add_timeline(2, 1, 1, [StageEvent(0, 0, "forward", 0.0, 1.0)])
    tell(reporter, 2)
    until(lambda: supervisor.steps() == [2])
