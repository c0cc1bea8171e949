"""The parent of a replica's agent: what it passes on, what it leaves behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipollux_agent import supervisor
from pipollux_sched.backend.replica.replica_process import ReplicaProcess, read_status
from pipollux_sched.store.log_files import read_part, read_tail
from tests.small_disk import fill, small_disk
from tests.waiting import until

PATIENT = """
import signal, sys, time
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
print("ready", flush=True)
while not asked:
    time.sleep(0.01)
time.sleep(0.3)
sys.exit(40 + len(asked))
"""


class Case:
    """One replica, whose files lie in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.status, self.log = folder / "replica-0.json", folder / "log"
        self.process: ReplicaProcess | None = None

    def start(self, code: str) -> ReplicaProcess:
        self.process = ReplicaProcess.start(
            [sys.executable, "-c", code],
            status=self.status,
            log=self.log,
            environment=dict(os.environ),
            directory=None,
        )
        return self.process

    def ended(self) -> int:
        """How it ended, once it has."""
        assert self.process is not None
        self.process.wait(240)
        code = self.process.poll()
        assert code is not None
        return code


@pytest.fixture
def case(tmp_path: Path) -> Iterator[Case]:
    case = Case(tmp_path)
    yield case
    if case.process is not None and case.process.poll() is None:
        case.process.signal(signal.SIGKILL)
        case.process.wait(240)


@pytest.mark.parametrize(
    ("code", "status"),
    [("print('done')", 0), ("raise SystemExit(3)", 3), ("import os; os.kill(os.getpid(), 9)", -9)],
)
def test_how_the_agent_ended_is_on_the_disk(case: Case, code: str, status: int) -> None:
    """Also for a scheduler that was not there when it happened."""
    case.start(code)
    assert case.ended() == status
    assert read_status(case.status)["code"] == status
    assert ReplicaProcess(case.status).poll() == status


def test_a_second_sigterm_is_not_passed_on(case: Case) -> None:
    """A new scheduler asks once more, as it cannot know; scripts take two for impatience."""
    case.start(PATIENT)
    until(lambda: "ready" in (case.log.read_text() if case.log.exists() else ""))
    again = ReplicaProcess(case.status)
    assert again.poll() is None
    for _ in range(3):
        again.signal(signal.SIGTERM)
    assert case.ended() == 41


def test_a_supervisor_that_was_killed_has_ended(case: Case) -> None:
    """Nobody can say how its agent ended; what is left of it is found by its environment."""
    waits = "while os.getppid() == parent: time.sleep(0.01)"
    code = f"import os, time; parent = os.getppid(); print('ready', flush=True)\n{waits}"
    started = case.start(code)
    until(lambda: "ready" in (case.log.read_text() if case.log.exists() else ""))
    again = ReplicaProcess(case.status)
    started.signal(signal.SIGKILL)
    assert case.ended() == -signal.SIGKILL
    assert again.poll() == -signal.SIGKILL


def test_another_process_of_the_same_id_is_not_taken_for_it(case: Case) -> None:
    """Its birth differs, so it is neither waited for nor hit."""
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        status = {"pid": sleeper.pid, "birth": "another boot:1"}
        case.status.write_text(json.dumps(status))
        stranger = ReplicaProcess(case.status)
        assert stranger.poll() == -signal.SIGKILL
        stranger.signal(signal.SIGKILL)
        assert sleeper.poll() is None
        status["birth"] = str(supervisor.birth(sleeper.pid))
        case.status.write_text(json.dumps(status))
        assert ReplicaProcess(case.status).poll() is None
    finally:
        sleeper.kill()
        sleeper.wait(240)
    assert supervisor.birth(sleeper.pid) is None


def test_without_a_status_nothing_is_started(case: Case, tmp_path: Path) -> None:
    case.status = tmp_path / "missing" / "replica-0.json"
    case.start("print('started')")
    assert case.ended() == supervisor.NO_STATUS
    assert "nothing was started" in case.log.read_text()


def test_a_log_is_moved_aside_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"old\n" * 5)
    log = supervisor.RotatingLog(path, limit=40)
    log.write(b"old\n" * 4)
    log.write(b"old\n")
    assert path.stat().st_size == 40
    log.write(b"new\n")
    log.close()
    assert path.read_bytes() == b"new\n"
    assert (tmp_path / "log.from-0").read_bytes() == b"old\n" * 10


def test_of_a_long_log_the_end_is_kept(tmp_path: Path) -> None:
    """Whole lines of it, also after a restart of the supervisor; what is missing is known."""
    path = tmp_path / "log"
    written = [f"{number:05d}\n".encode() for number in range(1000)]
    for half in (written[:500], written[500:]):
        log = supervisor.RotatingLog(path, limit=1000)
        for start in range(0, 500, 3):
            log.write(b"".join(half[start : start + 3]))
        log.close()
    part = read_part(path, 0, 2**20)
    marker, *kept = part.content.splitlines(keepends=True)
    assert part.offset < 6000
    kept += read_part(path, part.offset, 2**20).content.splitlines(keepends=True)
    assert kept == written[-len(kept) :]
    missing = 6000 - 6 * len(kept)
    assert marker.startswith(f"[pipollux: {missing} bytes of output are missing".encode())
    assert len(kept) * 6 > 1000
    assert read_tail(path, 1500) == b"".join(written)[-1500:]
    assert read_part(path, 6000, 2**20) == (b"", 6000)
    assert sorted(one.name.partition("-")[0] for one in tmp_path.iterdir()) == ["log", "log.from"]


def test_output_that_a_full_disk_does_not_take_is_marked(tmp_path: Path) -> None:
    """And the pipe is read on, so that the script does not wait; also where a file is full."""
    with small_disk(tmp_path):
        path, others = tmp_path / "log", tmp_path / "others"
        log = supervisor.RotatingLog(path, limit=2**12)
        log.write(b"one\n" * 2**10)
        fill(others)
        log.write(b"two\n")
        log.write(b"three\n")
        others.unlink()
        log.write(b"four\n")
        log.close()
        marker = b"\n[pipollux: 10 bytes of output are missing here, as the disk was full]\n"
        assert read_part(path, 0, 2**20).content == b"one\n" * 2**10
        assert read_part(path, 2**12, 2**20).content == marker + b"four\n"


def test_how_a_script_ended_is_stored_on_a_full_disk(tmp_path: Path) -> None:
    """With status 0 it is complete, not failed with one that the supervisor ends with itself."""
    disk = tmp_path / "disk"
    disk.mkdir()
    with small_disk(disk):
        go = tmp_path / "go"
        code = f"""
import pathlib, time
print("ready", flush=True)
while not pathlib.Path({str(go)!r}).exists():
    time.sleep(0.01)
"""
        case = Case(disk)
        started = case.start(code)
        until(lambda: "ready" in (case.log.read_text() if case.log.exists() else ""))
        fill(disk / "others")
        go.touch()
        assert case.ended() == 0
        assert (read_status(case.status)["code"], started.asked) == (0, False)
        assert ReplicaProcess(case.status).poll() == 0


def test_no_line_is_lost_while_a_log_is_moved_aside(tmp_path: Path) -> None:
    """However fast a script prints; here into a log and the one before it."""
    log = tmp_path / "log"
    lines = "".join(f"{number:06d}\n" for number in range(60_000)).encode()
    code = "for number in range(60_000): print(f'{number:06d}')"
    arguments = (str(tmp_path / "status.json"), str(log), str(len(lines) * 2 // 3))
    own = [sys.executable, "-I", "-S", supervisor.__file__, *arguments]
    subprocess.run([*own, sys.executable, "-c", code], check=True, timeout=240)
    before = (tmp_path / "log.from-0").read_bytes()
    assert len(lines) * 2 // 3 <= len(before) < len(lines)
    assert before + log.read_bytes() == lines
