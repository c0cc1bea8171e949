"""Forecasts of a store: by hand for two jobs, in a process of their own, kept and compared."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipollux_perfmodel import SchedHints
from pipollux_sched.allocator.job_infos import hints_worth
from pipollux_sched.forecasting.loop import ForecastLoop
from pipollux_sched.forecasting.make import Forecaster, effort_for
from pipollux_sched.forecasting.new_jobs import forecast_new
from pipollux_sched.forecasting.policy import NoForecastError
from pipollux_sched.forecasting.process import ForecastError, ForecastProcess
from pipollux_sched.forecasting.state import StateReader
from pipollux_sched.lifecycle import Allocate, Exited, Outcome, Started
from pipollux_sched.spec.job import JobSpec
from pipollux_sched.store import JobExistsError, StateDir, Store, StoredForecast
from pipollux_sched.views.forecasts import list_forecasts
from pipollux_sched.views.jobs import list_jobs
from pipollux_simulator.forecasting.errors import ERROR, START_ERROR
from tests.cli.kept import HINTS, Clock, kept, point, spec

RESTART = 20.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("time.time", clock)
    return clock


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> Iterator[Store]:
    with two_jobs(tmp_path, clock) as store:
        yield store


@contextmanager
def two_jobs(tmp_path: Path, clock: Clock) -> Iterator[Store]:
    """One slot, on which `first` trains; `second` waits behind it."""
    directory = StateDir(tmp_path / "state")
    directory.create()
    with Store(directory.database, create=True, clock=clock) as store:
        serve(store)
        clock.now += 10
        train(store, "first", remaining=7000.0)
        submit(store, "second", hints={**HINTS, "remainingSamples": 1400.0, "trainedSamples": 0})
        clock.now += 600
        tell_hints(store, "first", remaining=7000.0)
        yield store


def serve(store: Store, policy: str = "FifoPolicy") -> None:
    store.set_nodes([("n", 1, "cpu", {"name": "n", "slots": 1, "kind": "cpu"})])
    data = {"nodes": {"n": {"slots": 1, "kind": "cpu"}}, "policy": policy}
    store.add_event("cluster", {**data, "restart_seconds": RESTART, "interval": 60.0})


def submit(store: Store, name: str, **fields: Any) -> JobSpec:
    job = spec(name, **fields)
    store.submit(job.name, job.model_dump(mode="json"), "token", 3)
    return job


def train(store: Store, name: str, *, remaining: float) -> None:
    submit(store, name)
    store.transition(name, Allocate(["n"], "it is free"))
    store.transition(name, Started(1, ("4711",)))
    store.add_report(name, 1, [point(1, store._clock())])
    tell_hints(store, name, remaining=remaining)


def tell_hints(store: Store, name: str, *, remaining: float) -> None:
    store.put_hints(name, 1, {**HINTS, "remainingSamples": remaining, "trainedSamples": 100.0})


def seconds_of(samples: float) -> float:
    """The seconds in which one replica trains some samples, by its hints."""
    hints = SchedHints.from_json_object(HINTS)
    return samples / hints_worth(spec("any"), hints).speedups[1].base_goodput


def test_two_jobs_on_one_slot_by_hand(store: Store, clock: Clock) -> None:
    state = StateReader(store, restart_seconds=RESTART, interval=60.0).read()
    first, second = state.jobs
    assert (first.is_new, second.is_new) == (False, True)
    assert first.info.remaining_work == pytest.approx(seconds_of(7000))
    assert second.info.remaining_work == pytest.approx(seconds_of(1400))
    assert state.num_arrivals == 2
    found = Forecaster(store).make()
    end = clock.now + seconds_of(7000)
    # Errors of speeds spread around what the hints say; the median is exact by symmetry.
    assert found["first"].start is None
    assert found["first"].end["median"] == pytest.approx(end, abs=0.06 * seconds_of(7000))
    start = found["second"].start
    assert start is not None
    assert start == pytest.approx(found["first"].end, abs=1)
    took = found["second"].end["median"] - start["median"]
    assert took == pytest.approx(RESTART + seconds_of(1400), rel=0.25)


@pytest.mark.exhaustive
def test_a_new_job_waits_behind_the_others_and_nothing_is_stored(tmp_path: Path) -> None:
    clock = Clock(time.time() - 610.0)  # the other process has the time of day
    with two_jobs(tmp_path, clock) as store:
        before = store.jobs(), store.last_event()
        new = spec("third", hints={**HINTS, "remainingSamples": 100.0})
        [found] = forecast_new(store, StateDir(tmp_path / "state"), [new])
        assert (store.jobs(), store.last_event()) == before
        ends = Forecaster(store).make()["second"].end
        assert found.job == "third"
        assert found.start is not None
        assert found.start.median == pytest.approx(ends["median"], abs=1)
        with pytest.raises(JobExistsError, match="already exists"):
            forecast_new(store, StateDir(tmp_path / "state"), [spec("first")])


def test_a_policy_that_cannot_be_simulated(store: Store) -> None:
    serve(store, "WishPolicy")
    with pytest.raises(NoForecastError, match="under the policy 'wish'"):
        Forecaster(store).make()


@pytest.mark.exhaustive
def test_the_worker_says_that_a_policy_cannot_be_simulated(store: Store, tmp_path: Path) -> None:
    serve(store, "WishPolicy")
    with pytest.raises(ForecastError, match="under the policy 'wish'"):
        forecast_new(store, StateDir(tmp_path / "state"), [spec("third")])


def test_the_worker_is_of_low_priority_and_ends_with_its_owner(
    store: Store, tmp_path: Path
) -> None:
    began = time.time()
    with ForecastProcess(StateDir(tmp_path / "state").store) as process:
        found = process.ask()
        assert found.by_job.keys() == {"first", "second"}
        assert found.cpu_seconds > 0
        assert process._process is not None
        worker = psutil.Process(process._process.pid)
        assert worker.nice() == min(os.nice(0) + 19, 19)
        again = process.ask()
        # A job that makes no progress ends later by the time between the two.
        between = time.time() - began
        one, other = found.by_job["first"].end, again.by_job["first"].end
        assert all(-2 < other[name] - one[name] < between + 2 for name in ("low", "median", "high"))
        assert again.cpu_seconds < found.cpu_seconds  # without the start
        assert process._process.stdin is not None
        process._process.stdin.close()  # as if the scheduler were killed
        assert worker.wait(30) == 0
        with pytest.raises(ForecastError, match="has ended"):
            process.ask()
    with pytest.raises(ForecastError, match="is stopping"):
        process.ask()


@pytest.mark.exhaustive
def test_after_a_worker_that_has_ended_there_is_another_one(store: Store, tmp_path: Path) -> None:
    with ForecastProcess(StateDir(tmp_path / "state").store) as process:
        assert process.ask().by_job.keys() == {"first", "second"}
        assert process._process is not None
        process._process.kill()
        with pytest.raises(ForecastError, match="has ended"):
            process.ask()
        assert process.ask().by_job.keys() == {"first", "second"}


def loop_of(store: Store, tmp_path: Path) -> tuple[ForecastLoop, ForecastProcess]:
    process = ForecastProcess(StateDir(tmp_path / "state").store)
    return ForecastLoop(store, process, ending=threading.Event()), process


def recorded(store: Store) -> list[str]:
    return [event["job"] for event in store.events(types=["forecast"])]


class Fixed(ForecastProcess):
    """Answers with the forecasts that a test wishes."""

    def __init__(self, store: Store) -> None:
        super().__init__("")
        self.store = store
        self.answer: dict[str, StoredForecast] = {}

    def ask(self, new: Any = ()) -> Any:  # noqa: ARG002  # the process's
        from pipollux_sched.forecasting.process import Forecasts

        return Forecasts(self.answer, 0.5)


def test_forecasts_are_kept_recorded_and_compared_across_a_restart(
    store: Store, clock: Clock, tmp_path: Path
) -> None:
    begin = clock.now
    process = Fixed(store)
    loop = ForecastLoop(store, process, ending=threading.Event())

    def foresee(low: float, median: float, high: float) -> None:
        end = {"low": begin + low, "median": begin + median, "high": begin + high}
        process.answer = {
            "first": StoredForecast(clock.now, None, end, end),
            "second": StoredForecast(clock.now, end, end, end),
        }
        assert loop.run_once() == 0.5

    foresee(100, 150, 200)
    assert recorded(store) == ["first", "second"]
    shown = {job.name: job.forecast for job in list_jobs(store)[0]}
    assert shown["first"] is not None
    assert shown["first"].end.median == begin + 150
    clock.now = begin + 30  # too soon for another record
    foresee(100, 160, 200)
    assert len(recorded(store)) == 2
    directory = StateDir(tmp_path / "state")
    with Store(directory.database, clock=clock) as again:  # as the next scheduler opens it
        loop = ForecastLoop(again, process, ending=threading.Event())
        clock.now = begin + 590  # its age has not doubled since the record at 600 s
        foresee(900, 950, 1000)
        assert len(recorded(again)) == 2
        clock.now = begin + 650
        foresee(900, 950, 1000)
        assert recorded(again) == ["first", "second"] * 2
        again.transition("first", Exited(1, Outcome.COMPLETE, step=9, epoch=0))
        found = list_forecasts(again)
        errors = StateReader(again, restart_seconds=RESTART, interval=60.0).read().errors
    # The later one was as wrong as can be: it had ended by then.
    assert [one.family for one in errors] == ["first", "first"]
    assert errors[0].score == pytest.approx(math.log(650 / 150) / (math.log(200 / 150) + ERROR))
    assert errors[1].score == pytest.approx(-math.log(300) / (math.log(300 / 250) + ERROR))
    assert [job.job for job in found.jobs] == ["second"]
    # It ended at 650 s: the first record (100 to 200 s) is wrong, the second one ends then.
    assert [(one.made_at - begin, one.covered) for one in found.past] == [(0, False), (650, False)]
    assert found.accuracy.num_ends == 2
    assert found.accuracy.ends_covered == 0.0
    assert found.accuracy.median_error == pytest.approx(500 / 650)
    assert found.accuracy.num_starts == 0


def test_a_covered_end_and_a_covered_start(store: Store, clock: Clock) -> None:
    begin = clock.now
    end = {"low": begin + 90.0, "median": begin + 120.0, "high": begin + 150.0}
    start = {"low": begin + 5.0, "median": begin + 10.0, "high": None}
    forecasts = {"second": StoredForecast(begin, start, end, end)}
    store.forecasts.keep(forecasts, ["second"])
    clock.now = begin + 20
    store.transition("second", Allocate(["n"], "it is free"))
    store.transition("second", Started(1, ("4711",)))
    clock.now = begin + 100
    store.transition("second", Exited(1, Outcome.COMPLETE, step=9, epoch=0))
    accuracy = list_forecasts(store).accuracy
    assert (accuracy.num_ends, accuracy.ends_covered) == (1, 1.0)
    assert (accuracy.num_starts, accuracy.starts_covered) == (1, 1.0)
    assert accuracy.median_error == pytest.approx(0.2)


def test_only_known_intervals_are_compared(store: Store, clock: Clock) -> None:
    begin = clock.now
    unknown = dict.fromkeys(("low", "median", "high"))
    later = {**unknown, "low": begin + 90.0}
    for end in (unknown, later):
        forecast = StoredForecast(clock.now, unknown, end, end, uncorrected_start=unknown)
        store.forecasts.keep({"second": forecast}, ["second"])
        clock.now += 10
    store.transition("second", Allocate(["n"], "it is free"))
    store.transition("second", Started(1, ("4711",)))
    clock.now = begin + 100
    store.transition("second", Exited(1, Outcome.COMPLETE, step=9, epoch=0))
    found = list_forecasts(store)
    assert [one.covered for one in found.past] == [None, True]
    assert (found.accuracy.num_ends, found.accuracy.ends_covered) == (1, 1.0)
    assert (found.accuracy.num_starts, found.accuracy.starts_covered) == (0, None)
    errors = StateReader(store, restart_seconds=RESTART, interval=60.0).read().errors
    assert [(one.score, one.start, one.running) for one in errors] == [(None, None, None)] * 2


def test_starts_and_running_times_are_learned_from(store: Store, clock: Clock) -> None:
    made = Forecaster(store).make()
    raw = made["second"].uncorrected_start
    assert raw is not None
    assert made["second"].running_seconds == pytest.approx(RESTART + seconds_of(1400), abs=1)
    assert made["first"].running_seconds is None
    store.forecasts.keep(made, list(made))
    begin = clock.now
    clock.now = begin + 2 * (raw["median"] - begin)
    store.transition("second", Allocate(["n"], "it is free"))
    store.transition("second", Started(1, ("4711",)))
    started = clock.now
    clock.now += 3 * made["second"].running_seconds
    store.transition("second", Exited(1, Outcome.COMPLETE, step=9, epoch=0))
    [error] = StateReader(store, restart_seconds=RESTART, interval=60.0).read().errors
    spread = math.log((raw["high"] - begin) / (raw["median"] - begin)) + START_ERROR
    assert error.start == pytest.approx(math.log(2) / spread, rel=0.01)
    assert error.running == pytest.approx(math.log(3), abs=0.01)
    assert started > begin


def test_arrivals_are_looked_back_at_until_a_pause(store: Store, clock: Clock) -> None:
    """Both jobs of the store were submitted now; others come for two hours, after a pause."""
    begin = clock.now
    for number, hours in enumerate((2.0, 2.5, 3.4, 4.0)):
        clock.now = begin + 3600 * hours
        submit(store, f"later-{number}")
    clock.now = begin + 3600 * 4.2
    state = StateReader(store, restart_seconds=RESTART, interval=60.0).read()
    assert state.spell_seconds == pytest.approx(3600 * 2.2)


def test_the_background_stays_within_its_share(store: Store) -> None:
    class Counted(Fixed):
        asked = 0

        def ask(self, new: Any = ()) -> Any:
            self.asked += 1
            return super().ask(new)

    pauses: list[float] = []

    class Ending(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            pauses.append(timeout or 0.0)
            return len(pauses) > 3

    process = Counted(store)
    ForecastLoop(store, process, ending=Ending(), share=0.01, shortest_pause=10.0).run()
    assert process.asked == 3
    assert pauses[0] == 10.0
    assert all(pause == pytest.approx(50.0, abs=1.0) for pause in pauses[1:])


def test_a_failure_is_logged_once_and_tried_again_later(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing(Fixed):
        def ask(self, new: Any = ()) -> Any:  # noqa: ARG002  # the process's
            raise ForecastError("it went wrong")

    pauses: list[float] = []

    class Ending(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            pauses.append(timeout or 0.0)
            return len(pauses) > 3

    ForecastLoop(store, Failing(store), ending=Ending()).run()
    assert [record.message for record in caplog.records] == [
        "the forecast of jobs failed and is retried: it went wrong"
    ]
    assert min(pauses[1:]) >= 60


def test_jobs_in_every_state(tmp_path: Path, clock: Clock) -> None:
    """A forecast is possible whatever state jobs are in; those that may not run have none."""
    with kept(tmp_path / "state", clock) as store:
        found = Forecaster(store).make()
        assert found.keys() == {"grown", "wide", "waiting"}
        for one in found.values():
            moments = [m for m in (one.end["low"], one.end["median"], one.end["high"]) if m]
            assert moments == sorted(moments)


def test_with_many_jobs_each_pass_adds_a_sample(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Forecaster(store).make()
    monkeypatch.setattr("pipollux_sched.forecasting.make._SEVERAL", 1)
    forecaster = Forecaster(store)
    passes = [forecaster.make() for _ in range(10)]
    # After as many passes as a forecast has samples, in the same state, it is the same.
    assert passes[8] == whole
    assert passes[9] == whole
    assert passes[0].keys() == whole.keys()
    submit(store, "third", hints={**HINTS, "remainingSamples": 100.0, "trainedSamples": 0})
    assert forecaster.make().keys() == {"first", "second", "third"}


def test_more_jobs_get_less_effort_each() -> None:
    efforts = [effort_for(number) for number in (1, 40, 400, 4000)]
    assert efforts[0] == efforts[1]
    assert [e.exact_changes for e in efforts] == [20, 20, 2, 0]
    assert [e.stretch for e in efforts] == sorted(e.stretch for e in efforts)
