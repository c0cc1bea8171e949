"""Streams, texts and worker processes in real jobs: stopped, killed, and started otherwise."""

from __future__ import annotations

import subprocess
from collections import Counter
from pathlib import Path

import psutil
import pytest

from tests.hybrid import test_restart
from tests.hybrid.elastic_training import EPOCHS, SIZE
from tests.hybrid.test_restart import LIMIT, Job, stop


@pytest.fixture
def job(tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    monkeypatch.setattr(test_restart, "SCRIPT", Path(__file__).with_name("elastic_training.py"))
    return Job(tmp_path / "job", repository)


def kill_all(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """Kill a job's agent and replicas without a word; what they started themselves is left."""
    replicas = [p for p in psutil.Process(process.pid).children() if "training" in str(p.cmdline())]
    left = [worker for replica in replicas for worker in replica.children()]
    process.kill()
    for replica in replicas:
        replica.kill()
    process.communicate(timeout=LIMIT)
    return left


@pytest.mark.parametrize("data", ["workers", "stream-worker", "text"])
def test_stopped_killed_and_restarted(job: Job, monkeypatch: pytest.MonkeyPatch, data: str) -> None:
    """From two replicas to one, killed there, and on with two: all once an epoch."""
    monkeypatch.setenv("DATA", data)
    stop(job, 2, 5)
    job.hold(20)
    monkeypatch.setenv("PIPOLLUX_CHECKPOINT_INTERVAL", "0.001")
    process = job.start(2)
    job.wait_until_held(process, 20, 2)
    left = kill_all(process)
    job.release(20)
    _, alive = psutil.wait_procs(left, timeout=LIMIT)
    assert not alive, "loaders' workers end with their replica"
    monkeypatch.delenv("PIPOLLUX_CHECKPOINT_INTERVAL")
    job.run(1)
    generations = [job.rows(generation) for generation in (1, 2, 3)]
    assert all(generations)
    # What came after the checkpoint that the next run began from is lost, and done again.
    begins = [min(row[0] for row in rows) for rows in generations]
    assert begins[1] > 5
    assert begins[2] > begins[1]
    ends = [*begins[1:], 10**9]
    rows = [
        row for rows, end in zip(generations, ends, strict=True) for row in rows if row[0] < end
    ]
    for epoch in range(EPOCHS):
        taken = Counter(number for _, e, *numbers in rows if e == epoch for number in numbers)
        assert taken == Counter(range(SIZE))
    found = (job.results / "found-0.txt").read_text()
    assert found == f"{EPOCHS * sum(range(SIZE))} {EPOCHS * SIZE}"
