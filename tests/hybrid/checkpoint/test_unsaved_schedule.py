"""A learning-rate scheduler that is in no checkpoint is named when the first one is written."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, StepLR

from pipollux_hybrid import (
    GradScaler,
    HybridParallel,
    State,
    init_process_group,
    register_for_checkpointing,
    save_all_states,
)
from pipollux_hybrid.job import context as contexts


@pytest.fixture(autouse=True)
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    contexts.reset()
    monkeypatch.setenv("PIPOLLUX_CHECKPOINT_DIR", str(tmp_path))
    init_process_group("gloo")
    yield
    contexts.reset()


class Own(State):
    """Saves a scheduler in a way of its own."""

    def save(self, fileobj: BinaryIO) -> None:
        fileobj.write(b"1")

    def load(self, fileobj: BinaryIO) -> None:
        fileobj.read()


def warned(
    caplog: pytest.LogCaptureFixture, keep: Callable[[LRScheduler], object], *, given: bool = False
) -> list[str]:
    module = nn.Sequential(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    schedule = StepLR(optimizer, 1)
    HybridParallel(module, optimizer, lr_scheduler=schedule if given else None)
    register_for_checkpointing("scaler", GradScaler("cpu"))
    keep(schedule)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            save_all_states()
    return [x.getMessage() for x in caplog.records if "scheduler" in x.getMessage()]


def test_a_schedule_that_is_in_no_checkpoint(caplog: pytest.LogCaptureFixture) -> None:
    (text,) = warned(caplog, lambda _: None)
    assert "a restart resets it" in text
    assert "HybridParallel(…, lr_scheduler=scheduler)" in text


def test_a_schedule_that_is_given(caplog: pytest.LogCaptureFixture) -> None:
    assert warned(caplog, lambda _: None, given=True) == []


def test_a_schedule_that_is_registered(caplog: pytest.LogCaptureFixture) -> None:
    keep = register_for_checkpointing
    assert warned(caplog, lambda schedule: keep("schedule", schedule)) == []


def test_a_schedule_that_a_state_of_the_script_s_may_hold(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert warned(caplog, lambda _: Own("own")) == []


def test_without_a_schedule(caplog: pytest.LogCaptureFixture) -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    HybridParallel(module, torch.optim.SGD(module.parameters(), lr=0.1))
    with caplog.at_level(logging.WARNING):
        save_all_states()
    assert caplog.records == []
