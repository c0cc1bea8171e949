"""Training by push and pull equals a reference of thirty lines."""

from __future__ import annotations

import contextlib
import copy
import io
import math
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import pipollux
from pipollux_hybrid.push_pull import learner
from tests.extent import first, first_points
from tests.hybrid.push_pull.jobs import servers
from tests.hybrid.replicas import run_replicas

SAMPLES, BATCH, RATE = 96, 4, 0.05


def make_model() -> nn.Sequential:
    torch.manual_seed(3)
    layers = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(*layers, nn.Linear(6, 2)).double()


def make_data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(SAMPLES, 6, dtype=torch.float64, generator=generator)
    return inputs, torch.randn(SAMPLES, 2, dtype=torch.float64, generator=generator)


def make_optimizer(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=RATE)
    return torch.optim.AdamW(model.parameters(), lr=RATE)


def train(
    options: dict[str, Any],
    kind: str,
    epochs: int,
    num_stages: int,
    processes: int,
    accumulates: bool = False,
) -> tuple[list[list[int]], dict[str, Tensor]]:
    """Train a replica; return the samples of its steps, and its parameters."""
    pipollux.init_process_group("gloo", processes_per_replica=processes)
    model = make_model()
    optimizer = make_optimizer(model, kind)
    wrapped = pipollux.HybridParallel(
        model,
        optimizer,
        num_stages=num_stages,
        num_microbatches=2,
        synchronization=pipollux.PushPull(**options),
    )
    data = TensorDataset(torch.arange(SAMPLES), *make_data())
    loader = pipollux.AdaptiveDataLoader(data, batch_size=BATCH, shuffle=True)
    if accumulates:
        loader.autoscale_batch_size(BATCH, local_bsz_bounds=(1, 2), gradient_accumulation=True)
    steps: list[list[int]] = []
    for _ in pipollux.remaining_epochs_until(epochs):
        for indices, inputs, targets in loader:
            optimizer.zero_grad()
            if processes > 1:
                wrapped.train_step(inputs, targets, nn.functional.mse_loss)
            else:
                nn.functional.mse_loss(wrapped(inputs), targets).backward()
            optimizer.step()
            begins = not accumulates or not steps or len(steps[-1]) == BATCH
            steps.append(indices.tolist()) if begins else steps[-1].extend(indices.tolist())
    return steps, {name: x.detach().clone() for name, x in wrapped.state_dict().items()}


def reference(
    steps: list[list[list[int]]], options: dict[str, Any], kind: str, fragments: list[list[str]]
) -> dict[str, Tensor]:
    """Return the parameters after the steps of replicas that all take equally many.

    The change of a fragment is averaged after every H steps and goes to the outer optimizer; τ
    steps later a replica continues from the result, and from what it has changed meanwhile.
    """
    every, overlap = options["sync_every"], options.get("overlap", 0)
    outer = options.get("outer_optimizer", pipollux.OuterSGD())
    inputs, targets = make_data()
    models = [make_model() for _ in steps]
    optimizers = [make_optimizer(model, kind) for model in models]
    mine = [dict(model.named_parameters()) for model in models]
    shared = {name: x.detach().clone() for name, x in mine[0].items()}
    base = [copy.deepcopy(shared) for _ in steps]
    momentum = {name: torch.zeros_like(x) for name, x in shared.items()}
    sent: dict[int, tuple[int, list[dict[str, Tensor]]]] = {}
    pushed = dict.fromkeys(range(len(fragments)), -1)

    def push(index: int, step: int) -> None:
        pushed[index] = step
        sent[index] = step, [{n: x[n].detach().clone() for n in fragments[index]} for x in mine]
        for name in fragments[index]:
            changes = [b[name] - x[name] for b, x in zip(base, sent[index][1], strict=True)]
            mean = torch.stack(changes).mean(0)
            momentum[name] = outer.momentum * momentum[name] + mean
            shared[name] = shared[name] - outer.lr * (
                mean + outer.momentum * momentum[name] if outer.nesterov else momentum[name]
            )

    def pull(index: int) -> None:
        _, then = sent.pop(index)
        with torch.no_grad():
            for name in fragments[index]:
                for r, x in enumerate(mine):
                    x[name].copy_(shared[name] + (x[name] - then[r][name]))
                    base[r][name] = shared[name].clone()

    turn = progress = 0
    for step in range(len(steps[0])):
        for model, optimizer, taken in zip(models, optimizers, steps, strict=True):
            optimizer.zero_grad()
            chosen = taken[step]
            nn.functional.mse_loss(model(inputs[chosen]), targets[chosen]).backward()
            optimizer.step()
        for index in [i for i, (at, _) in sent.items() if overlap and step - at >= overlap]:
            pull(index)
        progress += len(fragments)
        while progress >= every:
            push(turn, step)
            turn, progress = (turn + 1) % len(fragments), progress - every
        for index in list(sent) if not overlap else []:
            pull(index)
    for index in list(sent):
        pull(index)
    for index in [i for i, at in pushed.items() if at < step]:
        push(index, step)
        pull(index)
    return {name: x.detach() for name, x in shared.items()}


def check(
    options: dict[str, Any], replicas: int, stages: int = 1, accumulates: bool = False
) -> None:
    options, kind = {"adapt_to_speed": False, **options}, "adamw"
    with servers(2) as running:
        found = run_replicas(
            train,
            replicas,
            *(options, kind, 1, stages, 1, accumulates),
            environment=running.environment(),
        )
    taken = [steps for steps, _ in found]
    assert sorted(x for steps in taken for step in steps for x in step) == list(range(SAMPLES))
    assert len({len(steps) for steps in taken}) == 1
    groups = fragments_of_model(options.get("fragments", 1))
    expected = reference(taken, options, kind, groups)
    for _, state in found:
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=1e-12)


def fragments_of_model(count: int) -> list[list[str]]:
    if count == 1:
        return [[name for name, _ in make_model().named_parameters()]]
    # Three layers of 42 parameters and one of 14: the last goes to a fragment that has one less.
    layers = {2: [[0, 2], [1, 3]], 3: [[0, 3], [1], [2]]}[count]
    names = [name for name, _ in make_model().named_parameters()]
    return [[n for n in names if int(n.split(".")[0]) in group] for group in layers]


@pytest.mark.parametrize(
    "replicas", [2, *(pytest.param(count, marks=pytest.mark.exhaustive) for count in (1, 3, 4))]
)
def test_rounds_of_several_steps(replicas: int) -> None:
    check({"sync_every": 4}, replicas)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"sync_every": 4, "fragments": 2}, marks=pytest.mark.exhaustive),
        pytest.param({"sync_every": 4, "overlap": 2}, marks=pytest.mark.exhaustive),
        {"sync_every": 6, "fragments": 3, "overlap": 1},
        pytest.param(
            {"sync_every": 3, "outer_optimizer": pipollux.OuterSGD(nesterov=False, momentum=0.5)},
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=str,
)
def test_fragments_and_overlap(options: dict[str, Any]) -> None:
    check(options, 2, stages=2)


@pytest.mark.exhaustive
def test_accumulation_steps() -> None:
    check({"sync_every": 4}, 2, accumulates=True)


def warned(*args: Any) -> list[str]:
    """Train a replica; return the warnings of momentum."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(*args)
    found = [one for one in caught if "momentum" in str(one.message)]
    folder = str(Path(__file__).parent)
    assert all(one.filename.startswith(folder) for one in found), "it names the script's line"
    return [str(one.message) for one in found]


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    first_points(
        1,
        [
            ("adamw", {"sync_every": 1}, True),
            ("adamw", {"sync_every": 2}, False),
            ("adamw", {"sync_every": 1, "outer_optimizer": pipollux.OuterSGD(momentum=0.0)}, False),
            ("sgd", {"sync_every": 1}, False),
        ],
    ),
)
def test_momentum_on_every_step_of_adamw_is_warned_of_once(
    kind: str, options: dict[str, Any], said: bool
) -> None:
    with servers(1) as running:
        (found,) = run_replicas(
            warned, 1, options, kind, 1, 1, 1, environment=running.environment()
        )
    assert len(found) == said
    effect = "lr=0.7 and momentum=0.9 multiplies each step of the inner optimizer by 7 in the end"
    assert all(effect in text for text in found)


@pytest.mark.parametrize("replicas", [2, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_a_push_per_step_is_the_synchronous_training(replicas: int) -> None:
    outer = pipollux.OuterSGD(lr=1.0, momentum=0.0, nesterov=False)
    options = {"sync_every": 1, "outer_optimizer": outer, "adapt_to_speed": False}
    with servers(1) as running:
        found = run_replicas(
            train, replicas, options, "sgd", 2, 1, 1, environment=running.environment()
        )
    model, (inputs, targets) = make_model(), make_data()
    optimizer = make_optimizer(model, "sgd")
    for together in zip(*(steps for steps, _ in found), strict=True):
        chosen = [index for step in together for index in step]
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs[chosen]), targets[chosen]).backward()
        optimizer.step()
    for name, value in model.state_dict().items():
        for _, state in found:
            torch.testing.assert_close(state[name], value, rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    "options",
    first(
        2,
        [
            {"sync_every": 2, "max_staleness": 2, "quorum": 2, "overlap": 1, "compression": "int8"},
            {"sync_every": "auto"},
            {"sync_every": 3, "max_staleness": 1, "fragments": 2},
            {"sync_every": 3, "max_staleness": math.inf, "compression": "int8"},
            {"sync_every": 2, "max_staleness": 2, "quorum": 2, "overlap": 1},
        ],
    ),
    ids=str,
)
def test_whoever_is_ahead_every_sample_counts_once_and_all_end_alike(
    options: dict[str, Any],
) -> None:
    with servers(2) as running:
        found = run_replicas(train, 3, options, "adamw", 2, 1, 1, environment=running.environment())
    taken = sorted(index for steps, _ in found for step in steps for index in step)
    assert taken == sorted([*range(SAMPLES), *range(SAMPLES)])
    for _, state in found[1:]:
        assert all(torch.equal(value, found[0][1][name]) for name, value in state.items())


def train_impatiently(options: dict[str, Any]) -> tuple[list[list[int]], dict[str, Tensor]]:
    """Train as replicas do that wait for each other long enough to push all fragments."""
    with mock.patch.object(learner, "ALIGNING", 0.01):
        return train(options, "adamw", 2, 1, 1)


def test_replicas_that_wait_for_each_other_with_several_fragments_go_on() -> None:
    """Each lacks a push of the other, for a fragment whose last pull it has not applied yet."""
    options = {"sync_every": 2, "max_staleness": 2, "quorum": 2, "overlap": 1}
    with servers(2) as running:
        environment = running.environment()
        found = run_replicas(train_impatiently, 3, options, environment=environment)
    taken = sorted(index for steps, _ in found for step in steps for index in step)
    assert taken == sorted([*range(SAMPLES), *range(SAMPLES)])


class Noise(Dataset[Tensor]):
    """A data set with a random transform."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        return torch.rand(2)


def train_on_noise() -> list[float]:
    """Return the numbers that a replica's workers have drawn first."""
    pipollux.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = pipollux.PushPull(sync_every=1)
    wrapped = pipollux.HybridParallel(model, optimizer, synchronization=options)
    drawn: list[float] = []
    for inputs in pipollux.AdaptiveDataLoader(Noise(), batch_size=4, num_workers=1):
        wrapped(inputs).sum().backward()
        optimizer.step()
        drawn += inputs.flatten().tolist()
    return drawn


@pytest.mark.exhaustive
def test_random_transforms_of_workers_differ_between_replicas() -> None:
    with servers(1) as running:
        first, second = run_replicas(train_on_noise, 2, environment=running.environment())
    assert len(first) == len(second) == 8
    assert set(first).isdisjoint(second)


def train_and_evaluate() -> tuple[list[list[int]], float]:
    """Train two loops per epoch, after each of which replica 0 evaluates; return the samples of
    each loop, and a parameter.
    """
    pipollux.init_process_group("gloo")
    model = make_model()
    optimizer = make_optimizer(model, "sgd")
    options = pipollux.PushPull(sync_every=2, adapt_to_speed=False)
    wrapped = pipollux.HybridParallel(model, optimizer, synchronization=options)
    data = TensorDataset(torch.arange(SAMPLES), *make_data())
    loader = pipollux.AdaptiveDataLoader(data, batch_size=BATCH)
    held_out = pipollux.AdaptiveDataLoader(TensorDataset(make_data()[0][:8]), batch_size=BATCH)
    taken: list[list[int]] = []
    for _ in range(2):  # without remaining_epochs_until: one epoch
        wrapped.train()
        taken.append([])
        for indices, inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(wrapped(inputs), targets).backward()
            optimizer.step()
            taken[-1] += indices.tolist()
        if pipollux.process_rank() == 0:
            wrapped.eval()
            for (inputs,) in held_out:
                with torch.no_grad():
                    wrapped(inputs)
    return taken, float(model[3].weight.detach().sum())


def test_an_evaluation_on_one_replica_alone_is_no_loop_of_the_others() -> None:
    with servers(1) as running:
        found = run_replicas(train_and_evaluate, 2, environment=running.environment())
    (first, value), (second, other) = found
    for ours, theirs in zip(first, second, strict=True):
        assert sorted(ours + theirs) == list(range(SAMPLES))
        assert len(ours) == len(theirs)
    assert value == other


def train_to_nan() -> float:
    """Train two epochs of a loss that is not finite, and return a parameter."""
    pipollux.init_process_group("gloo")
    model = nn.Sequential(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = pipollux.PushPull(sync_every=2)
    wrapped = pipollux.HybridParallel(model, optimizer, synchronization=options)
    loader = pipollux.AdaptiveDataLoader(TensorDataset(torch.ones(8, 2)), batch_size=2)
    for _ in pipollux.remaining_epochs_until(2):
        for (inputs,) in loader:
            optimizer.zero_grad()
            (wrapped(inputs).mean() * math.nan).backward()
            optimizer.step()
    return float(model[0].weight.detach().sum())


def test_a_training_that_has_diverged_is_not_one_whose_parameters_were_changed() -> None:
    with servers(1) as running:
        (found,) = run_replicas(train_to_nan, 1, environment=running.environment())
    assert math.isnan(found)


def train_normalized() -> tuple[dict[str, Tensor], str]:
    """Train with batch normalization; return the state, and what was printed at construction."""
    pipollux.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    optimizer = make_optimizer(model, "sgd")
    options = pipollux.PushPull(sync_every=3, adapt_to_speed=False)
    with contextlib.redirect_stderr(io.StringIO()) as said:
        wrapped = pipollux.HybridParallel(model, optimizer, synchronization=options)
    loader = pipollux.AdaptiveDataLoader(TensorDataset(*make_data()), batch_size=BATCH)
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(wrapped(inputs), targets).backward()
        optimizer.step()
    return {name: x.detach().clone() for name, x in wrapped.state_dict().items()}, said.getvalue()


def test_running_statistics_stay_with_their_replica_which_says_so_once() -> None:
    with servers(1) as running:
        found = run_replicas(train_normalized, 2, environment=running.environment())
    (first, said), (second, nothing) = found
    assert said.count("running statistics of batch normalization stay with their replica") == 1
    assert nothing == ""
    differing = {name for name, x in first.items() if not torch.equal(x, second[name])}
    assert differing == {"1.running_mean", "1.running_var"}
    assert int(first["1.num_batches_tracked"]) == SAMPLES // BATCH // 2


def train_short() -> list[int]:
    """Train with batch normalization on 18 samples, in batches of 8; return the steps' sizes."""
    pipollux.init_process_group("gloo")
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    optimizer = make_optimizer(model, "sgd")
    options = pipollux.PushPull(sync_every=2, adapt_to_speed=False)
    wrapped = pipollux.HybridParallel(model, optimizer, synchronization=options)
    inputs, targets = make_data()
    sizes: list[int] = []
    for x, y in pipollux.AdaptiveDataLoader(TensorDataset(inputs[:18], targets[:18]), batch_size=8):
        optimizer.zero_grad()
        nn.functional.mse_loss(wrapped(x), y).backward()
        optimizer.step()
        sizes.append(len(x))
    return sizes


def test_batch_normalization_gets_no_step_of_one_sample() -> None:
    with servers(1) as running:
        assert run_replicas(train_short, 2, environment=running.environment()) == [[7, 2], [7, 2]]


@pytest.mark.exhaustive  # the test of a stopped job has processes for stages, too
def test_where_each_stage_has_a_process() -> None:
    options = {"sync_every": 4, "adapt_to_speed": False}
    with servers(2) as running:
        environment = {**running.environment(), "LOCAL_WORLD_SIZE": "4"}
        found = run_replicas(train, 4, options, "adamw", 1, 2, 2, environment=environment)
    assert [found[0][0], found[2][0]] == [found[1][0], found[3][0]]
    expected = reference([found[0][0], found[2][0]], options, "adamw", fragments_of_model(1))
    for _, state in found:
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=1e-12)


def train_mixed(scales: bool) -> tuple[list[list[int]], dict[str, Tensor]]:
    """Train a replica in float32 under autocast, as with AMP; return what `train` does."""
    pipollux.init_process_group("gloo")
    model = make_model().float()
    optimizer = make_optimizer(model, "adamw")
    options = pipollux.PushPull(
        sync_every=5, outer_optimizer=pipollux.OuterSGD(lr=1.0, momentum=0.0, nesterov=False)
    )
    wrapped = pipollux.HybridParallel(model, optimizer, num_microbatches=1, synchronization=options)
    data = TensorDataset(torch.arange(SAMPLES), *(x.float() for x in make_data()))
    scaler = pipollux.GradScaler("cpu", enabled=scales)
    steps: list[list[int]] = []
    for _ in pipollux.remaining_epochs_until(1):
        for indices, inputs, targets in pipollux.AdaptiveDataLoader(data, batch_size=BATCH):
            mixed_step(wrapped, optimizer, scaler, inputs, targets)
            steps.append(indices.tolist())
    return steps, {name: x.detach().clone() for name, x in wrapped.state_dict().items()}


def mixed_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    inputs: Tensor,
    targets: Tensor,
) -> None:
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = nn.functional.mse_loss(model(inputs).float(), targets)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("scales", [pytest.param(False, marks=pytest.mark.exhaustive), True])
def test_mixed_precision(scales: bool) -> None:
    """Servers that add a replica's changes leave it with what the plain loop has."""
    with servers(1) as running:
        ((steps, found),) = run_replicas(train_mixed, 1, scales, environment=running.environment())
    model = make_model().float()
    optimizer, scaler = make_optimizer(model, "adamw"), torch.amp.GradScaler("cpu", enabled=scales)
    inputs, targets = (x.float() for x in make_data())
    for taken in steps:
        mixed_step(model, optimizer, scaler, inputs[taken], targets[taken])
    for name, value in model.state_dict().items():
        # Adding a change to what it was taken from rounds, and bfloat16 makes more of it.
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-4)
