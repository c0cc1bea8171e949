"""Each stage's process writes its part beside the training: all of one step, or no checkpoint."""

from __future__ import annotations

import errno
import io
import itertools
import os
import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from pipollux_hybrid import (
    CheckpointError,
    SynchronizationError,
    init_process_group,
    load_state,
    save_all_states,
)
from pipollux_hybrid.checkpoint.async_save import AsyncSaver
from pipollux_hybrid.checkpoint.manager import CheckpointManager
from pipollux_hybrid.job.context import context
from tests.hybrid.checkpoint.test_killed_saves import (
    CHUNKS,
    Value,
    die_after,
    read_chunks,
    write_chunks,
)
from tests.hybrid.folders import saved_in
from tests.hybrid.models import assert_close
from tests.hybrid.replicas import run_replicas
from tests.hybrid.stage_processes.training import run_stages, together
from tests.hybrid.stage_processes.whole_job import Outcome, whole_job

PATIENCE = 200.0


class BatchSlice(Value):
    """What a stage has. The thread that writes it may wait, fail, or end the process."""

    in_parts = True

    def __init__(self) -> None:
        super().__init__("part")
        self.found: list[int] = []
        """What all stages had saved."""
        self.may_write = threading.Event()
        self.may_write.set()
        self.copying: Exception | None = None
        self.writing: Exception | None = None

    def snapshot(self) -> Callable[[BinaryIO], None]:
        if self.copying is not None:
            raise self.copying
        value = self.value

        def write(fileobj: BinaryIO) -> None:
            assert self.may_write.wait(PATIENCE)
            if self.writing is not None:
                raise self.writing
            write_chunks(fileobj, value, self.dies_at)

        return write

    def load_parts(self, files: Sequence[BinaryIO]) -> None:
        self.found = [read_chunks(x) for x in files]


def begin() -> BatchSlice:
    init_process_group("gloo", timeout=PATIENCE)
    state = BatchSlice()
    load_state(state)
    return state


def saver() -> AsyncSaver:
    return context().component(CheckpointManager).saver


def saves_until_one_dies(victim: int, chunk: int | None, operation: int | None) -> str:
    """Save 7, then 8 in whose middle the process of one stage is killed."""
    state = begin()
    try:
        state.value = 7
        save_all_states(background=True)
        saver().wait()
        context().control.barrier()
        state.value = 8
        if context().env.stage == victim:
            state.dies_at = chunk
            if operation is not None:
                die_after(operation)
        save_all_states(background=True)
        saver().wait()
        context().control.barrier()
    except SynchronizationError:
        return "lost its peer"
    return "nothing happened"


def finds() -> list[int]:
    return begin().found


def found_by_the_next_run(folder: Path) -> int:
    """What both stages find; nothing half is left."""
    (stages,) = run_stages(finds, 1, 2, environment={"PIPOLLUX_CHECKPOINT_DIR": str(folder)})
    values = {value for found in stages for value in found}
    assert [len(found) for found in stages] == [2, 2]
    assert not [name for name in saved_in(folder) if name.startswith(".")]
    (value,) = values
    return value


@pytest.mark.parametrize(
    ("victim", "chunk", "operation"),
    [
        (1, CHUNKS - 1, None),
        pytest.param(0, 3, None, marks=pytest.mark.exhaustive),
        *(
            pytest.param(victim, None, operation, marks=pytest.mark.exhaustive)
            for victim, operation in itertools.product((0, 1), range(12))
        ),
    ],
)
def test_killed_in_a_save(
    tmp_path: Path, victim: int, chunk: int | None, operation: int | None
) -> None:
    """Whichever stage it is: the checkpoint before is whole, or this one is."""
    environment = {"PIPOLLUX_CHECKPOINT_DIR": str(tmp_path)}
    (stages,) = run_stages(
        saves_until_one_dies,
        *(1, 2, victim, chunk, operation),
        environment=environment,
        exit_codes=(0, -signal.SIGKILL),
    )
    if chunk is not None:
        assert stages.pop(victim) == -signal.SIGKILL
        assert stages == ["lost its peer"]
    assert found_by_the_next_run(tmp_path) in ((7,) if chunk is not None else (7, 8))


def goes_on_meanwhile(folder: Path) -> tuple[list[str], bool, list[str]]:
    """What is there before the second stage may write, whether it is being written, and after."""

    def checkpoints() -> list[str]:
        return sorted(path.name for path in folder.iterdir() if path.name[0] != ".")

    state, control = begin(), context().control
    state.value = 1
    if context().env.stage == 1:
        state.may_write.clear()
    save_all_states(background=True)
    state.value = 2
    control.barrier()
    before, busy = checkpoints(), saver().busy
    control.barrier()
    state.may_write.set()
    saver().wait()
    control.barrier()
    return before, busy, checkpoints()


def test_training_goes_on_and_a_checkpoint_waits_for_its_last_part(tmp_path: Path) -> None:
    """What is saved is what there was at the boundary, in all stages."""
    environment = {"PIPOLLUX_CHECKPOINT_DIR": str(tmp_path)}
    (stages,) = run_stages(goes_on_meanwhile, 1, 2, tmp_path, environment=environment)
    assert stages == [([], True, ["checkpoint-00000001"])] * 2
    assert found_by_the_next_run(tmp_path) == 1


def one_stage_fails(victim: int, where: str) -> tuple[str, list[str]]:
    """What is said where a stage cannot copy or write its part; and what the next save makes."""
    state = begin()
    fails = TypeError("not today") if where == "copying" else OSError(errno.ENOSPC, "no space")
    if context().env.stage == victim:
        setattr(state, where, fails)
    said = io.StringIO()
    with redirect_stderr(said):
        try:
            save_all_states(background=True)
        except CheckpointError as error:
            said.write(str(error))
        saver().wait()
    context().control.barrier()
    root = context().env.checkpoint_dir
    assert root is not None
    assert saved_in(root) == []
    context().control.barrier()
    state.copying = state.writing = None
    save_all_states(background=True)
    save_all_states()  # as at a stop, which waits
    context().control.barrier()
    return said.getvalue(), saved_in(root)


@pytest.mark.parametrize(
    ("victim", "where", "says"),
    [
        (1, "copying", "stage 1: no checkpoint is written: saving the state 'part' failed with"),
        (1, "writing", "stage 1: [Errno 28] no space"),
        pytest.param(0, "copying", "TypeError: not today", marks=pytest.mark.exhaustive),
        pytest.param(0, "writing", "no space", marks=pytest.mark.exhaustive),
    ],
)
def test_a_part_that_cannot_be_saved(tmp_path: Path, victim: int, where: str, says: str) -> None:
    """The first process says so, nothing of it is left, and the next save is as ever."""
    environment = {"PIPOLLUX_CHECKPOINT_DIR": str(tmp_path)}
    (stages,) = run_stages(one_stage_fails, 1, 2, victim, where, environment=environment)
    assert says in stages[0][0]
    assert "earlier checkpoints are untouched" in stages[0][0]
    assert stages[1][0] == ""
    assert [names for _, names in stages] == [["checkpoint-00000001", "checkpoint-00000002"]] * 2


def killed_at_step(last: int, *args: Any) -> Outcome | str:
    """Run a job that saves at each boundary; a stage is killed when there is a checkpoint."""
    steps = itertools.count(1)

    def after(_optimizer: Optimizer, *_: Any) -> None:
        number = next(steps)
        if number == last - 2:
            saver().wait()
        if number == last and context().env.stage == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    handle = register_optimizer_step_post_hook(after)
    try:
        return whole_job(*args)
    except SynchronizationError:
        return "lost its peer"
    finally:
        handle.remove()


def test_a_job_goes_on_from_a_save_in_the_background(tmp_path: Path) -> None:
    environment = {
        "PIPOLLUX_CHECKPOINT_DIR": str(tmp_path),
        "PIPOLLUX_CHECKPOINT_BACKGROUND": "1",
        "PIPOLLUX_CHECKPOINT_INTERVAL": "0.001",
    }
    job = 2, 2, "1f1b"
    (killed,) = run_stages(
        killed_at_step, 1, 2, 6, *job, environment=environment, exit_codes=(0, -signal.SIGKILL)
    )
    assert killed == ["lost its peer", -signal.SIGKILL]
    (stages,) = run_stages(whole_job, 1, 2, *job, environment=environment)
    (whole,) = run_replicas(whole_job, 1, 1, 2, None)
    losses = stages[0].losses
    assert 0 < len(losses) < len(whole.losses)
    assert losses == pytest.approx(whole.losses[-len(losses) :], rel=1e-9)
    assert_close(together([stage.state for stage in stages]), whole.state, 1e-9)
