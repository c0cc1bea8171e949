"""The tutorial, step by step: its files, its commands, and what it says that they print."""

from __future__ import annotations

import os
import re
import shlex
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from pipollux_sched.store import StateDir, Store
from tests.programs import LIMIT, PIPOLLUX, Command, Forked, Replicas, run_pipollux

GAINFUL = {
    "initBatchSize": 200,
    "maxBatchSize": 1600,
    "localBszBounds": [50, 800],
    "maxProfiledReplicas": 1,
    "gradParams": {"norm": 0.002, "var": 0.04},
    "perfParams": {"alpha_c": 0.02, "beta_c": 0.004, "gamma": 1.8}
    | dict.fromkeys(("alpha_n", "beta_n", "alpha_r", "beta_r"), 0.0),
    "numStages": 2,
}
"""What a job says of itself to whom two replicas are worth nearly twice as much as one."""


@dataclass(frozen=True)
class Step:
    """One block of the page: a file, a command with its output, or lines of the scheduler."""

    kind: str
    head: str
    lines: list[str]


def steps_of(page: str) -> Iterator[Step]:
    block = r"(?:<!-- file: (\S+) -->\n)?```(\w+)\n(.*?)```"
    for name, language, text in re.findall(block, page, re.DOTALL):
        if name:
            yield Step("file", name, [text])
        elif language == "text":
            yield Step("told", "", text.splitlines())
        else:
            for part in re.split(r"^(?=\$ |\^C)", text, flags=re.MULTILINE)[1:]:
                first, *output = part.splitlines()
                yield Step("command", first.removeprefix("$ "), output)


def shape(line: str) -> str:
    """Return a line without what differs from run to run: numbers, paths, links, which node."""
    line = re.sub(r"(?<=after a pause of )[\d.]+ (?:ms|s)", "#", line)
    line = re.sub(r"/home/\S+?(?=\.? )|/\S+/state(?=\.? )", "PATH", line)
    line = re.sub(r"(?<=^Watch it at )\S+?/( with the token in |#).*", "LINK", line)
    line = re.sub(r"node-[ab]", "NODE", line)
    line = re.sub(r"(?:\d+(?:ms|[hms]))+\b", "#", line)
    return " ".join(re.sub(r"\d+(?:[.:]\d+)*(?:e[-+]?\d+)?|–", "#", line).split())


def prints(output: str, shown: list[str]) -> bool:
    """Whether this is what is shown, where `…` stands for any lines."""
    rows = [row for line in shown if (row := shape(line))]
    pattern = "".join(r"(?:.*\n)*?" if row == "…" else re.escape(row) + "\n" for row in rows)
    printed = [row for line in output.splitlines() if (row := shape(line))]
    return re.fullmatch(pattern, "".join(f"{row}\n" for row in printed)) is not None


def wait_until(true: Callable[[], bool], say: Callable[[], str]) -> None:
    deadline = time.monotonic() + LIMIT
    while not true():
        assert time.monotonic() < deadline, say()
        time.sleep(0.1)


class Reader:
    """Somebody who does what the page says, in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.state = folder, folder / "state"
        self.environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PIPOLLUX_STATE_DIR": str(self.state),
        }
        self.scheduler: Command | None = None
        self._seen: list[str] = []

    def do(self, step: Step) -> None:
        if step.kind == "file":
            (self.folder / step.head).write_text(step.lines[0])
        elif step.kind == "told":
            self.wait_for(step.lines)
        elif step.head == "^C":
            self.interrupt(step.lines)
        else:
            self.run(shlex.split(step.head), step.lines)

    def run(self, words: list[str], shown: list[str]) -> None:
        environment = dict(self.environment)
        while "=" in words[0]:
            name, _, value = words.pop(0).partition("=")
            environment[name] = value
        program, *args = words
        if program == "python":
            self.train(Forked(self.folder / args[0], args[1:], environment, self.folder), shown)
        elif program == "torchrun":
            assert args.pop(0) == "--nproc-per-node"
            count, script = int(args.pop(0)), self.folder / args.pop(0)
            self.train(Replicas(script, count, args, environment, self.folder), shown)
        elif args[0] == "serve":
            self.serve(args, shown)
        else:
            result = run_pipollux(*args, environment=environment, folder=self.folder)
            assert result.returncode == 0, result.stderr
            assert not shown or prints(result.stdout, shown), result.stdout

    def train(self, job: Forked | Replicas, shown: list[str]) -> None:
        with job:
            assert job.wait() == 0, job.errors
            assert prints(job.output, shown), job.output

    def serve(self, args: list[str], shown: list[str]) -> None:
        # Jobs tell nothing of their speed by themselves: what they measure here is up to chance.
        command = [str(PIPOLLUX), *args, "--hints-interval", "3600"]
        self.scheduler = scheduler = Command(command, self.environment, self.folder)
        wait_until(lambda: prints(scheduler.output, shown), lambda: scheduler.errors)
        self._seen = [shape(line) for line in scheduler.output.splitlines()]
        url = re.findall(r"at (http://\S+),", scheduler.output)[0]
        assert "<html" in httpx.get(f"{url}/", trust_env=False, timeout=LIMIT).text

    def wait_for(self, lines: list[str]) -> None:
        """Wait until the scheduler has told all these, in any order, and after those before."""
        scheduler = self.scheduler
        assert scheduler is not None
        wanted = [shape(line) for line in lines]

        def left() -> list[str]:
            told = [shape(line) for line in scheduler.output.splitlines()]
            for row in [*self._seen, *wanted]:
                if row in told:
                    told.remove(row)
                else:
                    return [row]
            return []

        wait_until(lambda: not left(), lambda: f"{left()} is not in {scheduler.output}")
        self._seen += wanted
        if any("training since step" in line for line in lines):
            self.tell_hints()

    def tell_hints(self) -> None:
        """Tell the scheduler that the first job gains from replicas, whatever it measures."""
        server = StateDir(self.state).read_server()
        assert server is not None
        client = httpx.Client(
            base_url=server.url,
            headers={"Authorization": f"Bearer {server.token}"},
            trust_env=False,
            timeout=LIMIT,
        )
        with client:
            attempt = client.get("/jobs/spirals").json()["attempt"]
            client.put(f"/jobs/spirals/hints?attempt={attempt}", json=GAINFUL).raise_for_status()

    def interrupt(self, shown: list[str]) -> None:
        assert self.scheduler is not None
        self.scheduler.send_signal(signal.SIGINT)
        assert self.scheduler.wait() == 0, self.scheduler.errors
        assert prints(self.scheduler.output, ["…", *shown, "…"]), self.scheduler.output

    def close(self) -> None:
        if self.scheduler is not None:
            with self.scheduler:
                self.scheduler.send_signal(signal.SIGTERM)
                self.scheduler.wait()


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    reader = Reader(tmp_path)
    yield reader
    reader.close()


@pytest.mark.exhaustive
def test_every_step_of_the_tutorial(reader: Reader, repository: Path) -> None:
    """What the job says of its speed is given, so that it grows and shrinks by construction."""
    page = (repository / "docs/start/tutorial.md").read_text()
    steps = list(steps_of(page))
    commands = [step.head for step in steps if step.kind == "command"]
    assert len(commands) >= 12, "the page is read as a whole"
    for step in steps:
        reader.do(step)
    told = reader.scheduler.output if reader.scheduler else ""
    report = (reader.folder / "report.html").read_text()
    assert "spirals" in report
    begun = re.findall(r"spirals: training since step (\d+)", told)
    assert begun == ["1"], "it grew and shrank without a restart"
    with Store(StateDir(reader.state).database) as store:
        reports = store.events(job="spirals", types=["progress"])
    steps = [report["step"] for report in reports]
    assert steps == sorted(set(steps)), "no step is done twice"


def test_the_output_shown_is_told_from_another() -> None:
    """The comparison sees a word that differs, a line too many, and one that is missing."""
    shown = ["spirals: grows from 1 to 2 replicas", "…", "Job  Loss  41s"]
    assert prints("spirals: grows from 1 to 2 replicas\nx\ny\nJob Loss 3m02s\n", shown)
    assert not prints("spirals: shrinks from 1 to 2 replicas\nJob Loss 1s\n", shown)
    assert not prints("spirals: grows from 1 to 2 replicas\nJob Loss 1s\nmore\n", shown)
    assert not prints("Job Loss 1s\n", shown)
