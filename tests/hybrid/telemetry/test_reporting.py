"""What a job tells the scheduler, over real HTTP, and what it does when nobody listens."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from pipollux_hybrid import (
    AdaptiveDataLoader,
    HybridParallel,
    init_process_group,
    remaining_epochs_until,
    report,
)
from pipollux_hybrid.job import context as contexts
from pipollux_hybrid.job.context import context
from pipollux_hybrid.telemetry import reporter as reporter_module
from pipollux_hybrid.telemetry.metrics import Metrics
from pipollux_hybrid.telemetry.reporter import MAX_POINTS, Reporter
from pipollux_hybrid.telemetry.step_record import StepRecord
from pipollux_perfmodel import SchedHints, StageEvent
from tests.hybrid.models import make_data, make_model
from tests.hybrid.replicas import run_replicas
from tests.programs import free_port

TOKEN = "a-token-of-the-job"


@dataclass
class Listener:
    """A supervisor that writes down what it hears."""

    url: str
    heard: list[tuple[str, str, str, Any]] = field(default_factory=list)

    def bodies(self, method: str) -> list[Any]:
        return [body for m, _, _, body in self.heard if m == method]


@pytest.fixture
def listener() -> Iterator[Listener]:
    class Handler(BaseHTTPRequestHandler):
        def take(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            token = self.headers.get("Authorization", "")
            heard.heard.append((self.command, self.path, token, body))
            self.send_response(204)
            self.end_headers()

        do_PUT = do_POST = take  # noqa: N815  # the base class's names

        def log_message(self, *args: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    heard = Listener(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield heard
    server.shutdown()
    thread.join(240)
    server.server_close()


def environment(url: str) -> dict[str, str]:
    return {
        "PIPOLLUX_SUPERVISOR_URL": url,
        "PIPOLLUX_JOB_ID": "a-job",
        "PIPOLLUX_GENERATION": "3",
        "PIPOLLUX_TOKEN": TOKEN,
        "PIPOLLUX_HINTS_INTERVAL": "1",
        "PIPOLLUX_HEARTBEAT_INTERVAL": "0",
    }


def train(enough: Path | None = None) -> tuple[int, list[float]]:
    """Train until a file is there, or for some steps; how many, and the last epoch's losses."""
    init_process_group("gloo")
    module = make_model("transformer")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    loader = AdaptiveDataLoader(make_data("transformer", 256), batch_size=16, shuffle=True)
    loader.autoscale_batch_size(64, (4, 32), gradient_accumulation=True)
    model = HybridParallel(module, optimizer, num_stages=2, num_microbatches=2)
    losses: list[float] = []
    for _ in remaining_epochs_until(10_000):
        losses = []
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            report(loss=loss)
            losses.append(loss.item())
        # All replicas leave together, when rank 0 does.
        is_over = context().component(Metrics).step > 30 if enough is None else enough.exists()
        over = torch.tensor([float(is_over)])
        if context().control.gather(over)[0].item():
            break
    context().component(Metrics).flush()
    return context().component(Metrics).step, losses


def test_hints_and_points_arrive(listener: Listener, tmp_path: Path) -> None:
    def has_heard() -> bool:
        reports = listener.bodies("POST")
        told = [body for body in reports if body["timeline"]]
        return bool(listener.bodies("PUT") and told and sum(len(x["points"]) for x in reports) > 3)

    def end_training() -> None:
        until(has_heard)
        (tmp_path / "enough").touch()

    watching = threading.Thread(target=end_training, daemon=True)
    watching.start()
    results = run_replicas(train, 2, tmp_path / "enough", environment=environment(listener.url))
    watching.join()
    assert {token for _, _, token, _ in listener.heard} == {f"Bearer {TOKEN}"}
    hints = [SchedHints.model_validate(body) for body in listener.bodies("PUT")]
    assert hints, "fitted and sent while training"
    last = hints[-1]
    assert (last.num_stages, last.num_microbatches) == (2, 2)
    assert (last.init_batch_size, last.max_batch_size) == (16, 64)
    assert last.max_profiled_replicas == 2
    assert (last.layers, last.memory_limit) == (None, None), "there was no sample to measure"
    assert last.remaining_samples is not None
    assert 0 < last.remaining_samples < 10_000 * 256
    goodput = last.goodput_function()
    assert goodput is not None
    assert goodput.evaluate(1, 2, 8, 0, 2) > 0.0
    assert ("PUT", "/jobs/a-job/hints?generation=3") in {(m, p) for m, p, _, _ in listener.heard}
    reports = listener.bodies("POST")
    points = [point for body in reports for point in body["points"]]
    steps = [point["step"] for point in points]
    assert steps == sorted(set(steps)), "in order, none twice"
    assert all(point["loss"] > 0 and point["stepTime"] > 0 for point in points)
    assert all(point["numReplicas"] == 2 for point in points)
    assert steps[-1] == results[0][0], "the last step is not held back"
    times = [point["time"] for point in points[:-1]]
    assert len(times) < 4.5 * (times[-1] - times[0]) + 2, "thinned"
    timelines = [body["timeline"] for body in reports if body["timeline"]]
    assert timelines
    assert timelines[-1]["schedule"] == "gpipe"
    events = timelines[-1]["events"]
    assert {tuple(event[:3]) for event in events} == {
        (stage, microbatch, phase)
        for stage in (0, 1)
        for microbatch in (0, 1)
        for phase in ("forward", "backward")
    }
    assert all(start <= end for *_, start, end in events)


def test_training_goes_on_without_a_scheduler() -> None:
    nobody = f"http://127.0.0.1:{free_port()}"
    steps, losses = run_replicas(train, 1, environment=environment(nobody))[0]
    assert steps > 30
    assert losses


class Supervisor:
    """A scheduler that can be away, over real HTTP on one port."""

    def __init__(self, status: int = 204) -> None:
        self.status = status
        self.again: float | None = None
        """Seconds that reports are told to wait; None: they are answered without a word."""
        self.failing: set[str] = set()
        self.port = free_port()
        self.heard: list[tuple[str, Any]] = []
        self._server: ThreadingHTTPServer | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        supervisor = self

        class Handler(BaseHTTPRequestHandler):
            def take(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                supervisor.heard.append((self.command, body))
                fails = self.command in supervisor.failing
                told = self.command == "POST" and supervisor.again is not None
                self.send_response(500 if fails else 200 if told else supervisor.status)
                content = json.dumps({"again": supervisor.again}).encode() if told else b""
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_PUT = do_POST = take  # noqa: N815  # the base class's names

            def log_message(self, *args: object) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def stop(self) -> None:
        if self._server is not None and self._thread is not None:
            self._server.shutdown()
            self._thread.join(240)
            self._server.server_close()
            self._server = None

    def steps(self) -> list[int]:
        return [
            p["step"] for method, body in self.heard if method == "POST" for p in body["points"]
        ]


@pytest.fixture
def reporting(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Supervisor, Reporter]]:
    """A reporter in this process, ten times as quick as usual, and its scheduler, away as yet."""
    supervisor = Supervisor()
    for name, value in environment(f"http://127.0.0.1:{supervisor.port}").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("pipollux_hybrid.telemetry.reporter.REPORT_INTERVAL", 0.05)
    monkeypatch.setattr("pipollux_hybrid.telemetry.reporter.MAX_BACKOFF", 0.2)
    contexts.reset()
    metrics = context().component(Metrics)
    monkeypatch.setattr(metrics, "hints", lambda: SchedHints(init_batch_size=16))
    yield supervisor, context().component(Metrics).reporter
    contexts.reset()
    supervisor.stop()


def record(step: int, at: float, **known: Any) -> StepRecord:
    fields: dict[str, Any] = dict.fromkeys(("epoch", "samples", "accum_steps"), 0)
    fields |= dict.fromkeys(("predicted_step_time", "goodput", "efficiency", "loss"), None)
    fields |= dict.fromkeys(("batch_size", "atomic_bsz", "num_replicas"), 1)
    return StepRecord(time=at, step=step, step_time=0.1, **(fields | known))


def tell(reporter: Reporter, step: int, **known: Any) -> None:
    made = record(step, float(step), **known)
    reporter.note_loss(step, made.loss)
    reporter.add_point(made.time, lambda: made)


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


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
    until(lambda: any(method == "PUT" for method, _ in supervisor.heard))
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
    assert ("PUT", 16) in [(m, body.get("initBatchSize")) for m, body in supervisor.heard]


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
    until(lambda: [method for method, _ in supervisor.heard].count("PUT") > 1)
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
    until(lambda: any(method == "PUT" for method, _ in supervisor.heard))
    points = [p for method, body in supervisor.heard if method == "POST" for p in body["points"]]
    sent = {point["step"]: point["loss"] for point in points}
    assert sent == dict(enumerate([1.0, None, None, 0.5, None, None, 0.25], 1))
    assert all(point["goodput"] is None for point in points)
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


def batch_sizes() -> list[int]:
    """Train with noise that favours large batches until one is used; the batch sizes so far."""
    init_process_group("gloo")
    module = make_model("mlp")
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-4)
    data = make_data("mlp", 512)  # random classes: the gradient is almost all noise
    loader = AdaptiveDataLoader(data, batch_size=8, shuffle=True)
    loader.autoscale_batch_size(128, (4, 64), gradient_accumulation=True)
    model = HybridParallel(module, optimizer, num_stages=2, num_microbatches=4)
    used: list[int] = []
    for _ in remaining_epochs_until(10_000):
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            used.append(loader.current_batch_size)
        over = torch.tensor([float(max(used) > 8)])
        if context().control.gather(over)[0].item():
            break
    return used


def test_the_batch_size_follows_the_goodput() -> None:
    """Fixed costs dominate so small a model's steps, and noise its gradient: larger is better."""
    first, second = run_replicas(batch_sizes, 2, environment={"PIPOLLUX_HINTS_INTERVAL": "1"})
    assert first == second, "replicas change it at the same step"
    assert first[0] == 8
    assert max(first) > 8
    assert max(first) <= 128
