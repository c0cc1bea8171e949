"""Layers that keep state of their own, or draw random numbers of the host."""

from __future__ import annotations

import logging
import random
import re
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchgpipe import is_recomputing

from pipollux_hybrid import (
    ConfigurationError,
    HybridParallel,
    init_process_group,
    per_microbatch,
)
from pipollux_hybrid.job import context as contexts
from pipollux_hybrid.pipeline.contributions import Contributions
from pipollux_hybrid.pipeline.stage import Stage
from tests.extent import turns
from tests.hybrid.layer_cases import (
    WIDTH,
    Case,
    Experts,
    WithLinear,
    check_case,
    linear,
    numbers,
    sorted_numbers,
    train,
)
from tests.hybrid.models import assert_close
from tests.hybrid.stage_processes.training import run_stages

MODES = ["always", "except_last", "never"]


@pytest.fixture(autouse=True)
def fresh_context() -> Iterator[None]:
    contexts.reset()
    yield
    contexts.reset()


class Draws(WithLinear):
    """Skips itself at random, by a generator of the host."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.tanh(self.linear(x)) if self.draw() < 0.5 else x * self.draw()
        return y


GENERATORS: dict[str, Callable[[], float]] = {
    "random": random.random,
    "numpy": np.random.random,
    "torch": lambda: float(torch.rand(())),
}


def drawing(name: str) -> Case:
    draw = GENERATORS[name]
    return Case(lambda: [Draws(draw), Draws(draw), Draws(draw), linear()], lambda: numbers(1))


def train_drawing(names: list[str], modes: list[str]) -> list[dict[str, Tensor]]:
    init_process_group("gloo", timeout=60.0)
    train(drawing(names[0]))  # what is imported at first draws numbers, too
    found = []
    for name in names:
        for mode in modes:
            random.seed(0)
            np.random.seed(0)  # the generator that scripts seed
            torch.manual_seed(0)
            found.append(train(drawing(name), activation_checkpoint=mode))
    return found


@pytest.mark.parametrize("name", list(GENERATORS))
def test_recomputation_draws_the_same_numbers(name: str) -> None:
    kept, *recomputed = train_drawing([name], ["never", "always", "except_last"])
    for found in recomputed:
        assert_close(found, kept, 1e-12)


@pytest.mark.exhaustive
def test_recomputation_draws_the_same_numbers_in_processes() -> None:
    names = list(GENERATORS)
    (stages,) = run_stages(train_drawing, 1, 2, names, ["never", "always"])
    for found in stages:
        for kept, recomputed in zip(found[::2], found[1::2], strict=True):
            assert_close(recomputed, kept, 1e-12)


class OwnGenerator(WithLinear):
    """Draws from a generator that nobody restores."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x) * torch.rand(WIDTH, generator=self.generator, dtype=x.dtype)
        return y


class SkipsByItself(WithLinear):
    """Skips itself at random, by a generator of its own: another graph, with other tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.random = np.random.default_rng(0)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) if self.random.random() < 0.5 else x


class Anneals(WithLinear):
    """Counts its forwards, and computes with the count."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        y: Tensor = self.linear(x) / self.steps
        return y


class Normalizes(WithLinear):
    """Subtracts a moving average of what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH, dtype=torch.float64))
        self.mean: Tensor

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.5)
        y: Tensor = self.linear(x - self.mean)
        return y


class Remembers(WithLinear):
    """Adds its last output, as a recurrent layer adds its hidden state."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden: list[Tensor] = [torch.zeros((), dtype=torch.float64)]

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x) + self.hidden[0])
        self.hidden[0] = y.detach()
        return y


class Initializes(WithLinear):
    """Sets its weight from the first samples that it sees."""

    def __init__(self, counted: bool) -> None:
        super().__init__()
        self.counted, self.ready = counted, False

    def forward(self, x: Tensor) -> Tensor:
        if not self.ready:
            self.ready = True
            with torch.no_grad():
                if self.counted:
                    self.linear.bias.copy_(x.mean(0))
                else:
                    self.linear.bias.data.copy_(x.mean(0))
        y: Tensor = self.linear(x)
        return y


def with_layer(layer: Callable[[], nn.Module]) -> Case:
    return Case(lambda: [linear(), layer(), nn.Tanh(), linear()], lambda: numbers(1))


REJECTED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a counter": (Anneals, r"each forward changes attribute 'steps' of layer '1' \(Anneals\), and"),
    "a moving average": (Normalizes, r"each forward changes buffer 'mean' of layer '1' \(Norm"),
    "a hidden state": (Remembers, r"each forward changes attribute 'hidden' of layer '1' \(Rem"),
    "a counted initialisation": (lambda: Initializes(True), "changes the weight '1.linear.bias'"),
    "an initialisation": (lambda: Initializes(False), "changes the weight '1.linear.bias'"),
}


@pytest.mark.parametrize(("name", "mode"), turns(list(REJECTED), MODES))
def test_state_that_the_output_depends_on(name: str, mode: str) -> None:
    layer, message = REJECTED[name]
    with pytest.raises(ConfigurationError, match=message):
        train(with_layer(layer), activation_checkpoint=mode)


def said_in_processes(name: str, mode: str) -> str:
    init_process_group("gloo", timeout=60.0)
    try:
        train(with_layer(REJECTED[name][0]), activation_checkpoint=mode)
    except Exception as error:  # which is told to the test
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("name", "mode"),
    [("a counter", "never"), ("a hidden state", "always"), ("a counter", "always")],
)
def test_state_that_the_output_depends_on_in_processes(name: str, mode: str) -> None:
    (found,) = run_stages(said_in_processes, 1, 2, name, mode)
    assert any(re.search(REJECTED[name][1], text) for text in found), found
    assert "nothing" not in found


CHANGES_ONCE = [(Normalizes, mode) for mode in MODES] + [(Remembers, "never"), (Anneals, "never")]


@pytest.mark.parametrize(("layer", "mode"), CHANGES_ONCE)
def test_with_one_micro_batch_state_is_that_of_the_plain_model(
    layer: type[nn.Module], mode: str
) -> None:
    case = with_layer(layer)
    check_case(train(case, activation_checkpoint=mode, num_microbatches=1), case)


@pytest.mark.parametrize(
    ("num_microbatches", "layer"), turns([1, 4], [Anneals, Remembers, OwnGenerator, SkipsByItself])
)
def test_a_recomputation_that_gives_another_output(
    layer: type[nn.Module], num_microbatches: int
) -> None:
    case = with_layer(lambda: per_microbatch(layer()))
    with pytest.raises(ConfigurationError, match="computed something else when recomputed"):
        train(case, activation_checkpoint="always", num_microbatches=num_microbatches)


def train_with_own_generator(layer: type[nn.Module]) -> str:
    init_process_group("gloo", timeout=60.0)
    try:
        train(with_layer(layer), activation_checkpoint="always")
    except Exception as error:  # which is told to the test
        return str(error)
    return "nothing"


@pytest.mark.parametrize("layer", [OwnGenerator, SkipsByItself])
def test_a_recomputation_that_gives_another_output_in_processes(layer: type[nn.Module]) -> None:
    (found,) = run_stages(train_with_own_generator, 1, 2, layer)
    assert any("computed something else when recomputed" in text for text in found), found


class Quantized(WithLinear):
    """Holds a weight of a type that has no norm."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([2], dtype=torch.int8), requires_grad=False)
        self.gate = nn.Parameter(torch.tensor([True]), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x) * self.scale * self.gate
        return y


@pytest.mark.parametrize("mode", ["always", "never"])
def test_a_weight_of_whole_numbers(mode: str) -> None:
    case = with_layer(Quantized)
    check_case(train(case, activation_checkpoint=mode), case)


class Shows(WithLinear):
    """Keeps what nothing depends on: a count, the batch's size, the last output, a sum."""

    def __init__(self, counts: bool) -> None:
        super().__init__()
        self.counts, self.forwards, self.size = counts, 0, 0
        self.last: Tensor | None = None
        self.register_buffer("load", torch.zeros(WIDTH, dtype=torch.float64))
        self.load: Tensor

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        self.size, self.last = len(x), y.detach()
        if self.counts and not is_recomputing():
            self.forwards += 1
            with torch.no_grad():
                self.load += x.sum(0)
        return y


SHOWS = r"attribute 'forwards' of layer '1' \(Shows\), buffer 'load' of layer '1' \(Shows\): once"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("counts", "marked"), [(True, False), (True, True), (False, False)])
def test_state_that_nothing_depends_on(
    counts: bool, marked: bool, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    mark = per_microbatch if marked else lambda layer: layer
    case = with_layer(lambda: mark(Shows(counts)))
    with caplog.at_level(logging.WARNING):
        found = train(case, activation_checkpoint=mode)
    check_case(found, case)  # sums over samples are the plain model's, too
    warned = [re.search(SHOWS, record.getMessage()) for record in caplog.records]
    assert [bool(match) for match in warned] == ([True] if counts and not marked else [])


def test_marked_layers_change_once_for_each_micro_batch() -> None:
    layer = per_microbatch(Anneals())
    train(with_layer(lambda: layer), activation_checkpoint="never")
    assert layer.steps == 3 * 4


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_an_embedding_that_normalises_its_weight(kind: type[nn.Module]) -> None:
    module = nn.Sequential(kind(8, WIDTH, max_norm=1.0), nn.Linear(WIDTH, 1))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with pytest.raises(ConfigurationError, match=rf"'0' is an {kind.__name__} with max_norm=1.0"):
        HybridParallel(module, optimizer, balance=[1, 1], num_microbatches=1)


@pytest.mark.parametrize("mode", MODES)
def test_weights_that_some_micro_batches_reach(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    # The first half of the sorted samples goes to one expert, the second to the other.
    case = Case(lambda: [linear(), Experts(), nn.Tanh(), linear()], sorted_numbers)
    with caplog.at_level(logging.INFO, logger="pipollux_hybrid.pipeline.contributions"):
        train(case, activation_checkpoint=mode)
    reached = [x.getMessage() for x in caplog.records]
    assert reached, "no weight was reached by some micro-batches only"


def test_contributions_are_those_of_the_graphs() -> None:
    stage = Stage({"0": Experts(), "1": linear()}, 0)
    contributions = Contributions(stage)
    contributions.begin(3)
    up, down = torch.ones(2, WIDTH, dtype=torch.float64), -torch.ones(2, WIDTH, dtype=torch.float64)
    for x in (up, down, up):
        contributions.add(x, stage(x))
    expected = {f"0.experts.0.{name}": 2 for name in ("weight", "bias")}
    expected |= {f"0.experts.1.{name}": 1 for name in ("weight", "bias")}
    assert contributions.partial() == expected


def test_the_stage_s_input_is_no_weight() -> None:
    stage = Stage({"0": linear()}, 0)
    contributions = Contributions(stage)
    contributions.begin(2)
    x = torch.ones(2, WIDTH, dtype=torch.float64, requires_grad=True)
    for _ in range(2):
        contributions.add(x, stage(x))
    assert contributions.partial() == {}
