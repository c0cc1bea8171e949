"""Skip connections between stages that each have a process: gradients are the plain model's."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipollux_hybrid import (
    AdaptiveDataLoader,
    HybridParallel,
    Namespace,
    init_process_group,
    pop,
    skippable,
    stash,
)
from pipollux_hybrid.job import context as contexts
from pipollux_hybrid.job.context import context
from pipollux_hybrid.pipeline.engine import cut_stages
from pipollux_hybrid.pipeline.skip import connections_of
from tests.extent import each
from tests.hybrid.models import (
    assert_close,
    freeze_statistics,
    gradients,
    make_data,
    make_model,
    state_of,
)
from tests.hybrid.stage_processes.training import BATCH_SIZE, SIZE, run_stages, together

MODES = ("never", "except_last", "always")
SCHEDULES = ("gpipe", "1f1b", "interleaved")


def convolutions(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
        nn.GroupNorm(2, outputs),
        nn.ReLU(inplace=True),
    )


@skippable(stash=["fine"])
class Down(nn.Module):
    """Convolves, keeps the result for the `Up` of this size, and gives half the resolution."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.convolutions = convolutions(inputs, outputs)

    def forward(self, x: Tensor) -> Iterator[object]:
        fine = self.convolutions(x)
        yield stash("fine", fine)
        return F.max_pool2d(fine, (1, 2))


@skippable(pop=["fine"])
class Up(nn.Module):
    """Doubles the resolution, and convolves that with what the `Down` of this size kept."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.grow = nn.ConvTranspose2d(inputs, outputs, (1, 2), stride=(1, 2))
        self.convolutions = convolutions(2 * outputs, outputs)

    def forward(self, x: Tensor) -> Iterator[object]:
        fine = yield pop("fine")
        return self.convolutions(torch.cat((self.grow(x), fine), dim=1))


def unet(*, nested: bool) -> nn.Sequential:
    """Inputs [batch, 6], outputs [batch, 3]; encoder and decoder may be a layer each."""
    sizes = Namespace(), Namespace()
    downs = Down(1, 4).isolate(sizes[0]), Down(4, 8).isolate(sizes[1])
    ups = Up(8, 8).isolate(sizes[1]), Up(8, 4).isolate(sizes[0])
    first, last = nn.Unflatten(1, (1, 1, 6)), nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    bottom = nn.Conv2d(8, 8, 1), nn.Tanh()
    pad, head = nn.ZeroPad2d((1, 1, 0, 0)), nn.Conv2d(4, 2, 1)
    if nested:
        return nn.Sequential(
            *(first, pad, nn.Sequential(*downs), *bottom, nn.Sequential(*ups), head, last)
        )
    return nn.Sequential(first, pad, *downs, *bottom, *ups, head, last)


@skippable(stash=["mask", "pair", "nothing"])
class Gives(nn.Module):
    """Stashes its input itself, integers, and a tuple in a dict, half of which is unused."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.other = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Iterator[object]:
        y = self.linear(x)
        yield stash("pair", {"both": (self.other(y), x), "scale": 2.0})
        yield stash("mask", (y > 0).long())
        yield stash("nothing", None)
        return y


@skippable(pop=["pair"])
class TakesPair(nn.Module):
    """Changes in place what it pops."""

    def forward(self, x: Tensor) -> Iterator[object]:
        pair = yield pop("pair")
        return x + pair["both"][0].mul_(pair["scale"])


@skippable(pop=["mask", "nothing"], stash=["compared"])
class TakesMask(nn.Module):
    """Stashes what is only compared, which gets no gradient, and gives the same tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Iterator[object]:
        mask = yield pop("mask")
        assert mask.dtype == torch.int64
        assert (yield pop("nothing")) is None
        y = self.linear(x) * mask
        yield stash("compared", y)
        return y


@skippable(pop=["compared"])
class Compares(nn.Module):
    def forward(self, x: Tensor) -> Iterator[object]:
        compared = yield pop("compared")
        return x * (x > compared)


@skippable(stash=["fine"])
class Keeps(nn.Module):
    """Stashes what it gives: both get gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Iterator[object]:
        y = self.linear(x)
        yield stash("fine", y)
        return y


@skippable(pop=["fine"])
class Adds(nn.Module):
    def forward(self, x: Tensor) -> Iterator[object]:
        return torch.tanh(x) + (yield pop("fine"))


def values() -> nn.Sequential:
    """All kinds of values; 12 layers, inputs [batch, 6], outputs [batch, 3]."""
    one, two = Namespace(), Namespace()
    return nn.Sequential(
        *(Keeps().isolate(one), Gives(), nn.Linear(6, 6), Keeps().isolate(two)),
        *(Keeps(), TakesMask(), nn.Tanh(), Adds(), Adds().isolate(one)),
        *(TakesPair(), nn.Sequential(Compares(), Adds().isolate(two)), nn.Linear(6, 3)),
    )


MODELS: dict[str, Callable[[], nn.Sequential]] = {
    "unet": lambda: unet(nested=False),
    "nested": lambda: unet(nested=True),
    "values": values,
    "batch norm": lambda: make_model("unet"),
}


class Case(NamedTuple):
    """A cut of a model, and how it is trained."""

    name: str
    schedule: str
    checkpoint: str
    accum_steps: int


CUTS = {
    # In the same stage, in the next one, and over one or two stages.
    ("unet", 2): [4, 6],
    ("unet", 3): [3, 3, 4],
    ("unet", 4): [3, 1, 3, 3],
    ("unet", 6): [2, 1, 1, 2, 1, 3],
    ("nested", 2): [4, 4],
    ("nested", 3): [3, 1, 4],
    ("nested", 4): [3, 1, 1, 3],
    ("nested", 6): [2, 1, 1, 1, 2, 1],
    ("values", 2): [5, 7],
    ("values", 3): [2, 4, 6],
    ("values", 4): [2, 3, 4, 3],
    ("values", 6): [1, 1, 3, 3, 2, 2],
    ("batch norm", 2): [5, 8],
    ("batch norm", 3): [5, 3, 5],
    ("batch norm", 4): [5, 1, 4, 3],
    ("batch norm", 6): [4, 1, 2, 2, 1, 3],
}
"""Layers of each part, by model and number of parts."""


def build(name: str) -> nn.Sequential:
    torch.manual_seed(3)
    module = MODELS[name]().double()
    freeze_statistics(module)
    return module


class Trained(NamedTuple):
    losses: list[float]
    gradients: list[dict[str, Tensor]]
    outputs: Tensor
    state: dict[str, Tensor]


def train(case: Case) -> Trained:
    contexts.reset()
    env = context().env
    module = build(case.name)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    loader = AdaptiveDataLoader(make_data("mlp", SIZE), batch_size=BATCH_SIZE)
    largest = -(-BATCH_SIZE // (env.num_replicas * (case.accum_steps + 1)))
    loader.autoscale_batch_size(BATCH_SIZE, (1, largest), gradient_accumulation=True)
    num_stages = env.processes_per_replica
    parts = num_stages * (2 if case.schedule == "interleaved" else 1)
    model = HybridParallel(
        *(module, optimizer),
        balance=CUTS[case.name, parts],
        num_microbatches=1,
        activation_checkpoint=case.checkpoint,
        schedule=case.schedule,
    )
    losses, history = [], []
    turns = itertools.cycle((3, 1, 5, 2))
    for inputs, targets in loader:
        model.num_microbatches = next(turns)
        optimizer.zero_grad()
        losses.append(float(model.train_step(inputs, targets, F.cross_entropy)))
        if not context().batch.accumulates:
            history.append(gradients(module))
        optimizer.step()
    with torch.no_grad():
        outputs = model(make_data("mlp", 7).tensors[0])
    return Trained(losses, history, outputs, state_of(module))


def train_all(cases: list[Case]) -> list[Trained]:
    init_process_group("gloo")
    return [train(case) for case in cases]


def check(num_replicas: int, num_stages: int, cases: list[Case]) -> None:
    found = run_stages(train_all, num_replicas, num_stages, cases)
    plain = {name: plainly(name) for name in {case.name for case in cases}}
    for replica in found:
        for case, trained in zip(cases, zip(*replica, strict=True), strict=True):
            expected = plain[case.name]
            assert len({tuple(stage.losses) for stage in trained}) == 1, case
            steps = [together(step) for step in zip(*(x.gradients for x in trained), strict=True)]
            for ours, theirs in zip(steps, expected.gradients, strict=True):
                assert_close(ours, theirs, 1e-11)
            assert_close(together([x.state for x in trained]), expected.state, 1e-11)
            for stage in trained:
                torch.testing.assert_close(stage.outputs, expected.outputs, rtol=1e-11, atol=1e-11)


def plainly(name: str) -> Trained:
    module, data = build(name), make_data("mlp", SIZE)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    losses, history = [], []
    for first in range(0, SIZE, BATCH_SIZE):
        inputs, targets = data[first : first + BATCH_SIZE]
        optimizer.zero_grad()
        loss = F.cross_entropy(module(inputs), targets)
        loss.backward()
        losses.append(float(loss.detach()))
        history.append(gradients(module))
        optimizer.step()
    with torch.no_grad():
        outputs = module(make_data("mlp", 7).tensors[0])
    return Trained(losses, history, outputs, state_of(module))


AXES = tuple(MODELS), SCHEDULES, MODES, (0, 1)
CASES = [Case(*case) for case in each(*AXES)]
ALL = [Case(*case) for case in itertools.product(*AXES)]


@pytest.mark.parametrize(
    ("num_replicas", "num_stages"), [(1, 3), pytest.param(2, 2, marks=pytest.mark.exhaustive)]
)
def test_gradients_are_the_plain_models(num_replicas: int, num_stages: int) -> None:
    check(num_replicas, num_stages, CASES)


NAMES = ["a", "b", "c", "d", "e", "f", "g", "h"]


@skippable(stash=NAMES)
class StashesAll(nn.Module):
    def forward(self, x: Tensor) -> Iterator[object]:
        for name in NAMES:
            yield stash(name, x)
        return x


@skippable(pop=NAMES)
class PopsAll(nn.Module):
    def forward(self, x: Tensor) -> Iterator[object]:
        for name in NAMES:
            x = x + (yield pop(name))
        return x


def test_all_processes_carry_values_in_the_same_order() -> None:
    """Though sets of names have another order in each process, and namespaces other values."""
    spaces = Namespace(), Namespace()
    layers = [kind().isolate(space) for kind in (StashesAll, PopsAll) for space in spaces]
    module = nn.Sequential(*layers)
    found = connections_of(module, cut_stages(module, [1, 1, 1, 1]))
    order = [(spaces.index(space), name, *ends) for (space, name), *ends in found]
    assert order == [(n, name, n, n + 2) for n in range(2) for name in NAMES]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize(("num_replicas", "num_stages"), [(1, 2), (1, 3), (2, 2), (2, 3)])
def test_all_cases(num_replicas: int, num_stages: int, name: str) -> None:
    check(num_replicas, num_stages, [case for case in ALL if case.name == name])
