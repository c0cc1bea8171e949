"""Whole runs of a script under torchrun, stopped and killed in the middle of an epoch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest
import torch

from tests.hybrid.models import assert_close
from tests.hybrid.replicas import free_port
from tests.hybrid.training import EPOCHS, SIZE

SCRIPT = Path(__file__).with_name("training.py")
LIMIT = 90.0


class Job:
    """Generations of one job in a directory."""

    def __init__(self, directory: Path, repository: Path) -> None:
        self.results = directory / "results"
        self.checkpoints = directory / "checkpoints"
        self.results.mkdir(parents=True)
        self._repository = repository
        self.generation = 0

    def start(self, num_replicas: int, **environment: str) -> subprocess.Popen[str]:
        self.generation += 1
        env = {
            **os.environ,
            "RESULTS": str(self.results),
            "PIPOLLUX_CHECKPOINT_DIR": str(self.checkpoints),
            "PIPOLLUX_GENERATION": str(self.generation),
            "PYTHONPATH": os.pathsep.join(
                filter(None, (str(self._repository), os.environ.get("PYTHONPATH")))
            ),
            "OMP_NUM_THREADS": "1",
            **environment,
        }
        command = [sys.executable, str(SCRIPT)]
        if num_replicas > 1:
            command[1:1] = [
                *("-m", "torch.distributed.run", "--nnodes=1", "--master-addr=127.0.0.1"),
                *(f"--nproc-per-node={num_replicas}", f"--master-port={free_port()}"),
            ]
        return subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)

    def run(self, num_replicas: int, **environment: str) -> None:
        """Run to the end."""
        process = self.start(num_replicas, **environment)
        _, errors = process.communicate(timeout=LIMIT)
        assert process.returncode == 0, errors

    def hold(self, step: int) -> None:
        """Have the replicas wait at a step."""
        (self.results / f"hold-{step}").touch()

    def wait_until_held(self, process: subprocess.Popen[str], step: int, num_replicas: int) -> None:
        deadline = time.monotonic() + LIMIT
        while len(list(self.results.glob(f"reached-{step}-*"))) < num_replicas:
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < deadline, f"step {step} was not reached"
            time.sleep(0.01)

    def release(self, step: int) -> None:
        (self.results / f"hold-{step}").unlink()

    def marker(self) -> dict[str, object]:
        content: dict[str, object] = json.loads((self.checkpoints / "stopped.json").read_text())
        return content

    def rows(self, generation: int) -> list[list[int]]:
        """Step, epoch and indices of each batch a generation trained on."""
        rows = []
        for path in sorted(self.results.glob(f"samples-{generation}-*.txt")):
            rows += [[int(word) for word in line.split()] for line in path.read_text().splitlines()]
        return rows

    def final(self) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = torch.load(self.results / "final.pt", weights_only=True)
        return state


@pytest.fixture
def job(tmp_path: Path, repository: Path) -> Job:
    return Job(tmp_path / "job", repository)


def stop(job: Job, num_replicas: int, step: int, number: signal.Signals = signal.SIGTERM) -> None:
    """Run until a step, ask for a stop while the step is under way, and see it stop."""
    job.hold(step)
    process = job.start(num_replicas)
    job.wait_until_held(process, step, num_replicas)
    process.send_signal(number)
    job.release(step)
    _, errors = process.communicate(timeout=LIMIT)
    assert process.returncode != 0
    assert "training.py" not in errors, "only torchrun's agent says that it was signalled"
    for path in job.results.glob("reached-*"):
        path.unlink()


def samples(rows: list[list[int]], epoch: int) -> Counter[int]:
    return Counter(index for _, e, *indices in rows if e == epoch for index in indices)


def test_stopped_and_resumed_as_if_nothing_had_been(
    job: Job, tmp_path: Path, repository: Path
) -> None:
    """Twice stopped by SIGTERM, with two replicas: same parameters, each sample once an epoch."""
    steady = Job(tmp_path / "steady", repository)
    steady.run(2)
    stop(job, 2, 8)
    first = job.marker()
    stop(job, 2, 25)
    second = job.marker()
    job.run(2)
    assert first["generation"] == 1
    assert second["generation"] == 2
    assert 8 < int(str(first["step"])) < 12
    assert_close(job.final(), steady.final(), 0.0)
    rows = [row for generation in (1, 2, 3) for row in job.rows(generation)]
    steps = sorted({row[0] for row in rows})
    assert steps == list(range(1, len(steps) + 1)), "no step is left out or done twice"
    for epoch in range(EPOCHS):
        assert samples(rows, epoch) == Counter(range(SIZE))


def test_replicas_change_at_every_restart(job: Job) -> None:
    """From one replica to three and back to two, stopped in the middle of epochs."""
    stop(job, 1, 5)
    stop(job, 3, 20)
    job.run(2)
    rows = [row for generation in (1, 2, 3) for row in job.rows(generation)]
    assert {row[0] for row in rows} == set(range(1, EPOCHS * -(-SIZE // 7) + 1))
    for epoch in range(EPOCHS):
        assert samples(rows, epoch) == Counter(range(SIZE))


def test_killed_with_sigkill(job: Job, tmp_path: Path, repository: Path) -> None:
    """What was trained since the last periodic checkpoint is done again, to the same end."""
    steady = Job(tmp_path / "steady", repository)
    steady.run(1)
    job.hold(20)
    process = job.start(1, PIPOLLUX_CHECKPOINT_INTERVAL="0.001")
    job.wait_until_held(process, 20, 1)
    process.kill()
    process.communicate(timeout=LIMIT)
    job.release(20)
    job.run(1)
    assert_close(job.final(), steady.final(), 0.0)
    resumed = min(row[0] for row in job.rows(2))
    assert 1 < resumed <= 21, "it went on from a periodic checkpoint"


def test_a_signal_to_one_replica_stops_all_at_the_same_step(job: Job) -> None:
    job.hold(6)
    process = job.start(2)
    job.wait_until_held(process, 6, 2)
    workers = [
        p for p in psutil.Process(process.pid).children() if "training.py" in str(p.cmdline())
    ]
    assert len(workers) == 2
    workers[1].send_signal(signal.SIGTERM)
    job.release(6)
    process.communicate(timeout=LIMIT)
    last = {max(row[0] for row in _rows_of(job, rank)) for rank in (0, 1)}
    assert len(last) == 1, "both replicas took the same steps"
    assert job.marker()["step"] == last.pop()


def _rows_of(job: Job, rank: int) -> list[list[int]]:
    text = (job.results / f"samples-1-{rank}.txt").read_text()
    return [[int(word) for word in line.split()] for line in text.splitlines()]


def test_ctrl_c_without_a_scheduler_stops_with_one_sentence(job: Job) -> None:
    job.hold(3)
    process = job.start(1)
    job.wait_until_held(process, 3, 1)
    process.send_signal(signal.SIGINT)
    job.release(3)
    _, errors = process.communicate(timeout=LIMIT)
    assert process.returncode == 128 + signal.SIGINT
    assert "pipollux: stopped at step" in errors
    assert "Traceback" not in errors


def test_a_finished_job_has_nothing_left_to_do(job: Job) -> None:
    job.run(1)
    rows = len(job.rows(1))
    job.run(1)
    assert rows > 0
    assert job.rows(2) == []
