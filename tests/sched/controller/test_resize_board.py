"""How soon replicas are to say more, while jobs are resized."""

from __future__ import annotations

import pytest

from pipollux_sched.controller.resize_board import (
    CHANGING_RATE,
    LATEST,
    LEADERS_INTERVAL,
    SOON,
    ResizeBoard,
)
from pipollux_sched.lifecycle import ChangeStage, JobState, Membership, PendingResize, Phase


def running(width: int, joining: int = 0) -> JobState:
    """Return a job that can be resized, and is if there are joining replicas."""
    members = tuple(range(width))
    change = None
    if joining:
        everyone = tuple(range(width + joining))
        change = PendingResize(2, everyone, ("n",) * len(everyone), ChangeStage.FORMING)
    membership = Membership(1, members, width + joining, 2, why_not=None, change=change)
    return JobState(Phase.RUNNING, attempt=1, running_on=("n",) * width, membership=membership)


def again(board: ResizeBoard, job: str, state: JobState, replica: int = 1) -> float | None:
    return board.answer(job, state, replica).again


def test_those_of_a_change_say_more_at_once() -> None:
    board = ResizeBoard()
    assert again(board, "one", running(3, 1)) == SOON
    assert again(board, "wide", running(31, 1)) == SOON * 4
    assert again(board, "one", running(4)) is None, "the change is over"
    assert again(board, "one", running(4), replica=0) == LEADERS_INTERVAL


def test_those_of_thousands_of_changes_share_a_rate() -> None:
    board = ResizeBoard()
    for number in range(400):
        again(board, f"job-{number}", running(1, 1))
    assert again(board, "job-7", running(1, 1)) == pytest.approx(800 / CHANGING_RATE)
    again(board, "job-7", running(2))
    board.forget("job-8")
    assert again(board, "job-9", running(1, 1)) == pytest.approx(796 / CHANGING_RATE)
    again(board, "job-9", running(1, 4))
    assert again(board, "job-10", running(1, 1)) == pytest.approx(799 / CHANGING_RATE)
    for number in range(4000):
        again(board, f"job-{number}", running(1, 1))
    assert again(board, "job-0", running(1, 1)) == LATEST, "those that form groups do not wait long"
    for number in range(4000):
        board.forget(f"job-{number}")
    assert again(board, "one", running(3, 1)) == SOON
