"""`pipollux top`: its frames at many sizes, and the program itself on a terminal of its own."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipollux_sched.cli import main
from pipollux_sched.cli.cluster_view import ClusterView, look
from pipollux_sched.cli.sparkline import Span, sparkline, window_for
from pipollux_sched.cli.top_frame import frame
from pipollux_sched.lifecycle import Allocate
from pipollux_sched.store import StateDir, Store

from .kept import Clock, kept, spec
from .runner import PIPOLLUX

SGR = re.compile(r"\x1b\[[0-9;]*m")


@pytest.fixture
def state_dir(tmp_path: Path) -> Iterator[StateDir]:
    """What `kept` leaves, as of now, so that a process of its own sees it as recent."""
    with kept(tmp_path / "state", Clock(time.time() - 120)):
        yield StateDir(tmp_path / "state")


@pytest.fixture
def view(state_dir: StateDir) -> ClusterView:
    with Store(state_dir.store) as store:
        return look(store, state_dir)


def test_what_a_frame_shows(view: ClusterView) -> None:
    lines = [line.plain.rstrip() for line in frame(view, 120, 30, "q quits")]
    assert re.fullmatch(
        r"Pipollux  policy exact  goodput 870 samples/s +○ no scheduler runs .*", lines[0]
    )
    assert lines[1].endswith("4 of 6 slots used, 1 node not ready ──")
    assert re.fullmatch(r"node-a  1 grown +1 grown", lines[2])
    assert re.fullmatch(r"node-b  2 wide", lines[3])
    assert re.fullmatch(r"node-c +free +free +draining", lines[4])
    assert lines[5].endswith("2 running, 1 waiting, 1 suspended, 2 failed ──")
    assert lines[6].split()[:4] == ["#", "Job", "Phase", "R×K"]
    grown = r" 1  grown +Running +2×1 +1/4 +21 +2\.50 +580 +92 % +100 ms "
    assert re.match(grown, lines[7])
    assert re.match(r" 3  waiting +Queued +waits: there is no room ", lines[9])
    assert lines[-1] == "q quits"
    assert any("grown grows from 1 to 2 replicas" in line for line in lines)
    assert not any("\x1b" in line for line in lines)


@pytest.mark.parametrize(
    ("width", "height"), [(20, 6), (40, 10), (60, 16), (80, 24), (120, 40), (200, 60), (500, 200)]
)
def test_a_frame_fills_its_terminal_and_no_more(view: ClusterView, width: int, height: int) -> None:
    lines = frame(view, width, height, "q quits")
    assert len(lines) == height
    assert max(line.cell_len for line in lines) <= width
    assert lines[-1].plain.startswith("q quits")


def test_many_jobs_and_nodes(tmp_path: Path) -> None:
    """What there is no room for is counted; the slots of every node that is shown are there."""
    directory = StateDir(tmp_path)
    with Store(directory.database, create=True) as store:
        store.set_nodes(
            (f"n{number:02}", 8, "gpu", {"name": f"n{number:02}", "slots": 8})
            for number in range(90)
        )
        for number in range(50):
            job = spec(f"job-{number:02}", num_stages=4)
            store.submit(job.name, job.model_dump(mode="json"), "token", 3)
            store.transition(job.name, Allocate([f"n{number // 2:02}"], "starts", num_stages=4))
        view = look(store, directory)
    lines = [line.plain.rstrip() for line in frame(view, 120, 40)]
    assert len(lines) == 40
    assert "200 of 720 slots used" in lines[1]
    assert any(re.fullmatch(r"and \d+ more nodes, \d+ slots free", line) for line in lines)
    (more,) = [line for line in lines if line.endswith("more jobs")]
    shown = [line for line in lines if re.match(r"\s*\d+ +job-\d\d ", line)]
    assert len(shown) + int(more.split()[1]) == 50
    first = next(line for line in lines if line.startswith("n00 "))
    assert re.match(r"n00  1 job-00 +2 job-01 ", first)


@pytest.mark.parametrize(
    ("spans", "alive", "top", "drawn"),
    [
        ([], (0, 8), 1, "········"),
        ([], (2, 4), 1, "  ··    "),
        ([Span(0, 8, 1)], (0, 8), 1, "████████"),
        ([Span(0, 4, 1), Span(4, 8, 2)], (0, 8), 2, "▄▄▄▄████"),
        ([Span(0, 8, 1)], (0, 8), 100, "▁▁▁▁▁▁▁▁"),
        ([Span(2, 2.5, 8)], (0, 4), 8, "··▄·    "),
        ([Span(-9, 99, 3)], (-9, 99), 3, "████████"),
    ],
)
def test_sparkline(spans: list[Span], alive: tuple[float, float], top: int, drawn: str) -> None:
    assert sparkline(spans, alive, 0, 8, 8, top) == drawn


def test_windows() -> None:
    assert [window_for(seconds) for seconds in (0, 61, 3600, 1e9)] == [60, 300, 3600, 604800]


def test_one_look_for_programs(state_dir: StateDir) -> None:
    command = [PIPOLLUX, "top", "--output", "json", "--state-dir", str(state_dir.path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    told = json.loads(done.stdout)
    assert (told["policy"], told["served"], told["goodput"]) == ("exact", False, 870.0)
    assert {name: number for name, number in told["phases"].items() if number} == {
        "Running": 2,
        "Queued": 1,
        "Suspended": 1,
        "Failed": 2,
    }
    nodes = {node["name"]: (node["used"], node["jobs"]) for node in told["nodes"]}
    assert nodes == {"node-a": (2, {"grown": 2}), "node-b": (2, {"wide": 2}), "node-c": (0, {})}
    [grown] = [job for job in told["jobs"] if job["name"] == "grown"]
    assert (grown["num_launches"], grown["progress"]["step"]) == (2, 21)
    assert told["events"][-1]["type"] == "node"


def test_once_and_into_a_pipe(state_dir: StateDir, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["top"], ["top", "--once"]):
        with pytest.raises(SystemExit) as ended:
            main([*command, "--state-dir", str(state_dir.path)])
        said = capsys.readouterr()
        assert (ended.value.code, said.err) == (0, "")
        assert "\x1b" not in said.out
        assert said.out.startswith("Pipollux  policy exact")
        assert "node node-c is draining: new fans\n" in said.out


class Terminal:
    """`pipollux top` on a terminal of its own, of which it is the controlling process."""

    def __init__(self, state_dir: StateDir, width: int, height: int) -> None:
        self.master, self.slave = pty.openpty()
        self.resize(width, height)
        self.before = termios.tcgetattr(self.slave)
        environment = {**os.environ, "TERM": "xterm-256color"}
        for name in ("COLUMNS", "LINES", "NO_COLOR"):
            environment.pop(name, None)
        # The session's first process takes the terminal for its own, so that Ctrl-C reaches it.
        start = (
            "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
            "os.execv(sys.argv[1], sys.argv[1:])"
        )
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-c", start, PIPOLLUX, "top", "--interval", "0.2"),
                *("--state-dir", str(state_dir.path)),
            ],
            stdin=self.slave,
            stdout=self.slave,
            stderr=self.slave,
            env=environment,
            start_new_session=True,
        )
        self.said = ""

    def resize(self, width: int, height: int) -> None:
        size = struct.pack("HHHH", height, width, 0, 0)
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, size)

    def type(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    def read_until(self, what: str, seconds: float = 240.0) -> str:
        """Return what was written since the last call, once `what` (a pattern) is in it."""
        deadline = time.monotonic() + seconds
        begun = len(self.said)
        raw = b""
        while not re.search(what, SGR.sub("", self.said[begun:])):
            assert time.monotonic() < deadline, f"{what!r} never came: {self.said[begun:][-2000:]}"
            if select.select([self.master], [], [], 0.1)[0]:
                raw += os.read(self.master, 65536)
                self.said = self.said[:begun] + raw.decode("utf-8", "ignore")
        return SGR.sub("", self.said[begun:])

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(240)
        os.close(self.master)
        os.close(self.slave)


@pytest.fixture
def terminal(state_dir: StateDir) -> Iterator[Terminal]:
    terminal = Terminal(state_dir, 80, 24)
    yield terminal
    terminal.close()


@pytest.mark.parametrize("way", ["q", "\x03", "SIGTERM"])
def test_leaving_restores_the_terminal(terminal: Terminal, way: str) -> None:
    first = terminal.read_until("q quits")
    assert "\x1b[?1049h" in first  # the other screen
    assert "\x1b[?25l" in first  # no cursor
    assert not termios.tcgetattr(terminal.slave)[3] & termios.ICANON
    if way == "SIGTERM":
        terminal.process.send_signal(signal.SIGTERM)
    else:
        terminal.type(way)
    last = terminal.read_until(r"\x1b\[\?1049l")
    assert "Traceback" not in last
    assert terminal.process.wait(240) == 0
    terminal.read_until(r"\x1b\[\?25h") if "\x1b[?25h" not in last else None
    assert termios.tcgetattr(terminal.slave) == terminal.before


def test_it_changes_with_the_store_and_with_the_size(
    terminal: Terminal, state_dir: StateDir
) -> None:
    terminal.read_until("q quits")
    with Store(state_dir.store) as store:
        job = spec("newcomer")
        store.submit(job.name, job.model_dump(mode="json"), "token", 3)
    terminal.read_until("newcomer submitted")
    terminal.resize(120, 40)
    screen = terminal.read_until(r"(?s)Epoch.*q quits").rpartition("\x1b[H")[2]
    lines = screen.replace("\r", "").split("\n")
    assert len(lines) == 40
    assert max(map(len, lines)) == 120
    terminal.type("x\x1a")  # neither a key that means nothing nor Ctrl-Z disturbs it
    with Store(state_dir.store) as store:
        job = spec("latecomer")
        store.submit(job.name, job.model_dump(mode="json"), "token", 3)
    terminal.read_until("latecomer submitted")
    terminal.type("q")
    terminal.read_until(r"\x1b\[\?1049l")
    assert terminal.process.wait(240) == 0
