"""What a job in training tells the scheduler, over real HTTP, and does with what it measures."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

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
from pipollux_hybrid.job.context import context
from pipollux_hybrid.telemetry.metrics import Metrics
from pipollux_perfmodel import SchedHints
from tests.hybrid.models import make_data, make_model
from tests.hybrid.replicas import run_replicas
from tests.programs import free_port

from .reporting import TOKEN, Supervisor, environment, until


@pytest.fixture
def listener() -> Iterator[Supervisor]:
    supervisor = Supervisor()
    supervisor.start()
    yield supervisor
    supervisor.stop()


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


def test_hints_and_points_arrive(listener: Supervisor, tmp_path: Path) -> None:
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
    assert {request.token for request in listener.heard} == {f"Bearer {TOKEN}"}
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
    asked = {(request.method, request.path) for request in listener.heard}
    assert ("PUT", "/jobs/a-job/hints?attempt=3") in asked
    reports = listener.bodies("POST")
    points, steps = listener.points(), listener.steps()
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
    first, second = run_replicas(batch_sizes, 2, environment={"PIPOLLUX_HINTS_INTERVAL": "0.2"})
    assert first == second, "replicas change it at the same step"
    assert first[0] == 8
    assert max(first) > 8
    assert max(first) <= 128
