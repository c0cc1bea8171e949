"""Layers compute when recomputed what they computed at first, or are refused."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipollux_hybrid import HybridParallel, init_process_group
from pipollux_hybrid.errors import ConfigurationError
from pipollux_hybrid.job import context as contexts
from tests.extent import first
from tests.hybrid.replicas import run_replicas
from tests.hybrid.stage_processes.training import run_stages

BATCH, WIDTH, STEPS = 8, 4, 3
REFUSED = "computed something else when recomputed than at first"


class Drawing(nn.Module):
    """A linear layer, multiplied by a number, or left out where there is none."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.linear, self.draw = nn.Linear(WIDTH, WIDTH), draw

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x
        number = self.draw()
        return self.linear(x) * number if number else y


def of_python() -> float:
    return random.random()  # noqa: S311  # as layers do


def left_out() -> float:
    return float(of_python() < 0.5)


def of_numpy() -> float:
    return float(np.random.rand())


def of_torch() -> float:
    return float(torch.rand(()))


class Generator:
    """Draws from a generator of its own."""

    def __init__(self, dropping: bool) -> None:
        self.generator, self.dropping = torch.Generator().manual_seed(3), dropping

    def __call__(self) -> float:
        number = float(torch.rand((), generator=self.generator))
        return float(number < 0.5) if self.dropping else number


class Count:
    """One divided by the calls so far."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> float:
        self.calls += 1
        return 1.0 / self.calls


ALIKE = {"left out": left_out, "Python": of_python, "numpy": of_numpy, "torch": of_torch}
OTHERWISE: dict[str, Callable[[], Callable[[], float]]] = {
    "numbers of its own": lambda: Generator(dropping=False),
    "left out by itself": lambda: Generator(dropping=True),
    "counts": Count,
}


def model_of(draw: Callable[[], float], schedule: str | None, mode: str) -> HybridParallel:
    contexts.reset()
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(7)
    layers = [nn.Linear(WIDTH, WIDTH), Drawing(draw), Drawing(draw), nn.Linear(WIDTH, WIDTH)]
    module = nn.Sequential(*layers).double()
    return HybridParallel(
        module,
        torch.optim.SGD(module.parameters(), lr=0.3),
        balance=[2, 2],
        num_microbatches=2,
        schedule=schedule,
        activation_checkpoint=mode,
    )


def train(draw: Callable[[], float], schedule: str | None, mode: str) -> dict[str, Tensor]:
    """Train, and note a number that the script draws after each step."""
    model = model_of(draw, schedule, mode)
    drawn = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(BATCH, WIDTH, generator=generator, dtype=torch.float64)
        model.zero_grad()
        model.train_step(inputs, inputs.flip(1), F.mse_loss)
        model._optimizer.optimizer.step()
        drawn.append([of_python(), of_numpy(), of_torch()])
    return {**model.state_dict(), "drawn": torch.tensor(drawn)}


def by_mode(schedule: str | None) -> list[list[dict[str, Tensor]]]:
    init_process_group("gloo")
    modes = ("never", "always", "except_last")
    return [[train(draw, schedule, mode) for mode in modes] for draw in ALIKE.values()]


def refused(name: str, schedule: str | None) -> str:
    init_process_group("gloo")
    try:
        train(OTHERWISE[name](), schedule, "always")
    except ConfigurationError as error:
        return str(error)
    except RuntimeError as error:  # of a stage whose peer was refused
        return f"lost: {error}"
    return "trained"


def check(found: list[list[dict[str, Tensor]]]) -> None:
    for expected, *others in found:
        for other in others:
            torch.testing.assert_close(other, expected, rtol=0.0, atol=0.0)


def test_numbers_are_drawn_again_where_one_process_drives_all_stages() -> None:
    check(run_replicas(by_mode, 1, None)[0])


@pytest.mark.exhaustive
def test_numbers_are_drawn_again_where_each_stage_has_a_process() -> None:
    (replica,) = run_stages(by_mode, 1, 2, "1f1b")
    for process in replica:
        check(process)
    drawn = [[run["drawn"] for runs in process for run in runs] for process in replica]
    torch.testing.assert_close(drawn[0], drawn[1], rtol=0.0, atol=0.0)


@pytest.mark.parametrize("name", first(1, list(OTHERWISE)))
def test_other_outputs_are_refused(name: str) -> None:
    (told,) = run_replicas(refused, 1, name, None)
    assert REFUSED in told
    soon = {"PIPOLLUX_TIMEOUT": "60"}
    (replica,) = run_stages(refused, 1, 2, name, "1f1b", environment=soon)
    assert any(REFUSED in told for told in replica)
    assert "trained" not in replica
