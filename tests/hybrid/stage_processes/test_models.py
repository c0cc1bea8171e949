"""Models of all kinds, each of whose stages has a process, against the plain model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from pipollux_hybrid import (
    ConfigurationError,
    HybridParallel,
    device_mesh,
    init_process_group,
    process_rank,
    replica_rank,
)
from pipollux_hybrid.job import context as contexts
from pipollux_hybrid.job.context import context
from pipollux_perfmodel.timing.params import Checkpoints
from tests.extent import first
from tests.hybrid.models import assert_close, gradients, make_data, make_model
from tests.hybrid.stage_processes.training import run_stages, together

SAMPLES = 11


class Split(nn.Module):
    """Gives a dict with tensors that have gradients and tensors that cannot have any."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(6, 8)

    def forward(self, batch: dict[str, Any]) -> dict[str, Any]:
        x = self.wide(batch["x"])
        return {
            "pair": (x, x.detach() > 0),
            "index": torch.arange(len(x)),
            "unused": self.wide(batch["x"]) * 2,
            "scale": batch["scale"],
            "plain": [1.5, "word", None, torch.float64, torch.Size([2]), 1j, b"\x00", True],
        }


class Pass(nn.Module):
    """Has no parameters, and gives on what it was given."""

    def forward(self, batch: Any) -> Any:
        return batch


class Join(nn.Module):
    """Takes all of that, and gives outputs [batch, 3] in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Linear(8, 3)

    def forward(self, batch: dict[str, Any]) -> list[Tensor]:
        plain = [1.5, "word", None, torch.float64, torch.Size([2]), 1j, b"\x00", True]
        assert batch["plain"] == plain
        x, positive = batch["pair"]
        return [self.narrow(torch.where(positive, x, 0.1 * x)) * batch["scale"]]


def nested() -> nn.Sequential:
    return nn.Sequential(Split(), Pass(), Join()).double()


def frozen_first() -> nn.Sequential:
    module = make_model("mlp")
    for parameter in module[:4].parameters():
        parameter.requires_grad_(False)
    return module


def frozen_last() -> nn.Sequential:
    module = make_model("mlp")
    for parameter in module[6:].parameters():
        parameter.requires_grad_(False)
    return module


def in_place() -> nn.Sequential:
    layers = nn.Linear(6, 8), nn.ReLU(True), nn.Linear(8, 8), nn.ReLU(True), nn.Linear(8, 3)
    return nn.Sequential(*layers).double()


def normalised() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 3)
    ).double()


class Given(NamedTuple):
    """A model, its inputs, and the loss of its outputs."""

    module: Callable[[], nn.Sequential]
    balance: list[int]
    inputs: Callable[[Tensor], Any] = lambda x: x
    output: Callable[[Any], Tensor] = lambda y: y


def _nested_inputs(x: Tensor) -> Any:
    return {"x": x, "scale": 2.0}


GIVEN = {
    "identity last": Given(lambda: nn.Sequential(*make_model("mlp"), nn.Identity()), [4, 5, 1]),
    "nested": Given(nested, [1, 1, 1], _nested_inputs, lambda y: y[0]),
    "frozen first": Given(frozen_first, [2, 2, 5]),
    "frozen last": Given(frozen_last, [4, 2, 3]),
    "in place": Given(in_place, [1, 2, 2]),
    "layer norm": Given(normalised, [1, 2, 1]),
}


NUM_STAGES = {"gpipe": 3, "1f1b": 3, "interleaved": 2}
EVEN = {"in place": [1, 1, 1, 2], "layer norm": [1, 1, 1, 1]}
"""Balances for two stages of two chunks; of the others the last chunk is an identity."""


def balance_of(name: str, schedule: str) -> list[int]:
    given = GIVEN[name].balance
    return EVEN.get(name, [*given, 1]) if schedule == "interleaved" else given


def loss_of(name: str, output: Any, targets: Tensor) -> Tensor:
    return F.cross_entropy(GIVEN[name].output(output), targets)


def build(name: str, schedule: str) -> nn.Sequential:
    torch.manual_seed(3)
    module = GIVEN[name].module()
    for _ in range(sum(balance_of(name, schedule)) - len(module)):
        module.append(Pass())
    return module


Trained = tuple[float, dict[str, Tensor], Any, Any]


def train(name: str, schedule: str, autocast: bool) -> Trained:
    contexts.reset()
    module = build(name, schedule)
    if autocast:
        module.float()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model = HybridParallel(
        module,
        optimizer,
        balance=balance_of(name, schedule),
        num_microbatches=4,
        schedule=schedule,
    )
    inputs, targets = make_data(
        "mlp", SAMPLES, torch.float32 if autocast else torch.float64
    ).tensors
    batch = GIVEN[name].inputs(inputs)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model.train_step(batch, targets, lambda y, t: loss_of(name, y, t))
        with torch.no_grad():
            output = model(batch)
    return float(loss), gradients(module), output, model.state_dict()


def train_all(names: list[str], schedule: str, autocast: bool) -> dict[str, Trained]:
    init_process_group("gloo")
    return {name: train(name, schedule, autocast) for name in names}


@pytest.fixture(scope="module", params=first(1, ["1f1b", "gpipe", "interleaved"]))
def trained(request: pytest.FixtureRequest) -> tuple[str, list[dict[str, Trained]]]:
    """A schedule, and what each process has of all models after a step by it."""
    schedule = request.param
    (stages,) = run_stages(train_all, 1, NUM_STAGES[schedule], list(GIVEN), schedule, False)
    return schedule, stages


@pytest.mark.parametrize("name", list(GIVEN))
def test_gradients_outputs_and_state_are_the_plain_models(
    name: str, trained: tuple[str, list[dict[str, Trained]]]
) -> None:
    schedule, processes = trained
    stages = [process[name] for process in processes]
    module = build(name, schedule)
    inputs, targets = make_data("mlp", SAMPLES).tensors
    output = module(GIVEN[name].inputs(inputs))
    loss = loss_of(name, output, targets)
    loss.backward()
    assert_close(together([stage[1] for stage in stages]), gradients(module), 1e-12)
    for found, _, outputs, state in stages:
        assert found == pytest.approx(float(loss.detach()), rel=1e-12)
        ours = GIVEN[name].output(outputs)
        torch.testing.assert_close(ours, GIVEN[name].output(output).detach(), rtol=0, atol=1e-12)
        assert state.keys() == module.state_dict().keys()
        assert_close(state, dict(module.state_dict()), 0.0)


def test_autocast_holds_for_all_stages() -> None:
    (processes,) = run_stages(train_all, 1, 3, ["layer norm"], "1f1b", True)
    stages = [process["layer norm"] for process in processes]
    module = build("layer norm", "1f1b").float()
    inputs, targets = make_data("mlp", SAMPLES, torch.float32).tensors
    with torch.autocast("cpu", torch.bfloat16):
        output = module(inputs)
        F.cross_entropy(output, targets).backward()
    assert {stage[2].dtype for stage in stages} == {torch.bfloat16}
    assert_close(together([stage[1] for stage in stages]), gradients(module), 0.05)


def normalises_batches(num_stages: int) -> dict[str, Tensor]:
    init_process_group("gloo")
    torch.manual_seed(3)
    module = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model = HybridParallel(module.double(), optimizer, num_stages=num_stages, num_microbatches=3)
    inputs, targets = make_data("mlp", 2 * SAMPLES)[replica_rank() :: 2]
    for _ in range(3):
        optimizer.zero_grad()
        model.train_step(inputs, targets, F.cross_entropy)
        optimizer.step()
    return dict(model.state_dict())


def test_running_statistics_are_those_of_the_whole_batch() -> None:
    """And of all replicas: the same as where one process drives both stages."""
    (first, _), (second, _) = run_stages(normalises_batches, 2, 2, 2)
    ((plain,), (_,)) = run_stages(normalises_batches, 2, 1, 2)
    assert_close(first, plain, 1e-12)
    assert_close(second, plain, 1e-12)


def adds_up_along_the_mesh() -> tuple[list[list[int]], list[float]]:
    init_process_group("gloo")
    mesh = device_mesh()
    sums = []
    for dimension in ("replica", "stage"):
        number = torch.tensor(10.0 ** process_rank())
        dist.all_reduce(number, group=mesh.get_group(dimension))
        sums.append(float(number))
    return mesh.mesh.tolist(), sums


def test_the_mesh_is_torchs_own() -> None:
    """Down a column are the processes of a stage, along a row those of a replica."""
    ((first, second), (third, fourth)) = run_stages(adds_up_along_the_mesh, 2, 2)
    assert [found for found, _ in (first, second, third, fourth)] == [[[0, 1], [2, 3]]] * 4
    assert [sums for _, sums in (first, second)] == [[101, 11], [1010, 11]]
    assert [sums for _, sums in (third, fourth)] == [[101, 1100], [1010, 1100]]


def test_no_mesh_where_one_process_drives_all_stages() -> None:
    with pytest.raises(ConfigurationError, match="one process drives all stages"):
        device_mesh()


def drops_out(seeds_by_rank: bool) -> tuple[float, list[float], list[float]]:
    init_process_group("gloo")
    env = context().env
    assert (process_rank(), replica_rank()) == (env.stage, 0)
    torch.manual_seed(5 + (process_rank() if seeds_by_rank else 0))
    module = nn.Sequential(nn.Linear(6, 64), nn.Dropout(0.5), nn.Linear(64, 64), nn.Dropout(0.5))
    for layer in (module[0], module[2]):
        nn.init.eye_(layer.weight)
    module = module.double()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    model = HybridParallel(
        module, optimizer, num_stages=2, num_microbatches=2, activation_checkpoint="always"
    )
    targets = torch.zeros(8, dtype=torch.long)
    inputs = torch.ones(8, 6, dtype=torch.float64)
    losses = [float(model.train_step(inputs, targets, F.cross_entropy)) for _ in range(2)]
    return float(torch.rand(())), losses, [float(x) for x in copy.copy(torch.rand(2))]


@pytest.mark.parametrize("seeds_by_rank", first(1, [True, False]))
def test_layers_draw_numbers_of_their_own_and_the_script_the_same(seeds_by_rank: bool) -> None:
    """So what a loader draws for inputs and targets is alike in the processes of a replica."""
    ((one, two),) = run_stages(drops_out, 1, 2, seeds_by_rank)
    assert one == two
    assert one[1][0] != one[1][1]
    ((again, _),) = run_stages(drops_out, 1, 2, seeds_by_rank)
    assert again == one


class Counting(nn.Module):
    """Counts its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.count = nn.Linear(6, 6), 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        kept: Tensor = self.linear(x)
        return kept


def counts_forwards() -> tuple[int, Checkpoints]:
    init_process_group("gloo")
    module = nn.Sequential(Counting(), Counting(), Counting()).double()
    model = HybridParallel(
        module,
        torch.optim.SGD(module.parameters(), lr=0.1),
        num_stages=3,
        num_microbatches=4,
        activation_checkpoint=["never", "always", "except_last"],
    )
    inputs, targets = make_data("mlp", SAMPLES).tensors
    model.train_step(inputs, targets, F.cross_entropy)
    layer = module[context().env.stage]
    assert isinstance(layer, Counting)
    return layer.count, context().pipeline.checkpoint_mode


def test_each_stage_recomputes_as_it_was_told() -> None:
    """And each process tells the performance model of all."""
    modes = ("never", "always", "except_last")
    assert run_stages(counts_forwards, 1, 3) == [[(count, modes) for count in (4, 8, 7)]]
