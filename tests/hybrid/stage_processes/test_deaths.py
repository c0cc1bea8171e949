"""The process of a stage ends: all others end too, within seconds, and say which one is gone."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pipollux_hybrid import HybridParallel, PipolluxError, init_process_group, replica_rank
from pipollux_hybrid.job.context import context
from pipollux_hybrid.pipeline.process_stage import ProcessStage, Roots
from tests.extent import first_points
from tests.hybrid.models import make_data, make_model
from tests.hybrid.stage_processes.training import run_stages


def trains_until_one_dies(victim: int, schedule: str, backend: str) -> tuple[str, float]:
    init_process_group(backend, timeout=60.0)
    module = make_model("mlp")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model = HybridParallel(module, optimizer, num_stages=2, num_microbatches=4, schedule=schedule)
    inputs, targets = make_data("mlp", 24)[replica_rank() :: 2]
    died = time.monotonic()
    try:
        for step in range(100):
            if step == 3:
                died = time.monotonic()
                if context().env.world_rank == victim:
                    os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            model.train_step(inputs, targets, F.cross_entropy)
            optimizer.step()
    except PipolluxError as error:
        return str(error), time.monotonic() - died
    return "nothing", 0.0


@pytest.mark.parametrize(
    ("victim", "schedule"),
    first_points(1, [(3, "1f1b"), (0, "1f1b"), (1, "interleaved")]),
)
def test_the_others_end_and_say_so(victim: int, schedule: str) -> None:
    """Those of its replica, and those that average gradients with it."""
    check_that_others_end(victim, schedule, "gloo")


def check_that_others_end(
    victim: int, schedule: str, backend: str, environment: Mapping[str, str] | None = None
) -> None:
    replicas = run_stages(
        *(trains_until_one_dies, 2, 2, victim, schedule, backend),
        exit_codes=(0, -signal.SIGKILL),
        environment=environment or {},
    )
    answers = [answer for replica in replicas for answer in replica]
    assert answers.pop(victim) == -signal.SIGKILL
    for text, seconds in answers:
        assert re.match(r"rank \d of 4 lost its peers .*: .*rank.*", text), text
        assert seconds < 30.0


def loses_the_flags_of_gradients() -> str:
    """Over NCCL the gradients' receives are only queued, so the flags' is the first to fail."""

    def fails(stage: ProcessStage, chunk: int, outputs: tuple[Tensor, ...]) -> Roots:
        stage.row = Unreachable()
        return received_roots(stage, chunk, outputs)

    received_roots = ProcessStage._received_roots
    ProcessStage._received_roots = fails  # type: ignore[method-assign]  # in this process alone
    init_process_group("gloo", timeout=60.0)
    module = make_model("mlp")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model = HybridParallel(module, optimizer, num_stages=2, num_microbatches=4)
    try:
        model.train_step(*make_data("mlp", 24)[:], F.cross_entropy)
    except PipolluxError as error:
        return str(error)
    return "nothing"


class Unreachable:
    def wait(self, _work: Any) -> None:
        raise RuntimeError("Connection reset by peer")


def test_a_stage_that_loses_the_flags_of_gradients_says_so() -> None:
    ((first, _),) = run_stages(
        loses_the_flags_of_gradients, 1, 2, environment={"PIPOLLUX_HOST_TIMEOUT": "1"}
    )
    assert re.match(r"rank 0 of 2 lost its peers while passing micro-batches", first), first
