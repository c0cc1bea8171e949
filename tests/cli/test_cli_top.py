"""`pipollux top`: its frames at many sizes, and the program itself on a terminal of its own."""

from __future__ import annotations

import asyncio
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
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.console import Console
from textual.events import Key
from textual.pilot import Pilot
from textual.widgets import Input, Static, Tab, Tabs
from textual.worker import WorkerFailed

from pipollux_sched.cli import main
from pipollux_sched.cli.reader import LocalReader
from pipollux_sched.cli.top.app import TopApp
from pipollux_sched.cli.top.details import JobScreen, NodeScreen
from pipollux_sched.cli.top.sparkline import Span, bars, sparkline, window_for
from pipollux_sched.cli.top.table import LiveTable
from pipollux_sched.cli.top.view import FIRST_JOBS
from pipollux_sched.lifecycle import Suspend
from pipollux_sched.store import StateDir, Store
from pipollux_sched.views.models import JobDetails
from tests.extent import first
from tests.sched.crowd import crowd

from .kept import Clock, kept, spec
from .runner import PIPOLLUX

SGR = re.compile(r"\x1b\[[0-9;]*m")


@pytest.fixture
def state_dir(tmp_path: Path) -> Iterator[StateDir]:
    """What `kept` leaves, as of now, so that a process of its own sees it as recent."""
    with kept(tmp_path / "state", Clock(time.time() - 120)):
        yield StateDir(tmp_path / "state")


def test_an_update_that_finds_no_widget_is_an_error(
    state_dir: StateDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not taken for the end of the app."""

    async def look_at_it() -> None:
        with Store(state_dir.store) as store:
            app = TopApp(LocalReader(store, state_dir), 0.1)
            monkeypatch.setattr(app, "_show_phases", lambda _phases: app.query_one("#nothing"))
            async with app.run_test():
                await app.workers.wait_for_complete()

    with pytest.raises(WorkerFailed, match="#nothing"):
        asyncio.run(look_at_it())


async def shown(app: TopApp, pilot: Pilot[None], what: Callable[[], bool]) -> None:
    """Wait until something is shown."""
    deadline = time.monotonic() + 240
    while app.view is None or not what():
        assert time.monotonic() < deadline, [names(app), app.view and app.view.query]
        await pilot.pause(0.02)


def table(app: TopApp, which: str = "#jobs") -> LiveTable:
    return app.screen_stack[0].query_one(which, LiveTable)


def names(app: TopApp) -> list[str]:
    found = (table(app).name_at(line) for line in range(table(app).row_count))
    return [name for name in found if name is not None]


def cells(app: TopApp, line: int, which: str = "#jobs") -> list[str]:
    return [str(cell) for cell in table(app, which).get_row_at(line)]


def words(app: TopApp, which: str) -> str:
    return str(app.screen.query_one(which, Static).render())


def test_what_the_screen_shows(state_dir: StateDir) -> None:
    async def look_at_it() -> None:
        with Store(state_dir.store) as store:
            app = TopApp(LocalReader(store, state_dir), 0.1)
            async with app.run_test(size=(160, 40)) as pilot:
                await shown(app, pilot, lambda: len(names(app)) == 6)
                head = r"Pipollux  policy exact  goodput 870 samples/s  ○ no scheduler runs .*"
                assert re.fullmatch(head, words(app, "#head"))
                assert words(app, "#slots") == "Nodes: 4 of 6 slots used, 1 node not ready"
                assert cells(app, 0)[:9] == [
                    *("■ grown", "Running", "2×1", "node-a ×2", "1/4", "21", "2.50", "580", "92 %")
                ]
                assert names(app) == ["grown", "wide", "waiting", "held", "broken", "gone"]
                assert [cells(app, line)[1] for line in (3, 4, 5)] == [
                    *("Suspended", "Failed", "Cancelled")
                ]
                node = cells(app, 2, "#nodes")
                assert [node[0], *node[2:]] == ["node-c", "0 of 2", "0", "draining", "new fans"]
                assert set(cells(app, 0, "#nodes")[1]) & set("▁▂▃▄▅▆▇█")
                assert "grown: grows from 1 to 2 replicas" in words(app, "#events")
                job = spec("joining")
                store.submit(job.name, job.model_dump(mode="json"), "token", 3)
                await shown(app, pilot, lambda: "joining" in names(app))
                await pilot.press("down", "enter")
                await shown(app, pilot, lambda: isinstance(app.screen, JobScreen))
                await shown(app, pilot, lambda: "wide" in details(app))
                assert "Conditions" in details(app)
                assert "Slots held" in details(app)
                await pilot.press("escape", "n", "enter")
                await shown(app, pilot, lambda: isinstance(app.screen, NodeScreen))
                await shown(app, pilot, lambda: "2 slots of kind cpu, 0 free" in details(app))
                assert re.search(r"(?m)^grown +2\b", details(app))
                await pilot.press("q")
            assert app.return_code == 0

    asyncio.run(look_at_it())


def test_teams(state_dir: StateDir) -> None:
    teams = [{"name": "text", "quota": 2, "borrow": 3}, {"name": "vision", "quota": 4}]

    async def look_at_it() -> None:
        with Store(state_dir.store) as store:
            app = TopApp(LocalReader(store, state_dir), 0.1)
            async with app.run_test(size=(160, 40)) as pilot:
                await shown(app, pilot, lambda: len(names(app)) == 6)
                box = app.screen.query_one("#of-teams")
                assert not box.display
                store.teams.set_spec({"teams": teams, "default": "text"})
                store.teams.set_notices({"grown": time.time() + 3600})
                await shown(app, pilot, lambda: box.display)
                said = "Teams: 4 slots used; the quotas are 6 of 4 slots: each gets its part"
                assert words(app, "#quotas") == said  # a third node drains
                assert cells(app, 0, "#teams")[:8] == [
                    "text",
                    "2",
                    "4",
                    "2 of 3",
                    "0",
                    "2",
                    "4",
                    "1",
                ]
                assert "(in 5" in cells(app, 0, "#teams")[8]
                assert cells(app, 1, "#teams") == ["vision", "4", "0", "0", "2", "0", "0", "0", "–"]
                store.teams.set_spec(None)
                await shown(app, pilot, lambda: not box.display)

    asyncio.run(look_at_it())


@pytest.mark.exhaustive
def test_keys_that_are_typed_ahead(state_dir: StateDir) -> None:
    """Each goes to what the one before it has moved the focus to, however fast they come."""

    async def look_at_it() -> None:
        with Store(state_dir.store) as store:
            app = TopApp(LocalReader(store, state_dir), 0.1)

            def type_at_once(*keys: str) -> None:
                for key in keys:
                    app.post_message(Key(key, key if len(key) == 1 else None))

            async with app.run_test(size=(160, 40)) as pilot:
                await shown(app, pilot, lambda: len(names(app)) == 6)
                type_at_once("slash", *"wai", "enter", "s")
                await shown(app, pilot, lambda: names(app) == ["waiting"])
                assert app.query_one("#search", Input).value == "wai"
                type_at_once("escape", "n", "enter")
                await shown(app, pilot, lambda: isinstance(app.screen, NodeScreen))
                assert app.screen_stack[0].query_one("#search", Input).value == ""
                await pilot.press("q")
            assert app.return_code == 0

    asyncio.run(look_at_it())


@pytest.mark.exhaustive
def test_a_job_that_is_left_while_it_is_read(state_dir: StateDir) -> None:
    """Its screen's text goes first, then the screen, and a look may end in between."""
    read: list[str] = []

    class Noting(LocalReader):
        def job(self, name: str) -> JobDetails:
            read.append(name)
            return super().job(name)

    async def look_at_it() -> None:
        with Store(state_dir.store) as store:
            app = TopApp(Noting(store, state_dir), 0.1)
            async with app.run_test(size=(160, 40)) as pilot:
                await shown(app, pilot, lambda: len(names(app)) == 6)
                await pilot.press("enter")
                await shown(app, pilot, lambda: isinstance(app.screen, JobScreen))
                await app.screen.query_one("#details").remove()
                before = len(read)
                await shown(app, pilot, lambda: len(read) > before + 1)
                await pilot.press("escape", "q")
            assert app.return_code == 0

    asyncio.run(look_at_it())


def details(app: TopApp) -> str:
    console = Console(width=120)
    with console.capture() as capture:
        for found in app.screen.query("#details").results(Static):  # none at first
            console.print(found.content)
    return capture.get()


@pytest.mark.exhaustive
def test_many_jobs(tmp_path: Path) -> None:
    """Searched, filtered, sorted, scrolled to the last; no more are read than are looked at."""
    directory = StateDir(tmp_path)
    phases = crowd(directory.database, time.time(), num_jobs=300, num_nodes=24)

    async def look_at_it() -> None:
        with Store(directory.store) as store:
            app = TopApp(LocalReader(store, directory), 0.1)
            async with app.run_test(size=(80, 24)) as pilot:
                await shown(app, pilot, lambda: len(names(app)) == FIRST_JOBS)
                tabs = app.query_one("#phases", Tabs)
                assert tabs.query_one("#Queued", Tab).label_text == f"Queued {phases['Queued']}"
                assert not tabs.query_one("#Created", Tab).display
                while (many := len(names(app))) < 300:
                    await pilot.press("end")
                    await shown(app, pilot, lambda many=many: len(names(app)) > many)
                assert len(set(names(app))) == 300
                await pilot.press("s", "slash", *"gpt2-small-00")
                await shown(app, pilot, lambda: len(names(app)) == 20)
                assert names(app) == sorted(names(app))
                await pilot.press("enter", "r")
                await shown(app, pilot, lambda: names(app)[0] > names(app)[-1])
                await pilot.press("escape", "p")
                await shown(app, pilot, lambda: len(names(app)) == phases["Running"])
                await shown(app, pilot, lambda: app.query_one("#phases", Tabs).active == "Running")
                await shown(app, pilot, lambda: cells(app, 0)[1] == "Running")
                assert await pilot.click("#jobs", offset=(30, 0))  # the head of R×K
                await shown(app, pilot, lambda: cells(app, 0)[2] == "1×4")
                store.transition(names(app)[0], Suspend())
                gone = names(app)[0]
                await shown(app, pilot, lambda: gone not in names(app))
                await pilot.press("ctrl+c")
            assert app.return_code == 0

    asyncio.run(look_at_it())


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


def test_bars() -> None:
    assert bars([0, 0.01, 4, 8, 9], 8) == " ▁▄██"
    assert bars([], 8) == ""


def test_windows() -> None:
    assert [window_for(seconds) for seconds in (0, 61, 3600, 1e9)] == [60, 300, 3600, 604800]


@pytest.mark.exhaustive
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
    assert (grown["num_attempts"], grown["progress"]["step"]) == (2, 21)
    assert told["events"][-1]["type"] == "node"


def test_once_and_into_a_pipe(state_dir: StateDir, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["top"], ["top", "--once"]):
        with pytest.raises(SystemExit) as ended:
            main([*command, "--state-dir", str(state_dir.path)])
        said = capsys.readouterr()
        assert (ended.value.code, said.err) == (0, "")
        assert "\x1b" not in said.out
        assert said.out.startswith("Pipollux  policy exact")
        assert "Jobs: 2 running, 1 queued, 1 suspended, 1 failed, 1 cancelled\n" in said.out
        assert re.search(r"^grown +Running ", said.out, re.MULTILINE)
        assert re.search(r"^node-a .* grown \(2\) +ready ", said.out, re.MULTILINE)
        assert "Nodes: 4 of 6 slots used, 1 node not ready\n" in said.out
        assert "node node-c is draining: new fans\n" in said.out


@pytest.mark.exhaustive
def test_who_does_not_watch_does_not_import_what_draws() -> None:
    code = (
        "import sys, pipollux_sched.cli.top.command, pipollux_sched.cli.top.text\n"
        "print([name for name in ('textual', 'numpy') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


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


@pytest.mark.parametrize("way", first(1, ["\x03", "SIGTERM"]))
@pytest.mark.exhaustive
def test_leaving_restores_the_terminal(terminal: Terminal, way: str) -> None:
    first = terminal.read_until("grown")
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


@pytest.mark.exhaustive
def test_on_a_terminal(terminal: Terminal, state_dir: StateDir) -> None:
    """It starts, follows what happens, scrolls, takes the size that it is given, and ends."""
    terminal.read_until("(?s)(?=.*grown)(?=.*q quit)")
    with Store(state_dir.store) as store:
        for number in range(40):
            job = spec(f"joining-{number:02}")
            store.submit(job.name, job.model_dump(mode="json"), "token", 3)
    terminal.read_until("all 46")
    terminal.type("\x1b[F")  # End
    terminal.read_until("broken")
    terminal.resize(160, 40)
    terminal.read_until("Restarts")
    terminal.type("x\x1a")  # neither a key that means nothing nor Ctrl-Z disturbs it
    terminal.type("/-03")  # which is out of sight
    terminal.read_until("joining-03")
    terminal.type("\rq")
    terminal.read_until(r"\x1b\[\?1049l")
    assert terminal.process.wait(240) == 0
