"""Transitions by exit status, and at the end of the running time."""

from __future__ import annotations

from typing import Literal

import pytest

from pipollux_sched.lifecycle import (
    Allocate,
    Exited,
    Expire,
    FirstStep,
    JobState,
    Outcome,
    Phase,
    Record,
    RetryAfter,
    advance,
)


def training() -> JobState:
    state, _ = advance(JobState(max_restarts=1), Allocate(["a"], "free"), 0.0)
    return advance(state, FirstStep(1, 1), 1.0)[0]


@pytest.mark.parametrize(
    ("rule", "phase", "reason", "failures"),
    [
        ("retry", Phase.RESTARTING, "Failed", 1),
        ("ignore", Phase.RESTARTING, "ExitCode", 0),
        ("fail", Phase.FAILED, "ExitCode", 1),
    ],
)
def test_exit_codes_decide(
    rule: Literal["retry", "fail", "ignore"], phase: Phase, reason: str, failures: int
) -> None:
    exited = Exited(1, Outcome.FAILED, message="no", status=75, rule=rule)
    state, actions = advance(training(), exited, 2.0)
    assert (state.phase, state.reason, state.failures) == (phase, reason, failures)
    assert [a.type for a in actions if isinstance(a, Record)] == [
        "failed" if phase is Phase.FAILED else "restarting"
    ]
    assert any(isinstance(action, RetryAfter) for action in actions) == (phase is not Phase.FAILED)
    if rule == "fail":
        assert state.message == "Not restarted after exit status 75 (exit_codes). no"


def test_a_script_that_cannot_start_is_not_retried_whatever_its_status() -> None:
    exited = Exited(1, Outcome.FAILED, cannot_start=True, status=75, rule="ignore")
    assert advance(training(), exited, 2.0)[0].reason == "CannotStart"


def test_the_end_of_the_running_time() -> None:
    state, _ = advance(training(), Expire("It ran for 2 h.", run_time=True), 2.0)
    assert (state.phase, state.reason) == (Phase.RUNNING, "RunTimeExceeded")
    state, actions = advance(state, Exited(1, Outcome.STOPPED, step=5), 3.0)
    assert (state.phase, state.reason) == (Phase.FAILED, "RunTimeExceeded")
    assert actions[-1] == Record("failed", 1, {"why": "It ran for 2 h."})
