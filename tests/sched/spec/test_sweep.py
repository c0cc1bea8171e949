"""Sweeps in a job file: what their trials are, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipollux_sched.spec.job import JobSpec, SpecError, load_jobs
from pipollux_sched.spec.sweep import MOST_TRIALS, SweepSpec


def read(folder: Path, sweep: str, args: str = "[]", name: str = "rates") -> JobSpec:
    path = folder / "jobs.yaml"
    path.write_text(
        f"jobs:\n- name: {name}\n  script: train.py\n  args: {args}\n  sweep: {sweep}\n"
    )
    return load_jobs(path)[0]


def sweep_of(folder: Path, text: str) -> SweepSpec:
    found = read(folder, text).sweep
    assert found is not None
    return found


def test_a_grid_has_every_combination(tmp_path: Path) -> None:
    spec = sweep_of(tmp_path, "{grid: {lr: [0.1, 1e-3], kind: [adam], nesterov: [true, false]}}")
    trials = list(spec.fixed_trials())
    assert trials == [
        {"lr": lr, "kind": "adam", "nesterov": nesterov}
        for lr in (0.1, 0.001)
        for nesterov in (True, False)
    ]
    assert spec.num_trials == 4
    again = SweepSpec.model_validate(spec.model_dump(mode="json"))
    assert list(again.fixed_trials()) == trials
    assert [type(value) for value in trials[0].values()] == [float, str, bool]


def test_a_list_and_a_search(tmp_path: Path) -> None:
    spec = sweep_of(tmp_path, "{list: [{lr: 1, n: a}, {n: b, lr: 2}], direction: maximize}")
    assert [*spec.fixed_trials()] == [{"lr": 1, "n": "a"}, {"n": "b", "lr": 2}]
    assert spec.better(2.0, 1.0)
    search = sweep_of(tmp_path, "{search: {lr: {low: 1e-4, high: 1, log: true}}, trials: 7}")
    assert (search.num_trials, [*search.fixed_trials()]) == (7, [])
    assert (search.search["lr"].low, search.search["lr"].is_whole) == (0.0001, False)


def test_a_trial_is_a_job_with_its_parameters(tmp_path: Path) -> None:
    args = '["--lr={lr}", "{n}", "{{lr}}", "{}", \'{"a": 1}\']'
    job = read(tmp_path, "{grid: {lr: [1e-5], n: [true]}}", args)
    assert job.sweep is not None
    (parameters,) = job.sweep.fixed_trials()
    trial = job.of_trial(0, parameters)
    assert trial.args == ("--lr=1e-05", "true", "{lr}", "{}", '{"a": 1}')
    assert (trial.name, trial.sweep, trial.script) == ("rates-0", None, "train.py")
    assert JobSpec.model_validate(trial.model_dump(mode="json")) == trial


@pytest.mark.parametrize(
    ("sweep", "complaint"),
    [
        ("{}", "sweep: has no parameters; give one of grid, list and search"),
        ("{grid: {a: [1]}, list: [{a: 1}]}", "sweep: has grid and list; give one of grid, list"),
        ("{grid: {a: []}}", "sweep.grid.a: has no values"),
        ("{grid: {a b: [1]}}", "'a b' is not the name of a parameter"),
        ("{grid: {a: [.nan]}}", "is not a finite number"),
        ("{grid: {a: [1], A: [1]}}", "differ from 'a' in upper and lower case only"),
        ("{grid: {a: [1]}, trials: 3}", "sweep.trials: is for a search; leave it out"),
        ("{list: [{a: 1}, {b: 1}]}", "sweep.list[1]: has the parameters b, and the first entry a"),
        ("{list: [{}]}", "sweep.list: has no parameters; give at least one"),
        ("{search: {a: {low: 1, high: 2}}}", "sweep.trials: is missing; give the number"),
        ("{search: {a: {low: 1}}, trials: 2}", "sweep.search.a.high: is missing"),
        ("{search: {a: {low: 2, high: 1}}, trials: 2}", "a.low: 2 is not less than high = 1"),
        ("{search: {a: {low: 0, high: 1, log: true}}, trials: 2}", "0 has no logarithm"),
        ("{search: {a: {low: 1, high: 9, step: 0.5}}, trials: 2}", "0.5 is not a whole number"),
        ("{search: {a: {low: 1, choices: [1]}}, trials: 2}", "excludes low, high, log and step"),
        ("{search: {a: {low: 1, high: 2}}, trials: 2, pruner: x}", "sweep.pruner: "),
        ("{search: {a: {low: x, high: 2}}, trials: 2}", 'low: "x" is not allowed; it must be a n'),
        ("{search: {a: {choices: []}}, trials: 2}", "a.choices: is empty; give at least one value"),
        ("{search: {a: {low: 1, high: 2}}, trials: 10001}", "a whole number from 1 to 10000"),
        ("{grid: {a: 0.1}}", "sweep.grid.a: 0.1 is not allowed; it must be a list of values"),
        ("{grid: {a: [[1]]}}", "a[0]: [1] is not allowed; it must be a number, a text, true or f"),
        ("{grid: {a: [1]}, max_parallel: 0}", "it must be a whole number of at least 1"),
        ("{grid: {a: [1]}, max_replicas: x}", "it must be a whole number of at least 1"),
        ("{grid: {a: [1]}, metric: ''}", "it must be a name of 1 to 100 characters"),
    ],
)
def test_what_is_refused(tmp_path: Path, sweep: str, complaint: str) -> None:
    with pytest.raises(SpecError) as refused:
        read(tmp_path, sweep)
    assert complaint in str(refused.value)
    assert str(refused.value).count("\n") == 0


def test_what_a_job_with_a_sweep_cannot_have(tmp_path: Path) -> None:
    grid = "{grid: {lr: [1, 2]}}"
    with pytest.raises(SpecError, match=r"args\[0\]: '\{rate\}' is no parameter of the sweep"):
        read(tmp_path, grid, '["{rate}"]')
    with pytest.raises(SpecError, match="is too long for a sweep"):
        read(tmp_path, grid, name="x" * 62)
    fields: dict[str, Any] = {"name": "a", "script": "x", "sweep": {"grid": {"lr": [1]}}}
    with pytest.raises(ValueError, match="is for one job; leave it out of a sweep"):
        JobSpec.model_validate({**fields, "checkpoint_dir": "/data/a"})
    too_many = {"grid": {"a": list(range(101)), "b": list(range(100))}}
    with pytest.raises(ValueError, match=f"10100 trials; a sweep has at most {MOST_TRIALS}"):
        JobSpec.model_validate({**fields, "sweep": too_many})
