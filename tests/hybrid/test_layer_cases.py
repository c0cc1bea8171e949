"""Layers and batches as scripts have them train what the plain model trains, in both engines."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import torch.nn.functional as F
from torch import Tensor, nn

from pipollux_hybrid import ConfigurationError, init_process_group, replica_rank
from pipollux_hybrid.job import context as contexts
from tests.extent import turns
from tests.hybrid.layer_cases import (
    BATCH,
    CASES,
    CHANGES_BUFFERS,
    STEPS,
    Schedule,
    check,
    numbers,
    train,
    train_all,
)
from tests.hybrid.models import assert_close
from tests.hybrid.pipeline.trap_cases import wrap as wrapped
from tests.hybrid.stage_processes.training import run_stages


@pytest.fixture(autouse=True)
def fresh_context() -> Iterator[None]:
    contexts.reset()
    yield
    contexts.reset()


@pytest.mark.parametrize(("name", "mode"), turns(list(CASES), ["always", "except_last", "never"]))
def test_one_process(name: str, mode: str) -> None:
    check(train(CASES[name], activation_checkpoint=mode), name)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("schedule", "mode"), [("1f1b", "always"), ("gpipe", "never")])
def test_a_process_per_stage(schedule: str, mode: str) -> None:
    options = {"schedule": schedule, "activation_checkpoint": mode}
    (stages,) = run_stages(functools.partial(train_all, **options), 1, 2)
    for name in CASES:
        check(stages[0][name] | stages[1][name], name)


@pytest.mark.parametrize("mode", ["always", "except_last"])
def test_recomputation_sees_the_buffers_of_the_first_forward(mode: str) -> None:
    kept = train(CHANGES_BUFFERS, activation_checkpoint="never")
    recomputed = train(CHANGES_BUFFERS, activation_checkpoint=mode)
    assert_close(recomputed, kept, 1e-12)
    assert float(kept["0.scale"]) == 0.5 ** (STEPS * 4)  # once for each micro-batch


def test_a_large_buffer_that_begins_to_change() -> None:
    layer = Schedule()
    model = wrapped(nn.Sequential(layer), activation_checkpoint="always")
    layer.eval()
    model.train_step(numbers(1), numbers(2), F.mse_loss)
    layer.large.mul_(2.0)  # between forwards
    model.train_step(numbers(1), numbers(2), F.mse_loss)
    layer.train()
    with pytest.raises(ConfigurationError, match=r"buffer 'large' of a Schedule was changed"):
        model.train_step(numbers(1), numbers(2), F.mse_loss)


def train_experts() -> dict[str, Tensor]:
    """Train on this replica's half of the samples, which all go to the same experts."""
    init_process_group("gloo", timeout=60.0)
    case = CASES["experts"]
    first = BATCH // 2 * replica_rank()
    half = slice(first, first + BATCH // 2)
    mine = case._replace(inputs=lambda: case.inputs()[half], targets=lambda: case.targets()[half])
    return train(mine, activation_checkpoint="always")


def test_an_expert_that_one_replica_uses() -> None:
    for (found,) in run_stages(train_experts, 2, 1):
        check(found, "experts")
