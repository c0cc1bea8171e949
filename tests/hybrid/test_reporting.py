"""What a job tells the scheduler, over real HTTP, and what it does when nobody listens."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
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
from pipollux_hybrid.context import context
from pipollux_perfmodel import SchedHints
from tests.hybrid.models import make_data, make_model
from tests.hybrid.replicas import free_port, run_replicas

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
    thread.join(10)
    server.server_close()


def environment(url: str) -> dict[str, str]:
    return {
        "PIPOLLUX_SUPERVISOR_URL": url,
        "PIPOLLUX_JOB_ID": "a-job",
        "PIPOLLUX_GENERATION": "3",
        "PIPOLLUX_TOKEN": TOKEN,
        "PIPOLLUX_HINTS_INTERVAL": "1",
    }


def train(seconds: float) -> tuple[int, list[float]]:
    """Train for some seconds; the number of steps and the losses of the last epoch."""
    init_process_group("gloo")
    module = make_model("transformer")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    loader = AdaptiveDataLoader(make_data("transformer", 256), batch_size=16, shuffle=True)
    loader.autoscale_batch_size(64, (4, 32), gradient_accumulation=True)
    model = HybridParallel(module, optimizer, num_stages=2, num_microbatches=2)
    started = time.monotonic()
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
        # All replicas leave together: rank 0's clock decides.
        over = torch.tensor([float(time.monotonic() - started > seconds)])
        if context().control.gather(over)[0].item():
            break
    context().metrics.flush()
    return context().metrics.step, losses


def test_hints_and_points_arrive(listener: Listener) -> None:
    results = run_replicas(train, 2, 2.5, environment=environment(listener.url))
    assert {token for _, _, token, _ in listener.heard} == {f"Bearer {TOKEN}"}
    hints = [SchedHints.model_validate(body) for body in listener.bodies("PUT")]
    assert hints, "fitted and sent while training"
    last = hints[-1]
    assert (last.num_stages, last.num_microbatches) == (2, 2)
    assert (last.init_batch_size, last.max_batch_size) == (16, 64)
    assert last.max_profiled_replicas == 2
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
    steps, losses = run_replicas(train, 1, 1.5, environment=environment(nobody))[0]
    assert steps > 10
    assert losses


def batch_sizes(seconds: float) -> list[int]:
    """Train with noise that favours large batches; the batch sizes that were used."""
    init_process_group("gloo")
    module = make_model("mlp")
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-4)
    data = make_data("mlp", 512)  # random classes: the gradient is almost all noise
    loader = AdaptiveDataLoader(data, batch_size=8, shuffle=True)
    loader.autoscale_batch_size(128, (4, 64), gradient_accumulation=True)
    model = HybridParallel(module, optimizer, num_stages=2, num_microbatches=4)
    used: list[int] = []
    started = time.monotonic()
    for _ in remaining_epochs_until(10_000):
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            used.append(loader.current_batch_size)
        over = torch.tensor([float(time.monotonic() - started > seconds)])
        if context().control.gather(over)[0].item():
            break
    return used


def test_the_batch_size_follows_the_goodput() -> None:
    """Fixed costs dominate so small a model's steps, and noise its gradient: larger is better."""
    first, second = run_replicas(batch_sizes, 2, 5.0, environment={"PIPOLLUX_HINTS_INTERVAL": "1"})
    assert first == second, "replicas change it at the same step"
    assert first[0] == 8
    assert max(first) > 8
    assert max(first) <= 128
