"""Proposals and pruning by Optuna, from what the store knows."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from pipollux_sched.controller import search
from pipollux_sched.controller.search import Search, why_no_optuna
from pipollux_sched.spec.sweep import SweepSpec
from pipollux_sched.store import Curve, TrialRecord, TrialState

RANGES = {
    "lr": {"low": 1e-4, "high": 1.0, "log": True},
    "width": {"low": 8, "high": 64, "step": 8},
    "kind": {"choices": ["adam", "sgd"]},
}


def spec(**fields: Any) -> SweepSpec:
    return SweepSpec.model_validate({"search": RANGES, "trials": 100, **fields})


def error_of(parameters: Any) -> float:
    """Least for a learning rate of 0.01 and wide layers."""
    return float((math.log10(parameters["lr"]) + 2) ** 2 + 1 / parameters["width"])


def run(sweep: SweepSpec, number: int) -> list[TrialRecord]:
    """Run as many trials one by one, each from what is known of the earlier ones."""
    trials: list[TrialRecord] = []
    for index in range(number):
        (parameters,) = Search("s", sweep, trials, {}).propose(1)
        value = error_of(parameters)
        trials.append(TrialRecord("s", index, parameters, TrialState.COMPLETE, value))
    return trials


def test_a_search_comes_closer_and_is_the_same_each_time() -> None:
    trials = run(spec(), 24)
    assert [trial.parameters for trial in run(spec(), 24)] == [t.parameters for t in trials]
    other = run(spec(seed=50), 3)
    assert [trial.parameters for trial in other] != [trial.parameters for trial in trials[:3]]
    for trial in trials:
        assert 1e-4 <= trial.parameters["lr"] <= 1.0
        assert trial.parameters["width"] in range(8, 65, 8)
        assert trial.parameters["kind"] in ("adam", "sgd")
    values = [trial.value or 0.0 for trial in trials]
    # Random trials first, then those of the estimator.
    assert sum(values[10:]) / 14 < sum(values[:10]) / 10


def test_trials_that_run_side_by_side_differ() -> None:
    known = run(spec(), 12)
    proposals = Search("s", spec(), known, {}).propose(4)
    assert len({entry["lr"] for entry in proposals}) == 4
    running = [TrialRecord("s", 12 + i, entry) for i, entry in enumerate(proposals)]
    (more,) = Search("s", spec(), [*known, *running], {}).propose(1)
    assert more["lr"] not in {entry["lr"] for entry in proposals}


def test_trials_without_a_value_do_not_stop_a_search() -> None:
    trials = [
        replace(trial, state=state, value=None)
        for trial, state in zip(run(spec(), 5), TrialState, strict=False)
    ]
    curves: dict[int, Curve] = {4: {1: None}}
    assert len(Search("s", spec(sampler="random"), trials, curves).propose(2)) == 2


@pytest.mark.parametrize("pruner", ["median", "halving", "hyperband"])
def test_a_hopeless_trial_is_pruned(pruner: str) -> None:
    """The study is made again for each look, as after a restart of the scheduler."""
    sweep = SweepSpec.model_validate({"grid": {"lr": list(range(12))}, "pruner": pruner})
    trials = [TrialRecord("s", number, {"lr": number}) for number in range(12)]
    curves: dict[int, dict[int, float | None]] = {number: {} for number in range(12)}
    pruned: list[int] = []
    for number in range(12):
        worse = number >= 6
        for step in range(1, 10):
            curves[number][step] = (10.0 if worse else 1.0) + number / 100 + 1 / step
            trials[number] = replace(trials[number], state=TrialState.UNFINISHED)
            found, notes = Search("s", sweep, trials[: number + 1], curves).hopeless([number])
            trials[number] = replace(trials[number], attributes=notes[number])
            if found:
                pruned.append(number)
                trials[number] = replace(trials[number], state=TrialState.PRUNED)
                break
        else:
            done = {"state": TrialState.COMPLETE, "value": curves[number][9]}
            trials[number] = replace(trials[number], **done)
    assert 0 not in pruned
    assert len([number for number in pruned if number >= 6]) >= 4
    # Hyperband's third bracket judges a trial at its ninth step for the first time.
    rungs = {"median": range(1, 9), "halving": (1, 4), "hyperband": (1, 3, 9)}
    assert {max(curves[number]) for number in pruned} <= {*rungs[pruner]}


def test_what_needs_optuna(monkeypatch: pytest.MonkeyPatch) -> None:
    grid = {"grid": {"lr": [1]}}
    assert why_no_optuna(spec()) is None
    monkeypatch.setattr(search, "find_spec", lambda _: None)
    assert why_no_optuna(SweepSpec.model_validate(grid)) is None
    needs = SweepSpec.model_validate({**grid, "pruner": "median"})
    assert why_no_optuna(needs) == (
        "a pruner needs Optuna; install it where the scheduler runs, with: "
        "pip install 'pipollux[sweep]'"
    )
    assert (why_no_optuna(spec()) or "").startswith("a search needs Optuna")
