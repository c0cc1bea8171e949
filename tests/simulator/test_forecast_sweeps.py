"""Forecasts of sweeps and of jobs that wait for others, by hand and by brute force."""

from __future__ import annotations

import heapq
import math
from dataclasses import replace

import numpy as np
import pytest

from pipollux_policies import NodeInfo
from pipollux_simulator import Effort, Estimate, ForecastJob, ForecastSweep, JobKind
from pipollux_simulator.forecasting.draws import Draws
from pipollux_simulator.forecasting.holding import Holding
from pipollux_simulator.forecasting.state import ForecastState

from .test_forecast import NOW, RESTART, exactly, forecasts, info, running, waiting

EXACT, COARSE = Effort(samples=1, exact_changes=10_000), Effort(samples=1, exact_changes=0)
NEVER = Estimate(math.inf, math.inf, math.inf)


def gpus(number: int) -> dict[str, NodeInfo]:
    return {f"n{i}": NodeInfo({"slots": 1}) for i in range(number)}


def trial(work: float | None = 100.0, **fields: object) -> ForecastJob:
    return ForecastJob("s-9", info(NOW, remaining_work=work, **fields), is_new=True)


def after(name: str, *others: str, work: float = 50.0) -> ForecastJob:
    return replace(waiting(name, NOW, remaining_work=work), after=others)


def test_a_chain_of_jobs_starts_one_after_another() -> None:
    """There are free slots: each job waits for the one before and for nothing else."""
    first = running("a", "n0", remaining_work=100.0)
    found = forecasts(first, after("b", "a"), after("c", "b", "a"), nodes=gpus(4))
    assert found["b"].start == exactly(NOW + 100)
    assert found["b"].end == exactly(NOW + 100 + RESTART + 50)
    assert found["c"].start == found["b"].end
    assert found["c"].end == exactly(NOW + 100 + 2 * (RESTART + 50))


@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_jobs_as_by_brute_force(seed: int) -> None:
    """With a slot for each job, a job ends by the longest path to it."""
    rng = np.random.default_rng(seed)
    jobs, ends = [], {}
    for i in range(12):
        before = [f"j{k}" for k in range(i) if rng.random() < 0.25]
        work = float(rng.uniform(10, 500))
        jobs.append(after(f"j{i}", *before, work=work))
        ends[f"j{i}"] = max([NOW, *(ends[k] for k in before)]) + RESTART + work
    rng.shuffle(jobs)  # type: ignore[arg-type]  # a list is a sequence
    found = forecasts(*jobs, nodes=gpus(12), effort=EXACT)
    assert {name: one.end.median for name, one in found.items()} == pytest.approx(ends, abs=1e-2)


def test_who_waits_for_what_never_ends_has_no_end_either() -> None:
    unknown = running("a", "n0")  # of unknown length
    found = forecasts(unknown, after("b", "a"), after("c", "gone"), nodes=gpus(2))
    assert [found[name].end for name in "abc"] == [NEVER] * 3
    alone = forecasts(after("c", "gone"), nodes=gpus(1))["c"]
    assert (alone.start, alone.end) == (NEVER, NEVER)


@pytest.mark.parametrize("effort", [EXACT, COARSE])
@pytest.mark.parametrize("lanes", [1, 3, 4, 30])
@pytest.mark.parametrize("seed", range(2))
def test_a_sweep_on_several_gpus_as_by_brute_force(seed: int, lanes: int, effort: Effort) -> None:
    """Trials are jobs as far as the sweep and the slots have room for them."""
    rng = np.random.default_rng(seed)
    work, side_by_side = float(rng.uniform(10, 1000)), min(lanes, 4)
    left = rng.uniform(1, 2000, min(lanes, 3)).tolist()
    begun = [running(f"s-{i}", f"n{i}", remaining_work=left[i]) for i in range(len(left))]
    names = tuple(job.name for job in begun)
    sweep = ForecastSweep("s", trial(work), 11, lanes, names, is_new=False)
    found = forecasts(*begun, sweeps=(sweep,), nodes=gpus(4), effort=effort)["s"]
    free = [NOW] * (side_by_side - len(left)) + [NOW + one for one in left]
    heapq.heapify(free)
    for _ in range(11):
        heapq.heappush(free, heapq.heappop(free) + RESTART + work)
    assert found.start is None
    assert found.end == exactly(max(free))


def test_thousands_of_short_trials_do_not_wait_for_steps_of_the_forecast() -> None:
    sweep = ForecastSweep("s", trial(60.0), 2000, 10)
    found = forecasts(sweeps=(sweep,), nodes=gpus(10), effort=Effort(samples=2))["s"]
    assert found.start == exactly(NOW)
    assert found.end == pytest.approx((NOW + 200 * (RESTART + 60),) * 3, rel=0.03)


def test_a_job_that_waits_gets_the_slots_of_a_trial_first() -> None:
    """It came before the next trials, which are submitted when there is room for them."""
    begun = running("s-0", "n0", remaining_work=40.0)
    sweep = ForecastSweep("s", trial(), 2, 1, ("s-0",), is_new=False)
    other = waiting("other", 500.0, remaining_work=10.0)
    found = forecasts(begun, other, sweeps=(sweep,), nodes=gpus(1), effort=EXACT)
    assert found["other"].start == exactly(NOW + 40)
    assert found["s"].end == exactly(NOW + 40 + (RESTART + 10) + 2 * (RESTART + 100))


@pytest.mark.parametrize("effort", [EXACT, COARSE])
def test_sweeps_and_jobs_wait_for_each_other(effort: Effort) -> None:
    a = running("a", "n0", remaining_work=100.0)
    sweep = ForecastSweep("s", trial(), 4, 2, after=("a",))
    found = forecasts(a, after("b", "s"), sweeps=(sweep,), nodes=gpus(2), effort=effort)
    end = NOW + 100 + 2 * (RESTART + 100)
    late = 1.0 if effort is EXACT else 1.6  # a coarse step is at least an interval
    assert found["s"].start is not None
    assert found["s"].start.median - NOW == pytest.approx(100, rel=late - 1 + 1e-6)
    assert end - NOW - 1e-4 <= found["s"].end.median - NOW <= late * (end - NOW)
    assert found["b"].start is not None
    assert found["s"].end.median - 1e-4 <= found["b"].start.median
    assert found["b"].end.median - NOW <= late * (end + RESTART + 50 - NOW) + 1e-4


def test_an_ended_sweep_lets_jobs_start_at_once() -> None:
    sweep = ForecastSweep("s", trial(), 0, 2, is_new=False)
    found = forecasts(after("b", "s"), sweeps=(sweep,), nodes=gpus(1))
    assert found["s"].end == exactly(NOW)
    assert found["b"].start == exactly(NOW)


def test_trials_are_alike_as_long_as_nothing_is_known() -> None:
    """Otherwise a sweep of many trials of unknown length would seem to be of known length."""
    kind = JobKind(info(), (100.0, 10_000.0))
    unknown = ForecastSweep("s", trial(None), 50, 5)
    known = ForecastSweep("s", replace(trial(None, work_left=(100.0, 10_000.0))), 50, 5)
    spans = []
    for sweep in (unknown, known):
        state = ForecastState(NOW, gpus(5), (), kinds=(kind,), sweeps=(sweep,))
        draws = Draws(state, 0, 9)
        works = [[job.work for job in draws.planned(i)["s"]] for i in range(9)]
        assert all((len({*sample}) == 1) is (sweep is unknown) for sample in works)
        # Each trial has one draw in each ninth of the distribution.
        each = [sorted(sample[number] for sample in works) for number in range(50)]
        assert [one[4] for one in each] == pytest.approx([5050] * 50, rel=0.25)
        found = forecasts(sweeps=(sweep,), kinds=(kind,), nodes=gpus(5))["s"].end
        spans.append(found.high - found.low)
    assert spans[0] > 3 * spans[1]


def test_a_trial_leaves_room_for_the_next_one_only() -> None:
    sweep = ForecastSweep("s", trial(), 3, 2, ("s-0", "s-1"), is_new=False)
    state = ForecastState(NOW, gpus(1), (after("b", "s"),), sweeps=(sweep,))
    holding = Holding(state, {"s": ["t0", "t1", "t2"]})
    assert holding.begin() == []
    assert [holding.end(name) for name in ("s-1", "t0", "s-0", "t1", "t2")] == [
        ["t0"],
        ["t1"],
        ["t2"],
        [],
        ["b"],
    ]
