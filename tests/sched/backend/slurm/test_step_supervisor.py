"""The first process of a step, run as it runs there, without Slurm."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from pipollux_agent import supervisor
from pipollux_sched.backend.replica.replica_process import LOG_LIMIT
from pipollux_sched.backend.slurm.record import ReplicaFiles
from pipollux_sched.store.log_files import read_tail
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
RUN = """
import sys
from pathlib import Path
folder, poll_interval, base, log, script = sys.argv[1:]
sys.path.insert(0, folder)
import supervisor
supervisor.POLL_INTERVAL = float(poll_interval)
words = [sys.executable, "-c", script]
sys.exit(supervisor.run_step(Path(base), Path(log), 2**20, words))
"""


@contextmanager
def step(base: Path, script: str, poll_interval: float = 0.1) -> Iterator[subprocess.Popen[str]]:
    base.parent.mkdir(exist_ok=True)
    process = subprocess.Popen(
        [
            *(sys.executable, "-I", "-S", "-c", RUN, os.path.dirname(supervisor.__file__)),
            *(str(poll_interval), str(base), str(base.with_name("log")), script),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        yield process
        process.kill()


def prints(base: Path, line: str) -> None:
    """Return when a step has printed a line."""
    until(lambda: line in read_tail(base.with_name("log"), 1000).decode().splitlines())


def left_code(base: Path) -> int:
    return int(json.loads(base.with_name(f"{base.name}.exit").read_text())["code"])


def say(base: Path, what: str) -> None:
    base.with_name(f"{base.name}.signal").write_text(f"{what}\n")


@pytest.mark.parametrize("numbers", [[signal.SIGCONT] * 3, [signal.SIGTERM, signal.SIGCONT]])
def test_a_stop_reaches_the_command_once(tmp_path: Path, numbers: list[signal.Signals]) -> None:
    base = tmp_path / "gen" / "replica-0"
    with step(base, COUNTS_SIGNALS, poll_interval=600) as process:
        prints(base, "up")
        process.send_signal(signal.SIGCONT)  # Slurm sends it, too: alone, it means nothing
        say(base, "stop")
        for number in numbers:
            process.send_signal(number)
        prints(base, "1")
        assert process.wait() == 7
    assert left_code(base) == 7


INTERRUPTED = """
import signal, subprocess, sys
sys.path.insert(0, sys.argv[1])
import supervisor
times = []
class Process(subprocess.Popen):
    def terminate(self):
        signal.raise_signal(signal.SIGUSR1)
        times.append(1)
        super().terminate()
subprocess.Popen = Process
command = supervisor.Command(signal.SIGTERM, signal.SIGUSR1)
process = command.start(["sleep", "600"])
signal.raise_signal(signal.SIGTERM)
process.wait()
print(len(times))
"""


def test_a_stop_that_another_interrupts_is_passed_on_once() -> None:
    folder = os.path.dirname(supervisor.__file__)
    call = [sys.executable, "-I", "-S", "-c", INTERRUPTED, folder]
    assert subprocess.run(call, capture_output=True, text=True, check=True).stdout == "1\n"


def test_a_file_says_the_same_as_a_signal(tmp_path: Path) -> None:
    base = tmp_path / "gen" / "replica-0"
    with step(base, COUNTS_SIGNALS) as process:
        prints(base, "up")
        say(base, "stop")
        prints(base, "1")
        assert process.wait() == 7


@pytest.mark.parametrize("by_file", [True, False])  # else by a signal that it is there
def test_a_killed_step_leaves_its_status_and_nothing_else(tmp_path: Path, by_file: bool) -> None:
    base = tmp_path / "gen" / "replica-0"
    script = LEAVES_AN_ORPHAN + "time.sleep(600)"
    with step(base, script, 0.1 if by_file else 600) as process:
        prints(base, "up")
        started = psutil.Process(process.pid).children(recursive=True)
        assert len(started) == 2
        say(base, "kill")
        if not by_file:
            process.send_signal(signal.SIGCONT)
        assert process.wait() == 137
    assert left_code(base) == -9
    until(lambda: not any(child.is_running() for child in started))


def test_what_a_command_leaves_behind_is_killed(tmp_path: Path) -> None:
    base = tmp_path / "gen" / "replica-0"
    with step(base, LEAVES_AN_ORPHAN + "time.sleep(0.5)") as process:
        prints(base, "up")
        started = psutil.Process(process.pid).children(recursive=True)
        assert process.wait() == 0
    assert left_code(base) == 0
    until(lambda: not any(child.is_running() for child in started))


def test_a_step_told_to_stop_before_it_begins_runs_nothing(tmp_path: Path) -> None:
    base = tmp_path / "replica-0"
    say(base, "stop")
    with step(base, "print('up')") as process:
        assert process.wait() == 143
    assert left_code(base) == 143
    assert not base.with_name("log").exists()


def test_a_folder_that_is_not_shared_is_named(tmp_path: Path) -> None:
    base = tmp_path / "missing" / "replica-0"
    process = subprocess.run(
        [
            *(sys.executable, "-I", "-S", supervisor.__file__, "--step", str(base)),
            *(str(tmp_path / "log"), str(LOG_LIMIT), "true"),
        ],
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
        with step(base, COUNTS_SIGNALS, 600) as process:
            prints(base, "up")
            assert files.read_exit() is None
            files.prepare_signal()
            fill(disk / "others")
            files.write_signal("stop")
            process.send_signal(signal.SIGCONT)
            assert process.wait(240) == 7
        assert files.read_exit() == 7
        assert files.read_result().asked


def test_the_log_of_a_step_is_written_without_srun(tmp_path: Path) -> None:
    """Whose machine may be lost: the step prints on, into a log of limited size."""
    base = tmp_path / "gen" / "replica-0"
    with step(base, "for number in range(200_000): print(f'{number:06d}')") as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait() == 0
    log = base.with_name("log")
    tail = read_tail(log, 7 * 100_000).decode().split()
    assert tail == [f"{number:06d}" for number in range(100_000, 200_000)]
    assert sum(path.stat().st_size for path in log.parent.glob("log*")) < 2**21 + 2**17


SAVES = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
print("up", flush=True)
time.sleep(600)
"""


def test_a_guard_that_is_killed_stops_the_command(tmp_path: Path) -> None:
    """What kills all children of a process without warning reaches only the guard."""
    base = tmp_path / "attempt" / "replica-0"
    base.parent.mkdir()
    command = [sys.executable, "-I", "-S", str(supervisor.__file__), f"--guard={os.getpid()}"]
    command += ["--step", str(base), str(base.with_name("log")), str(LOG_LIMIT)]
    with subprocess.Popen([*command, sys.executable, "-c", SAVES]) as process:
        prints(base, "up")
        process.kill()
        assert process.wait(240) == -signal.SIGKILL
    files = ReplicaFiles(base)
    assert until(files.read_exit) == 7
    assert files.read_result().asked


def test_a_guard_passes_on_how_the_command_ended_and_its_signal(tmp_path: Path) -> None:
    base = tmp_path / "attempt" / "replica-0"
    base.parent.mkdir()
    files = ReplicaFiles(base)
    files.prepare_signal()
    command = [sys.executable, "-I", "-S", str(supervisor.__file__), f"--guard={os.getpid()}"]
    command += ["--step", str(base), str(base.with_name("log")), str(LOG_LIMIT)]
    with subprocess.Popen([*command, sys.executable, "-c", SAVES]) as process:
        prints(base, "up")
        files.write_signal("kill")
        process.send_signal(signal.SIGCONT)
        assert process.wait(240) == 128 + signal.SIGKILL
    assert files.read_exit() == -signal.SIGKILL


def test_a_step_without_a_supervisor_is_ended(tmp_path: Path) -> None:
    """At once if it was told to be killed; else it has the patience to save."""
    base = tmp_path / "attempt" / "replica-0"
    base.parent.mkdir()
    with step(base, SAVES) as process:
        prints(base, "up")
        process.kill()
        process.wait()
        assert len(supervisor.step_processes(base)) == 1
        say(base, "kill")
        assert supervisor.end_step(base, 600.0) == 0
        assert supervisor.step_processes(base) == []


HUNGRY = """
import subprocess, sys, time
shared = b"x" * 60 * 2**20
children = [subprocess.Popen([sys.executable, "-c", "import time; x = b'x' * 60 * 2**20; "
            "time.sleep(600)"], start_new_session=True) for _ in range(2)]
print("up", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("limit", [2**27, 2**40])
def test_memory_of_all_processes_together(tmp_path: Path, limit: int) -> None:
    """None of them exceeds the limit alone, and the children are in sessions of their own."""
    base = tmp_path / "attempt" / "replica-0"
    base.parent.mkdir()
    command = [sys.executable, "-I", "-S", str(supervisor.__file__), f"--memory={limit}", "--step"]
    command += [str(base), str(base.with_name("log")), str(LOG_LIMIT), sys.executable, "-c", HUNGRY]
    with subprocess.Popen(command) as process:
        if limit > 2**30:
            prints(base, "up")
            say(base, "kill")
        process.wait(240)
        assert supervisor.step_processes(base) == []
    error = ReplicaFiles(base).read_result().error
    if limit > 2**30:
        assert error is None
    else:
        assert error is not None
        assert error.text.startswith("out of memory: limit 0.12 GiB, used 0.")
        assert not error.cannot_start
        assert left_code(base) == -signal.SIGKILL
