"""Gradients and parameters are the plain model's on the whole batch, whatever the parallelism."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipollux_hybrid import AdaptiveDataLoader, HybridParallel, init_process_group
from pipollux_hybrid.job import context as contexts
from pipollux_hybrid.job.context import context
from pipollux_hybrid.pipeline.microbatch import microbatch_sizes
from tests.extent import first, pairs, turns
from tests.hybrid.models import (
    assert_close,
    freeze_statistics,
    gradients,
    make_data,
    make_model,
    plain_training,
    state_of,
)
from tests.hybrid.replicas import run_replicas

BATCH_SIZE = 24
SIZE = 2 * BATCH_SIZE + 17
"""Two whole batches and one that neither replicas nor accumulation steps divide."""
MODES = ("always", "except_last", "never")
FAMILIES = ("unet", "transformer", "mlp")

Trained = tuple[list[dict[str, Tensor]], dict[str, Tensor]]
"""Gradients of each step, and the parameters and buffers at the end."""


class Case(NamedTuple):
    """How a model is trained."""

    num_stages: int
    checkpoint: str
    accum_steps: int


AXES = (1, 2, 3, 4), MODES, (0, 1, 2)
PAIRS = [Case(*case) for case in pairs(*AXES)]
REPLICAS = (1, 2, 3)


def optimizer_for(module: nn.Module, adam: bool) -> torch.optim.Optimizer:
    if adam:
        return torch.optim.AdamW(module.parameters(), lr=1e-3)
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def microbatches(case: Case) -> Iterator[int]:
    """1 to 8 micro-batches, another number at each forward."""
    turns = (8, 1, 3, 5, 2, 7, 4, 6)
    return itertools.islice(itertools.cycle(turns), case.num_stages - 1, None)


def train(name: str, case: Case, epochs: int, adam: bool, dtype: torch.dtype) -> Trained:
    """Train in a pipeline, with other micro-batches at every forward."""
    contexts.reset()
    module = make_model(name, dtype)
    freeze_statistics(module)
    optimizer = optimizer_for(module, adam)
    loader = AdaptiveDataLoader(make_data(name, SIZE, dtype), batch_size=BATCH_SIZE)
    parts = context().env.num_replicas * (case.accum_steps + 1)
    loader.autoscale_batch_size(
        BATCH_SIZE, (1, -(-BATCH_SIZE // parts)), gradient_accumulation=True
    )
    assert loader.accumulation_steps == case.accum_steps
    model = HybridParallel(
        module,
        optimizer,
        num_stages=case.num_stages,
        num_microbatches=1,
        activation_checkpoint=case.checkpoint,
    )
    history = []
    turns = microbatches(case)
    for _ in range(epochs):
        for inputs, targets in loader:
            model.num_microbatches = next(turns)
            optimizer.zero_grad()
            output = model(inputs)
            F.cross_entropy(output, targets.to(output.device)).backward()
            micro_step = context().batch.micro_step
            assert micro_step is not None
            if micro_step.is_optimizer_step:
                history.append(gradients(module))
            optimizer.step()
    return history, state_of(module)


def plain(name: str, epochs: int, adam: bool, dtype: torch.dtype) -> Trained:
    module = make_model(name, dtype)
    freeze_statistics(module)
    batches = [range(i, min(i + BATCH_SIZE, SIZE)) for i in range(0, SIZE, BATCH_SIZE)] * epochs
    data = make_data(name, SIZE, dtype)
    history = plain_training(module, optimizer_for(module, adam), data, batches)
    return history, dict(module.state_dict())


def train_all(name: str, cases: list[Case], backend: str) -> list[Trained]:
    init_process_group(backend)
    return [train(name, case, 1, False, torch.float64) for case in cases]


def check_all(
    name: str,
    num_replicas: int,
    cases: list[Case],
    backend: str = "gloo",
    environment: Mapping[str, str] | None = None,
) -> None:
    expected_gradients, expected_state = plain(name, 1, False, torch.float64)
    found = run_replicas(train_all, num_replicas, name, cases, backend, environment=environment)
    for results in found:
        for history, state in results:
            assert len(history) == len(expected_gradients)
            for ours, theirs in zip(history, expected_gradients, strict=True):
                assert_close(ours, theirs, 1e-12)
            assert_close(state, expected_state, 1e-12)


@pytest.mark.parametrize(("name", "num_replicas"), turns(FAMILIES, REPLICAS))
def test_gradients_are_the_plain_models(name: str, num_replicas: int) -> None:
    """Stages 1 to 4, checkpoint modes, accumulation steps 0 to 2, micro-batches 1 to 8.

    Every pair of these is tried on one of the numbers of replicas, with one of the models.
    """
    check_all(name, num_replicas, PAIRS[REPLICAS.index(num_replicas) :: len(REPLICAS)])


@pytest.mark.exhaustive
@pytest.mark.parametrize("num_replicas", REPLICAS)
@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_are_the_plain_models_in_every_case(name: str, num_replicas: int) -> None:
    check_all(name, num_replicas, [Case(*case) for case in itertools.product(*AXES)])


def train_long(name: str, case: Case, adam: bool, dtype: torch.dtype) -> Trained:
    init_process_group("gloo")
    return train(name, case, 17, adam, dtype)


LONG = [("mlp", 4), ("transformer", 2), ("unet", 3)]
"""Models and their stages."""


def long_cases() -> list[tuple[tuple[str, int], bool, str]]:
    """Each model with either optimizer, in each mode; with another mode in turn come first."""
    turns = itertools.product(range(len(MODES)), enumerate(LONG), (False, True))
    return [
        (model, adam, MODES[(turn + number + adam) % len(MODES)])
        for turn, (number, model), adam in turns
    ]


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", long_cases(), ids=str)
def test_parameters_after_50_steps_are_the_plain_models(
    case: tuple[tuple[str, int], bool, str],
) -> None:
    """Gradients of the first step to 1e-6 in float32, parameters in the end to 1e-5.

    AdamW in float64: the keys' bias of an attention has no gradient but rounding, which AdamW
    blows up to steps of full size. In float64 that is below its epsilon.
    """
    (name, num_stages), adam, mode = case
    dtype = torch.float64 if adam else torch.float32
    expected_gradients, expected_state = plain(name, 17, adam, dtype)
    how = Case(num_stages, mode, 1)
    for history, state in run_replicas(train_long, 2, name, how, adam, dtype):
        assert len(history) == len(expected_gradients) == 51
        assert_close(history[0], expected_gradients[0], 1e-6)
        assert_close(state, expected_state, 1e-5)


def train_on_small_batches(name: str, batch_size: int, size: int, local_bsz: int) -> Trained:
    init_process_group("gloo")
    module = make_model(name)
    optimizer = optimizer_for(module, adam=False)
    loader = AdaptiveDataLoader(make_data(name, size), batch_size=batch_size)
    loader.autoscale_batch_size(batch_size, (1, local_bsz), gradient_accumulation=True)
    model = HybridParallel(module, optimizer, num_stages=2, num_microbatches=2)
    history = []
    for inputs, targets in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        micro_step = context().batch.micro_step
        assert micro_step is not None
        if micro_step.is_optimizer_step:
            history.append(gradients(module))
        optimizer.step()
    return history, dict(module.state_dict())


@pytest.mark.parametrize(
    "size", first(1, [17, 22]), ids=["last batch of one sample", "short last batch"]
)
def test_replicas_without_a_sample_in_the_last_batch(size: int) -> None:
    module = make_model("mlp")
    batches = [range(i, min(i + 8, size)) for i in range(0, size, 8)]
    data = make_data("mlp", size)
    expected = plain_training(module, optimizer_for(module, adam=False), data, batches)
    for history, _ in run_replicas(train_on_small_batches, 3, "mlp", 8, size, 2):
        for ours, theirs in zip(history, expected, strict=True):
            assert_close(ours, theirs, 1e-12)


@pytest.mark.parametrize(("num_stages", "checkpoint"), turns([1, 2, 4], MODES))
def test_batch_normalisation_is_that_of_each_micro_batch(num_stages: int, checkpoint: str) -> None:
    """In training it normalises a micro-batch by itself: so does the plain model, given those."""
    contexts.reset()
    module, plain_module = make_model("unet"), make_model("unet")
    model = HybridParallel(
        module,
        optimizer_for(module, adam=False),
        num_stages=num_stages,
        activation_checkpoint=checkpoint,
        num_microbatches=1,
    )
    inputs, targets = make_data("unet", 20)[list(range(20))]
    for num_microbatches in (4, 1, 3):
        model.num_microbatches = num_microbatches
        module.zero_grad()
        plain_module.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        sizes = microbatch_sizes(20, num_microbatches)
        for part, labels in zip(inputs.split(sizes), targets.split(sizes), strict=True):
            share = len(part) / 20
            (share * F.cross_entropy(plain_module(part), labels)).backward()
        assert_close(gradients(module), gradients(plain_module), 1e-12)
    contexts.reset()


def statistics(accum_steps: int) -> dict[str, Tensor]:
    init_process_group("gloo")
    torch.manual_seed(3)
    module = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3)).double()
    optimizer = optimizer_for(module, adam=False)
    loader = AdaptiveDataLoader(make_data("mlp", SIZE), batch_size=BATCH_SIZE)
    local_bsz = -(-BATCH_SIZE // (context().env.num_replicas * (accum_steps + 1)))
    loader.autoscale_batch_size(BATCH_SIZE, (1, local_bsz), gradient_accumulation=True)
    model = HybridParallel(module, optimizer, num_stages=2, num_microbatches=3, check_replicas=True)
    for inputs, targets in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    return dict(module.named_buffers())


@pytest.mark.parametrize(("num_replicas", "accum_steps"), turns([1, 2, 3], [0, 1]))
def test_running_statistics_are_those_of_the_whole_batch(
    num_replicas: int, accum_steps: int
) -> None:
    """Over micro-batches, accumulation steps and replicas, however many samples each has."""
    layer = nn.BatchNorm1d(6).double()
    inputs = make_data("mlp", SIZE).tensors[0]
    for batch in inputs.split(BATCH_SIZE):
        layer(batch)
    for buffers in run_replicas(statistics, num_replicas, accum_steps):
        for name, buffer in layer.named_buffers():
            torch.testing.assert_close(buffers[f"0.{name}"], buffer, rtol=1e-12, atol=1e-12)


def statistics_of_single_samples() -> dict[str, Tensor]:
    init_process_group("gloo")
    module = nn.Sequential(nn.Unflatten(1, (1, 2, 3)), nn.BatchNorm2d(1), nn.Flatten())
    module.append(nn.Linear(6, 3)).double()
    optimizer = optimizer_for(module, adam=False)
    loader = AdaptiveDataLoader(make_data("mlp", 7), batch_size=4)
    loader.autoscale_batch_size(4, (1, 1), gradient_accumulation=True)
    model = HybridParallel(module, optimizer, num_microbatches=1)
    for inputs, targets in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    return dict(module.named_buffers())


def test_running_statistics_where_a_replica_runs_out_of_samples() -> None:
    """The last batch has 3 samples for 2 replicas of 2 accumulation steps: one has a filler."""
    layer = nn.BatchNorm2d(1).double()
    inputs = make_data("mlp", 7).tensors[0].view(7, 1, 2, 3)
    for batch in inputs.split(4):
        layer(batch)
    for buffers in run_replicas(statistics_of_single_samples, 2):
        for name, buffer in layer.named_buffers():
            torch.testing.assert_close(buffers[f"1.{name}"], buffer, rtol=1e-12, atol=1e-12)
