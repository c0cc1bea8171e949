"""What a job leaves on the disk when nobody took its last report."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest

import pipollux
from pipollux_hybrid.job import context as contexts
from pipollux_hybrid.job.context import context
from pipollux_hybrid.telemetry.metrics import Metrics
from pipollux_hybrid.telemetry.reporter import Reporter
from pipollux_protocol.messages import TrainingReport
from tests.hybrid.folders import saved_in
from tests.hybrid.replicas import free_port

from .reporting import Supervisor, environment, tell


@pytest.fixture
def reporter(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path, int], Reporter]]:
    """Return a reporter that saves in a folder and sends to a port."""

    def make(folder: Path, port: int) -> Reporter:
        for name, value in environment(f"http://127.0.0.1:{port}").items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("PIPOLLUX_CHECKPOINT_DIR", str(folder))
        contexts.reset()
        return context().component(Metrics).reporter

    yield make
    contexts.reset()


def test_what_nobody_takes_is_kept_for_the_next_scheduler(
    reporter: Callable[[Path, int], Reporter], tmp_path: Path
) -> None:
    """In the words that a scheduler takes, the step that was held back among them."""
    teller = reporter(tmp_path, free_port())
    for step in (1, 2, 3):
        tell(teller, step)
    teller.close()
    kept = TrainingReport.model_validate(json.loads((tmp_path / "unsent_report.json").read_text()))
    assert (kept.attempt, [point.step for point in kept.points]) == (3, [1, 2, 3])
    assert saved_in(tmp_path) == ["unsent_report.json"]


def test_metrics_that_nobody_takes_are_kept_too(
    reporter: Callable[[Path, int], Reporter], tmp_path: Path
) -> None:
    teller = reporter(tmp_path, free_port())
    pipollux.report_metric(accuracy=0.5)
    teller.close()
    kept = TrainingReport.model_validate(json.loads((tmp_path / "unsent_report.json").read_text()))
    assert (kept.points, [metric.value for metric in kept.metrics]) == ([], [0.5])


def test_what_was_taken_is_not_kept(
    reporter: Callable[[Path, int], Reporter], tmp_path: Path
) -> None:
    supervisor = Supervisor()
    supervisor.start()
    try:
        teller = reporter(tmp_path, supervisor.port)
        tell(teller, 1)
        teller.close()
    finally:
        supervisor.stop()
    assert supervisor.steps() == [1]
    assert saved_in(tmp_path) == []


def test_a_fit_that_fails_at_the_end_does_not_cost_the_last_report(
    reporter: Callable[[Path, int], Reporter], tmp_path: Path
) -> None:
    def fit() -> NoReturn:
        raise RuntimeError("cannot schedule new futures after interpreter shutdown")

    supervisor = Supervisor()
    supervisor.start()
    try:
        teller = reporter(tmp_path, supervisor.port)
        teller.send_hints_of(fit)
        for step in (1, 2, 3):
            tell(teller, step)
        teller.close()
    finally:
        supervisor.stop()
    assert supervisor.steps() == [1, 2, 3]
    assert saved_in(tmp_path) == []


def test_a_disk_that_takes_nothing_is_no_failure(
    reporter: Callable[[Path, int], Reporter], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / ".unsent_report.json").mkdir()  # so that the file cannot be written
    teller = reporter(tmp_path, free_port())
    tell(teller, 1)
    teller.close()
    assert "could neither be sent nor be kept" in caplog.text
