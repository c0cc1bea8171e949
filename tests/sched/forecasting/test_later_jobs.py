"""Forecasts of jobs that wait for others and of sweeps, from a store, by hand."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from pipollux_sched.forecasting.loop import ForecastLoop
from pipollux_sched.forecasting.make import Forecaster
from pipollux_sched.forecasting.new_jobs import forecast_new
from pipollux_sched.forecasting.state import PRUNING, StateReader
from pipollux_sched.lifecycle import Allocate, Exited, Outcome, Started, Suspend, SweepProgress
from pipollux_sched.spec.job import parse_job
from pipollux_sched.store import DependencyError, StateDir, Store, TrialRecord
from pipollux_sched.store.submissions import Submission
from pipollux_sched.views.forecasts import list_forecasts
from pipollux_simulator import ForecastState
from tests.cli.kept import HINTS, Clock, spec

from .test_forecasting import RESTART, Fixed, clock, seconds_of, store, submit

__all__ = ["clock", "store"]
SHORT = {**HINTS, "remainingSamples": 1400.0, "trainedSamples": 0}
GRID = {"grid": {"lr": [0.1, 0.2, 0.3]}, "max_parallel": 1}


def read(store: Store) -> tuple[ForecastState, StateReader]:
    reader = StateReader(store, restart_seconds=RESTART, interval=60.0)
    return reader.read(), reader


def start_trial(store: Store, sweep: str, number: int) -> str:
    """Submit the job of a trial as the scheduler does."""
    template = parse_job(store.job(sweep).spec)
    one = template.of_trial(number, {"lr": 0.1})
    trial = TrialRecord(sweep, number, {"lr": 0.1})
    store.submit_all([Submission(one.name, one.model_dump(mode="json"), "t", 3, trial=trial)])
    store.transition(sweep, SweepProgress("It runs."))
    return one.name


def test_a_chain_of_a_job_another_one_and_a_sweep(store: Store, clock: Clock) -> None:
    """On one slot, `first` trains and `second` waits for slots; each median follows by hand."""
    submit(store, "third", after=["second"], hints=SHORT)
    submit(store, "rates", after=["third"], hints=SHORT, sweep=GRID)
    found = Forecaster(store).make()
    assert found.keys() == {"first", "second", "third", "rates"}
    each = RESTART + seconds_of(1400)
    begin = clock.now + seconds_of(7000)
    medians = {name: one.end["median"] for name, one in found.items()}
    assert medians["second"] == pytest.approx(begin + each, abs=0.1)
    assert medians["third"] == pytest.approx(begin + 2 * each, abs=0.1)
    assert medians["rates"] == pytest.approx(begin + 5 * each, abs=0.1)
    for name, before in (("third", "second"), ("rates", "third")):
        start = found[name].start
        assert start is not None
        assert start["median"] == pytest.approx(found[before].end["median"], abs=0.1)
    assert {one.note for one in found.values()} == {None}


def test_who_waits_for_a_failure_has_no_forecast(
    store: Store, clock: Clock, tmp_path: Path
) -> None:
    submit(store, "alarm", after=[{"job": "first", "when": "failed"}])
    submit(store, "later", after=[{"job": "alarm", "when": "ended"}])
    submit(store, "always", after=[{"job": "first", "when": "ended"}], hints=SHORT)
    process = Fixed(store)
    process.answer = Forecaster(store).make()
    notes = {name: one.note for name, one in process.answer.items()}
    assert notes == {
        "first": None,
        "second": None,
        "always": None,
        "alarm": "it waits for job first to fail, and forecasts assume that jobs succeed",
        "later": "it waits for job alarm to end, which has no forecast",
    }
    ForecastLoop(store, process, ending=threading.Event()).run_once()
    assert [one["job"] for one in store.events(types=["forecast"])] == ["always", "first", "second"]
    shown = {one.job: one for one in list_forecasts(store).jobs}
    assert shown["alarm"].end.low is None
    assert shown["alarm"].note == notes["alarm"]


def test_a_sweep_under_way(store: Store, clock: Clock) -> None:
    """Two trials are jobs, of which one has ended; the others are still to come."""
    sweep = {"grid": {"lr": [0.1, 0.2, 0.3, 0.4]}, "pruner": "median", "max_replicas": 4}
    submit(store, "rates", hints=SHORT, sweep=sweep, max_replicas=8)
    state, reader = read(store)
    (one,) = state.sweeps
    assert (one.num_planned, one.trials, one.is_new, one.most_unfinished) == (4, (), True, 1)
    assert one.trial.info.max_replicas == 4
    assert reader.notes == {"rates": PRUNING}
    for number in range(2):
        name = start_trial(store, "rates", number)
        if number == 0:
            store.transition(name, Allocate(["n"], "it is free"))
            store.transition(name, Started(1, ("1",)))
            store.transition(name, Exited(1, Outcome.COMPLETE, step=9, epoch=0))
    (one,) = read(store)[0].sweeps
    assert (one.num_planned, one.trials, one.is_new) == (2, ("rates-1",), False)
    found = Forecaster(store).make()["rates"]
    assert (found.start, found.note) == (None, PRUNING)
    assert found.end["low"] is not None
    submit(store, "last", after=["rates"])
    store.transition("rates", Suspend())
    store.transition("rates-1", Suspend())
    state, reader = read(store)
    assert state.sweeps == ()
    assert reader.notes == {"last": "it waits for job rates to complete, which has no forecast"}


def test_new_sweeps_and_dependants_are_forecast_together(
    store: Store, clock: Clock, tmp_path: Path
) -> None:
    before = store.jobs(), store.last_event()
    new = [spec("last", after=["rates"], hints=SHORT), spec("rates", hints=SHORT, sweep=GRID)]
    found = Forecaster(store).make(new)
    assert (store.jobs(), store.last_event()) == before
    each = RESTART + seconds_of(1400)
    last, rates = found["last"].start, found["rates"].start
    assert last is not None
    assert rates is not None
    assert last["median"] == pytest.approx(found["rates"].end["median"], abs=0.2)
    assert rates["median"] == pytest.approx(clock.now + seconds_of(7000) + each, abs=0.2)
    assert found["rates"].end["median"] == pytest.approx(rates["median"] + 3 * each, abs=0.2)


def test_dependencies_of_new_jobs_are_checked(store: Store, tmp_path: Path) -> None:
    directory = StateDir(tmp_path / "state")
    with pytest.raises(DependencyError, match="there is no job of this name"):
        forecast_new(store, directory, [spec("last", after=["gone"])])
    store.transition("first", Exited(1, Outcome.COMPLETE, step=9, epoch=0))
    with pytest.raises(DependencyError, match="can never start"):
        forecast_new(store, directory, [spec("last", after=[{"job": "first", "when": "failed"}])])
    found = Forecaster(store).make([spec("last", after=["first"], hints=SHORT)])["last"]
    assert (found.note, found.start is None) == (None, False)
