"""Jobs on a GPU that restart, and whose replicas join and leave over gloo."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.sharing import ON_THE_GPU
from tests.hybrid.resize.changing_job import ChangingJob
from tests.hybrid.resize.test_resizes import MakeJob, make_job

__all__ = ["make_job"]

pytestmark = pytest.mark.gpu


def add(job: ChangingJob) -> None:
    if job.processes > 1:
        job.add_stages()
    else:
        job.add()


@pytest.mark.parametrize("processes", ["1", "2"])
def test_replicas_join_and_leave_and_every_sample_is_taken_once(
    make_job: MakeJob, processes: str
) -> None:
    job = make_job(CHANGES="5,9,13", PROCESSES=processes, **ON_THE_GPU)
    job.begin(1)
    job.wait_until_at(5)
    add(job)
    job.wait_until_at(9)
    add(job)
    job.wait_until_at(13)
    job.ask_to_leave(0, 3)
    job.wait()
    assert [replicas for _, replicas in job.check()] == [1, 2, 3, 2]


@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_change_is_what_a_restart_would_be_to_the_last_bit(
    make_job: MakeJob, tmp_path: Path, processes: str
) -> None:
    """Dropout draws on the GPU's generator, and the layers are on it before and after."""
    resized = make_job(CHANGES="5", PROCESSES=processes, **ON_THE_GPU)
    resized.begin(1)
    resized.wait_until_at(5)
    add(resized)
    resized.wait()
    assert resized.check() == [(1, 1), (8, 2)]

    kept = {"PIPOLLUX_RENDEZVOUS": "", "PIPOLLUX_CHECKPOINT_DIR": str(tmp_path / "checkpoints")}
    restarted = make_job(PROCESSES=processes, **kept, **ON_THE_GPU)
    restarted.stop_at(5, 1)
    restarted.begin(2)
    restarted.wait()
    assert restarted.check() == [(1, 1), (8, 2)]
    ours, theirs = resized.steps(), restarted.steps()
    assert ours.keys() == theirs.keys()
    for step, lines in ours.items():  # one after the other: a failure names the first
        for line, other in zip(lines, theirs[step], strict=True):
            assert line == other, step
