"""Losses that are no mean over samples: supported as a sum or over the batch, or refused."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from pipollux_hybrid import (
    AdaptiveDataLoader,
    ConfigurationError,
    HybridParallel,
    PipolluxError,
    WeightedLoss,
    init_process_group,
)
from pipollux_hybrid.job import context as contexts
from pipollux_hybrid.job.context import context
from tests.extent import each, first
from tests.hybrid.models import assert_close, gradients, make_data, make_model
from tests.hybrid.replicas import run_replicas
from tests.hybrid.stage_processes.training import run_stages, together

CLASS_WEIGHTS = torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)
SIZE, BATCH = 41, 12


def padded() -> TensorDataset:
    """Every third target, and most of the first micro-batch, is padding."""
    inputs, targets = make_data("mlp", SIZE).tensors
    targets = targets.clone()
    targets[::3] = -100
    targets[:3] = -100
    targets[1] = 0
    return TensorDataset(inputs, targets)


def ignoring(output: Tensor, targets: Tensor) -> WeightedLoss:
    loss = F.cross_entropy(output, targets, reduction="sum")
    return WeightedLoss(loss, (targets != -100).sum())


def weighing(output: Tensor, targets: Tensor) -> WeightedLoss:
    loss = F.cross_entropy(output, targets, CLASS_WEIGHTS, reduction="sum")
    return WeightedLoss(loss, CLASS_WEIGHTS[targets.clamp(min=0)][targets >= 0].sum())


def contrasting(output: Tensor, targets: Tensor) -> Tensor:
    """Compares samples with each other."""
    features = F.normalize(output, dim=1)
    alike = features @ features.T / 0.1
    return F.cross_entropy(alike, targets.roll(1).abs() % len(output))


PLAIN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "ignoring": F.cross_entropy,
    "weighing": lambda output, targets: F.cross_entropy(output, targets, CLASS_WEIGHTS),
    "contrasting": contrasting,
}
OURS: dict[str, Callable[..., Any]] = {"ignoring": ignoring, "weighing": weighing}


class Way(NamedTuple):
    """How a model is trained."""

    loss: str
    schedule: str | None
    accum_steps: int = 0
    scope: str | None = None


def steps(way: Way) -> tuple[list[float], list[dict[str, Tensor]]]:
    """Train an epoch; the losses, and the gradients of this process's stage at each step."""
    contexts.reset()
    env = context().env
    module = make_model("mlp")
    loader = AdaptiveDataLoader(padded(), batch_size=BATCH)
    parts = env.num_replicas * (way.accum_steps + 1)
    loader.autoscale_batch_size(BATCH, (1, -(-BATCH // parts)), gradient_accumulation=True)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    options = {} if way.schedule is None else {"schedule": way.schedule}
    stages = max(env.processes_per_replica, 2)
    model = HybridParallel(module, optimizer, num_stages=stages, num_microbatches=4, **options)
    losses, history = [], []
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss_fn = OURS.get(way.loss, PLAIN[way.loss])
        losses.append(float(model.train_step(inputs, targets, loss_fn, loss_scope=way.scope)))
        micro_step = context().batch.micro_step
        assert micro_step is not None
        if micro_step.is_optimizer_step:
            history.append(gradients(module))
        optimizer.step()
    return losses, history


def all_ways(ways: list[Way]) -> list[tuple[list[float], list[dict[str, Tensor]]]]:
    init_process_group("gloo")
    return [steps(way) for way in ways]


def plain(loss: str) -> list[dict[str, Tensor]]:
    """The gradients of whole batches."""
    contexts.reset()
    module = make_model("mlp")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    history = []
    for inputs, targets in AdaptiveDataLoader(padded(), batch_size=BATCH):
        optimizer.zero_grad()
        PLAIN[loss](module(inputs), targets).backward()
        history.append(gradients(module))
        optimizer.step()
    return history


@functools.cache
def plain_gradients(loss: str) -> list[dict[str, Tensor]]:
    (expected,) = run_replicas(plain, 1, loss)
    return expected


def check(way: Way, stages: list[tuple[list[float], list[dict[str, Tensor]]]]) -> None:
    expected = plain_gradients(way.loss)
    assert len(expected) == 4
    for step, gradient in enumerate(expected):
        whole = together([history[step] for _, history in stages])
        assert_close(whole, gradient, 1e-12)


@pytest.mark.parametrize(
    "ways",
    first(
        1,
        [
            [Way("weighing", "1f1b", 1), Way("ignoring", "interleaved", 2)],
            [Way("ignoring", "1f1b"), Way("weighing", "gpipe", 1)],
        ],
    ),
    ids=["accumulation", "all schedules"],
)
def test_sums_and_weights_add_up_over_everything(ways: list[Way]) -> None:
    """Micro-batches, accumulation steps and replicas."""
    for replica in run_stages(all_ways, 2, 2, ways):
        for number, way in enumerate(ways):
            check(way, [stage[number] for stage in replica])


def test_sums_and_weights_where_one_process_drives_all_stages() -> None:
    ways = [Way("ignoring", None), Way("weighing", None, 2)]
    for replica in run_replicas(all_ways, 2, ways):
        for number, way in enumerate(ways):
            check(way, [replica[number]])
    (alone,) = run_replicas(all_ways, 1, ways)
    for number, way in enumerate(ways):
        check(way, [alone[number]])


LOSSES, SCHEDULES = ("contrasting", "ignoring"), ("1f1b", "gpipe", "interleaved")


@pytest.mark.parametrize(
    "points",
    first(1, [each(LOSSES, SCHEDULES), list(itertools.product(LOSSES, SCHEDULES))]),
    ids=["few", "all"],
)
def test_a_loss_over_the_whole_batch(points: list[tuple[str, str]]) -> None:
    """With every schedule, also one that would begin backwards earlier."""
    ways = [Way(loss, schedule, 0, "batch") for loss, schedule in points]
    (stages,) = run_stages(all_ways, 1, 2, ways)
    for number, way in enumerate(ways):
        check(way, [stage[number] for stage in stages])
        assert stages[0][number][0] == stages[1][number][0]


def penalised(output: Tensor, targets: Tensor) -> Tensor:
    weight = _first_weight[0]
    return F.cross_entropy(output, targets) + 0.1 * (weight**2).sum()


_first_weight: list[nn.Parameter] = []

REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "ignoring": (PLAIN["ignoring"], "the loss is not a mean over samples"),
    "weighing": (PLAIN["weighing"], "the loss is not a mean over samples"),
    "contrasting": (contrasting, "loss_scope='batch'"),
    "penalty": (penalised, "depends on parameter '8.weight' in another way"),
    "detached": (
        lambda output, targets: F.cross_entropy(output.detach(), targets),
        "no graph that leads to the model's output",
    ),
    "metrics": (
        lambda output, targets: (F.cross_entropy(output, targets), {"n": len(targets)}),
        "loss_fn returned a tuple: return the loss alone",
    ),
    "each": (
        lambda output, targets: F.cross_entropy(output, targets, reduction="none"),
        "loss_fn returned a tensor of shape (",
    ),
    "no weight": (
        lambda output, targets: WeightedLoss(F.cross_entropy(output, targets), float("nan")),
        "with the weight nan: a finite number of at least 0 is needed",
    ),
    "sum": (
        lambda output, targets: F.cross_entropy(output, targets, reduction="sum"),
        "the loss is not a mean over samples",
    ),
}


OFTEN = "ignoring", "contrasting", "penalty"


def refusals(names: list[str], scope: str | None, microbatches: int = 4) -> list[str]:
    init_process_group("gloo", timeout=60.0)
    found = []
    for name in names:
        contexts.reset()
        module = make_model("mlp")
        _first_weight[:] = [module[8].weight]
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        model = HybridParallel(module, optimizer, num_stages=2, num_microbatches=microbatches)
        try:
            model.train_step(*padded()[:BATCH], REFUSED[name][0], loss_scope=scope)
        except PipolluxError as error:
            found.append(f"{type(error).__name__}: {error}")
            break
        found.append("nothing")
    return found


@pytest.mark.parametrize("name", first(3, sorted(REFUSED, key=OFTEN.__contains__, reverse=True)))
def test_what_is_refused_where_each_stage_has_a_process(name: str) -> None:
    ((first, last),) = run_stages(refusals, 1, 2, [name], None)
    assert REFUSED[name][1] in last[0]
    assert last[0].startswith("ConfigurationError")
    assert first[0].startswith(("ReplicaBrokenError", "ConfigurationError"))


def test_a_single_microbatch_is_compared_where_replicas_divide_the_batch() -> None:
    for begin, end in run_stages(refusals, 2, 2, ["ignoring"], None, 1):
        assert "for this replica's batch it is" in end[0]
        assert begin[0].startswith(("ReplicaBrokenError", "ConfigurationError"))
    for scope, replicas in (("batch", 2), (None, 1)):
        for begin, end in run_stages(refusals, replicas, 2, ["ignoring"], scope, 1):
            assert begin == end == ["nothing"]


def test_a_mean_over_microbatches_that_is_meant() -> None:
    ((first, last),) = run_stages(refusals, 1, 2, ["ignoring", "weighing"], "microbatch")
    assert first == last == ["nothing"] * 2


@pytest.mark.parametrize("name", ["metrics", "each", "no weight"])
def test_what_is_refused_where_one_process_drives_all_stages(name: str) -> None:
    ((said,),) = run_replicas(refusals, 1, [name], None)
    assert REFUSED[name][1] in said


def test_an_unknown_scope() -> None:
    module = make_model("mlp")
    model = HybridParallel(module, torch.optim.SGD(module.parameters(), lr=0.1))
    with pytest.raises(ConfigurationError, match="loss_scope='epoch': None, 'microbatch' and"):
        model.train_step(*padded()[:BATCH], F.cross_entropy, loss_scope="epoch")  # type: ignore[arg-type]  # what the message is for


def test_a_weighted_loss_adds_up_nowhere_else() -> None:
    module = make_model("mlp")
    model = HybridParallel(module, torch.optim.SGD(module.parameters(), lr=0.1))
    with model.no_sync(), pytest.raises(ConfigurationError, match=r"under model.no_sync\(\)"):
        model.train_step(*padded()[:BATCH], ignoring)
