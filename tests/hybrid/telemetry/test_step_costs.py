"""What a step does beside training: no more than is needed, and the same on all replicas."""

from __future__ import annotations

import statistics
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from pipollux_hybrid import (
    AdaptiveDataLoader,
    HybridParallel,
    SynchronizationError,
    init_process_group,
    replica_rank,
)
from pipollux_hybrid.job.context import context, reset
from pipollux_hybrid.job.groups import ReplicaGroup
from pipollux_hybrid.optim import noise_meter
from pipollux_hybrid.optim.gradient_noise_scale import GradientNoiseScale
from pipollux_hybrid.telemetry.metrics import Metrics
from tests.hybrid.models import make_data, make_model
from tests.hybrid.replicas import run_replicas

AT_FIRST, EVERY = 3, 5


class Where(nn.Module):
    """Notes the threads that it runs in."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: set[int] = set()

    def forward(self, x: Tensor) -> Tensor:
        self.threads.add(threading.get_ident())
        return x


def train(num_steps: int, known: dict[str, Any] | None = None) -> dict[str, Any]:
    """Steps of one stage and one micro-batch, and what they did.

    Args:
        num_steps: Their number.
        known: The noise that a checkpoint held.
    """
    init_process_group("gloo")
    noise_meter.MEASURED_AT_FIRST, noise_meter.MEASURED_EVERY = AT_FIRST, EVERY
    where = Where()
    module = nn.Sequential(where, *make_model("mlp"))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    num_replicas = context().env.num_replicas
    batch_size = 4 * num_replicas
    loader = AdaptiveDataLoader(make_data("mlp", num_steps * batch_size), batch_size=batch_size)
    model = HybridParallel(module, optimizer)
    if known is not None:
        context().component(Metrics).restore_noise(GradientNoiseScale.from_json(known))
    collectives = [0]  # those before the first step, and of each step
    real = dist.all_reduce

    def counted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        collectives[-1] += 1
        return real(tensor, *args, **kwargs)

    dist.all_reduce = counted
    of_groups = ReplicaGroup.all_reduce

    def counted_too(group: ReplicaGroup, tensor: Tensor, timeout: float | None = None) -> None:
        collectives[-1] += 1
        of_groups(group, tensor, timeout)

    ReplicaGroup.all_reduce = counted_too  # type: ignore[method-assign]  # in a process of this test's own
    hooked, measured, seen = [], [], known["samples"] if known else 0
    for number, (inputs, targets) in enumerate(loader):
        collectives.append(0)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        hooked.append(
            any(p._backward_hooks or p._post_accumulate_grad_hooks for p in module[1].parameters())
        )
        optimizer.step()
        noise = context().component(Metrics).noise
        assert noise is not None
        if noise.num_samples > seen:
            measured.append(number)
        seen = noise.num_samples
    dist.all_reduce, ReplicaGroup.all_reduce = real, of_groups  # type: ignore[method-assign]  # as above
    return {
        "threads": where.threads == {threading.get_ident()},
        "hooked": hooked,
        "measured": measured,
        "collectives": collectives[1:],
        "noise": noise.to_json(),
    }


def test_one_replica_has_no_hooks_but_where_something_is_measured() -> None:
    """The noise of single estimates comes from a step and the one before, without hooks at all."""
    done = run_replicas(train, 1, 14)[0]
    assert done["threads"], "one micro-batch of one stage belongs to the script's own thread"
    assert done["collectives"] == [0] * 14
    # Steps in which the stages are timed alone: the first few, and then one of ten.
    assert 1 <= sum(done["hooked"]) <= 2
    # The first step has none before it; after three samples, one of so many steps.
    assert done["measured"] == [1, 2, 3, 6, 11]
    assert done["noise"]["differenced"]


def test_replicas_measure_at_the_same_steps_and_need_one_collective_beside_the_gradients() -> None:
    first, second = run_replicas(train, 2, 12)
    assert first["measured"] == second["measured"] == [0, 1, 2, 6, 11]
    assert first["noise"] == second["noise"], "made of the same sums"
    for done in (first, second):
        assert done["collectives"] == [2] * 12


def test_a_restart_goes_on_measuring_rarely() -> None:
    before = run_replicas(train, 1, 4)[0]
    assert before["measured"] == [1, 2, 3]
    assert run_replicas(train, 1, 12, before["noise"])[0]["measured"] == [1, 6, 11]


def test_a_sample_is_no_more_than_its_share_of_the_average() -> None:
    """Steps measured rarely, at a batch size of many initial ones, are averaged all the same."""
    noise = GradientNoiseScale(init_batch_size=8)
    for number in range(400):
        total = 1.0 if number % 2 else 2.0
        noise.update(
            total_sqr=total, estimate_sqr=4.0, num_estimates=2, batch_size=800, num_steps=64
        )
    assert noise.grad_params is not None
    # |g|² is 2 |G|² - S: -2 and 0 in turn, and their mean, clamped; tr Σ / 8: 300 and 200 in turn.
    assert noise.grad_params.var == pytest.approx(250.0, rel=0.01)


class Complex(nn.Module):
    """A complex readout and its squared distance: the gradient is complex, the output real."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.3 + 0.7j, -0.2 + 0.1j, 0.5 - 0.4j]))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight).abs().square()


def complex_data() -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(12, 3, dtype=torch.complex64, generator=generator)


def complex_noise(optimizer_name: str) -> tuple[float, float]:
    """|g|² and tr Σ / B of an iteration of four micro-batches."""
    init_process_group("gloo")
    noise_meter.MEASURED_EVERY = 1
    module = nn.Sequential(Complex())
    optimizer = getattr(torch.optim, optimizer_name)(module.parameters(), lr=0.0)
    data = complex_data()
    loader = AdaptiveDataLoader(TensorDataset(data.repeat(7, 1)), batch_size=12)
    model = HybridParallel(module, optimizer, num_microbatches=4)
    for (inputs,) in loader:
        optimizer.zero_grad()
        model(inputs).mean().backward()
        optimizer.step()
    noise = context().component(Metrics).noise
    assert noise is not None
    assert noise.preconditioned == (optimizer_name == "Adam")
    return noise._sqr.value, noise._var.value


@pytest.mark.parametrize("optimizer_name", ["SGD", "Adam"])
def test_complex_gradients_count_with_both_parts(optimizer_name: str) -> None:
    gradients = []
    for part in complex_data().split(3):
        module = Complex()
        module(part).mean().backward()
        assert module.weight.grad is not None
        gradients.append(torch.view_as_real(module.weight.grad).double())
    mean = torch.stack(gradients).mean(0)
    # All steps have the same gradient, so that Adam's second moment, corrected, is its square.
    weights = 1 / (mean.abs() + 1e-8) ** 2 if optimizer_name == "Adam" else torch.ones_like(mean)
    total = float((weights * mean.square()).sum())
    spread = sum(float((weights * g.square()).sum()) for g in gradients) / 4
    found = run_replicas(complex_noise, 1, optimizer_name)[0]
    assert found == pytest.approx(((4 * total - spread) / 3, (spread - total) / 3), rel=1e-4)


def leave_one_out() -> str:
    init_process_group("gloo")
    module = make_model("mlp")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    loader = AdaptiveDataLoader(make_data("mlp", 32), batch_size=8)
    model = HybridParallel(module, optimizer)
    try:
        for number, (inputs, targets) in enumerate(loader):
            if number == 1 and replica_rank() == 1:
                continue
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
    except SynchronizationError as error:
        return str(error)
    return "nothing was said"


def test_a_backward_on_some_replicas_only_is_found_out_at_that_step() -> None:
    for message in run_replicas(leave_one_out, 2):
        assert "samples 8 to 16" in message
        assert "1 replica ran a backward and the others did not" in message


def calls_of_a_step(step: Callable[[], None]) -> int:
    """The calls of Python and C functions in this thread."""
    count = [0]

    def note(_frame: FrameType, event: str, _argument: object) -> None:
        count[0] += event in ("call", "c_call")

    sys.setprofile(note)
    step()
    sys.setprofile(None)
    return count[0]


def calls(num_layers: int, wrapped: bool) -> float:
    """The median over steps that measure nothing; every tenth times the stages."""
    reset()
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(4, 4) for _ in range(num_layers)))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    model = HybridParallel(module, optimizer) if wrapped else module
    inputs = torch.randn(8, 4) + replica_rank()

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).mean().backward()
        optimizer.step()

    for _ in range(8):
        step()
    return statistics.median(calls_of_a_step(step) for _ in range(9))


def calls_by_parameter() -> float:
    """How many more calls a step makes for each further parameter, than the plain loop."""
    init_process_group("gloo")
    few, many = 5, 35
    parameters = 2 * (many - few)
    ours, plain = (calls(many, wrapped) - calls(few, wrapped) for wrapped in (True, False))
    return (ours - plain) / parameters


@pytest.mark.parametrize(("replicas", "most"), [(1, 0.5), (2, 4.5)])
def test_a_parameter_costs_few_calls_in_a_step(replicas: int, most: float) -> None:
    """None with one replica; with several a hook counts its gradients."""
    for found in run_replicas(calls_by_parameter, replicas):
        assert found <= most
