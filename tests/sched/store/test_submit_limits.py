"""How many unfinished jobs teams may have, counted by each kind of database."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from pipollux_sched.controller.sweeps import SweepLoop
from pipollux_sched.lifecycle import Cancel
from pipollux_sched.spec.job import JobSpec
from pipollux_sched.store import Store, Submission, TeamFullError, TrialRecord

TEAMS = {
    "teams": [{"name": "vision", "max_submit_jobs": 7, "users": ["ana"]}, {"name": "text"}],
    "default": "text",
}


def submission(name: str, **fields: Any) -> Submission:
    spec = JobSpec(name=name, script="train.py", **fields)
    return Submission(name, spec.model_dump(mode="json"), f"token of {name}", 3)


def test_requests_that_race_never_make_more_than_the_limit(store: Store) -> None:
    """Ten ask for two each at once, by the team that jobs name, or by their user's."""
    store.teams.set_spec(TEAMS)

    def accepted(number: int) -> bool:
        team = None if number % 2 else "vision"
        jobs = [submission(f"j{number}{half}", user="ana", team=team) for half in "ab"]
        try:
            store.submit_all(jobs)
        except TeamFullError:
            return False
        return True

    with ThreadPoolExecutor(10) as threads:
        assert sum(threads.map(accepted, range(10))) == 3
    assert len(store.jobs()) == 6


def test_what_counts_is_what_is_unfinished_and_the_teams_own(store: Store) -> None:
    store.teams.set_spec(TEAMS)
    for number in range(7):
        store.submit_all([submission(f"text-{number}"), submission(f"j{number}", user="ana")])
    with pytest.raises(TeamFullError, match=r"may have 7 .*, has 7, and this one is more"):
        store.teams.move("text-0", "vision")
    store.transition("j0", Cancel())
    assert store.teams.move("text-0", "vision").spec["team"] == "vision"
    with pytest.raises(TeamFullError):
        store.rerun("j0", from_scratch=False)
    # One that only names what it counts to anyway is no more than before.
    assert store.teams.move("j1", "vision").spec["team"] == "vision"
    assert [event["team"] for event in store.events(types=["updated"])] == ["vision", "vision"]


def test_a_sweep_that_fills_its_team_can_run_a_trial(store: Store) -> None:
    store.teams.set_spec({"teams": [{"name": "vision", "max_submit_jobs": 1}]})
    sweep = {"grid": {"lr": [0.1, 0.2]}, "metric": "error", "max_parallel": 2}
    store.submit_all([submission("rates", team="vision", args=["{lr}"], sweep=sweep)])

    def trial(number: int) -> Submission:
        record = TrialRecord("rates", number, {"lr": 0.1})
        return replace(submission(f"rates-{number}", team="vision"), trial=record)

    def submit(_: object, trials: Sequence[TrialRecord]) -> None:
        store.submit_all([trial(record.number) for record in trials])

    SweepLoop(store, submit, store.transition).step()
    full = "0 of 2 trials ended, 1 in progress; more wait, as its team has reached max_submit_jobs."
    assert store.job("rates").state.message == full
    for more in (trial(1), submission("other", team="vision")):
        with pytest.raises(TeamFullError, match=r"may have 1 .*, has [12], and this one is more"):
            store.submit_all([more])
    store.transition("rates-0", Cancel())
    store.submit_all([trial(1)])
