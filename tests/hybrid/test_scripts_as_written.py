"""Layers and loops as people write them, which other tools were reported to train wrongly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from pipollux_hybrid import HybridParallel, init_process_group
from pipollux_hybrid.job import context as contexts
from pipollux_hybrid.job.context import context
from tests.extent import first_points
from tests.hybrid.models import assert_close
from tests.hybrid.replicas import run_replicas
from tests.hybrid.stage_processes.training import run_stages

BATCH, WIDTH, STEPS = 8, 6, 3


class Apply(nn.Module):
    """A linear layer, and then any function of its output."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(WIDTH, WIDTH), function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.linear(x))


class Take(nn.Module):
    """Any function of the input, and then a linear layer."""

    def __init__(self, function: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(WIDTH, WIDTH), function

    def forward(self, x: Any) -> Tensor:
        taken: Tensor = self.linear(self.function(x))
        return taken


class Twice(nn.Module):
    """Applies one layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        twice: Tensor = self.linear(self.linear(x).tanh())
        return twice


def plain_layers() -> list[nn.Module]:
    return [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh()]


def transposed() -> list[nn.Module]:
    """Tensors between stages that are not contiguous."""
    return [nn.Tanh(), Apply(lambda y: y.view(-1, 2, 3).transpose(1, 2)), Take(_flat), nn.Tanh()]


def _flat(x: Tensor) -> Tensor:
    return x.transpose(1, 2).reshape(len(x), WIDTH)


def expanded() -> list[nn.Module]:
    """Tensors between stages whose elements share memory."""
    wide = Apply(lambda y: (y[:, :1].expand(-1, WIDTH), y))
    return [nn.Tanh(), wide, Take(lambda pair: pair[0] * pair[1]), nn.Tanh()]


def complex_numbers() -> list[nn.Module]:
    spectrum = Apply(lambda y: torch.fft.fft(y, dim=1))
    return [nn.Tanh(), spectrum, Take(lambda z: torch.fft.ifft(z, dim=1).real), nn.Tanh()]


def one_tensor_twice() -> list[nn.Module]:
    pair = Apply(lambda y: {"a": y, "b": y})
    return [nn.Tanh(), pair, Take(lambda d: d["a"] * 2 + d["b"]), nn.Tanh()]


def scalars() -> list[nn.Module]:
    """A tensor without dimensions that every micro-batch computes alike."""
    pair = Apply(lambda y: [y, torch.tensor(0.5, dtype=torch.float64)])
    return [nn.Tanh(), pair, Take(lambda items: items[0] * items[1]), nn.Tanh()]


def empty_tensors() -> list[nn.Module]:
    pair = Apply(lambda y: (y, y[:, :0], y[:0]))
    return [nn.Tanh(), pair, Take(lambda t: t[0] + t[1].sum() + t[2].sum()), nn.Tanh()]


def views_changed_in_place() -> list[nn.Module]:
    def change(y: Tensor) -> Tensor:
        y = y * 1.0
        y[:, 2:].mul_(3.0)
        return y

    return [nn.Tanh(), Apply(change), Take(lambda x: x), nn.Tanh()]


def normalised_weights() -> list[nn.Module]:
    return [weight_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh(), Twice(), nn.Tanh()]


def hooked() -> list[nn.Module]:
    layers = plain_layers()
    layers[2].register_forward_hook(lambda _module, _given, output: output * 0.5)
    layers[0].register_forward_pre_hook(lambda _module, given: (given[0] + 1.0,))
    return layers


Loop = Callable[[int, nn.Module, torch.optim.Optimizer], None]


def nothing(_step: int, _module: nn.Module, _optimizer: torch.optim.Optimizer) -> None:
    """A loop without anything of its own."""


def freezes(step: int, module: nn.Module, _optimizer: torch.optim.Optimizer) -> None:
    """Some layers are frozen for two steps, and others after that."""
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name.startswith("2" if step < 2 else "0"))


def _named(module: nn.Module, prefix: str) -> Iterator[nn.Parameter]:
    return (p for name, p in module.named_parameters() if name.startswith(prefix))


def drops_gradients(step: int, module: nn.Module, _optimizer: torch.optim.Optimizer) -> None:
    """Before the step, as schemes do that keep some weights for the first steps."""
    if step < 2:
        for parameter in _named(module, "2"):
            parameter.grad = None


def clips_values(_step: int, module: nn.Module, _optimizer: torch.optim.Optimizer) -> None:
    nn.utils.clip_grad_value_(module.parameters(), 0.01)


def changes_rates(step: int, _module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        group["lr"] = 0.1 / (step + 1)
        group["weight_decay"] = 0.1 * step


class Script(NamedTuple):
    """A model, and what its loop does before the forward and before the step."""

    layers: Callable[[], list[nn.Module]]
    before: Loop = nothing
    after: Loop = nothing


SCRIPTS = {
    "transposed": Script(transposed),
    "expanded": Script(expanded),
    "complex": Script(complex_numbers),
    "one tensor twice": Script(one_tensor_twice),
    "scalars": Script(scalars),
    "empty": Script(empty_tensors),
    "views in place": Script(views_changed_in_place),
    "weight norm, a layer twice": Script(normalised_weights),
    "hooks": Script(hooked),
    "freezes": Script(plain_layers, freezes),
    "drops gradients": Script(plain_layers, after=drops_gradients),
    "clips values": Script(plain_layers, after=clips_values),
    "changes rates": Script(plain_layers, changes_rates),
}


def build(script: Script) -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(*script.layers()).double()


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    groups = [{"params": [*module[0].parameters()]}, {"params": [*module[1:].parameters()]}]  # type: ignore[index]  # a Sequential
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=0.05, weight_decay=0.2)


def data(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(BATCH, WIDTH, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(WIDTH, (BATCH,), generator=generator)


def plain(name: str) -> dict[str, Tensor]:
    script = SCRIPTS[name]
    module = build(script)
    optimizer = optimizer_of(module)
    for step in range(STEPS):
        inputs, targets = data(step)
        script.before(step, module, optimizer)
        optimizer.zero_grad()
        F.cross_entropy(module(inputs), targets).backward()
        script.after(step, module, optimizer)
        optimizer.step()
    return dict(module.state_dict())


def ours(names: list[str], schedule: str | None, checkpoint: str) -> list[dict[str, Tensor]]:
    init_process_group("gloo")
    found = []
    for name in names:
        contexts.reset()
        env, script = context().env, SCRIPTS[name]
        module = build(script)
        optimizer = optimizer_of(module)
        model = HybridParallel(
            module,
            optimizer,
            balance=[1, 1, 1, 1] if schedule == "interleaved" else [2, 2],
            num_microbatches=2,
            schedule=schedule,
            activation_checkpoint=checkpoint,
        )
        for step in range(STEPS):
            inputs, targets = (x[env.rank :: env.num_replicas] for x in data(step))
            script.before(step, module, optimizer)
            optimizer.zero_grad()
            model.train_step(inputs, targets, F.cross_entropy)
            script.after(step, module, optimizer)
            optimizer.step()
        found.append(dict(model.state_dict()))
    return found


def check(found: list[dict[str, Tensor]]) -> None:
    for name, state in zip(SCRIPTS, found, strict=True):
        try:
            assert_close(state, plain(name), 1e-9)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


@pytest.mark.parametrize(
    ("schedule", "checkpoint", "num_replicas"),
    [
        pytest.param("1f1b", "except_last", 1, marks=pytest.mark.exhaustive),
        pytest.param("1f1b", "except_last", 2, marks=pytest.mark.exhaustive),
        pytest.param("interleaved", "never", 1, marks=pytest.mark.exhaustive),
        pytest.param("gpipe", "always", 1, marks=pytest.mark.exhaustive),
    ],
)
def test_where_each_stage_has_a_process(schedule: str, checkpoint: str, num_replicas: int) -> None:
    for replica in run_stages(ours, num_replicas, 2, list(SCRIPTS), schedule, checkpoint):
        for process in replica:
            check(process)


@pytest.mark.parametrize(
    ("checkpoint", "num_replicas"), first_points(1, [("always", 2), ("never", 1)])
)
def test_where_one_process_drives_all_stages(checkpoint: str, num_replicas: int) -> None:
    for process in run_replicas(ours, num_replicas, list(SCRIPTS), None, checkpoint):
        check(process)
