"""Checkpoints that cannot be written: what is refused at the start, and what is told at the end."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from pipollux_hybrid import (
    CheckpointError,
    ConfigurationError,
    State,
    init_process_group,
    register_for_checkpointing,
    remaining_epochs_until,
    save_all_states,
)
from pipollux_hybrid.checkpoint import storage as files
from pipollux_hybrid.checkpoint.manager import CheckpointManager
from pipollux_hybrid.checkpoint.state import States
from pipollux_hybrid.elastic.step_boundary import StepBoundary
from pipollux_hybrid.job import context as contexts
from pipollux_hybrid.job.context import context
from pipollux_hybrid.job.exit_status import forget_failure
from pipollux_protocol.exit_statuses import CHECKPOINT_LOST
from tests.extent import first
from tests.hybrid.folders import saved_in
from tests.hybrid.replicas import free_port, run_replicas
from tests.programs import Forked, Replicas


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("PIPOLLUX_CHECKPOINT_DIR", str(tmp_path / "checkpoints"))
    contexts.reset()
    yield tmp_path / "checkpoints"
    contexts.reset()
    forget_failure()  # else these tests would end with its status


class Moody(State):
    """A state whose ``save`` raises when the test says so."""

    def __init__(self, name: str = "moody") -> None:
        super().__init__(name)
        self.raises: Exception | None = TypeError("not today")

    def save(self, fileobj: BinaryIO) -> None:
        if self.raises is not None:
            raise self.raises
        fileobj.write(b"all is well")

    def load(self, fileobj: BinaryIO) -> None:
        raise NotImplementedError


# --- at the start --------------------------------------------------------------------------------


def test_a_file_in_the_place_of_the_folder(directory: Path) -> None:
    directory.touch()
    with pytest.raises(CheckpointError, match=r"cannot be written to \(it is a file, and a folder"):
        init_process_group()
    remaining = remaining_epochs_until(1)
    with pytest.raises(CheckpointError, match="PIPOLLUX_CHECKPOINT_DIR"):  # it stays refused
        next(remaining)


def test_a_folder_is_tried_and_left_as_it_was(directory: Path) -> None:
    init_process_group()
    assert saved_in(directory) == []


def test_a_disk_that_is_full_for_now_is_no_reason_not_to_train(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def write_file(_path: Path, _content: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "write_file", write_file)
    init_process_group()
    assert "No space left on device; nothing can be saved there" in caplog.text


def refused_everywhere(path: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        init_process_group("gloo", timeout=60)
    return str(caught.value)


def test_every_replica_is_told_why(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    environment = {"PIPOLLUX_CHECKPOINT_DIR": str(tmp_path / "file")}
    told = run_replicas(refused_everywhere, 2, "", environment=environment)
    assert told[0] == told[1]
    assert "it is a file, and a folder is needed" in told[0]


@pytest.mark.parametrize("obj", [object(), Moody, {"state_dict": 1}])
def test_what_has_no_state_is_not_kept(directory: Path, obj: Any) -> None:
    with pytest.raises(
        ConfigurationError,
        match=r"register_for_checkpointing\('thing', …\) was given a .* state_dict",
    ):
        register_for_checkpointing("thing", obj)
    assert context().component(States) == {}


def test_an_object_whose_state_cannot_be_had(directory: Path) -> None:
    class Fails:
        def state_dict(self) -> dict[str, Any]:
            raise RuntimeError("no")

        def load_state_dict(self, _state: Any) -> None:
            raise NotImplementedError

    with pytest.raises(CheckpointError, match=r"state_dict\(\) of Fails fails with RuntimeError"):
        register_for_checkpointing("thing", Fails())

    class Locked(Fails):
        def state_dict(self) -> dict[str, Any]:
            return {"lock": threading.Lock()}

    with pytest.raises(CheckpointError, match=r"the state of thing cannot be kept .*lock"):
        register_for_checkpointing("thing", Locked())


def test_a_state_without_save(directory: Path) -> None:
    class Half(State):
        def load(self, fileobj: BinaryIO) -> None:
            raise NotImplementedError

    with pytest.raises(ConfigurationError, match=r"Half has no save\(fileobj\)"):
        Half("half")


# --- while training ------------------------------------------------------------------------------


@pytest.mark.parametrize("background", [False, True])
def test_a_state_that_cannot_be_saved_does_not_end_training(
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    background: bool,
) -> None:
    monkeypatch.setenv("PIPOLLUX_CHECKPOINT_BACKGROUND", str(int(background)))
    contexts.reset()
    moody = Moody()
    moody.raises = None
    first = save_all_states()
    moody.raises = TypeError("not today")
    boundary = StepBoundary(context())
    boundary._save_periodically()
    context().component(CheckpointManager).saver.wait()
    said = capsys.readouterr().err
    assert "saving the state 'moody' failed with TypeError: not today" in said
    assert "earlier checkpoints are untouched" in said
    assert first is not None
    assert saved_in(directory) == [first.name]
    moody.raises = None
    boundary._save_periodically()
    context().component(CheckpointManager).saver.wait()
    assert len(saved_in(directory)) == 2


def test_the_last_save_fails_and_a_later_one_does_not(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from pipollux_hybrid.job import exit_status

    moody = Moody()
    assert list(remaining_epochs_until(2)) == [0, 1], "the loop ends as if nothing had been"
    said = capsys.readouterr().err
    assert "the last checkpoint was not written: cannot write checkpoint" in said
    assert "'moody' failed with TypeError: not today" in said
    assert f"ends with status {CHECKPOINT_LOST}" in said
    assert exit_status._failure is not None
    moody.raises = None
    assert list(remaining_epochs_until(3)) == [2]
    assert exit_status._failure is None


SCRIPT = """
import atexit, os, shutil, sys
import torch, pipollux_hybrid as pipollux
from pathlib import Path
from torch.utils.data import TensorDataset
atexit.register(print, "the script's own exit function", flush=True)
pipollux.init_process_group("gloo")
module = torch.nn.Sequential(torch.nn.Linear(6, 1))
optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
loader = pipollux.AdaptiveDataLoader(TensorDataset(torch.randn(64, 6)), batch_size=8)
model = pipollux.HybridParallel(module, optimizer)
for epoch in pipollux.remaining_epochs_until(3):
    for (inputs,) in loader:
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        pipollux.report(loss=loss)
    print("the script's own line", epoch, flush=True)
    if epoch == 2:  # the disk goes away
        folder = Path(os.environ["PIPOLLUX_CHECKPOINT_DIR"])
        shutil.rmtree(folder)
        folder.touch()
torch.save(module.state_dict(), sys.argv[1])
print("the script's last line", flush=True)
"""


def run_forked(script: Path, saved: Path, environment: dict[str, str]) -> tuple[int, str]:
    """Return the exit status, and what the script wrote to either stream, in order."""
    script.write_text(f"import os\nos.dup2(1, 2)\n{script.read_text()}")
    with Forked(script, [str(saved)], environment) as program:
        return program.wait(), program.output


@pytest.mark.parametrize("launcher", first(1, ["forked", "python", "torchrun"]))
def test_a_script_whose_last_checkpoint_is_lost(
    directory: Path, tmp_path: Path, launcher: str
) -> None:
    """The script saves its model, and the status tells; also that of a real Python or torchrun."""
    script, saved = tmp_path / "script.py", tmp_path / "mine.pt"
    script.write_text(SCRIPT)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PIPOLLUX")}
    agent = ["-m", "torch.distributed.run", "--nproc-per-node=1", "--master-addr=127.0.0.1"]
    agent.append(f"--master-port={free_port()}")
    environment = {**kept, "PIPOLLUX_CHECKPOINT_DIR": str(directory), "OMP_NUM_THREADS": "1"}
    if launcher == "forked":
        code, output = run_forked(script, saved, environment)
    else:
        done = subprocess.run(
            [sys.executable, *(agent if launcher == "torchrun" else []), str(script), str(saved)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=150,
        )
        code, output = done.returncode, done.stdout
    lines = output.splitlines()
    assert saved.exists(), output
    if launcher == "torchrun":
        assert code == 1, "torchrun's own, whatever the script's was"
        assert f"exitcode  : {CHECKPOINT_LOST}" in output
    else:
        assert code == CHECKPOINT_LOST
    places = [
        next(i for i, line in enumerate(lines) if words in line)
        for words in (
            "the script's own line 2",
            "pipollux: epoch 2/3 100% step 24",  # no later than what the script prints next
            "pipollux: the last checkpoint was not written",
            "the script's last line",
            "the script's own exit function",
            f"pipollux: exit status {CHECKPOINT_LOST}",
        )
    ]
    assert places == sorted(places), output
    assert not [line for line in lines[places[2] :] if line.startswith("pipollux: epoch")]


FULL = """
import os, shutil, signal, sys
import torch, pipollux
from pathlib import Path
from torch.utils.data import TensorDataset
pipollux.init_process_group("gloo")
module = torch.nn.Sequential(torch.nn.Linear(6, 1))
optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
loader = pipollux.AdaptiveDataLoader(TensorDataset(torch.ones(64, 6)), batch_size=8)
model = pipollux.HybridParallel(module, optimizer)
for epoch in pipollux.remaining_epochs_until(1):
    for step, (inputs,) in enumerate(loader):
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
        if step == 3 and pipollux.replica_rank() == 0:  # the disk goes away
            folder = Path(os.environ["PIPOLLUX_CHECKPOINT_DIR"])
            shutil.rmtree(folder)
            folder.touch()
        if step == 4 and sys.argv[1] == "stop":
            os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.mark.parametrize("end", ["stop", "end of training"])
def test_no_replica_ends_as_if_all_were_saved(directory: Path, tmp_path: Path, end: str) -> None:
    """Of a stop that was asked for, status 143 would say that there is a checkpoint."""
    script = tmp_path / "script.py"
    script.write_text(FULL)
    with Replicas(script, 2, [end]) as job:
        assert [program.wait() for program in job.programs] == [CHECKPOINT_LOST] * 2, job.errors
        if end == "stop":
            assert " as asked, without a checkpoint of it: " in job.errors
