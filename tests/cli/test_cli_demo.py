"""`pipollux demo` with real training jobs: to the end, and interrupted half-way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.sched.processes import processes_of

PROGRAM = str(Path(sys.executable).with_name("pipollux"))
LIMIT = 240.0


class Run:
    """One demonstration with shorter jobs than the real one's."""

    def __init__(self, folder: Path, repository: Path, characters: int = 240_000) -> None:
        examples = folder / "examples"
        examples.mkdir(parents=True)
        source = repository / "examples"
        (examples / "demo-cluster.yaml").write_text((source / "demo-cluster.yaml").read_text())
        jobs = yaml.safe_load((source / "demo-jobs.yaml").read_text())
        shorter = [["--epochs", "2", "--characters", str(characters)], ["--epochs", "8"]]
        for job, args in zip(jobs["jobs"], shorter, strict=True):
            job["script"], job["args"] = str(source / job["script"]), args
        (examples / "demo-jobs.yaml").write_text(yaml.safe_dump(jobs))
        self.output = folder / "report"
        self._command = [
            *(PROGRAM, "demo", "--folder", str(self.output), "--examples", str(examples)),
            *("--steps-alone", "15"),
        ]
        self._log = (folder / "output.txt").open("w+")
        self.result = folder / "result.txt"
        """What a demonstration printed that was to print its result as data."""
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *, as_json: bool = False) -> subprocess.Popen[bytes]:
        command = [*self._command, "--output", "json"] if as_json else self._command
        with ExitStack() as files:
            result = files.enter_context(self.result.open("w")) if as_json else self._log
            self.process = subprocess.Popen(
                command, stdout=result, stderr=self._log, start_new_session=True
            )
        return self.process

    def events(self) -> list[dict[str, Any]]:
        path = self.output / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def wait_for(self, kind: str, job: str, **fields: object) -> None:
        """Wait until an event was logged."""
        assert self.process is not None
        deadline = time.monotonic() + LIMIT
        wanted = {"type": kind, "job": job, **fields}.items()
        while not any(wanted <= event.items() for event in self.events()):
            assert self.process.poll() is None, self.printed()
            assert time.monotonic() < deadline, f"no {kind} of {job}: {self.printed()}"
            time.sleep(0.1)

    def printed(self) -> str:
        self._log.flush()
        return Path(self._log.name).read_text()

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            self.process.wait(60)
        self._log.close()


@pytest.fixture
def run(tmp_path: Path, repository: Path) -> Iterator[Run]:
    demonstration = Run(tmp_path / "first", repository)
    yield demonstration
    demonstration.close()


def of(events: list[dict[str, Any]], kind: str, job: str) -> list[dict[str, Any]]:
    return [event for event in events if event["type"] == kind and event["job"] == job]


@pytest.mark.timeout(300)
def test_two_jobs_to_the_end(run: Run) -> None:
    """The pipeline grows from one replica to two, its steps go on, its loss falls; all is told."""
    assert run.start(as_json=True).wait(LIMIT) == 0, run.printed()
    assert json.loads(run.result.read_text()) == {
        "complete": True,
        "report": str(run.output / "report.html"),
        "events": str(run.output / "events.jsonl"),
        "state_dir": str(run.output / "state"),
    }
    events = run.events()
    allocations = [
        (event["num_replicas"], event["nodes"]) for event in of(events, "allocated", "char-lm")
    ]
    assert allocations[0][0] == 1
    # Whether it stays there, or grows again, depends on what it measures on these few cores.
    widest = max(allocations, key=lambda allocation: allocation[0])
    assert widest[0] == 2
    assert sorted(widest[1]) == ["node-a", "node-b"], "a replica fills a node"
    stopped = of(events, "stopped", "char-lm")[-1]["step"]
    assert of(events, "first_step", "char-lm")[-1]["step"] == stopped + 1
    for job in ("char-lm", "digits"):
        assert len(of(events, "complete", job)) == 1
        losses = [event["loss"] for event in of(events, "progress", job) if event["loss"]]
        assert losses[-1] < losses[0]
        steps = [event["step"] for event in of(events, "progress", job)]
        assert steps == sorted(set(steps)), "no step is told twice"
    samples = of(events, "progress", "char-lm")[-1]["samples"]
    windows = (240_000 - 1) // 64
    held_out = windows // 20
    assert samples == 2 * (windows - held_out), "every sample once in each of two epochs"
    assert of(events, "hints", "char-lm")[-1]["hints"]["numStages"] == 2
    assert of(events, "timeline", "char-lm")
    report = (run.output / "report.html").read_text()
    assert "char-lm" in report
    assert "digits" in report
    assert "grows from 1 to 2 replicas" in run.printed()
    assert processes_of(run.output / "state") == []


@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_and_run_again(run: Run, number: signal.Signals) -> None:
    """A signal ends every process; the store can be read; the next demonstration begins."""
    process = run.start()
    run.wait_for("first_step", "digits")
    os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
    assert process.wait(60) == 1
    assert processes_of(run.output / "state") == []
    assert "Traceback" not in run.printed()
    assert (run.output / "report.html").exists()
    listed = subprocess.run(
        [PROGRAM, "jobs", "--state-dir", str(run.output / "state"), "--output", "json"],
        capture_output=True,
        text=True,
        check=True,
    )
    jobs = {job["name"]: job for job in json.loads(listed.stdout)}
    assert jobs["char-lm"]["phase"] == "Suspended"
    assert jobs["char-lm"]["progress"]["step"] > 0
    (run.output / "events.jsonl").unlink()  # so that only the next one's are waited for
    process = run.start()
    run.wait_for("first_step", "char-lm", step=1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 1
    assert processes_of(run.output / "state") == []


def test_missing_examples_and_a_busy_folder(run: Run, tmp_path: Path) -> None:
    failed = subprocess.run(
        [PROGRAM, "demo", "--examples", str(tmp_path / "none")], capture_output=True, text=True
    )
    assert failed.returncode == 2
    assert "none/demo-cluster.yaml" in failed.stderr
    process = run.start()
    run.wait_for("cluster", None)
    second = subprocess.run(
        [*run._command], capture_output=True, text=True, timeout=60, check=False
    )
    assert second.returncode == 1
    assert "another demonstration runs in" in second.stderr
    process.send_signal(signal.SIGTERM)
    process.wait(60)
