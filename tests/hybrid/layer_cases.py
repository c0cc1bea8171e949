"""Models with layers as scripts have them, trained as plain models and in both engines."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipollux_hybrid import (
    HybridParallel,
    init_process_group,
    per_microbatch,
    per_sample,
    whole,
)
from pipollux_hybrid.job import context as contexts
from pipollux_hybrid.pipeline.microbatch import unmarked
from pipollux_hybrid.pipeline.samples import plain_batch

BATCH, WIDTH, STEPS = 8, 4, 3


def linear(out: int = WIDTH) -> nn.Linear:
    return nn.Linear(WIDTH, out, dtype=torch.float64)


class WithLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()


class ChangesDict(WithLinear):
    """Changes the dict that it gets, and returns it."""

    def forward(self, batch: dict[str, Any]) -> dict[str, Any]:
        batch["hidden"] = torch.tanh(self.linear(batch["hidden"])) + batch.get("turn", 0)
        batch["turn"] = batch.get("turn", 0) + 1
        return batch


class ChangesList(WithLinear):
    """Changes the lists that it gets, the inner one as well."""

    def forward(self, batch: list[Any]) -> list[Any]:
        batch[0] = torch.tanh(self.linear(batch[0])) + len(batch[1])
        batch[1].append(batch[0])
        return batch


class Entry(nn.Module):
    def __init__(self, key: Any) -> None:
        super().__init__()
        self.key = key

    def forward(self, batch: Any) -> Tensor:
        entry: Tensor = batch[self.key]
        return entry


class ChangesData(WithLinear):
    """Works in place where PyTorch does not count it."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x.data.mul_(2.0) if not x.requires_grad else self._doubled(x))
        return y

    @staticmethod
    def _doubled(x: Tensor) -> Tensor:
        x.data.mul_(2.0)
        return x


class Schedule(WithLinear):
    """Multiplies by a buffer that it changes, as a decaying noise or temperature is."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones((), dtype=torch.float64))
        self.register_buffer("large", torch.ones(20_000, dtype=torch.float64))
        self.scale: Tensor
        self.large: Tensor

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x) * self.scale * self.large[0].clone()
        if self.training:
            self.scale = self.scale * 0.5
            self.large.mul_(0.5)
        return y


class Forces(WithLinear):
    """Gives the gradient of an energy, as models of molecules do."""

    def forward(self, x: Tensor) -> Tensor:
        if not x.requires_grad:
            x = x.detach().requires_grad_()
        energy = torch.tanh(self.linear(x)).square().sum()
        (forces,) = torch.autograd.grad(energy, x, create_graph=True)
        return forces + x


class Experts(nn.Module):
    """Sends each sample to one of two experts, by the sign of its first number."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([linear(), linear()])

    def forward(self, x: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        for chosen, expert in zip((x[:, 0] > 0, x[:, 0] <= 0), self.experts, strict=True):
            rows = chosen.nonzero()[:, 0]
            if len(rows):
                y = y.index_put((rows,), expert(x[rows]))
        return y


class OneExpert(WithLinear):
    """Changes only those samples that begin with a positive number; there may be none."""

    def forward(self, x: Tensor) -> Tensor:
        rows = (x[:, 0] > 0).nonzero()[:, 0]
        return x.index_put((rows,), self.linear(x[rows])) if len(rows) else x


class Pair(NamedTuple):
    hidden: Tensor
    rest: Tensor


class GivesPair(WithLinear):
    def forward(self, x: Tensor) -> Pair:
        return Pair(self.linear(x), x)


class TakesPair(WithLinear):
    def forward(self, pair: Pair) -> Tensor:
        return torch.tanh(self.linear(pair.hidden)) + pair.rest


class Attention(WithLinear):
    """Lets each number of a sample see those before it; adds positions and lengths of texts."""

    def forward(self, batch: dict[str, Any]) -> Tensor:
        x: Tensor = self.linear(batch["hidden"])
        scores = x[:, :, None] * x[:, None, :] + batch["mask"]
        texts = x.new_tensor([len(text) for text in batch["texts"]])
        return scores.softmax(2).sum(1) + batch["positions"] + texts[:, None]


class Case(NamedTuple):
    """A model of four layers and a batch of it; the second stage begins at the third layer."""

    layers: Callable[[], list[nn.Module]]
    inputs: Callable[[], Any]
    targets: Callable[[], Any] = lambda: numbers(2)
    loss: Callable[[Any, Any], Any] = F.mse_loss


def numbers(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(BATCH, WIDTH, dtype=torch.float64, generator=generator)


def sorted_numbers() -> Tensor:
    """The first half of the samples goes to one expert, the others to the other."""
    x = numbers(1)
    x[:, 0] = x[:, 0].abs() * torch.tensor([1.0] * 4 + [-1.0] * 4)
    return x


def normed(spectral_norm: Callable[[nn.Module], nn.Module]) -> list[nn.Module]:
    return [spectral_norm(linear()), nn.Tanh(), spectral_norm(linear()), nn.Tanh()]


def weighted_loss(output: Tensor, targets: dict[str, Any]) -> Tensor:
    loss = F.cross_entropy(output, targets["classes"], targets["weights"], reduction="none")
    scales = torch.stack([row.sum() for row in targets["rows"]])
    return (loss * scales).mean()


CASES: dict[str, Case] = {
    "a dict changed": Case(
        lambda: [ChangesDict(), ChangesDict(), ChangesDict(), Entry("hidden")],
        lambda: {"hidden": numbers(1)},
    ),
    "lists changed": Case(
        lambda: [ChangesList(), ChangesList(), ChangesList(), Entry(0)], lambda: [numbers(1), []]
    ),
    "data changed": Case(lambda: [linear(), linear(), ChangesData(), linear()], lambda: numbers(1)),
    "spectral norm": Case(
        lambda: normed(nn.utils.parametrizations.spectral_norm), lambda: numbers(1)
    ),
    "spectral norm by hooks": Case(lambda: normed(nn.utils.spectral_norm), lambda: numbers(1)),
    "forces": Case(lambda: [linear(), Forces(), Forces(), linear()], lambda: numbers(1)),
    "a named tuple": Case(
        lambda: [linear(), GivesPair(), TakesPair(), linear()], lambda: numbers(1)
    ),
    "a batch encoding": Case(
        lambda: [ChangesDict(), ChangesDict(), ChangesDict(), Entry("hidden")],
        lambda: UserDict({"hidden": numbers(1)}),
    ),
    "marked inputs": Case(
        lambda: [Attention(), nn.Tanh(), linear(), linear()],
        lambda: {
            "hidden": numbers(1),
            "mask": whole(torch.full((WIDTH, WIDTH), -torch.inf).triu(1)),
            "positions": whole(torch.arange(WIDTH)[None]),
            "texts": per_sample(["text"[: n % 4] for n in range(BATCH)]),
        },
    ),
    "marked targets": Case(
        lambda: [linear(), nn.Tanh(), linear(), linear(BATCH)],
        lambda: numbers(1),
        lambda: {
            "classes": torch.arange(BATCH),
            "weights": whole(torch.linspace(1.0, 2.0, BATCH, dtype=torch.float64)),
            "rows": per_sample([torch.ones(1 + n % 3, dtype=torch.float64) for n in range(BATCH)]),
        },
        weighted_loss,
    ),
    "no targets": Case(
        lambda: [linear(), nn.Tanh(), linear(), linear()],
        lambda: numbers(1),
        lambda: None,
        lambda output, _: output.square().mean(),
    ),
    "one expert": Case(lambda: [OneExpert(), nn.Tanh(), OneExpert(), OneExpert()], sorted_numbers),
    "experts": Case(lambda: [Experts(), nn.Tanh(), Experts(), linear()], sorted_numbers),
}
"""By what the layers or the batch are like."""
CHANGES_BUFFERS = Case(
    lambda: [per_microbatch(Schedule()), nn.Tanh(), per_microbatch(Schedule()), nn.Tanh()],
    lambda: numbers(1),
)
"""Not the plain model, whose buffers change once for each batch; but alike in all modes."""


def module_of(case: Case) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*case.layers())


def state_of(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers that are here."""
    named = [*module.named_parameters(), *module.named_buffers()]
    return {name: tensor.detach().clone() for name, tensor in named}


def train_plain(case: Case) -> dict[str, Tensor]:
    module = module_of(case)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        inputs, targets = unmarked(plain_batch(case.inputs())), unmarked(case.targets())
        case.loss(module(inputs), targets).backward()
        optimizer.step()
    return state_of(module)


def train(case: Case, **options: Any) -> dict[str, Tensor]:
    """Train on two stages; return what is in this process."""
    contexts.reset()
    module = module_of(case)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    options = {"balance": [2, 2], "num_microbatches": 4} | options
    model = HybridParallel(module, optimizer, **options)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model.train_step(case.inputs(), case.targets(), case.loss)
        optimizer.step()
    return state_of(module)


def train_all(**options: Any) -> dict[str, dict[str, Tensor]]:
    """Train all cases, one after another, in a process of a job."""
    init_process_group("gloo", timeout=60.0)
    return {name: train(case, **options) for name, case in CASES.items()}


def check(found: dict[str, Tensor], name: str) -> None:
    """Fail unless what a process holds is what the plain model holds."""
    check_case(found, CASES[name])


def check_case(found: dict[str, Tensor], case: Case) -> None:
    """Fail unless what a process holds is what the plain model holds."""
    plain = train_plain(case)
    assert found
    for key, tensor in found.items():
        torch.testing.assert_close(
            tensor, plain[key], rtol=1e-12, atol=1e-12, msg=lambda m, k=key: f"{k}: {m}"
        )
