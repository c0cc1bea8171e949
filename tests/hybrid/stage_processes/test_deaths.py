"""The process of a stage ends: all others end too, within seconds, and say which one is gone."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Mapping

import pytest
import torch
import torch.nn.functional as F

from pipollux_hybrid import HybridParallel, PipolluxError, init_process_group, replica_rank
from pipollux_hybrid.job.context import context
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
    [(0, "1f1b"), (3, "1f1b"), pytest.param(1, "interleaved", marks=pytest.mark.exhaustive)],
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
