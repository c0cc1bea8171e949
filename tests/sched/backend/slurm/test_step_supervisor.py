"""The first process of a step, run as it runs there, without Slurm."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from pipollux_agent import supervisor
from pipollux_sched.backend.slurm.record import ReplicaFiles
from tests.small_disk import fill, small_disk
from tests.waiting import until

COUNTS_SIGNALS = """
import signal, sys, time
told = []
signal.signal(signal.SIGTERM, lambda *_: told.append(1))
print("up", flush=True)
while not told:
    time.sleep(0.01)
time.sleep(0.3)
print(len(told), flush=True)
sys.exit(7)
"""
LEAVES_AN_ORPHAN = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print("up", flush=True)
"""


@contextmanager
def step(base: Path, script: str) -> Iterator[subprocess.Popen[str]]:
    base.parent.mkdir(exist_ok=True)
    process = subprocess.Popen(
        [
            *(sys.executable, "-I", "-S", supervisor.__file__, "--step", str(base)),
            *(sys.executable, "-c", script),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        yield process
        process.kill()


def left_code(base: Path) -> int:
    return int(json.loads(base.with_name(f"{base.name}.exit").read_text())["code"])


def say(base: Path, what: str) -> None:
    base.with_name(f"{base.name}.signal").write_text(f"{what}\n")


@pytest.mark.parametrize("numbers", [[signal.SIGURG] * 3, [signal.SIGTERM, signal.SIGURG]])
def test_a_stop_reaches_the_command_once(tmp_path: Path, numbers: list[signal.Signals]) -> None:
    base = tmp_path / "gen" / "replica-0"
    with step(base, COUNTS_SIGNALS) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        for number in numbers:
            process.send_signal(number)
        assert process.stdout.readline() == "1\n"
        assert process.wait() == 7
    assert left_code(base) == 7


def test_a_file_says_the_same_as_a_signal(tmp_path: Path) -> None:
    base = tmp_path / "gen" / "replica-0"
    with step(base, COUNTS_SIGNALS) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        say(base, "stop")
        assert process.stdout.readline() == "1\n"
        assert process.wait() == 7


@pytest.mark.parametrize("by_file", [True, False])
def test_a_killed_step_leaves_its_status_and_nothing_else(tmp_path: Path, by_file: bool) -> None:
    base = tmp_path / "gen" / "replica-0"
    with step(base, LEAVES_AN_ORPHAN + "time.sleep(600)") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        started = psutil.Process(process.pid).children(recursive=True)
        assert len(started) == 2
        if by_file:
            say(base, "kill")
        else:
            process.send_signal(signal.SIGWINCH)
        assert process.wait() == 137
    assert left_code(base) == -9
    until(lambda: not any(child.is_running() for child in started))


def test_what_a_command_leaves_behind_is_killed(tmp_path: Path) -> None:
    base = tmp_path / "gen" / "replica-0"
    with step(base, LEAVES_AN_ORPHAN + "time.sleep(0.5)") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        started = psutil.Process(process.pid).children(recursive=True)
        assert process.wait() == 0
    assert left_code(base) == 0
    until(lambda: not any(child.is_running() for child in started))


def test_a_step_told_to_stop_before_it_begins_runs_nothing(tmp_path: Path) -> None:
    base = tmp_path / "replica-0"
    say(base, "stop")
    with step(base, "print('up')") as process:
        assert process.communicate()[0] == ""
        assert process.returncode == 143
    assert left_code(base) == 143


def test_a_folder_that_is_not_shared_is_named(tmp_path: Path) -> None:
    base = tmp_path / "missing" / "replica-0"
    process = subprocess.run(
        [sys.executable, "-I", "-S", supervisor.__file__, "--step", str(base), "true"],
        capture_output=True,
        text=True,
    )
    assert process.returncode == 74
    assert f"cannot write to {base.parent}, which all nodes must share" in process.stdout


def test_a_full_disk_does_not_hide_how_a_step_ended(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    with small_disk(disk):
        base = disk / "gen" / "replica-0"
        files = ReplicaFiles(base)
        with step(base, COUNTS_SIGNALS) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "up\n"
            assert files.read_exit() is None
            fill(disk / "others")
            process.send_signal(signal.SIGURG)
            assert process.wait(240) == 7
        assert files.read_exit() == 7
        assert files.read_result().asked
