"""With a process per stage, gradients and parameters are the plain model's on the whole batch."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import pytest

from tests.hybrid.models import (
    assert_close,
    freeze_statistics,
    make_data,
    make_model,
    plain_training,
)
from tests.hybrid.stage_processes.training import (
    BATCH_SIZE,
    SIZE,
    Case,
    optimizer_for,
    run_stages,
    together,
    train_all,
)

MODES = ("always", "except_last", "never")
SCHEDULES = ("gpipe", "1f1b", "interleaved")
AXES = MODES, (0, 1, 2), SCHEDULES
FEW = [Case(*case) for case in zip(*AXES, strict=True)]
ALL = [Case(*case) for case in itertools.product(*AXES)]


def check(
    name: str,
    num_replicas: int,
    num_stages: int,
    cases: list[Case],
    adam: bool,
    backend: str = "gloo",
    environment: Mapping[str, str] | None = None,
) -> None:
    module = make_model(name)
    if len(module) < 2 * num_stages:  # too few for two chunks each
        cases = [case for case in cases if case.schedule != "interleaved"]
    freeze_statistics(module)
    batches = [range(i, min(i + BATCH_SIZE, SIZE)) for i in range(0, SIZE, BATCH_SIZE)]
    data = make_data(name, SIZE)
    expected = plain_training(module, optimizer_for(module, adam), data, batches)
    found = run_stages(
        *(train_all, num_replicas, num_stages, name, cases, 1, adam, backend),
        environment=environment or {},
    )
    for replica in found:
        for trained in zip(*replica, strict=True):
            assert len({tuple(stage.losses) for stage in trained}) == 1
            steps = [together(step) for step in zip(*(x.gradients for x in trained), strict=True)]
            assert len(steps) == len(expected)
            for ours, theirs in zip(steps, expected, strict=True):
                assert_close(ours, theirs, 1e-12)
            assert_close(together([x.state for x in trained]), dict(module.state_dict()), 1e-12)


@pytest.mark.parametrize(
    ("name", "num_stages"),
    [("transformer", 2), pytest.param("mlp", 4, marks=pytest.mark.exhaustive)],
)
def test_one_replica(name: str, num_stages: int) -> None:
    check(name, 1, num_stages, FEW, adam=False)


def test_two_replicas() -> None:
    check("mlp", 2, 2, FEW[2:], adam=True)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("accum_steps", "schedule"), [(1, "1f1b"), (0, "gpipe"), (2, "interleaved")]
)
def test_stages_with_modes_of_their_own(accum_steps: int, schedule: str) -> None:
    check("mlp", 1, 3, [Case(("always", "never", "except_last"), accum_steps, schedule)], True)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "num_replicas", "num_stages"),
    [
        *(("mlp", 1, 3), ("mlp", 2, 2), ("transformer", 1, 4), ("transformer", 2, 3)),
        *(("convolutional", 1, 2), ("convolutional", 2, 4)),
    ],
)
def test_all_cases(name: str, num_replicas: int, num_stages: int) -> None:
    check(name, num_replicas, num_stages, ALL, adam=False)
