"""Loops as people write them, around any number of calls: accumulation, evaluation, clipping."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipollux_hybrid import HybridParallel, init_process_group
from pipollux_hybrid.job import context as contexts
from pipollux_hybrid.job.context import context
from tests.hybrid.models import assert_close
from tests.hybrid.replicas import run_replicas
from tests.hybrid.stage_processes.training import run_stages

BATCH, WIDTH, STEPS = 8, 6, 3
LossFunction = Callable[[Any, Any], Tensor]


class Training:
    """A plain model, and what a loop does with it.

    Args:
        module: The layers.
    """

    def __init__(self, module: nn.Sequential) -> None:
        self.module = module
        self.optimizer = torch.optim.AdamW(module.parameters(), lr=0.05, weight_decay=0.2)
        self.seen: list[Tensor] = []

    def share(self, batch: Tensor) -> Tensor:
        return batch

    def backward(self, inputs: Any, targets: Any, loss_fn: LossFunction) -> None:
        loss_fn(self.module(inputs), targets).backward()

    def step(self, inputs: Any, targets: Any, loss_fn: LossFunction = F.cross_entropy) -> None:
        self.optimizer.zero_grad()
        self.backward(inputs, targets, loss_fn)
        self.optimizer.step()

    def clip(self, *args: Any, **options: Any) -> None:
        self.seen.append(nn.utils.clip_grad_norm_(self.module.parameters(), *args, **options))

    def no_sync(self) -> AbstractContextManager[None]:
        return nullcontext()

    @torch.no_grad()
    def evaluate(self, inputs: Tensor) -> None:
        self.module.eval()
        self.seen.append(self.module(inputs))
        self.module.train()


class Ours(Training):
    """The same with a pipeline."""

    def __init__(self, module: nn.Sequential, **options: Any) -> None:
        super().__init__(module)
        self.model = HybridParallel(module, self.optimizer, **options)

    def share(self, batch: Tensor) -> Tensor:
        env = context().env
        return batch[env.rank :: env.num_replicas].clone()

    def backward(self, inputs: Any, targets: Any, loss_fn: LossFunction) -> None:
        self.model.train_step(inputs, targets, loss_fn)

    def clip(self, *args: Any, **options: Any) -> None:
        self.seen.append(self.model.clip_grad_norm_(*args, **options))

    def no_sync(self) -> AbstractContextManager[None]:
        return self.model.no_sync()

    @torch.no_grad()
    def evaluate(self, inputs: Tensor) -> None:
        self.model.eval()
        self.seen.append(self.model(inputs))
        self.model.train()


class Apply(nn.Module):
    """A linear layer within any function."""

    def __init__(self, function: Callable[[nn.Linear, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.function, self.is_used = nn.Linear(WIDTH, WIDTH), function, True

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear, x) if self.is_used else x


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


class Frozen(nn.BatchNorm1d):
    """Normalises by its running statistics, whatever the model's mode."""

    def train(self, mode: bool = True) -> Frozen:
        return super().train(mode and False)


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def data(step: int, *length: int, batch: int = BATCH) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(batch, *length, WIDTH, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(WIDTH, (batch,), generator=generator)


def shared(training: Training, step: int, *length: int) -> tuple[Tensor, Tensor]:
    inputs, targets = data(step, *length)
    return training.share(inputs), training.share(targets)


def steps(training: Training) -> None:
    for step in range(STEPS):
        training.step(*shared(training, step))


def steps_over_sequences(training: Training) -> None:
    for step in range(STEPS):
        training.step(*shared(training, step, 5))


def uses(training: Training, used: bool) -> None:
    for layer in training.module.modules():
        if isinstance(layer, Apply):
            layer.is_used = used


def used_in_the_first_pass_only(training: Training) -> None:
    for step in range(STEPS):
        training.optimizer.zero_grad()
        uses(training, used=True)
        with training.no_sync():
            training.backward(*shared(training, step), F.cross_entropy)
        uses(training, used=False)
        training.backward(*shared(training, 50 + step), F.cross_entropy)
        training.optimizer.step()


def zeros_for_unused(training: Training) -> None:
    """Zeros in the place of gradients have an optimizer decay what is unused."""
    for step in range(STEPS + 1):
        uses(training, used=step % 2 == 1)
        training.optimizer.zero_grad(set_to_none=False)
        training.backward(*shared(training, step), F.cross_entropy)
        training.optimizer.step()


def accumulates_sequences_of_any_length(training: Training) -> None:
    for step in range(2 * STEPS):
        last = step % 2 == 1
        with nullcontext() if last else training.no_sync():
            training.backward(*shared(training, step, 3 + step % 4), half)
        if last:
            training.clip(0.1)
            training.optimizer.step()
            training.optimizer.zero_grad()


def half(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output, targets) / 2


def evaluates_other_shapes(training: Training) -> None:
    for step in range(STEPS):
        training.evaluate(data(90 + step, 2 + step, batch=5 + step)[0])
        training.step(*shared(training, step, 3 + step % 2))
        training.evaluate(data(90 + step, 7, batch=1)[0])


def freezes_statistics(training: Training) -> None:
    for step in range(STEPS):
        training.module[1].eval()
        training.step(*shared(training, step))
        training.evaluate(data(step)[0])


def clips_by_any_norm(training: Training) -> None:
    for step in range(STEPS):
        training.optimizer.zero_grad()
        training.backward(*shared(training, step), F.cross_entropy)
        training.clip(0.05, norm_type=float("inf") if step % 2 else 1.0, error_if_nonfinite=True)
        training.optimizer.step()


def changes_gradients_and_weights(training: Training) -> None:
    for step in range(STEPS):
        training.optimizer.zero_grad()
        training.backward(*shared(training, step), F.cross_entropy)
        for parameter in training.module.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.3).add_(parameter.detach(), alpha=0.01)
        training.optimizer.step()
        with torch.no_grad():
            for parameter in training.module.parameters():
                parameter.clamp_(-0.3, 0.3)


def loss_in_place(output: Tensor, targets: Tensor) -> Tensor:
    output /= 0.5
    targets -= 1
    return F.cross_entropy(output, targets)


def changes_outputs_and_targets_in_place(training: Training) -> None:
    for step in range(STEPS):
        inputs, targets = shared(training, step)
        training.step(inputs, targets + 1, loss_in_place)


def ctc(output: Tensor, targets: tuple[Tensor, Tensor]) -> Tensor:
    labels, lengths = targets
    frames = torch.full((len(output),), output.shape[1])
    return F.ctc_loss(output.log_softmax(2).transpose(0, 1), labels, frames, lengths)


def aligns_labels(training: Training) -> None:
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        labels = torch.randint(1, WIDTH, (BATCH, 2), generator=generator)
        lengths = torch.randint(1, 3, (BATCH,), generator=generator)
        inputs, _ = shared(training, step, 7)
        training.step(inputs, (training.share(labels), training.share(lengths)), ctc)


def hooked(layer: nn.Linear, x: Tensor) -> Tensor:
    """Halves the gradients of its input and of its output."""
    if x.requires_grad:
        x.register_hook(lambda gradient: gradient * 0.5)
    y: Tensor = layer(x)
    y.register_hook(lambda gradient: gradient * 0.5)
    return y


def attending(layer: nn.Linear, x: Tensor) -> Tensor:
    y = layer(x)
    return F.scaled_dot_product_attention(y, y, y, is_causal=True)


def recomputing(reentrant: bool) -> Callable[[nn.Linear, Tensor], Tensor]:
    def function(layer: nn.Linear, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(lambda z: layer(z).tanh(), x, use_reentrant=reentrant)
        return y

    return function


class Transposing(nn.Module):
    """Recurrence and attention over [sequence, batch], in a model of [batch, sequence]."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.recurrence = nn.MultiheadAttention(WIDTH, 2), nn.GRU(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = x.transpose(0, 1)
        z: Tensor = self.attention(y, y, y)[0] + self.recurrence(y)[0]
        return z.transpose(0, 1)


class Loop(NamedTuple):
    """A model, a loop, and how many micro-batches a batch has."""

    layers: Callable[[], list[nn.Module]]
    run: Callable[[Training], None] = steps
    num_microbatches: int = 2


def plain_layers() -> list[nn.Module]:
    return [linear(), nn.Tanh(), linear(), nn.Tanh()]


def conditional_layers() -> list[nn.Module]:
    return [linear(), Apply(nn.Linear.forward), nn.Tanh(), Apply(nn.Linear.forward)]


def with_mean(*layers: nn.Module) -> list[nn.Module]:
    return [*layers, Mean()]


LOOPS = {
    "used in the first pass only": Loop(conditional_layers, used_in_the_first_pass_only),
    "zeros for unused": Loop(conditional_layers, zeros_for_unused),
    "sequences of any length": Loop(
        lambda: with_mean(linear(), nn.Tanh(), linear()), accumulates_sequences_of_any_length, 3
    ),
    "evaluates other shapes": Loop(
        lambda: with_mean(linear(), nn.Tanh(), linear()), evaluates_other_shapes, 3
    ),
    "frozen statistics": Loop(
        lambda: [linear(), nn.BatchNorm1d(WIDTH), linear(), Frozen(WIDTH)], freezes_statistics
    ),
    "norms": Loop(plain_layers, clips_by_any_norm),
    "gradients and weights": Loop(plain_layers, changes_gradients_and_weights),
    "a loss that works in place": Loop(
        lambda: [linear(), nn.Tanh(), nn.Tanh(), linear()], changes_outputs_and_targets_in_place
    ),
    "ctc": Loop(plain_layers, aligns_labels),
    "hooks of tensors": Loop(lambda: [linear(), Apply(hooked), Apply(hooked), Apply(hooked)]),
    "attention": Loop(
        lambda: with_mean(linear(), Apply(attending), Apply(attending)), steps_over_sequences, 3
    ),
    "checkpoints of their own": Loop(
        lambda: [linear(), *(Apply(recomputing(reentrant=x)) for x in (False, True)), linear()]
    ),
    "transposing": Loop(
        lambda: with_mean(linear(), Transposing(), Transposing()), steps_over_sequences
    ),
}


def build(loop: Loop) -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(*loop.layers()).double().train()


@cache
def plain(name: str) -> tuple[dict[str, Tensor], list[Tensor]]:
    training = Training(build(LOOPS[name]))
    LOOPS[name].run(training)
    return dict(training.module.state_dict()), training.seen


def ours(schedule: str | None, mode: str) -> list[tuple[dict[str, Tensor], list[Tensor]]]:
    init_process_group("gloo")
    found = []
    for loop in LOOPS.values():
        contexts.reset()
        training = Ours(
            build(loop),
            balance=[1, 1, 1, 1] if schedule == "interleaved" else [2, 2],
            num_microbatches=loop.num_microbatches,
            schedule=schedule,
            activation_checkpoint=mode,
        )
        loop.run(training)
        found.append((dict(training.model.state_dict()), training.seen))
    return found


def check(found: list[tuple[dict[str, Tensor], list[Tensor]]]) -> None:
    for name, (state, seen) in zip(LOOPS, found, strict=True):
        expected, expected_seen = plain(name)
        try:
            assert_close(state, expected, 1e-9)
            # A process without gradients does not know their type, and returns norms in float64.
            torch.testing.assert_close(seen, expected_seen, rtol=1e-9, atol=1e-9, check_dtype=False)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pytest.mark.parametrize(
    ("schedule", "mode", "num_replicas"),
    [
        ("1f1b", "always", 1),
        pytest.param("1f1b", "always", 2, marks=pytest.mark.exhaustive),
        pytest.param("interleaved", "never", 1, marks=pytest.mark.exhaustive),
        pytest.param("gpipe", "except_last", 1, marks=pytest.mark.exhaustive),
    ],
)
def test_where_each_stage_has_a_process(schedule: str, mode: str, num_replicas: int) -> None:
    for replica in run_stages(ours, num_replicas, 2, schedule, mode):
        for process in replica:
            check(process)


@pytest.mark.exhaustive  # `make test` has the other engine here, and this one for layers
@pytest.mark.parametrize(("mode", "num_replicas"), [("except_last", 2), ("always", 1)])
def test_where_one_process_drives_all_stages(mode: str, num_replicas: int) -> None:
    for process in run_replicas(ours, num_replicas, None, mode):
        check(process)
