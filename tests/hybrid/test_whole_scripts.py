"""Whole scripts as people write them: exact, or refused before the first step that would be wrong.

Each has more than a model, an optimizer and a mean: parameters of a loss, a model that is not
wrapped, another optimizer, gradients accumulated by hand. They run on two replicas, and on one with
accumulation steps whose parts are not equal.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.data import TensorDataset

from pipollux_hybrid import (
    AdaptiveDataLoader,
    ConfigurationError,
    HybridParallel,
    SynchronizationError,
    all_reduce_sum,
    init_process_group,
    num_replicas,
    process_rank,
    replica_rank,
)
from pipollux_hybrid.job import context as contexts
from tests.hybrid.models import assert_close
from tests.hybrid.replicas import run_replicas
from tests.hybrid.stage_processes.training import run_stages

BATCH, WIDTH, SAMPLES = 8, 4, 21
"""The last batch has 5 samples: parts of 3 and 2."""
Model = Callable[[Tensor], Tensor]
Step = Callable[[Tensor, Tensor], None]


class Training:
    """A model and its optimizer, plain or wrapped."""

    def __init__(self) -> None:
        torch.manual_seed(4)
        # The vectors of a spectral norm change once per batch.
        last = spectral_norm(nn.Linear(6, 3))
        self.module = nn.Sequential(nn.Linear(WIDTH, 6), nn.Tanh(), last).double()
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1, momentum=0.9)
        self.model: Model = self.module
        self.extra: dict[str, Tensor] = {}
        self.passes = 0

    def state(self) -> dict[str, Tensor]:
        return {**self.module.state_dict(), **self.extra}


class CenterLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.centers = nn.Parameter(torch.zeros(3, 3, dtype=torch.float64))

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        return (features - self.centers[labels]).square().sum(1).mean()


def penalty(training: Training) -> Step:
    """Gradients of the penalty arrive before those of the model."""

    def step(x: Tensor, y: Tensor) -> None:
        training.optimizer.zero_grad()
        loss = F.cross_entropy(training.model(x), y)
        (loss + 0.1 * sum(p.abs().sum() for p in training.module.parameters())).backward()
        training.optimizer.step()

    return step


def parameters_of_the_loss(training: Training, *, averages: bool = False) -> Step:
    center = CenterLoss()
    other = torch.optim.SGD(center.parameters(), lr=0.5)
    training.extra["centers"] = center.centers

    def step(x: Tensor, y: Tensor) -> None:
        training.optimizer.zero_grad()
        other.zero_grad()
        output = training.model(x)
        (F.cross_entropy(output, y) + 0.1 * center(output, y)).backward()
        if averages and training.model is not training.module:
            # Shares of a batch may differ: weigh them, as the model's gradients are.
            assert center.centers.grad is not None
            sums = center.centers.grad * len(x), torch.tensor(float(len(x)))
            all_reduce_sum(sums)
            center.centers.grad = sums[0] / sums[1]
        training.optimizer.step()
        other.step()

    return step


def averages_by_hand(training: Training) -> Step:
    return parameters_of_the_loss(training, averages=True)


def discriminator(training: Training) -> Step:
    """The discriminator is not wrapped, and steps before the generator's backward."""
    other_model = nn.Linear(3, 1).double()
    other = torch.optim.Adam(other_model.parameters())

    def step(x: Tensor, y: Tensor) -> None:
        other.zero_grad()
        with torch.no_grad():
            fake = training.model(x)
        other_model(fake).mean().backward()
        other.step()
        training.optimizer.zero_grad()
        (other_model(training.model(x)).mean() + F.cross_entropy(training.model(x), y)).backward()
        training.optimizer.step()

    return step


def new_optimizer(training: Training) -> Step:
    optimizer = torch.optim.Adam(training.module.parameters())

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        F.cross_entropy(training.model(x), y).backward()
        optimizer.step()

    return step


def module_inside(training: Training) -> Step:
    def step(x: Tensor, y: Tensor) -> None:
        training.optimizer.zero_grad()
        F.cross_entropy(training.module(x), y).backward()
        training.optimizer.step()

    return step


def accumulates_by_hand(training: Training) -> Step:
    def step(x: Tensor, y: Tensor) -> None:
        (F.cross_entropy(training.model(x), y) / 3).backward()
        training.passes += 1
        if training.passes % 3 == 0:
            training.optimizer.step()
            training.optimizer.zero_grad()

    return step


def skips_a_pass(training: Training) -> Step:
    def step(x: Tensor, y: Tensor) -> None:
        training.optimizer.zero_grad()
        loss = F.cross_entropy(training.model(x), y)
        training.passes += 1
        if training.passes != 2:
            loss.backward()
            training.optimizer.step()

    return step


def skips_steps(training: Training) -> Step:
    """Gradients of a step that is left out are reset, in place or not at all."""

    def step(x: Tensor, y: Tensor) -> None:
        training.optimizer.zero_grad(set_to_none=len(x) > 4)
        F.cross_entropy(training.model(x), y).backward()
        if y[0] != 0:
            training.optimizer.step()

    return step


def ascends(training: Training) -> Step:
    """SAM: the step is taken with the gradients at a point nearby."""

    def step(x: Tensor, y: Tensor) -> None:
        training.optimizer.zero_grad()
        F.cross_entropy(training.model(x), y).backward()
        before = [p.detach().clone() for p in training.module.parameters()]
        with torch.no_grad():
            for p in training.module.parameters():
                p.add_(0.01 * p.grad)
        training.optimizer.zero_grad()
        F.cross_entropy(training.model(x), y).backward()
        with torch.no_grad():
            for p, values in zip(training.module.parameters(), before, strict=True):
                p.copy_(values)
        training.optimizer.step()

    return step


def attacks(training: Training) -> Step:
    """Adversarial training: gradients of the inputs come from a backward, and are dropped."""

    def step(x: Tensor, y: Tensor) -> None:
        given = x.clone().requires_grad_()
        F.cross_entropy(training.model(given), y).backward()
        assert given.grad is not None
        training.optimizer.zero_grad()
        F.cross_entropy(training.model(x + 0.1 * given.grad.sign()), y).backward()
        training.optimizer.step()
        training.optimizer.zero_grad()

    return step


def clamps(training: Training) -> Step:
    def step(x: Tensor, y: Tensor) -> None:
        training.optimizer.zero_grad()
        F.cross_entropy(training.model(x), y).backward()
        training.optimizer.step()
        with torch.no_grad():
            for p in training.module.parameters():
                p.clamp_(-0.5, 0.5)

    return step


def skips_the_first_pass(training: Training) -> Step:
    def step(x: Tensor, y: Tensor) -> None:
        training.optimizer.zero_grad()
        training.passes += 1
        if training.passes == 1 and (training.model is training.module or replica_rank() == 0):
            return
        F.cross_entropy(training.model(x), y).backward()
        training.optimizer.step()

    return step


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, WIDTH, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.arange(SAMPLES) // BATCH)  # alike within a batch


def plain(script: Callable[[Training], Step]) -> dict[str, Tensor]:
    training = Training()
    step, (x, y) = script(training), data().tensors
    for _ in range(2):
        for begin in range(0, SAMPLES, BATCH):
            step(x[begin : begin + BATCH], y[begin : begin + BATCH])
    return training.state()


def ours(script: Callable[[Training], Step], *, accumulates: bool = False) -> dict[str, Tensor]:
    contexts.reset()
    training = Training()
    loader = AdaptiveDataLoader(data(), batch_size=BATCH)
    if accumulates:
        loader.autoscale_batch_size(BATCH, (1, BATCH // 2), gradient_accumulation=True)
    training.model = HybridParallel(training.module, training.optimizer, num_microbatches=2)
    step = script(training)
    for _ in range(2):
        for x, y in loader:
            step(x, y)
    return training.state()


class Refusal(NamedTuple):
    script: Callable[[Training], Step]
    replicas: str | None
    """Part of the message on two replicas; None: it is exact."""
    accumulation: str | None
    """The same with accumulation steps."""


SCRIPTS = [
    Refusal(penalty, None, None),
    Refusal(skips_steps, None, None),
    Refusal(clamps, None, None),
    Refusal(attacks, None, "gradients were reset between two backwards of one pass over a batch"),
    Refusal(ascends, None, "parameters were changed on an accumulation step, so the parts of"),
    Refusal(
        parameters_of_the_loss,
        "replicas differ in SGD, parameter 0 of shape (3, 3), after its step 1, as its gradients",
        "another optimizer (SGD, over 1 parameter) than that given to HybridParallel steps on an",
    ),
    Refusal(averages_by_hand, None, "another optimizer (SGD, over 1 parameter)"),
    Refusal(
        discriminator,
        "replicas differ in Adam, parameter 0 of shape (1, 3), after its step",
        "another optimizer (Adam, over 2 parameters)",
    ),
    Refusal(
        new_optimizer,
        "another optimizer (Adam) than the SGD given to HybridParallel steps parameters",
        "another optimizer (Adam) than the SGD given to HybridParallel steps parameters",
    ),
    Refusal(
        module_inside,
        "replicas differ in SGD, parameter 0 of shape (6, 4), after its step 1",
        "optimizer.step() was called on an accumulation step with gradients that did not come",
    ),
    Refusal(
        accumulates_by_hand,
        "the gradients of the last batch are still there: neither optimizer.step() nor",
        "the gradients of the last batch are still there: neither optimizer.step() nor",
    ),
    Refusal(skips_a_pass, None, "ran a backward in 1 of 2 passes over one batch"),
    # Last, as one replica has begun to average gradients.
    Refusal(
        skips_the_first_pass,
        "where 1 replica ran a backward and the others did not: decide on all replicas alike",
        "ran a backward in 1 of 2 passes over one batch",
    ),
]
NAMES = [case.script.__name__ for case in SCRIPTS]


def outcomes() -> list[dict[str, Tensor] | str]:
    """Run all scripts in one process of a job."""
    init_process_group("gloo")
    assert num_replicas() == 2
    found: list[dict[str, Tensor] | str] = []
    for case in SCRIPTS:
        try:
            found.append(ours(case.script))
        except (ConfigurationError, SynchronizationError) as error:
            found.append(str(error))
    return found


def check(found: dict[str, Tensor] | str, message: str | None, case: Refusal) -> None:
    if message is None:
        assert not isinstance(found, str), f"{case.script.__name__}: {found}"
        assert_close(found, plain(case.script), 1e-12)
    else:
        assert isinstance(found, str), f"{case.script.__name__} is not refused"
        assert message in found


def test_on_two_replicas() -> None:
    for replica in run_replicas(outcomes, 2):
        for found, case in zip(replica, SCRIPTS, strict=True):
            check(found, case.replicas, case)


@pytest.fixture
def job() -> Iterator[None]:
    contexts.reset()
    init_process_group("gloo")
    yield
    contexts.reset()


@pytest.mark.usefixtures("job")
@pytest.mark.parametrize("case", SCRIPTS, ids=NAMES)
def test_with_accumulation_steps(case: Refusal) -> None:
    if case.accumulation is None:
        check(ours(case.script, accumulates=True), None, case)
        return
    with pytest.raises(
        (ConfigurationError, SynchronizationError), match=re.escape(case.accumulation)
    ):
        ours(case.script, accumulates=True)


@pytest.mark.usefixtures("job")
def test_a_scheduler_that_steps_on_accumulation_steps() -> None:
    def schedules(training: Training) -> Step:
        scheduler = torch.optim.lr_scheduler.ExponentialLR(training.optimizer, 0.9)

        def step(x: Tensor, y: Tensor) -> None:
            training.optimizer.zero_grad()
            F.cross_entropy(training.model(x), y).backward()
            training.optimizer.step()
            scheduler.step()

        return step

    with pytest.warns(UserWarning, match="the learning rate was changed between two passes over"):
        ours(schedules, accumulates=True)


def test_another_optimizer_is_in_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIPOLLUX_CHECKPOINT_DIR", str(tmp_path))
    contexts.reset()
    with pytest.warns(UserWarning, match=r"an optimizer \(SGD\) that is not given to Hybrid"):
        ours(parameters_of_the_loss)
    contexts.reset()


def catches() -> tuple[str, bool]:
    """Go on after an error of a layer in the first of two stages."""

    def fail(x: Tensor) -> Tensor:
        raise KeyError("a bad sample")

    init_process_group("gloo")
    training = Training()
    first = training.module[0]
    model = HybridParallel(training.module, training.optimizer, num_stages=2, schedule="1f1b")
    if process_rank() == 0:
        first.forward = fail
    caught = False
    try:
        for x, y in AdaptiveDataLoader(data(), batch_size=BATCH):
            try:
                model.train_step(x, y, F.cross_entropy)
            except KeyError:
                caught = True
    except SynchronizationError as error:
        return str(error), caught
    return "", caught


def test_an_error_of_a_stage_is_not_to_be_caught() -> None:
    ((first, last),) = run_stages(catches, 1, 2)
    assert first[1]
    assert "a KeyError has ended a call of the model in this process" in first[0]
    assert "lost its peers while passing micro-batches between stages" in last[0]
