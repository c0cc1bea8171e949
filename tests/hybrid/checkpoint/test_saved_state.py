"""What is in a checkpoint: model, optimizer, random numbers, objects; saving beside training."""

from __future__ import annotations

import itertools
import random
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest
import torch
from torch import nn

from pipollux_hybrid import (
    CheckpointError,
    HybridParallel,
    State,
    init_process_group,
    load_state,
    register_for_checkpointing,
    save_all_states,
)
from pipollux_hybrid.checkpoint.manager import CheckpointManager
from pipollux_hybrid.checkpoint.rng_state import random_state
from pipollux_hybrid.checkpoint.state import States
from pipollux_hybrid.job import context as contexts
from pipollux_hybrid.telemetry.metrics import Metrics
from tests.hybrid.folders import saved_in
from tests.hybrid.replicas import run_replicas


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("PIPOLLUX_CHECKPOINT_DIR", str(tmp_path))
    contexts.reset()
    yield tmp_path
    contexts.reset()


def layers(*sizes: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(sizes)))


def train(module: nn.Sequential, optimizer: torch.optim.Optimizer, steps: int) -> None:
    model = HybridParallel(module, optimizer, num_stages=2)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(4, 2)).square().mean().backward()
        optimizer.step()


def two_groups(module: nn.Sequential) -> torch.optim.AdamW:
    groups: list[dict[str, Any]] = [
        {"params": module[0].parameters(), "lr": 0.1},
        {"params": module[1].parameters(), "lr": 0.01, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups)


def test_parameter_groups_keep_their_settings(directory: Path) -> None:
    module = layers(2, 3, 1)
    optimizer = two_groups(module)
    train(module, optimizer, 3)
    optimizer.param_groups[1]["lr"] = 0.005
    save_all_states()
    saved = optimizer.state_dict()
    contexts.reset()
    module = layers(2, 3, 1)
    optimizer = two_groups(module)
    HybridParallel(module, optimizer, num_stages=1)
    restored = optimizer.state_dict()
    assert [g["lr"] for g in restored["param_groups"]] == [0.1, 0.005]
    assert restored["param_groups"] == saved["param_groups"]
    for index, state in saved["state"].items():
        for key, value in state.items():
            torch.testing.assert_close(restored["state"][index][key], value, rtol=0, atol=0)


def resume_other(module: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    contexts.reset()
    HybridParallel(module, optimizer)


@pytest.mark.parametrize(
    ("sizes", "sentence"),
    [
        ((2, 5, 1), "'0.weight' has shape (3, 2) in the checkpoint and (5, 2) in the script"),
        ((2, 3, 1, 1), "'2.weight' is missing in the checkpoint"),
        ((2, 3), "'1.weight' of the checkpoint is not in the script's model"),
    ],
)
def test_a_checkpoint_of_another_model(
    directory: Path, sizes: tuple[int, ...], sentence: str
) -> None:
    module = layers(2, 3, 1)
    train(module, torch.optim.SGD(module.parameters(), lr=0.1), 1)
    save_all_states()
    other = layers(*sizes)
    with pytest.raises(CheckpointError, match=re.escape(sentence)):
        resume_other(other, torch.optim.SGD(other.parameters(), lr=0.1))


def test_a_checkpoint_of_another_optimizer(directory: Path) -> None:
    module = layers(2, 3, 1)
    train(module, two_groups(module), 1)
    save_all_states()
    module = layers(2, 3, 1)
    with pytest.raises(CheckpointError, match="its optimizer is AdamW and the script's is SGD"):
        resume_other(module, torch.optim.SGD(module.parameters(), lr=0.1))
    with pytest.raises(CheckpointError, match="2 parameter groups and the script's has 1"):
        resume_other(module, torch.optim.AdamW(module.parameters()))
    swapped = two_groups(module)
    groups = swapped.param_groups
    groups[0]["params"], groups[1]["params"] = groups[1]["params"], groups[0]["params"]
    with pytest.raises(CheckpointError, match=r"group 0 .* the first being '0\.bias'"):
        resume_other(module, swapped)


@pytest.mark.exhaustive
def test_compiled_layers_have_their_plain_names(directory: Path) -> None:
    """Saved with a compiled layer, restored without, and the other way round."""
    module = layers(2, 3, 1)
    compiled = nn.Sequential(torch.compile(module[0], backend="eager"), module[1])
    optimizer = torch.optim.AdamW(compiled.parameters())
    assert "0._orig_mod.weight" in compiled.state_dict()
    train(compiled, optimizer, 2)
    path = save_all_states()
    assert path is not None
    content = torch.load(path / "model.pt", weights_only=True)
    assert set(content["model"]) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    contexts.reset()
    plain = layers(2, 3, 1)
    HybridParallel(plain, torch.optim.AdamW(plain.parameters()))
    torch.testing.assert_close(dict(plain.state_dict()), dict(module.state_dict()))
    contexts.reset()
    again = layers(2, 3, 1)
    again = nn.Sequential(torch.compile(again[0], backend="eager"), again[1])
    HybridParallel(again, torch.optim.AdamW(again.parameters()))
    torch.testing.assert_close(dict(again.state_dict()), dict(compiled.state_dict()))


def test_objects_are_kept(directory: Path) -> None:
    module = layers(2, 1)
    scaler = register_for_checkpointing("scaler", torch.amp.GradScaler("cpu", init_scale=64.0))
    average = register_for_checkpointing("average", torch.optim.swa_utils.AveragedModel(module))
    average.update_parameters(module)
    scaler.scale(torch.ones(()))
    scaler.update(128.0)
    save_all_states()
    contexts.reset()
    again = register_for_checkpointing("scaler", torch.amp.GradScaler("cpu", init_scale=2.0))
    averaged = register_for_checkpointing(
        "average", torch.optim.swa_utils.AveragedModel(layers(2, 1))
    )
    assert again.state_dict()["scale"] == 128.0
    assert int(averaged.n_averaged) == 1


def test_what_could_not_be_read_back_is_refused_when_it_is_registered(directory: Path) -> None:
    class Odd:
        def state_dict(self) -> dict[str, Any]:
            return {"path": Path("x")}

        def load_state_dict(self, _state: Any) -> None:
            raise NotImplementedError

    with pytest.raises(CheckpointError, match=r"state of odd cannot be kept.*state_dict"):
        register_for_checkpointing("odd", Odd())
    assert contexts.context().component(States) == {}


Draws = tuple[float, float, float]


def draws() -> Draws:
    return float(torch.randn(())), random.gauss(0, 1), float(np.random.randn())  # noqa: NPY002, RUF100  # the generator scripts use


def numbers(seeds: list[int] | None) -> tuple[Draws, Draws]:
    """Numbers before and after a save, or, without seeds, after a restore."""
    init_process_group("gloo")
    rank = contexts.context().env.rank
    if seeds is not None:
        torch.manual_seed(seeds[rank])
        random.seed(seeds[rank])
        np.random.seed(seeds[rank])
    before = draws()  # leaves half a pair of normal numbers behind in two of the generators
    random_state(contexts.context()).restore_once()
    if seeds is not None:
        save_all_states()
    return before, draws()


def test_every_generator_goes_on(tmp_path: Path) -> None:
    environment = {"PIPOLLUX_CHECKPOINT_DIR": str(tmp_path)}
    expected = [after for _, after in run_replicas(numbers, 2, [3, 4], environment=environment)]
    found = [after for _, after in run_replicas(numbers, 2, None, environment=environment)]
    assert found == expected
    assert found[0] != found[1]


@pytest.mark.parametrize("seeds", [[3, 4], [5, 5]])
def test_generators_of_another_number_of_replicas(tmp_path: Path, seeds: list[int]) -> None:
    """New sequences, each its own; but a common one stays common."""
    environment = {"PIPOLLUX_CHECKPOINT_DIR": str(tmp_path)}
    before = [after for _, after in run_replicas(numbers, 2, seeds, environment=environment)]
    found = [after for _, after in run_replicas(numbers, 3, None, environment=environment)]
    if seeds[0] == seeds[1]:
        assert found == [before[0]] * 3
    else:
        for column in zip(*found, strict=True):
            assert len(set(column)) == 3
        assert not set(found) & set(before)


class Slow(State):
    """A state whose file is not complete before the test says so."""

    def __init__(self) -> None:
        super().__init__("slow")
        self.content = b"first"
        self.gate = threading.Event()
        self.fails = False

    def save(self, fileobj: BinaryIO) -> None:
        fileobj.write(self.content)

    def snapshot(self) -> Callable[[BinaryIO], None]:
        write = super().snapshot()

        def late(fileobj: BinaryIO) -> None:
            assert self.gate.wait(240)
            if self.fails:
                raise OSError(28, "No space left on device")
            write(fileobj)

        return late

    def load(self, fileobj: BinaryIO) -> None:
        self.content = fileobj.read()


def test_background_saves_what_was_there_at_the_boundary(directory: Path) -> None:
    module = layers(2, 3, 1)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    model = HybridParallel(module, optimizer)
    slow = Slow()

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(4, 2)).square().mean().backward()
        optimizer.step()

    for _ in range(2):
        step()
    at_boundary = {name: x.clone() for name, x in module.state_dict().items()}
    moments = {k: v.clone() for k, v in optimizer.state[module[0].weight].items()}
    assert save_all_states(background=True) is None
    slow.content = b"second"
    step()  # training goes on while the save is held up
    assert contexts.context().component(CheckpointManager).saver.busy
    slow.gate.set()
    contexts.context().component(CheckpointManager).saver.wait()
    contexts.reset()
    again, restored = Slow(), layers(2, 3, 1)
    load_state(again)
    optimizer = torch.optim.AdamW(restored.parameters(), lr=0.1)
    HybridParallel(restored, optimizer)
    assert again.content == b"first"
    for name, value in restored.state_dict().items():
        torch.testing.assert_close(value, at_boundary[name], rtol=0, atol=0)
    for key, value in optimizer.state[restored[0].weight].items():
        torch.testing.assert_close(value, moments[key], rtol=0, atol=0)


def test_one_save_at_a_time(directory: Path) -> None:
    slow = Slow()
    metrics, saving = (
        contexts.context().component(Metrics),
        contexts.context().component(CheckpointManager).saver,
    )
    save_all_states(background=True)
    metrics._last_save -= 1e6
    assert not metrics.checkpoint_due(), "the one before is under way"
    slow.gate.set()
    slow.content = b"second"
    assert save_all_states() == directory / "checkpoint-00000002", "it waited"
    assert not saving.busy
    assert metrics.checkpoint_due()


def test_a_background_failure_is_said_at_a_boundary(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = Slow()
    slow.fails = True
    slow.gate.set()
    save_all_states(background=True)
    saving = contexts.context().component(CheckpointManager).saver
    assert saving._thread is not None
    saving._thread.join(240)
    assert capsys.readouterr().err == ""
    contexts.context().component(Metrics).checkpoint_due()
    contexts.context().component(Metrics).checkpoint_due()
    said = capsys.readouterr().err
    assert said.count("pipollux: cannot write checkpoint") == 1
    assert "No space left" in said


def test_an_ending_job_waits_for_its_save(directory: Path) -> None:
    slow = Slow()
    save_all_states(background=True)
    threading.Timer(0.1, slow.gate.set).start()
    contexts.reset()
    assert saved_in(directory) == ["checkpoint-00000001"]
