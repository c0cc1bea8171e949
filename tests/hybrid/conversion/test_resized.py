"""Jobs of converted models: replicas that join and leave, and restarts with other stages."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.hybrid.conversion.small_models import (
    NAMES,
    assert_same_state,
    loss_of,
    make_model,
)
from tests.hybrid.resize.changing_job import ChangingJob
from tests.hybrid.resize.changing_training import samples
from tests.hybrid.resize.over import over_both

MakeJob = Callable[..., ChangingJob]
CHAINS = {"t5": "2 processes, 3 processes, 1 stage, 2 processes, 3 processes"}
"""The stages of T5's restarts: more than one in one process cannot share an embedding."""
CHAIN = "2 stages, 3 stages, 2 processes, 3 processes, 2 stages"


@pytest.fixture
def make_job(tmp_path: Path, repository: Path) -> Iterator[MakeJob]:
    made: list[ChangingJob] = []

    def make(**settings: str) -> ChangingJob:
        folder = tmp_path / f"job-{len(made)}"
        made.append(ChangingJob(folder, repository, **{"LAYERS": "converted", **settings}))
        return made[-1]

    yield make
    for job in made:
        with job:
            pass


@over_both
def test_replicas_join_and_leave(make_job: MakeJob, over: dict[str, str]) -> None:
    job = make_job(CHANGES="5,9", EPOCHS="1", **over)
    job.begin(1)
    job.wait_until_at(5)
    job.add()
    job.wait_until_at(9)
    job.ask_to_leave(0, 2)
    job.wait()
    assert [replicas for _, replicas in job.check()] == [1, 2, 1]


@over_both
@pytest.mark.exhaustive
@pytest.mark.parametrize("after", ["1", "2"])
def test_a_resize_is_what_a_restart_would_be(
    make_job: MakeJob, tmp_path: Path, after: str, over: dict[str, str]
) -> None:
    """The restart may also have another number of stages."""
    resized = make_job(CHANGES="5", STAGES="2", **over)
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


def settings_of(name: str, stages: str) -> dict[str, str]:
    """Return the settings of a job of 21 steps, with stages in one process or in several."""
    count, kind = stages.split()
    processes = count if kind == "processes" else "1"
    job = {"LAYERS": name, "DATA": "even", "EPOCHS": "1"}
    return {**job, "STAGES": count, "PROCESSES": processes}


def train_plain(name: str, jobs: Sequence[ChangingJob]) -> dict[str, Tensor]:
    """Train the original in a plain loop on the batches of jobs that went on from each other."""
    model = make_model(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    steps = {step: lines for job in jobs for step, lines in job.steps().items()}
    assert list(steps) == list(range(1, 22))
    for lines in steps.values():
        numbers = [x for line in lines if line["stage"] == 0 for x in line["numbers"]]
        batch, targets = samples(name, torch.tensor(numbers))
        optimizer.zero_grad()
        loss_of(model(**batch), targets).backward()
        optimizer.step()
    return {key: x.detach() for key, x in model.state_dict().items()}


def assert_trained(name: str, jobs: Sequence[ChangingJob]) -> None:
    """Check that each process has the parameters of the plain loop."""
    expected = train_plain(name, jobs)
    for state in jobs[-1].states():
        assert_same_state(state, expected)


ENGINES = ("2 stages", "3 stages", "2 processes", "3 processes")
RESIZED = [
    f"{name}: {stages}"
    for stages, name in itertools.product(ENGINES, NAMES)
    if name != ("unshared-t5" if "processes" in stages else "t5")
]


@over_both
@pytest.mark.exhaustive
@pytest.mark.parametrize("case", RESIZED)
def test_resized_training_is_plain_training(
    make_job: MakeJob, case: str, over: dict[str, str]
) -> None:
    """One replica, two replicas, then the first leaves."""
    name, stages = case.split(": ")
    job = make_job(CHANGES="5,11", **settings_of(name, stages), **over)
    job.begin(1)
    job.wait_until_at(5)
    job.add_stages()
    job.wait_until_at(11)
    job.ask_to_leave(0, 2)
    job.wait()
    assert job.check() == [(1, 1), (8, 2), (14, 1)]
    assert_trained(name, [job])


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", NAMES)
def test_restarted_training_is_plain_training(make_job: MakeJob, tmp_path: Path, name: str) -> None:
    """Each restart has another number of stages, another engine, or both, and other replicas."""
    checkpoints = {"PIPOLLUX_CHECKPOINT_DIR": str(tmp_path / "checkpoints")}
    jobs = []
    for place, stages in enumerate(CHAINS.get(name, CHAIN).split(", ")):
        jobs.append(make_job(PIPOLLUX_RENDEZVOUS="", **settings_of(name, stages), **checkpoints))
        replicas = 1 + place % 2
        if place < 4:
            jobs[-1].stop_at(3 + 4 * place, replicas)
        else:
            jobs[-1].begin(replicas)
            jobs[-1].wait()
    assert_trained(name, jobs)
