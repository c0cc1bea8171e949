"""Sweeps with real processes: all trials run, hopeless ones are pruned, schedulers come and go."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from pipollux_policies import make_policy
from pipollux_sched.lifecycle import Phase
from pipollux_sched.scheduler import Scheduler
from pipollux_sched.spec.job import JobSpec, SpecError
from pipollux_sched.store import JobEndedError, TrialState
from pipollux_sched.views.sweeps import sweep_details
from tests.sched.processes import processes_of
from tests.sched.scripts import TRIAL
from tests.sched.test_scheduler import CLUSTER, directory

__all__ = ["directory"]


def scheduler_on(directory: Path) -> Scheduler:
    return Scheduler(directory, CLUSTER, make_policy("exact"), interval=0.3)


def job(name: str, sweep: Mapping[str, Any], *args: str, **fields: Any) -> JobSpec:
    given = {"script": str(TRIAL), "args": args, "max_replicas": 1, "max_restarts": 0}
    return JobSpec.model_validate({"name": name, "sweep": sweep, **given, **fields})


def states(scheduler: Scheduler, sweep: str) -> list[TrialState]:
    return [trial.state for trial in scheduler.store.sweeps.trials(sweep)]


def wait_for(scheduler: Scheduler, name: str) -> None:
    assert scheduler.wait(lambda jobs: jobs[name].phase.ended, 240)


@pytest.mark.usefixtures("light_agent")
def test_a_grid_and_a_job_that_waits_for_it(directory: Path) -> None:
    grid = {"grid": {"lr": [0.1, 0.01], "fail": [False, True]}, "metric": "error"}
    with scheduler_on(directory) as scheduler:
        with pytest.raises(SpecError, match="there is no file"):
            scheduler.submit(job("rates", grid, script="/nowhere.py"))
        scheduler.control.submit_all(
            [
                job("rates", {**grid, "max_parallel": 2}, "--lr={lr}", "--fail", "{fail}"),
                JobSpec(name="last", script=str(TRIAL), after=["rates"], max_restarts=0),
            ]
        )
        wait_for(scheduler, "rates")
        found = sweep_details(scheduler.store, "rates")
        log = scheduler.state_dir.log("rates-2", 1, 0).read_text()
        sweep = scheduler.jobs()["rates"]
        most = _most_at_once(scheduler)
        wait_for(scheduler, "last")
    assert most == 2
    assert (sweep.phase, sweep.state.message) == (
        Phase.COMPLETE,
        "All 4 trials have ended (2 complete, 2 failed); the best is trial 2 with error 0.5, "
        "lr=0.01 fail=false.",
    )
    assert [(each.parameters["lr"], each.state, each.value) for each in found.trials] == [
        *((0.1, TrialState.COMPLETE, 1.5), (0.1, TrialState.FAILED, 1.5)),
        *((0.01, TrialState.COMPLETE, 0.5), (0.01, TrialState.FAILED, 0.5)),
    ]
    assert json.loads(log.splitlines()[0]) == {
        "PIPOLLUX_TRIAL": "2",
        "PIPOLLUX_TRIAL_PARAMETERS": '{"lr": 0.01, "fail": false}',
        "PIPOLLUX_TRIAL_PARAMETER_FAIL": "false",
        "PIPOLLUX_TRIAL_PARAMETER_LR": "0.01",
        "sweep": "rates",
    }


def _most_at_once(scheduler: Scheduler) -> int:
    """Return how many trials were unfinished at the same time, at most."""
    unfinished, most = set(), 0
    for event in scheduler.store.events(types=["submitted", "complete", "failed"]):
        if event["job"].startswith("rates-"):
            change = unfinished.add if event["type"] == "submitted" else unfinished.discard
            change(event["job"])
            most = max(most, len(unfinished))
    return most


@pytest.mark.usefixtures("light_agent")
@pytest.mark.exhaustive
def test_a_search_goes_on_with_another_scheduler(directory: Path, tmp_path: Path) -> None:
    """A hopeless trial, which would never end, is pruned: by the second scheduler."""
    ranges = {"lr": {"low": 0.005, "high": 0.02, "log": True}}
    sweep = {"search": ranges, "trials": 6, "metric": "error", "max_parallel": 2}
    with scheduler_on(directory) as scheduler:
        scheduler.submit(job("search", sweep, "--lr", "{lr}", "--steps", "3"))
        ended = (TrialState.COMPLETE,) * 2
        assert scheduler.wait(lambda _: tuple(states(scheduler, "search")[:2]) == ended, 240)
        before = scheduler.store.sweeps.trials("search")
    with scheduler_on(directory) as again:
        wait_for(again, "search")
        trials = again.store.sweeps.trials("search")
    assert [trial.state for trial in trials] == [TrialState.COMPLETE] * 6
    assert [trial.parameters for trial in trials[:2]] == [t.parameters for t in before[:2]]
    assert len({trial.parameters["lr"] for trial in trials}) == 6


@pytest.mark.usefixtures("light_agent")
@pytest.mark.exhaustive
def test_a_hopeless_trial_frees_its_slots(directory: Path, tmp_path: Path) -> None:
    sweep = {
        "list": [*[{"lr": 0.01}] * 5, {"lr": 0.9}, {"lr": 0.01}],
        "pruner": "median",
        "metric": "error",
        "max_parallel": 1,
    }
    args = ("--lr", "{lr}", "--hold", str(tmp_path / "never"))
    with scheduler_on(directory) as scheduler:
        scheduler.submit(job("rates", sweep, *args))
        wait_for(scheduler, "rates")
        assert processes_of(directory) == []
        pruned = scheduler.jobs()["rates-5"]
        assert states(scheduler, "rates") == [
            *[TrialState.COMPLETE] * 5,
            *(TrialState.PRUNED, TrialState.COMPLETE),
        ]
    assert pruned.state.reason == "Pruned"
    assert pruned.state.message.startswith("The trial was pruned: its error was 4.")


@pytest.mark.usefixtures("light_agent")
@pytest.mark.exhaustive
def test_a_sweep_is_suspended_cancelled_and_run_again(directory: Path, tmp_path: Path) -> None:
    hold = tmp_path / "go"
    sweep = {"list": [{"lr": 0.01}, {"lr": 0.9}, {"lr": 0.8}], "metric": "error"}
    with scheduler_on(directory) as scheduler:
        control = scheduler.control
        scheduler.submit(job("rates", {**sweep, "max_parallel": 2}, "--lr={lr}", f"--hold={hold}"))
        held = [TrialState.COMPLETE, *[TrialState.UNFINISHED] * 2]
        assert scheduler.wait(
            lambda jobs: (
                states(scheduler, "rates") == held
                and jobs["rates-2"].state.training
                and jobs["rates-1"].state.training
            ),
            240,
        )
        cancelled = control.cancel("rates")
        assert (cancelled.phase, cancelled.state.reason) == (Phase.FAILED, "Cancelled")
        for name in ("rates-1", "rates-2"):  # which ignore the signal, until they are killed
            assert scheduler.jobs()[name].state.intent is not None
        hold.touch()
        for name in ("rates-1", "rates-2"):
            wait_for(scheduler, name)
        hold.unlink()
        with pytest.raises(JobEndedError):
            control.suspend("rates")
        if TrialState.CANCELLED in states(scheduler, "rates"):
            control.rerun("rates", from_scratch=False)
            assert scheduler.wait(lambda jobs: jobs["rates"].phase is Phase.RUNNING, 240)
            assert control.suspend("rates").phase is Phase.SUSPENDED
            hold.touch()
            assert control.resume("rates").phase is Phase.QUEUED
            wait_for(scheduler, "rates")
            assert states(scheduler, "rates") == [TrialState.COMPLETE] * 3
            assert scheduler.jobs()["rates"].phase is Phase.COMPLETE
        control.delete("rates")
        assert scheduler.jobs() == {}
