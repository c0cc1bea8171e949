"""Converted models train to the parameters of the original: both engines, two replicas."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pipollux_hybrid import ConfigurationError, HybridParallel, init_process_group, replica_rank
from pipollux_hybrid.job import context as contexts
from pipollux_hybrid.job.context import context
from tests.extent import first
from tests.hybrid.conversion.small_models import (
    NAMES,
    ROWS,
    SEVEN,
    assert_same_state,
    loss_of,
    make_batches,
    make_model,
    only_default,
    train_plain,
)
from tests.hybrid.stage_processes.training import run_stages

STEPS = 6


def trained(name: str, num_stages: int, schedule: str | None) -> dict[str, Tensor]:
    """Train on the rows of this replica; return the whole state."""
    contexts.reset()
    init_process_group("gloo")
    replicas = context().env.num_replicas
    share = slice(replica_rank(), ROWS, replicas)
    original = make_model(name)
    batches = make_batches(name, STEPS)
    optimizer = torch.optim.AdamW(original.parameters(), lr=1e-2)
    model = HybridParallel(
        original,
        optimizer,
        example_inputs=batches[0][0],
        num_stages=num_stages,
        num_microbatches=2,
        schedule=schedule,
    )
    assert len(model.balance) == num_stages
    for batch, targets in batches:
        optimizer.zero_grad()
        mine = {key: x[share] for key, x in batch.items()}
        model.train_step(mine, targets[share], loss_of)
        optimizer.step()
    state: dict[str, Tensor] = model.state_dict()
    return state


@pytest.mark.parametrize("num_stages", [2, pytest.param(3, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("name", [only_default(name, "whisper") for name in NAMES if name != "t5"])
def test_in_one_process(name: str, num_stages: int) -> None:
    contexts.reset()
    try:
        assert_same_state(trained(name, num_stages, None), train_plain(name, STEPS))
    finally:
        contexts.reset()


def test_embeddings_that_stages_share_are_refused_in_one_process() -> None:
    contexts.reset()
    try:
        with pytest.raises(ConfigurationError, match=r"share the parameter 'shared\.weight'"):
            trained("t5", 2, None)
    finally:
        contexts.reset()


@pytest.mark.parametrize("num_replicas", first(1, [1, 2]))
@pytest.mark.parametrize("num_stages", first(1, [2, 3]))
@pytest.mark.parametrize("name", [only_default(name, "t5") for name in SEVEN])
def test_in_stage_processes(name: str, num_stages: int, num_replicas: int) -> None:
    environment = {"PIPOLLUX_NUM_STAGES": str(num_stages)}
    stages = run_stages(
        trained, num_replicas, num_stages, name, num_stages, "1f1b", environment=environment
    )
    assert_same_state(stages[0][0], train_plain(name, STEPS))
