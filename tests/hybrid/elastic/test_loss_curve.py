"""A job that is stopped and cut again, over and over, has the loss curve of one that is not."""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path

import pytest

from tests.programs import Replicas

SCRIPT = Path(__file__).with_name("curve.py")
NUM_STEPS = 4 * 12

# Stages, replicas, micro-batches, checkpoint mode, and the step at which a replica is told to stop.
Run = tuple[int, int, int, str, int]
RUNS: list[Run] = [
    (2, 1, 2, "except_last", 5),
    (1, 3, 4, "never", 13),
    (4, 2, 3, "always", 20),
    (3, 1, 8, "except_last", 27),
    (2, 3, 1, "always", 39),
    (3, 2, 2, "never", 0),
]


def run(directory: Path, attempt: int, shape: Run) -> int:
    """One attempt of the job; its exit status."""
    stages, replicas, microbatches, mode, stop_at = shape
    env = {
        **os.environ,
        "RESULTS": str(directory),
        "PIPOLLUX_CHECKPOINT_DIR": str(directory / "checkpoints"),
        "PIPOLLUX_ATTEMPT": str(attempt),
        "PIPOLLUX_NUM_STAGES": str(stages),
        "PIPOLLUX_PROGRESS": "0",
        "OMP_NUM_THREADS": "1",
        "MICROBATCHES": str(microbatches),
        "MODE": mode,
        "STOP_AT": str(stop_at),
    }
    with Replicas(SCRIPT, replicas, environment=env) as programs:
        status = programs.wait()
        assert stop_at > 0 or status == 0, programs.errors
    return status


def curve(directory: Path) -> dict[int, float]:
    """The mean loss of each step over all replicas; each sample once."""
    sums: dict[int, float] = defaultdict(float)
    counts: dict[int, int] = defaultdict(int)
    for path in directory.glob("losses-*.txt"):
        for line in path.read_text().splitlines():
            step, samples, loss = line.split()
            sums[int(step)] += int(samples) * float(loss)
            counts[int(step)] += int(samples)
    assert sum(counts.values()) == 4 * 100, "every sample once an epoch"
    return {step: sums[step] / counts[step] for step in sorted(sums)}


@pytest.mark.exhaustive
def test_five_restarts_with_other_stages_and_replicas(tmp_path: Path) -> None:
    steady, changing = tmp_path / "steady", tmp_path / "changing"
    for directory in (steady, changing):
        directory.mkdir()
    run(steady, 1, (1, 1, 1, "never", 0))
    for attempt, shape in enumerate(RUNS, start=1):
        status = run(changing, attempt, shape)
        assert (status != 0) == (shape[-1] > 0)
    expected, found = curve(steady), curve(changing)
    assert list(found) == list(range(1, NUM_STEPS + 1))
    assert expected[1] > 1.2 * expected[NUM_STEPS], "there is something to be wrong about"
    assert found == pytest.approx(expected, rel=1e-9)
