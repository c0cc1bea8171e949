"""Micro-batches that differ in more than their samples, and outputs that nothing uses."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipollux_hybrid import HybridParallel, init_process_group
from pipollux_hybrid.job import context as contexts
from pipollux_hybrid.job.context import context
from tests.extent import each, first_points
from tests.hybrid.models import assert_close, gradients, state_of
from tests.hybrid.replicas import run_replicas
from tests.hybrid.stage_processes.training import run_stages, together

BATCH = 10


class Mask(nn.Module):
    """Gives a mask of the padding on, or None where no row of a micro-batch has any."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        padding = x[:, :1] > 0.8
        return self.embed(x), padding if padding.any() else None


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, given: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor | None]:
        x, mask = given
        y = self.linear(x)
        return (y if mask is None else y.masked_fill(mask, 0.0)), mask


class First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)

    def forward(self, given: Any) -> Tensor:
        head: Tensor = self.head(given[0])
        return head


class Causal(nn.Module):
    """Gives a tensor on that has nothing to do with the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.bias = nn.Parameter(torch.ones(6, 6))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x), self.bias.tril()


class Mixed(nn.Module):
    def forward(self, given: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, mixing = given
        return x @ mixing, mixing


class Branches(nn.Module):
    """Gives the output of a branch on that no later layer uses."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(6, 6), nn.Linear(6, 6)
        self.first = first

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        used, unused = self.used(x).tanh(), self.unused(x)
        return (unused, used) if self.first else (used, unused)


class Choose(nn.Module):
    def __init__(self, place: int) -> None:
        super().__init__()
        self.head, self.place = nn.Linear(6, 3), place

    def forward(self, given: tuple[Tensor, Tensor]) -> Tensor:
        head: Tensor = self.head(given[self.place])
        return head


class Sometimes(nn.Module):
    """An expert that only some micro-batches use; others give their input on without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.expert, self.other = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> list[Tensor]:
        rows = x[:, 1] > 1.2
        return [self.expert(x[rows]), rows] if rows.any() else [x.detach()[rows], rows]


class Scatter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)

    def forward(self, given: list[Tensor]) -> Tensor:
        chosen, rows = given
        base = torch.ones(len(rows), 6, dtype=chosen.dtype)
        head: Tensor = self.head(base.index_add(0, rows.nonzero()[:, 0], chosen))
        return head


MODULES: dict[str, Callable[[], list[nn.Module]]] = {
    "padding": lambda: [Mask(), Masked(), Masked(), First()],
    "no batch": lambda: [Causal(), Mixed(), Mixed(), First()],
    "unused last": lambda: [nn.Linear(6, 6), Branches(first=False), Choose(0), nn.Tanh()],
    "unused first": lambda: [nn.Linear(6, 6), Branches(first=True), Choose(1), nn.Tanh()],
    "experts": lambda: [nn.Tanh(), Sometimes(), Scatter(), nn.Tanh()],
}
BALANCES = {2: [2, 2], 4: [1, 1, 1, 1]}


def build(name: str) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*MODULES[name]()).double()


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(BATCH, 6, generator=generator, dtype=torch.float64)
    inputs[:4, :2] = -1.0  # no padding in the first micro-batches, and nothing for the expert
    inputs[5, :2] = 2.0
    return inputs, torch.randint(3, (BATCH,), generator=generator)


Found = tuple[dict[str, Tensor], dict[str, Tensor]]


def plain(name: str) -> Found:
    module = build(name)
    inputs, targets = data()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, weight_decay=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(module(inputs), targets).backward()
        optimizer.step()
    return gradients(module), state_of(module)


class Case(NamedTuple):
    """What is trained, and how; without a schedule where one process drives all stages."""

    name: str
    checkpoint: str
    schedule: str | None


CHECKPOINTS = ("always", "except_last", "never")
AXES = list(MODULES), CHECKPOINTS, ("1f1b", "gpipe", "interleaved")


def ours(cases: list[Case]) -> list[Found]:
    init_process_group("gloo")
    return [trained(case) for case in cases]


def trained(case: Case) -> Found:
    contexts.reset()
    module = build(case.name)
    inputs, targets = data()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, weight_decay=0.5)
    model = HybridParallel(
        module,
        optimizer,
        balance=BALANCES[4 if case.schedule == "interleaved" else 2],
        num_microbatches=5,
        activation_checkpoint=case.checkpoint,
        schedule=case.schedule,
    )
    share = slice(context().env.rank, None, context().env.num_replicas)
    for _ in range(2):
        optimizer.zero_grad()
        model.train_step(inputs[share], targets[share], F.cross_entropy)
        optimizer.step()
    with torch.no_grad():
        model(inputs)
    return gradients(module), state_of(module)


def check(cases: list[Case], stages: list[list[Found]]) -> None:
    """A gradient that the plain model has not is none here, too, so that nothing decays."""
    expected = {name: plain(name) for name in MODULES}
    for case, found in zip(cases, zip(*stages, strict=True), strict=True):
        gradient, state = expected[case.name]
        try:
            assert_close(together([one[0] for one in found]), gradient, 1e-12)
            assert_close(together([one[1] for one in found]), state, 1e-9)
        except AssertionError as error:
            error.add_note(str(case))
            raise


@pytest.mark.exhaustive
@pytest.mark.parametrize("cases", [each(*AXES), list(itertools.product(*AXES))], ids=["few", "all"])
def test_where_each_stage_has_a_process(cases: list[tuple[str, str, str]]) -> None:
    """Every module, mode and schedule."""
    tried = [Case(*case) for case in cases]
    (stages,) = run_stages(ours, 1, 2, tried)
    check(tried, stages)


@pytest.mark.parametrize(
    ("num_replicas", "modes"),
    first_points(
        1,
        [
            *(
                (2, each(list(MODULES), CHECKPOINTS)),
                (1, list(itertools.product(MODULES, CHECKPOINTS))),
            ),
            (2, list(itertools.product(MODULES, CHECKPOINTS))),
        ],
    ),
    ids=["few", "one replica", "two replicas"],
)
def test_where_one_process_drives_all_stages(
    num_replicas: int, modes: list[tuple[str, str]]
) -> None:
    cases = [Case(name, mode, None) for name, mode in modes]
    for replica in run_replicas(ours, num_replicas, cases):
        check(cases, [replica])


@pytest.mark.exhaustive
def test_replicas_of_stages() -> None:
    cases = [Case(name, "except_last", "1f1b") for name in MODULES]
    for replica in run_stages(ours, 2, 2, cases):
        check(cases, replica)
