"""Whole runs of a script under torchrun, stopped and killed in the middle of an epoch."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from tests.extent import first
from tests.hybrid.elastic.training import EPOCHS, SIZE
from tests.hybrid.models import assert_close
from tests.programs import LIMIT, Command, Replicas, Started, free_port

SCRIPT = Path(__file__).with_name("training.py")


Running = Started | Replicas


class Job:
    """Attempts of one job in a directory."""

    def __init__(self, directory: Path, repository: Path, script: Path = SCRIPT) -> None:
        self.script = script
        self.results = directory / "results"
        self.checkpoints = directory / "checkpoints"
        self.results.mkdir(parents=True)
        self._repository = repository
        self.attempt = 0

    def start(self, num_replicas: int, **environment: str) -> Replicas:
        """Start the next attempt, in forked processes."""
        return Replicas(self.script, num_replicas, environment=self._environment(environment))

    def start_python(self, *options: str) -> Command:
        """Start the next attempt as a user does."""
        paths = filter(None, (str(self._repository), os.environ.get("PYTHONPATH")))
        env = self._environment({"PYTHONPATH": os.pathsep.join(paths)})
        return Command([sys.executable, *options, str(self.script)], env)

    def start_torchrun(self, num_replicas: int) -> Command:
        """Start the next attempt below a real agent."""
        launcher = ("-m", "torch.distributed.run", "--nnodes=1", "--master-addr=127.0.0.1")
        where = (f"--nproc-per-node={num_replicas}", f"--master-port={free_port()}")
        return self.start_python(*launcher, *where)

    def _environment(self, more: Mapping[str, str]) -> dict[str, str]:
        self.attempt += 1
        return {
            **os.environ,
            "RESULTS": str(self.results),
            "PIPOLLUX_CHECKPOINT_DIR": str(self.checkpoints),
            "PIPOLLUX_ATTEMPT": str(self.attempt),
            "OMP_NUM_THREADS": "1",
            **more,
        }

    def run(self, num_replicas: int, **environment: str) -> None:
        """Run to the end."""
        with self.start(num_replicas, **environment) as replicas:
            assert replicas.wait() == 0, replicas.errors

    def hold(self, step: int) -> None:
        """Have the replicas wait at a step."""
        (self.results / f"hold-{step}").touch()

    def wait_until_held(self, process: Running, step: int, num_replicas: int) -> None:
        self._wait_until("reached", process, step, num_replicas)

    def wait_until_asked(self, process: Running, step: int, num_replicas: int) -> None:
        """Wait until replicas that are held know that they are to stop."""
        self._wait_until("asked", process, step, num_replicas)

    def _wait_until(self, what: str, process: Running, step: int, num_replicas: int) -> None:
        deadline = time.monotonic() + LIMIT
        while len(list(self.results.glob(f"{what}-{step}-*"))) < num_replicas:
            assert process.poll() is None, process.errors
            assert time.monotonic() < deadline, f"step {step} was not {what}"
            time.sleep(0.01)

    def release(self, step: int) -> None:
        (self.results / f"hold-{step}").unlink()

    def marker(self) -> dict[str, object]:
        content: dict[str, object] = json.loads((self.checkpoints / "stopped.json").read_text())
        return content

    def rows(self, attempt: int) -> list[list[int]]:
        """Step, epoch and indices of each batch an attempt trained on."""
        rows = []
        for path in sorted(self.results.glob(f"samples-{attempt}-*.txt")):
            rows += [[int(word) for word in line.split()] for line in path.read_text().splitlines()]
        return rows

    def final(self) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = torch.load(self.results / "final.pt", weights_only=True)
        return state


@pytest.fixture
def job(tmp_path: Path, repository: Path) -> Job:
    return Job(tmp_path / "job", repository)


def stop(job: Job, process: Running, num_replicas: int, step: int) -> None:
    """Ask for a stop while a step is under way, and see it stop."""
    job.wait_until_held(process, step, num_replicas)
    process.send_signal(signal.SIGTERM)
    job.wait_until_asked(process, step, num_replicas)
    job.release(step)
    assert process.wait() != 0
    assert "training.py" not in process.errors, "only torchrun's agent says that it was signalled"
    for path in [*job.results.glob("reached-*"), *job.results.glob("asked-*")]:
        path.unlink()


def run_and_stop(job: Job, num_replicas: int, step: int) -> None:
    """Start the next attempt, and stop it while a step is under way."""
    job.hold(step)
    with job.start(num_replicas) as replicas:
        stop(job, replicas, num_replicas, step)


def samples(rows: list[list[int]], epoch: int) -> Counter[int]:
    return Counter(index for _, e, *indices in rows if e == epoch for index in indices)


@pytest.mark.parametrize("launcher", first(1, ["forked", "torchrun"]))
def test_stopped_and_resumed_as_if_nothing_had_been(
    job: Job, tmp_path: Path, repository: Path, launcher: str
) -> None:
    """Twice stopped by SIGTERM, with two replicas: same parameters, each sample once an epoch.

    Below torchrun it is the agent that is first sent the signal.
    """
    steady = Job(tmp_path / "steady", repository)
    steady.run(2)
    job.hold(8)
    with job.start_torchrun(2) if launcher == "torchrun" else job.start(2) as started:
        stop(job, started, 2, 8)
    markers = [job.marker()]
    run_and_stop(job, 2, 17)
    markers.append(job.marker())
    job.run(2)
    assert [marker["attempt"] for marker in markers] == [1, 2]
    assert 8 <= int(str(markers[0]["step"])) <= 10
    assert_close(job.final(), steady.final(), 0.0)
    rows = [row for attempt in (1, 2, 3) for row in job.rows(attempt)]
    steps = sorted({row[0] for row in rows})
    assert steps == list(range(1, len(steps) + 1)), "no step is left out or done twice"
    for epoch in range(EPOCHS):
        assert samples(rows, epoch) == Counter(range(SIZE))


@pytest.mark.exhaustive
def test_replicas_change_at_every_restart(job: Job) -> None:
    """From one replica to three and back to two, stopped in the middle of epochs."""
    run_and_stop(job, 1, 5)
    run_and_stop(job, 3, 20)
    job.run(2)
    rows = [row for attempt in (1, 2, 3) for row in job.rows(attempt)]
    assert {row[0] for row in rows} == set(range(1, EPOCHS * -(-SIZE // 7) + 1))
    for epoch in range(EPOCHS):
        assert samples(rows, epoch) == Counter(range(SIZE))


def test_killed_with_sigkill(job: Job, tmp_path: Path, repository: Path) -> None:
    """What was trained since the last periodic checkpoint is done again, to the same end."""
    steady = Job(tmp_path / "steady", repository)
    steady.run(1)
    job.hold(20)
    with job.start(1, PIPOLLUX_CHECKPOINT_INTERVAL="0.001") as replica:
        job.wait_until_held(replica, 20, 1)
        replica.send_signal(signal.SIGKILL)
        assert replica.wait() == -signal.SIGKILL
    job.release(20)
    job.run(1)
    assert_close(job.final(), steady.final(), 0.0)
    resumed = min(row[0] for row in job.rows(2))
    assert 1 < resumed <= 21, "it went on from a periodic checkpoint"


def test_a_signal_to_one_replica_stops_all_at_the_same_step(job: Job) -> None:
    job.hold(6)
    with job.start(2) as replicas:
        job.wait_until_held(replicas, 6, 2)
        replicas.programs[1].send_signal(signal.SIGTERM)
        job.wait_until_asked(replicas, 6, 1)
        job.release(6)
        assert [program.wait() for program in replicas.programs] == [128 + signal.SIGTERM] * 2
    last = {max(row[0] for row in _rows_of(job, rank)) for rank in (0, 1)}
    assert len(last) == 1, "both replicas took the same steps"
    assert job.marker()["step"] == last.pop()


def _rows_of(job: Job, rank: int) -> list[list[int]]:
    text = (job.results / f"samples-1-{rank}.txt").read_text()
    return [[int(word) for word in line.split()] for line in text.splitlines()]


@pytest.mark.exhaustive
def test_ctrl_c_stops_with_one_sentence_and_a_finished_job_has_nothing_to_do(job: Job) -> None:
    """A Python of its own, without a scheduler; what it leaves is trained to its end."""
    job.hold(3)
    with job.start_python() as process:
        job.wait_until_held(process, 3, 1)
        process.send_signal(signal.SIGINT)
        job.wait_until_asked(process, 3, 1)
        job.release(3)
        assert process.wait() == 128 + signal.SIGINT
        assert "pipollux: stopped at step" in process.errors
        assert "Traceback" not in process.errors
    job.run(1)
    job.run(1)
    assert job.rows(2)
    assert job.rows(3) == []
