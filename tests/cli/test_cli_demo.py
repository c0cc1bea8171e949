"""`pipollux demo`: to the end, and interrupted half-way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.programs import run_pipollux
from tests.sched.processes import processes_of
from tests.sched.report.page import charts
from tests.sched.scripts import TOY

PROGRAM = str(Path(sys.executable).with_name("pipollux"))
LIMIT = 500.0


Jobs = list[dict[str, Any]]

TWICE_AS_FAST: dict[str, Any] = {
    "initBatchSize": 32,
    "maxBatchSize": 1024,
    "localBszBounds": [8, 128],
    "maxProfiledReplicas": 2,
    "gradParams": {"norm": 0.002, "var": 0.04},
    "perfParams": {"alpha_c": 0.02, "beta_c": 0.004, "gamma": 1.8}
    | dict.fromkeys(("alpha_n", "beta_n", "alpha_r", "beta_r"), 0.0),
    "numStages": 2,
}
"""What a job says of itself to whom two replicas are worth as much as two can be."""


class Run:
    """One demonstration of other jobs than the real one's.

    Args:
        folder: where it writes.
        repository: where the examples are.
        change: changes the jobs of `demo-jobs.yaml`, in place.
    """

    def __init__(self, folder: Path, repository: Path, change: Callable[[Jobs], None]) -> None:
        examples = folder / "examples"
        examples.mkdir(parents=True)
        source = repository / "examples"
        (examples / "demo-cluster.yaml").write_text((source / "demo-cluster.yaml").read_text())
        jobs = yaml.safe_load((source / "demo-jobs.yaml").read_text())
        for job in jobs["jobs"]:
            job["script"] = str(source / job["script"])
        change(jobs["jobs"])
        (examples / "demo-jobs.yaml").write_text(yaml.safe_dump(jobs))
        self.output = folder / "report"
        self.command = [
            *(PROGRAM, "demo", "--folder", str(self.output), "--examples", str(examples)),
            *("--seconds-alone", "8"),
        ]
        self._log = (folder / "output.txt").open("w+")
        self.result = folder / "result.txt"
        """What a demonstration printed that was to print its result as data."""
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *, as_json: bool = False) -> subprocess.Popen[bytes]:
        command = [*self.command, "--output", "json"] if as_json else self.command
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
            self.process.wait(240)
        self._log.close()


@pytest.fixture
def start(tmp_path: Path, repository: Path) -> Iterator[Callable[[Callable[[Jobs], None]], Run]]:
    """Prepare demonstrations, which end with the test."""
    with ExitStack() as runs:

        def prepare(change: Callable[[Jobs], None]) -> Run:
            demonstration = Run(tmp_path / "demo", repository, change)
            runs.callback(demonstration.close)
            return demonstration

        yield prepare


def become_toy(job: dict[str, Any], *args: str) -> None:
    """Have a job count steps instead of training, in one process a replica."""
    job.update(script=str(TOY), args=list(args), process_per_stage=False)


def of(events: list[dict[str, Any]], kind: str, job: str) -> list[dict[str, Any]]:
    return [event for event in events if event["type"] == kind and event["job"] == job]


def ended_well(run: Run) -> list[dict[str, Any]]:
    """Run a demonstration to its end; the events, of which all is told."""
    assert run.start(as_json=True).wait(LIMIT) == 0, run.printed()
    assert json.loads(run.result.read_text()) == {
        "complete": True,
        "report": str(run.output / "report.html"),
        "events": str(run.output / "events.jsonl"),
        "state_dir": str(run.output / "state"),
    }
    events = run.events()
    for job in ("char-lm", "digits"):
        assert len(of(events, "complete", job)) == 1
        losses = [event["loss"] for event in of(events, "progress", job) if event["loss"]]
        assert losses[-1] < losses[0]
        steps = [event["step"] for event in of(events, "progress", job)]
        assert steps == sorted(set(steps)), "no step is told twice"
    report = (run.output / "report.html").read_text()
    assert "char-lm" in report
    assert "digits" in report
    assert processes_of(run.output / "state") == []
    return events


@pytest.mark.exhaustive
def test_two_jobs_to_the_end(start: Callable[..., Run], tmp_path: Path) -> None:
    """The pipeline ends on two replicas, its steps go on; the other job trains; all is told.

    The pipeline says of itself that two replicas are twice as fast, and does not end before.
    """
    hints = tmp_path / "hints.json"
    hints.write_text(json.dumps(TWICE_AS_FAST))

    def change(jobs: Jobs) -> None:
        digits, char_lm = jobs
        digits["args"] = ["--epochs", "4"]
        become_toy(char_lm, "--steps", "10", "--hints", str(hints), "--ends-on", "2")
        char_lm["max_replicas"] = 2

    run = start(change)
    events = ended_well(run)
    allocations = [
        (event["num_replicas"], sorted(event["nodes"]))
        for event in of(events, "allocated", "char-lm")
    ]
    assert allocations[0][0] == 1
    assert allocations[-1] == (2, ["node-a", "node-b"]), "a replica fills a node"
    stopped = of(events, "stopped", "char-lm")[-1]["step"]
    assert of(events, "first_step", "char-lm")[-1]["step"] == stopped + 1
    assert of(events, "hints", "char-lm")[-1]["hints"]["numStages"] == 2
    assert of(events, "hints", "digits")
    assert "grows from 1 to 2 replicas" in run.printed()


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
def test_the_jobs_of_the_real_demonstration(start: Callable[..., Run]) -> None:
    """Both train, on less data; who has how many replicas when is up to what they measure.

    Whenever digits gets others, one of them trains on: its loss has no gap.
    """
    characters = 240_000

    def change(jobs: Jobs) -> None:
        jobs[0]["args"] = ["--epochs", "30"]
        jobs[1]["args"] = ["--epochs", "2", "--characters", str(characters)]

    run = start(change)
    events = ended_well(run)
    later = of(events, "allocated", "digits")[1:]
    assert [event["elastic"] for event in later] == [True] * len(later)
    assert len(of(events, "first_step", "digits")) == 1
    loss = charts((run.output / "report.html").read_text())["loss-0-by-time"]
    assert (loss["bands"], len(loss["panels"][0]["lines"][0]["pieces"])) == ([], 1)
    changes = of(events, "changed", "digits")
    assert run.printed().count("digits: resized: ") == len(changes)
    samples = of(events, "progress", "char-lm")[-1]["samples"]
    windows = (characters - 1) // 64
    held_out = windows // 20
    assert samples == 2 * (windows - held_out), "every sample once in each of two epochs"
    assert of(events, "hints", "char-lm")[-1]["hints"]["numStages"] == 2
    assert of(events, "timeline", "char-lm")


def interrupted(run: Run, number: signal.Signals) -> dict[str, Any]:
    """Interrupt a demonstration, and see that all has ended; the job, as its store tells."""
    process = run.process
    assert process is not None
    os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
    assert process.wait(LIMIT) == 1
    assert processes_of(run.output / "state") == []
    assert "Traceback" not in run.printed()
    assert (run.output / "report.html").exists()
    listed = subprocess.run(
        [PROGRAM, "jobs", "--state-dir", str(run.output / "state"), "--output", "json"],
        capture_output=True,
        text=True,
        check=True,
    )
    jobs: dict[str, Any] = {job["name"]: job for job in json.loads(listed.stdout)}
    return jobs["char-lm"]  # type: ignore[no-any-return]  # decoded JSON


@pytest.mark.exhaustive
def test_interrupted_and_run_again(start: Callable[..., Run]) -> None:
    """A signal ends every process; the store can be read; the next demonstration begins.

    While one runs, no other may use its folder.
    """

    def change(jobs: Jobs) -> None:
        for job in jobs:
            become_toy(job)

    run = start(change)
    run.start()
    run.wait_for("first_step", "char-lm")
    second = subprocess.run(run.command, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert second.returncode == 1
    assert "another demonstration runs in" in second.stderr
    job = interrupted(run, signal.SIGINT)
    assert job["phase"] == "Suspended"
    assert job["progress"]["step"] > 0
    (run.output / "events.jsonl").unlink()  # so that only the next one's are waited for
    run.start()
    run.wait_for("first_step", "char-lm", step=1)
    assert interrupted(run, signal.SIGTERM)["phase"] == "Suspended"


def test_missing_examples(tmp_path: Path) -> None:
    failed = run_pipollux("demo", "--examples", tmp_path / "none")
    assert failed.returncode == 2
    assert "none/demo-cluster.yaml" in failed.stderr
