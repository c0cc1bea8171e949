"""Streams, texts and worker processes in real jobs: stopped, killed, and started otherwise."""

from __future__ import annotations

import signal
from collections import Counter
from pathlib import Path

import psutil
import pytest

from tests.hybrid.elastic.elastic_training import EPOCHS, SIZE
from tests.hybrid.elastic.test_restart import Job, run_and_stop
from tests.programs import LIMIT, Replicas


@pytest.fixture
def job(tmp_path: Path, repository: Path) -> Job:
    return Job(tmp_path / "job", repository, Path(__file__).with_name("elastic_training.py"))


def kill_all(replicas: Replicas) -> list[psutil.Process]:
    """Kill a job's replicas; what they started themselves is left."""
    left = [w for program in replicas.programs for w in psutil.Process(program.pid).children()]
    replicas.send_signal(signal.SIGKILL)
    assert replicas.wait() == -signal.SIGKILL
    return left


@pytest.mark.exhaustive
@pytest.mark.parametrize("data", ["text", "stream-worker", "workers"])
def test_stopped_killed_and_restarted(job: Job, monkeypatch: pytest.MonkeyPatch, data: str) -> None:
    """From two replicas to one, killed there, and on with two: all once an epoch."""
    monkeypatch.setenv("DATA", data)
    run_and_stop(job, 2, 5)
    job.hold(20)
    with job.start(2, PIPOLLUX_CHECKPOINT_INTERVAL="0.001") as replicas:
        job.wait_until_held(replicas, 20, 2)
        left = kill_all(replicas)
    job.release(20)
    _, alive = psutil.wait_procs(left, timeout=LIMIT)
    assert not alive, "loaders' workers end with their replica"
    job.run(1)
    attempts = [job.rows(attempt) for attempt in (1, 2, 3)]
    assert all(attempts)
    # What came after the checkpoint that the next run began from is lost, and done again.
    begins = [min(row[0] for row in rows) for rows in attempts]
    assert begins[1] > 5
    assert begins[2] > begins[1]
    ends = [*begins[1:], 10**9]
    rows = [row for rows, end in zip(attempts, ends, strict=True) for row in rows if row[0] < end]
    for epoch in range(EPOCHS):
        taken = Counter(number for _, e, *numbers in rows if e == epoch for number in numbers)
        assert taken == Counter(range(SIZE))
    found = (job.results / "found-0.txt").read_text()
    assert found == f"{EPOCHS * sum(range(SIZE))} {EPOCHS * SIZE}"
