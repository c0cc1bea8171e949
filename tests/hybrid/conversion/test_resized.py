"""Jobs of a converted model: replicas that join and leave, and a restart with other stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.hybrid.resize.changing_job import ChangingJob

MakeJob = Callable[..., ChangingJob]


@pytest.fixture
def make_job(tmp_path: Path, repository: Path) -> Iterator[MakeJob]:
    made: list[ChangingJob] = []

    def make(**settings: str) -> ChangingJob:
        folder = tmp_path / f"job-{len(made)}"
        made.append(ChangingJob(folder, repository, LAYERS="converted", **settings))
        return made[-1]

    yield make
    for job in made:
        with job:
            pass


def test_replicas_join_and_leave(make_job: MakeJob) -> None:
    job = make_job(CHANGES="5,9", EPOCHS="1")
    job.begin(1)
    job.wait_until_at(5)
    job.add()
    job.wait_until_at(9)
    job.ask_to_leave(0, 2)
    job.wait()
    assert [replicas for _, replicas in job.check()] == [1, 2, 1]


@pytest.mark.exhaustive
@pytest.mark.parametrize("after", ["1", "2"])
def test_a_resize_is_what_a_restart_would_be(make_job: MakeJob, tmp_path: Path, after: str) -> None:
    """The restart may also have another number of stages."""
    resized = make_job(CHANGES="5", STAGES="2")
    resized.begin(2)
    resized.wait_until_at(5)
    resized.ask_to_leave(1, 2)
    resized.wait()
    checkpoints = {"PIPOLLUX_CHECKPOINT_DIR": str(tmp_path / "checkpoints")}
    settings = {"PIPOLLUX_RENDEZVOUS": "", **checkpoints}
    make_job(STAGES="2", **settings).stop_at(5, 2)
    restarted = make_job(STAGES=after, **settings)
    restarted.begin(1)
    restarted.wait()
    found, expected = restarted.steps(), resized.steps()
    assert max(found) == max(expected)
    for step, lines in found.items():
        for line, other in zip(lines, expected[step], strict=True):
            assert line["parameters"] == other["parameters"], step
