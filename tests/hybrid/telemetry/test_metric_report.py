"""`pipollux.report_metric`: which values a scheduler gets, at which steps."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import pipollux
from pipollux_hybrid.job import context as contexts
from pipollux_hybrid.job.context import context
from pipollux_hybrid.telemetry.metrics import Metrics
from pipollux_protocol.messages import MAX_METRICS, TrainingReport

from .reporting import Supervisor, environment, until


@pytest.fixture
def supervisor(monkeypatch: pytest.MonkeyPatch) -> Iterator[Supervisor]:
    found = Supervisor()
    for name, value in environment(found.url).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("pipollux_hybrid.telemetry.reporter.REPORT_INTERVAL", 0.05)
    monkeypatch.setattr("pipollux_hybrid.telemetry.reporter.MAX_BACKOFF", 0.2)
    contexts.reset()
    yield found
    contexts.reset()
    found.stop()


def heard(supervisor: Supervisor) -> list[tuple[str, int, Any]]:
    reports = map(TrainingReport.model_validate, supervisor.bodies("POST"))
    return [(each.name, each.step, each.value) for report in reports for each in report.metrics]


def test_a_metric_is_of_the_epochs_that_have_begun(supervisor: Supervisor) -> None:
    pipollux.report_metric(accuracy=0.1)
    for epoch in pipollux.remaining_epochs_until(2):
        pipollux.report_metric(accuracy=0.5)
        pipollux.report_metric(accuracy=torch.tensor(0.5 + epoch / 4), loss=math.nan)
    pipollux.report_metric(perplexity=7, step=100)
    supervisor.start()
    context().component(Metrics).reporter.close()
    assert heard(supervisor) == [
        *(("accuracy", 0, 0.1), ("accuracy", 1, 0.5), ("loss", 1, None)),
        *(("accuracy", 2, 0.75), ("loss", 2, None), ("perplexity", 100, 7.0)),
    ]


def test_each_value_is_sent_once_and_the_latest_are_kept(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:  # nothing is sent before all are there
        patch.setattr(context().component(Metrics).reporter, "_ensure_running", lambda: None)
        for step in range(MAX_METRICS + 2):
            pipollux.report_metric(accuracy=step, step=step)
    pipollux.report_metric(accuracy=MAX_METRICS + 2, step=MAX_METRICS + 2)
    supervisor.start()
    until(lambda: heard(supervisor))
    assert [step for _, step, _ in heard(supervisor)] == list(range(3, MAX_METRICS + 3))
    pipollux.report_metric(accuracy=1.0, step=5)
    until(lambda: len(heard(supervisor)) > MAX_METRICS)
    context().component(Metrics).reporter.close()
    assert heard(supervisor)[MAX_METRICS:] == [("accuracy", 5, 1.0)]


@pytest.mark.parametrize("step", [-1, 1.5, True])
def test_what_is_no_step(step: Any) -> None:
    with pytest.raises(pipollux.ConfigurationError, match="is not a whole number of at least 0"):
        pipollux.report_metric(step=step, loss=1.0)


@pytest.mark.parametrize("name", ["é", "x" * 101, "a b"])
def test_what_is_no_name(name: str) -> None:
    with pytest.raises(pipollux.ConfigurationError, match="is not the name of a metric"):
        pipollux.report_metric(**{name: 1.0})


def test_no_metric_at_all() -> None:
    with pytest.raises(pipollux.ConfigurationError, match="has no value"):
        pipollux.report_metric()
