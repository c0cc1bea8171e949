"""Checkpoints are whole or not there, and any number of stages can go on from them."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pipollux_hybrid import (
    AdaptiveDataLoader,
    CheckpointError,
    HybridParallel,
    State,
    init_process_group,
    load_state,
    save_all_states,
)
from pipollux_hybrid.checkpoint.storage import KEPT
from pipollux_hybrid.job import context as contexts
from pipollux_hybrid.telemetry.metrics import Metrics
from pipollux_perfmodel import PerfParams
from tests.hybrid.folders import saved_in
from tests.hybrid.models import assert_close, make_data, make_model
from tests.hybrid.replicas import run_replicas
from tests.programs import Forked


class Number(State):
    """A number in a file."""

    def __init__(self, name: str = "number", value: int = 0) -> None:
        super().__init__(name)
        self.value = value

    def save(self, fileobj: BinaryIO) -> None:
        fileobj.write(json.dumps(self.value).encode())

    def load(self, fileobj: BinaryIO) -> None:
        self.value = json.load(fileobj)


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("PIPOLLUX_CHECKPOINT_DIR", str(tmp_path))
    contexts.reset()
    yield tmp_path
    contexts.reset()


def restarted(name: str = "number") -> Number:
    """A state as the next run of the job would find it."""
    contexts.reset()
    number = Number(name)
    load_state(number)
    return number


def test_saves_and_restores(directory: Path) -> None:
    number = Number(value=4)
    assert save_all_states() == directory / "checkpoint-00000001"
    number.value = 5
    save_all_states()
    assert restarted().value == 5


def test_the_fitted_model_outlives_a_restart(directory: Path) -> None:
    # With a field of every kind: numbers, shares, a mode.
    fitted = PerfParams(0.1, 0.01, 0.2, 0.02, 0.05, 0.01, 1.5, (0.1, 0.2), (0.3, 0.4), 0.5)
    fitted = fitted._replace(checkpoint="except_last", overhead=0.002, shared_link=False)
    contexts.context().component(Metrics).perf_params = fitted
    save_all_states()
    contexts.reset()
    assert contexts.context().component(Metrics).perf_params == fitted


def test_nothing_to_restore(directory: Path) -> None:
    assert not load_state(Number())


def test_old_checkpoints_are_pruned_but_not_the_one_in_use(directory: Path) -> None:
    Number(value=0)
    save_all_states()
    number = restarted()
    for value in range(1, 5):
        number.value = value
        save_all_states()
    kept = saved_in(directory)
    assert kept == ["checkpoint-00000001", "checkpoint-00000004", "checkpoint-00000005"]
    late = Number("late")  # made in the middle of the run: restores from where the run began
    assert not load_state(late)
    assert KEPT == 2


@pytest.mark.parametrize("damage", ["truncate", "flip", "lose a file", "lose the manifest"])
def test_a_torn_checkpoint_is_passed_over(
    directory: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    number = Number(value=1)
    save_all_states()
    number.value = 2
    newest = save_all_states()
    assert newest is not None
    file = newest / ("manifest.json" if damage == "lose the manifest" else "number")
    if damage == "truncate":
        file.write_bytes(b"")
    elif damage == "flip":
        file.write_bytes(b"3")
    else:
        file.unlink()
    assert restarted().value == 1
    assert "checkpoint-00000002 is skipped" in caplog.text


def test_a_leftover_of_a_killed_save_is_no_checkpoint(directory: Path) -> None:
    number = Number(value=1)
    save_all_states()
    half = directory / ".checkpoint-00000002"
    half.mkdir()
    (half / "number").write_text("2")
    assert restarted().value == 1
    number = restarted()
    number.value = 3
    save_all_states()
    assert restarted().value == 3
    assert not half.exists()


def test_a_disk_that_takes_nothing(directory: Path) -> None:
    class Full(Number):
        def save(self, _fileobj: BinaryIO) -> None:
            raise OSError(28, "No space left on device")

    number = Number(value=1)
    save_all_states()
    number.value = 2
    Full("full")
    with pytest.raises(CheckpointError, match=r"checkpoint-00000002.*No space left.*untouched"):
        save_all_states()
    assert restarted().value == 1
    assert saved_in(directory) == ["checkpoint-00000001"]


def test_a_full_disk_under_torch_save(tmp_path: Path) -> None:
    """The kernel refuses to let files grow: torch.save hides the reason, the sentence has it."""
    environment = {"PIPOLLUX_CHECKPOINT_DIR": str(tmp_path / "checkpoints")}
    message, left = run_replicas(save_beyond_the_limit, 1, environment=environment)[0]
    assert "File too large" in message
    assert "earlier checkpoints are untouched" in message
    assert left == ["checkpoint-00000001"]


def save_beyond_the_limit() -> tuple[str, list[str]]:
    module = torch.nn.Sequential(torch.nn.Linear(2, 2))
    HybridParallel(module, torch.optim.SGD(module.parameters(), lr=0.1))
    root = save_all_states().parent  # type: ignore[union-attr]  # rank 0 saves
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with pytest.raises(CheckpointError) as caught:
        save_all_states()
    return str(caught.value), saved_in(root)


def test_a_directory_that_cannot_be_made(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (directory / "file").touch()
    monkeypatch.setenv("PIPOLLUX_CHECKPOINT_DIR", str(directory / "file" / "below"))
    with pytest.raises(CheckpointError, match=r"file/below cannot be written to \(Not a directory"):
        init_process_group()


def test_no_whole_checkpoint_is_no_fresh_start(directory: Path) -> None:
    """Starting silently from scratch would prune what might have been rescued."""
    Number(value=1)
    saved = save_all_states()
    assert saved is not None
    (saved / "number").unlink()
    with pytest.raises(CheckpointError, match=r"none of the checkpoints.*is whole"):
        restarted()


def test_a_checkpoint_of_a_later_release(directory: Path) -> None:
    Number(value=1)
    saved = save_all_states()
    assert saved is not None
    manifest = json.loads((saved / "manifest.json").read_text())
    (saved / "manifest.json").write_text(json.dumps({**manifest, "version": 2}))
    with pytest.raises(CheckpointError, match=r"format version 2.*up to 1.*install"):
        restarted()


def test_foreign_names_are_let_be(directory: Path) -> None:
    for name in (
        "checkpoint-500",
        "checkpoint-best",
        "checkpoint-\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0669",
    ):
        (directory / name).mkdir()
    Number(value=1)
    assert save_all_states() == directory / "checkpoint-00000001"
    assert restarted().value == 1
    assert (directory / "checkpoint-500").is_dir()


def test_writers_that_go_back_in_the_file(directory: Path) -> None:
    """A checksum of the bytes on their way would be wrong; the file is read instead."""

    class Header(Number):
        def save(self, fileobj: BinaryIO) -> None:
            fileobj.write(b"0 ")
            fileobj.seek(0)
            fileobj.write(b"42")

    Header(value=1)
    save_all_states()
    assert restarted().value == 42


def private_directory(root: str) -> str:
    """A directory that is another one for each replica, as on nodes that share nothing."""
    os.environ["PIPOLLUX_CHECKPOINT_DIR"] = f"{root}/{os.environ['RANK']}"
    with pytest.raises(CheckpointError) as caught:
        init_process_group("gloo")
    return str(caught.value)


def test_a_directory_that_nodes_do_not_share(tmp_path: Path) -> None:
    for message in run_replicas(private_directory, 2, str(tmp_path)):
        assert "on replica 1 is not the directory that replica 0 sees" in message
    assert saved_in(tmp_path) == ["0"]
    assert saved_in(tmp_path / "0") == [], "the probe is gone"


def test_names_are_unique_file_names(directory: Path) -> None:
    Number("one")
    for name in ("one", "", "a/b", "..", "manifest.json"):
        with pytest.raises(ValueError, match="name"):
            Number(name)


def test_a_pickle_is_not_run(directory: Path) -> None:
    """A checkpoint that carries code is refused."""

    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(directory / "ran"),)

    module = make_model("mlp")
    HybridParallel(module, torch.optim.SGD(module.parameters(), lr=0.1))
    saved = save_all_states()
    assert saved is not None
    torch.save({"model": Evil()}, saved / "model.pt")
    manifest = json.loads((saved / "manifest.json").read_text())
    digest = subprocess.check_output(["sha256sum", saved / "model.pt"], text=True).split()[0]
    manifest["sha256"]["model.pt"] = digest
    manifest["size"]["model.pt"] = (saved / "model.pt").stat().st_size
    (saved / "manifest.json").write_text(json.dumps(manifest))
    contexts.reset()
    module = make_model("mlp")
    with pytest.raises(CheckpointError, match=r"model\.pt.*(?i:weights)"):
        HybridParallel(module, torch.optim.SGD(module.parameters(), lr=0.1))
    assert not (directory / "ran").exists()


SAVER = """
import json, sys
from pipollux_hybrid import State, init_process_group, save_all_states
class Big(State):
    value = 0
    def save(self, fileobj):
        for _ in range(16):
            fileobj.write(json.dumps(self.value).encode().ljust(1 << 20))
    def load(self, fileobj):
        raise NotImplementedError
init_process_group()
big = Big("big")
while True:
    big.value += 1
    save_all_states()
    print(big.value, flush=True)
"""


def test_killed_in_the_middle_of_saves(directory: Path, tmp_path: Path) -> None:
    """SIGKILL at moments spread over a save: the newest whole checkpoint is what was announced."""
    script = tmp_path / "saver.py"
    script.write_text(SAVER)
    for delay in (0.0, 0.01, 0.03, 0.06):
        with Forked(script) as process:
            while not process.output.endswith("\n"):
                assert process.poll() is None, process.errors
                time.sleep(0.005)
            time.sleep(delay)
            process.send_signal(signal.SIGKILL)
            process.wait()
            announced = int(process.output.split()[-1])
        contexts.reset()
        found = _largest_value(directory)
        assert found in (announced, announced + 1)
        contexts.reset()


def _largest_value(directory: Path) -> int:
    class Reader(State):
        value = -1

        def save(self, fileobj: BinaryIO) -> None:
            raise NotImplementedError

        def load(self, fileobj: BinaryIO) -> None:
            content = fileobj.read()
            assert len(content) == 16 << 20
            self.value = int(content.split()[0])

    reader = Reader("big")
    assert load_state(reader)
    return reader.value


def some_steps(num_stages: int, num_steps: int) -> dict[str, Tensor]:
    """Train so many steps of one sample each and save."""
    init_process_group("gloo")
    module = make_model("mlp")
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.5)
    loader = AdaptiveDataLoader(make_data("mlp", 64), batch_size=4)
    model = HybridParallel(
        module, optimizer, num_stages=num_stages, num_microbatches=2, lr_scheduler=schedule
    )
    for done, (inputs, targets) in enumerate(loader):
        if done == num_steps:
            save_all_states()
            break
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        schedule.step()
    return dict(module.state_dict())


def test_stages_and_replicas_change_between_runs(tmp_path: Path) -> None:
    environment = {"PIPOLLUX_CHECKPOINT_DIR": str(tmp_path / "changing")}
    for num_stages, num_replicas in ((1, 1), (3, 2), (2, 1), (4, 2)):
        changing = run_replicas(some_steps, num_replicas, num_stages, 3, environment=environment)
    steady = run_replicas(some_steps, 1, 1, 12)[0]
    for parameters in changing:
        assert_close(parameters, steady, 1e-11)
