"""A signal outside of a loop over a loader is answered at once; a finished job says that it is."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from pipollux_hybrid import (
    AdaptiveDataLoader,
    HybridParallel,
    init_process_group,
    remaining_epochs_until,
    save_all_states,
)
from pipollux_hybrid.job import context as contexts
from pipollux_hybrid.job.context import context
from pipollux_hybrid.telemetry.metrics import Metrics
from tests.hybrid.replicas import run_replicas

STOPPED = 128 + signal.SIGTERM


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("PIPOLLUX_CHECKPOINT_DIR", str(tmp_path))
    monkeypatch.setenv("PIPOLLUX_PROGRESS", "0")
    contexts.reset()
    yield tmp_path
    contexts.reset()


def begin() -> tuple[
    HybridParallel, torch.optim.Optimizer, AdaptiveDataLoader[tuple[torch.Tensor]]
]:
    init_process_group("gloo", timeout=60)
    module = nn.Sequential(nn.Linear(6, 1))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    loader = AdaptiveDataLoader(TensorDataset(torch.ones(16, 6)), batch_size=4)
    return HybridParallel(module, optimizer), optimizer, loader


def train_an_epoch(
    model: HybridParallel,
    optimizer: torch.optim.Optimizer,
    loader: AdaptiveDataLoader[tuple[torch.Tensor]],
) -> None:
    for (inputs,) in loader:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()


def ask(number: signal.Signals = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)


def marker(directory: Path) -> dict[str, object]:
    content: dict[str, object] = json.loads((directory / "stopped.json").read_text())
    return content


def test_before_the_first_loop_there_is_nothing_to_save(
    directory: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    begin()
    with pytest.raises(SystemExit) as caught:
        ask()
    assert caught.value.code == STOPPED
    assert "pipollux: stopped at step 0 as asked (SIGTERM outside of a loop" in (
        capfd.readouterr().err
    )
    assert marker(directory)["step"] == 0
    assert not list(directory.glob("checkpoint-*"))


def test_in_an_evaluation_it_is_noted_and_honoured_before_the_next_epoch(
    directory: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    parts = begin()
    epochs = []
    with pytest.raises(SystemExit) as caught:  # noqa: PT012  # a whole training is under test
        for epoch in remaining_epochs_until(5):
            train_an_epoch(*parts)
            epochs.append(epoch)
            if epoch == 1:
                ask()
                said = capfd.readouterr().err
                assert "pipollux: SIGTERM outside of a loop over a loader: the job stops" in said
    assert caught.value.code == STOPPED
    assert epochs == [0, 1]
    assert marker(directory)["step"] == 8
    assert "stopped at step 8 as asked" in capfd.readouterr().err
    contexts.reset()
    init_process_group()
    with pytest.raises(SystemExit):  # before there is a model
        ask()
    assert "stopped at step 8 as asked (SIGTERM outside of a loop" in capfd.readouterr().err
    contexts.reset()
    parts, resumed = begin(), []
    for epoch in remaining_epochs_until(5):
        train_an_epoch(*parts)
        resumed.append(epoch)
    assert resumed == [2, 3, 4], "the epoch that was about to begin"
    assert context().component(Metrics).step == 20


def test_behind_the_last_save_there_is_nothing_to_save_either(
    directory: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = begin()
    for _ in remaining_epochs_until(1):
        train_an_epoch(*parts)
    with pytest.raises(SystemExit):
        ask()
    assert "nothing was left to save" in capfd.readouterr().err
    # A job that is started once more says why it does nothing, and that once.
    contexts.reset()
    parts = begin()
    assert list(remaining_epochs_until(1)) == []
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    assert "left to train: the script asks for 1 epoch, and 1 epoch was done before" in said
    assert said.endswith("; ask for more, or start with an empty PIPOLLUX_CHECKPOINT_DIR\n")
    assert "checkpoint-00000001" in said
    assert list(remaining_epochs_until(3)) == [1, 2]
    assert capfd.readouterr().err == ""
    # Under a scheduler, which sets the directory of each run; and the script asks for less.
    monkeypatch.setenv("PIPOLLUX_ATTEMPT", "2")
    monkeypatch.setenv("PIPOLLUX_JOB_ID", "char-lm")
    contexts.reset()
    parts = begin()
    assert list(remaining_epochs_until(2)) == []
    said = capfd.readouterr().err
    assert "the script asks for 2 epochs, and 3 epochs were done before this run" in said
    assert said.endswith("; ask for more, or run `pipollux rerun char-lm --from-scratch`\n")


def test_a_stop_that_cannot_save_says_so(
    directory: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    parts = begin()
    with pytest.raises(SystemExit) as caught:  # noqa: PT012  # a whole training is under test
        for _ in remaining_epochs_until(2):
            train_an_epoch(*parts)
            directory.rename(directory.with_name("away"))
            directory.touch()
            ask()
    assert caught.value.code == os.EX_CANTCREAT
    said = capfd.readouterr().err
    assert "stopped at step 4 as asked, without a checkpoint of it: cannot write" in said
    contexts.reset()
    directory.unlink()
    directory.with_name("away").rename(directory)
    assert not (directory / "stopped.json").exists()


def stop_between(directory: str) -> list[tuple[int, int]]:
    """One replica of two is asked outside of a loop: before the first, then between two epochs."""
    found = []
    for rank, when in ((1, -1), (0, 1)):
        parts = begin()
        mine = context().env.rank == rank
        if mine and when < 0:
            ask()
        with pytest.raises(SystemExit) as caught:  # noqa: PT012  # a whole training is under test
            for epoch in remaining_epochs_until(4):
                train_an_epoch(*parts)
                if mine and epoch == when:
                    ask()
        found.append((int(str(caught.value.code)), context().component(Metrics).step))
        contexts.reset()
    return found


def test_all_replicas_stop_at_the_same_place(tmp_path: Path) -> None:
    environment = {"PIPOLLUX_CHECKPOINT_DIR": str(tmp_path)}
    asked, other = run_replicas(stop_between, 2, str(tmp_path), environment=environment)
    # Whoever was not asked itself has the status of a stop, too.
    assert asked == other == [(STOPPED, 0), (STOPPED, 8)]
    assert marker(tmp_path)["step"] == 8
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-00000001"]


def test_ctrl_c_outside_of_a_loop(directory: Path, capfd: pytest.CaptureFixture[str]) -> None:
    begin()
    save_all_states()
    with pytest.raises(SystemExit) as caught:
        ask(signal.SIGINT)
    assert caught.value.code == 128 + signal.SIGINT
    assert "SIGINT outside of a loop" in capfd.readouterr().err
