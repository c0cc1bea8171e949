"""A save killed at any instant: the newest whole checkpoint is found, nothing half is loaded."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import BinaryIO

import pytest

from pipollux_hybrid import (
    State,
    SynchronizationError,
    init_process_group,
    load_state,
    save_all_states,
)
from pipollux_hybrid.checkpoint.manager import CheckpointManager
from pipollux_hybrid.checkpoint.state import States
from pipollux_hybrid.job import context as contexts
from tests.extent import first
from tests.hybrid.folders import saved_in
from tests.hybrid.replicas import run_replicas

CHUNKS, CHUNK = 8, 1 << 16
INSTANTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir", "os.listdir")


def write_chunks(fileobj: BinaryIO, value: int, dies_at: int | None) -> None:
    """Write a number many times over, and perhaps end the process in the middle of it."""
    for chunk in range(CHUNKS):
        fileobj.write(json.dumps(value).encode().rjust(CHUNK))
        if chunk == dies_at:
            fileobj.flush()  # so that the bytes are there, and the file is half
            os.kill(os.getpid(), signal.SIGKILL)


def read_chunks(fileobj: BinaryIO) -> int:
    """Read what was written, all of which must be there."""
    content = fileobj.read()
    assert len(content) == CHUNKS * CHUNK
    (value,) = {int(content[i * CHUNK : (i + 1) * CHUNK]) for i in range(CHUNKS)}
    return value


class Value(State):
    """A number, written many times over; it may end the process in the middle of a save."""

    def __init__(self, name: str = "value") -> None:
        super().__init__(name)
        self.value = 0
        self.dies_at: int | None = None

    def save(self, fileobj: BinaryIO) -> None:
        write_chunks(fileobj, self.value, self.dies_at)

    def load(self, fileobj: BinaryIO) -> None:
        self.value = read_chunks(fileobj)


def die_after(instants: int) -> None:
    """Have this process killed at so many file operations from now."""
    left = instants

    def count(event: str, _args: object) -> None:
        nonlocal left
        if event in INSTANTS:
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)


def saves_in_a_child(first: Value, value: int, *, background: bool, **dies: int) -> bool:
    """Save once more in a forked process, which is killed in between; whether it survived."""
    pid = os.fork()
    if pid == 0:
        first.value = value
        if "at_chunk" in dies:
            first.dies_at = dies["at_chunk"]
        else:
            die_after(dies["at_operation"])
        save_all_states(background=background)
        contexts.context().component(CheckpointManager).saver.wait()
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.WIFEXITED(status) or os.WTERMSIG(status) == signal.SIGKILL
    return os.WIFEXITED(status)


def restored() -> int:
    """What the next run finds; it removes what the killed one left."""
    contexts.reset()
    state = Value()
    Value("second")
    assert load_state(state)
    return state.value


def kill_at_every_instant(root: str, background: bool) -> list[tuple[int, int, bool]]:
    """Values before, found after, and whether the save ended; of kills at each instant in turn."""
    found = []
    Value("second")
    state = Value()
    state.value = value = 1
    for _ in range(3):  # so that a save has something to prune
        save_all_states()
    operation, survived = 0, False
    deaths = [{"at_chunk": chunk} for chunk in (0, 3, 5, CHUNKS - 1)]
    while deaths or not survived:
        death = deaths.pop() if deaths else {"at_operation": operation}
        survived = saves_in_a_child(state, value + 1, background=background, **death)
        operation += "at_operation" in death
        before, value = value, restored()
        found.append((before, value, survived))
        names = saved_in(Path(root))
        assert not [name for name in names if name.startswith(".")], names
        current = contexts.context().component(States)["value"]
        assert isinstance(current, Value)
        state = current
    return found


@pytest.mark.parametrize("background", first(1, [True, False]))
def test_killed_at_every_file_operation(tmp_path: Path, background: bool) -> None:
    environment = {"PIPOLLUX_CHECKPOINT_DIR": str(tmp_path)}
    found = run_replicas(
        kill_at_every_instant, 1, str(tmp_path), background, environment=environment
    )[0]
    assert len(found) > 15, "there are many instants"
    for before, after, survived in found:
        assert after in ((before + 1,) if survived else (before, before + 1))
    assert any(after == before for before, after, _ in found)
    assert any(after > before and not survived for before, after, survived in found)


def two_replicas_one_dies(dies_at: int | None) -> tuple[int, str]:
    """Restore, save 7, then save 8 in whose middle replica 0 is killed."""
    init_process_group("gloo")
    state = Value()
    load_state(state)
    found = state.value
    if dies_at is None:
        return found, "done"
    state.value = 7
    save_all_states()
    state.value, state.dies_at = 8, dies_at
    try:
        save_all_states()
        contexts.context().control.barrier()
    except SynchronizationError:
        return found, "lost its peer"
    return found, "not killed"


@pytest.mark.parametrize("dies_at", first(1, [CHUNKS - 1, 0]))
def test_killed_beside_another_replica(tmp_path: Path, dies_at: int) -> None:
    environment = {"PIPOLLUX_CHECKPOINT_DIR": str(tmp_path)}
    killed, other = run_replicas(
        two_replicas_one_dies, 2, dies_at, environment=environment, exit_codes=(-signal.SIGKILL,)
    )
    assert killed == -signal.SIGKILL
    assert other == (0, "lost its peer")
    both = run_replicas(two_replicas_one_dies, 2, None, environment=environment)
    assert both == [(7, "done"), (7, "done")]
    assert saved_in(tmp_path) == ["checkpoint-00000001"]
