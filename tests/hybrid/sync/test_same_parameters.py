"""Parameters that replicas set differently are rejected in the first steps."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipollux_hybrid import (
    AdaptiveDataLoader,
    HybridParallel,
    SynchronizationError,
    init_process_group,
    num_replicas,
    replica_rank,
)
from pipollux_hybrid.job.context import context
from pipollux_hybrid.sync.parameter_check import CHECKED, are_alike, held
from pipollux_hybrid.telemetry.metrics import Metrics
from tests.extent import first_points, turns
from tests.hybrid.models import make_data, make_model, state_of
from tests.hybrid.stage_processes.training import run_stages

WIDTH, SHARE = 6, 4
ENGINES = [("one process", 1), ("processes", 2)]


def usual_turns(values: Sequence[object]) -> list[Any]:
    """Both engines with each value; the first engine with the first value, and the second with the
    second one, are not exhaustive.
    """
    others = itertools.product(ENGINES, values[2:])
    return [
        *turns(ENGINES, values[:2]),
        *(pytest.param(*point, marks=pytest.mark.exhaustive) for point in others),
    ]


class Normalizes(nn.Module):
    """Sets its weights from the first samples that it sees, as ActNorm does."""

    def __init__(self, counted: bool, trained: bool) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(WIDTH, dtype=torch.float64), requires_grad=trained)
        self.counted, self.ready = counted, False

    def forward(self, x: Tensor) -> Tensor:
        if not self.ready:
            self.ready = True
            with torch.no_grad():
                target = self.shift if self.counted else self.shift.data
                target.copy_(-x.mean(0))
        return x + self.shift


def wrapped(
    kind: str, options: dict[str, object]
) -> tuple[HybridParallel, torch.optim.Optimizer, nn.Sequential]:
    module = nn.Sequential(*make_model("mlp"))
    if kind.startswith("initializes"):
        counted, trained = "uncounted" not in kind, "frozen" not in kind
        module = nn.Sequential(nn.Linear(WIDTH, WIDTH).double(), Normalizes(counted, trained))
        module = nn.Sequential(*module, nn.Tanh(), nn.Linear(WIDTH, 3).double())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    if kind == "initializes before":
        module(make_data("mlp", SHARE * (1 + replica_rank())).tensors[0])
    model = HybridParallel(module, optimizer, num_stages=2, num_microbatches=1, **options)  # type: ignore[arg-type]  # whatever the test passes
    return model, optimizer, module


def batch(step: int) -> tuple[Tensor, Tensor]:
    inputs, targets = make_data("mlp", 96).tensors
    first = SHARE * (num_replicas() * step + replica_rank())
    return inputs[first : first + SHARE], targets[first : first + SHARE]


def change(module: nn.Module, kind: str) -> None:
    """Change a parameter of each stage on the last replica, if this is it."""
    if replica_rank() != num_replicas() - 1:
        return
    with torch.no_grad():
        for parameter in [p for name, p in module.named_parameters() if name.endswith("weight")]:
            if kind == "a scale":
                parameter.mul_(2.0)
            elif kind == "a digit":  # as another machine might round
                parameter.mul_(1.0 + 1e-15)
            elif kind == "uncounted":
                parameter.data.view(-1)[-1] += 1.0
            else:
                parameter.view(-1)[0] = math.nan


def train(kind: str, when: str, options: dict[str, object]) -> tuple[str, int, dict[str, Tensor]]:
    """Train and return the error, the optimizer's steps, and what this process holds then."""
    init_process_group("gloo", timeout=60.0)
    model, optimizer, module = wrapped(kind, options)
    message = "nothing"
    try:
        for step in range(CHECKED + 2):
            optimizer.zero_grad()
            if when == f"before backward {step}":
                change(module, kind)
            model.train_step(*batch(step), F.cross_entropy)
            if when == f"before step {step}":
                change(module, kind)
            optimizer.step()
    except SynchronizationError as error:
        message = str(error)
    return message, context().component(Metrics).step, state_of(module)


INITIALIZES = ["initializes", "initializes uncounted", "initializes frozen"]


@pytest.mark.parametrize(("engine", "kind"), turns(ENGINES, INITIALIZES), ids=str)
def test_weights_that_a_forward_sets_from_its_samples(engine: tuple[str, int], kind: str) -> None:
    _, num_stages = engine
    for replica in run_stages(train, 2, num_stages, kind, "", {}):
        for message, steps, _ in replica:
            assert "replicas differ before optimizer step 1: parameter '1.shift' is the" in message
            assert "on replica 0; " in message
            assert "on replica 1), as after a forward that sets weights from its sampl" in message
            assert "set weights before HybridParallel(…)" in message
            assert steps == 0


CHANGES = [
    ("uncounted", "before step 1", 2),
    ("nan", "before backward 2", 2),
    ("a scale", "before backward 0", 0),
    ("a scale", "before step 0", 1),
]


@pytest.mark.parametrize(("engine", "change"), usual_turns(CHANGES), ids=str)
def test_weights_that_a_script_changes_on_one_replica(
    engine: tuple[str, int], change: tuple[str, str, int]
) -> None:
    (_, num_stages), (kind, when, expected) = engine, change
    found = run_stages(train, 3, num_stages, kind, when, {})
    told = {(message, steps) for replica in found for message, steps, _ in replica}
    ((message, steps),) = told
    assert f"replicas differ before optimizer step {expected + 1}: parameter '0.w" in message
    assert "on replicas 0, 1; " in message
    assert "on replica 2), as after" in message
    assert steps == expected


OPTIONS: list[dict[str, object]] = [
    {"reduce_dtype": torch.bfloat16},
    {"shard_optimizer": True},
    {},
    {"broadcast_buffers": False},
]


@pytest.mark.parametrize(("engine", "options"), usual_turns(OPTIONS), ids=str)
def test_other_options_of_the_job(engine: tuple[str, int], options: dict[str, object]) -> None:
    """A run is not refused for what they do, and is for what the script does."""
    _, num_stages = engine
    first, *others = run_stages(train, 2, num_stages, "nothing", "", options)
    for replica in others:
        for (message, steps, state), (_, _, same) in zip(replica, first, strict=True):
            assert (message, steps) == ("nothing", CHECKED + 2)
            assert all(torch.equal(state[name], same[name]) for name in same)
    # Before a backward: where the state is sharded, a step gives all what the owner has.
    for replica in run_stages(train, 2, num_stages, "a scale", "before backward 1", options):
        for message, steps, _ in replica:
            assert "replicas differ before optimizer step 2: parameter '0.w" in message
            assert steps == 1


@pytest.mark.parametrize(("engine", "num_stages"), ENGINES)
def test_weights_set_before_wrapping_are_rank_0_s(engine: str, num_stages: int) -> None:
    first, second = run_stages(train, 2, num_stages, "initializes before", "", {})
    for (message, steps, state), (_, _, same) in zip(first, second, strict=True):
        assert (message, steps) == ("nothing", CHECKED + 2)
        assert all(torch.equal(state[name], same[name]) for name in same)


@pytest.mark.parametrize(("engine", "num_stages"), first_points(1, ENGINES))
def test_a_rounded_digit_differs_before_the_first_step_only(engine: str, num_stages: int) -> None:
    for replica in run_stages(train, 2, num_stages, "a digit", "before backward 0", {}):
        for message, steps, _ in replica:
            assert "replicas differ before optimizer step 1: parameter '0.w" in message
            assert steps == 0
    for replica in run_stages(train, 2, num_stages, "a digit", "before step 0", {}):
        for message, steps, _ in replica:
            assert (message, steps) == ("nothing", CHECKED + 2)


def accumulate(kind: str) -> tuple[str, int, int]:
    """Change weights within an iteration of several backwards, which is when they all count."""
    init_process_group("gloo", timeout=60.0)
    num_samples = 4 * SHARE * num_replicas()
    loader = AdaptiveDataLoader(make_data("mlp", 3 * num_samples), batch_size=num_samples)
    loader.autoscale_batch_size(num_samples, (1, SHARE), gradient_accumulation=True)
    model, optimizer, module = wrapped(kind, {})
    backwards = itertools.count()
    message = "nothing"
    try:
        for inputs, targets in loader:
            optimizer.zero_grad()
            model.train_step(inputs, targets, F.cross_entropy)
            if next(backwards) == 0 and not kind.startswith("initializes"):
                change(module, kind)
            optimizer.step()
    except SynchronizationError as error:
        message = str(error)
    return message, next(backwards), context().component(Metrics).step


@pytest.mark.exhaustive
@pytest.mark.parametrize(("engine", "kind"), turns(ENGINES, ["initializes", "a scale"]), ids=str)
def test_accumulation_steps(engine: tuple[str, int], kind: str) -> None:
    _, num_stages = engine
    for replica in run_stages(accumulate, 2, num_stages, kind):
        for message, backwards, steps in replica:
            assert "replicas differ before optimizer step 1: parameter" in message
            assert backwards > 1, "those of the iteration's first parts do not exchange anything"
            assert steps == 0


@pytest.mark.parametrize(
    ("dtype", "rounding", "change"),
    [
        (torch.float64, 1e-15, 1e-6),
        (torch.float32, 1e-6, 1e-2),
        (torch.bfloat16, 4e-3, 0.5),
        (torch.complex128, 1e-15, 1e-6),
    ],
)
def test_what_rounding_may_make(dtype: torch.dtype, rounding: float, change: float) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(3, 1000, dtype=torch.float64, generator=generator).to(dtype)
    first = held("weight", values)
    rounded = values.clone()
    rounded[:, ::7] *= 1 + rounding
    changed = values.clone()
    changed[:, ::7] *= 1 + change
    assert first.digest != held("weight", rounded).digest
    for other, exact, expected in [
        (values, True, True),
        (rounded, True, False),
        (rounded, False, True),
        (changed, False, False),
        (values * math.nan, False, False),
    ]:
        assert are_alike([first, first, held("weight", other)], exact=exact) == expected
    assert not are_alike([first, None], exact=False)
    nan = held("weight", values * math.nan)
    assert are_alike([nan, nan], exact=True)


def test_whole_numbers_are_not_rounded() -> None:
    numbers = [held("codes", torch.tensor([1, 2, x], dtype=torch.int64)) for x in (3, 4)]
    assert not are_alike(numbers, exact=False)


def warn() -> list[str]:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]  # as logging allows
    logging.getLogger("pipollux_hybrid.sync.parameter_check").addHandler(handler)
    train("a digit", "before step 0", {})
    return records


def test_rounding_is_logged_once() -> None:
    for replica in run_stages(warn, 2, 1):
        assert ["by rounding" in text for text in replica[0]] == [True]
