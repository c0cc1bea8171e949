"""`pipollux suspend`, `resume`, `cancel` and `drain`, asked of a scheduler that runs real jobs."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from .runner import PIPOLLUX, TOY, Cli, one_sentence, wait_until


@pytest.fixture
def follow(cli: Cli) -> Iterator[Callable[[], subprocess.Popen[str]]]:
    """Starts `pipollux events --follow`, and sees to it that it ends."""
    started: list[subprocess.Popen[str]] = []

    def start() -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [PIPOLLUX, "events", "--follow", "--output", "json", "--last", "1"],
            cwd=cli.folder,
            env=cli.environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate(timeout=240)


@pytest.mark.exhaustive
def test_suspending_and_draining(cli: Cli, follow: Callable[[], subprocess.Popen[str]]) -> None:
    def both(field: str) -> set[Any]:
        return {
            tuple(job[field]) if field == "running_on" else job[field]
            for name, job in cli.jobs().items()
            if name in ("one", "two")
        }

    (cli.folder / "jobs.yaml").write_text(f"""
jobs:
  - {{name: one, script: {TOY}}}
  - {{name: two, script: {TOY}}}
""")
    cli.serve("--interval", "1")
    taken = json.loads(cli("submit", "jobs.yaml", "--output", "json").stdout)
    assert [job["name"] for job in taken] == ["one", "two"]
    wait_until(lambda: both("reason") == {"Training"})

    following = follow()
    assert following.stdout is not None
    begun = [following.stdout.readline()]  # it follows from here on
    refused = cli("suspend", "one", "nobody", "somebody", "two")
    assert [line.partition(";")[0] for line in refused.stderr.splitlines()] == [
        "Error: no job is named 'nobody'",
        "Error: no job is named 'somebody'",
    ]
    assert refused.stdout.splitlines() == [
        "one: The job was suspended by its user and is being stopped.",
        "two: The job was suspended by its user and is being stopped.",
    ]
    wait_until(lambda: both("phase") == {"Suspended"})
    assert cli.alive() == []

    (cli.folder / "quick.yaml").write_text(
        f'jobs:\n  - {{name: quick, script: {TOY}, args: [--steps, "2"]}}\n'
    )
    waited = cli("submit", "quick.yaml", "--wait", "--output", "json")
    assert [job["phase"] for job in json.loads(waited.stdout)] == ["Complete"]
    assert "quick: complete at step 2" in waited.stderr
    lines = cli("logs", "quick", "--output", "json").stdout.splitlines()
    wanted = {"attempt": 1, "replica": 0, "line": "replica 0 of attempt 1 goes on from step 0"}
    assert wanted in map(json.loads, lines)

    drained = cli("drain", "node-a", "--reason", "new fans", "--wait", "--timeout", "30s")
    assert drained.stdout == "node-a: draining; nothing runs there\n"
    resumed = cli("resume", "one", "two")
    assert resumed.stdout.splitlines()[0].startswith("one: The job was resumed")
    wait_until(lambda: both("reason") == {"Training"})
    assert both("running_on") == {("node-b",)}

    waiting = cli("drain", "node-b", "--wait", "--timeout", "0.1s")
    assert "node-b is not empty after" in waiting.stderr
    assert waiting.returncode == 1
    assert "node-b: waiting for one, two to leave" in waiting.stderr
    assert "one, two still hold slots;" in waiting.stderr
    undone = json.loads(cli("drain", "node-a", "--undo", "--output", "json").stdout)
    assert (undone["condition"], undone["name"]) == ("ready", "node-a")
    assert cli("drain", "node-b", "--dead", "--reason", "fire").returncode == 0
    wait_until(lambda: both("running_on") == {("node-a",)})
    assert "no node is named 'node-z'; there are" in one_sentence(cli("drain", "node-z"), 1)

    cancelled = cli("cancel", "one", "two", "--output", "json")
    assert [job["intent"] for job in json.loads(cancelled.stdout)] == ["cancel", "cancel"]
    wait_until(lambda: both("reason") == {"Cancelled"})
    refused = one_sentence(cli("resume", "quick"), 1)
    assert refused == ("Error: job 'quick' has ended (Complete, Finished) and cannot be resumed\n")
    assert "complete and cannot continue" in one_sentence(cli("rerun", "quick"), 1)
    again = cli("rerun", "quick", "--from-scratch")
    assert again.stdout == "quick: The job is run again, from the start.\n"
    wait_until(lambda: cli.jobs()["quick"]["ended_at"] is not None)
    assert cli.jobs()["quick"]["phase"] == "Complete"
    written = cli("logs", "quick", "--attempt", "2").stdout
    assert "replica 0 of attempt 2 goes on from step 0" in written
    assert "cannot ask for confirmation: give --yes" in one_sentence(cli("delete", "quick"), 2)
    assert cli("delete", "quick", "--yes").stdout == "quick: The job was deleted.\n"
    assert "quick" not in cli.jobs()
    assert not (cli.state_dir / "jobs" / "quick").exists()
    following.terminate()
    told = [*begun, *following.communicate(timeout=240)[0].splitlines()]
    events = [json.loads(line) for line in told]
    kinds = [event["type"] for event in events]
    assert kinds.count("suspended") == kinds.count("resumed") == 2
    assert [
        (event["node"], event["condition"], event["reason"])
        for event in events
        if event["type"] == "node"
    ] == [
        ("node-a", "draining", "new fans"),
        ("node-b", "draining", ""),
        ("node-a", "ready", ""),
        ("node-b", "dead", "fire"),
    ]
