"""Forecasts against schedules worked out by hand, by brute force, and by the simulation itself."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pipollux_policies import Allocation, JobInfo, NodeInfo, make_policy
from pipollux_simulator import (
    Cluster,
    Effort,
    Estimate,
    ForecastJob,
    ForecastState,
    JobArrival,
    JobForecast,
    JobKind,
    Options,
    PastError,
    SimulationError,
    forecast,
)
from pipollux_simulator.applications.trace_model import linear_speedup
from pipollux_simulator.forecasting.draws import Draws
from pipollux_simulator.forecasting.errors import (
    ERROR,
    HORIZON,
    corrected,
    score,
    spread_of_starts,
)
from pipollux_simulator.forecasting.observed import MOST_KINDS, ObservedCluster
from pipollux_simulator.forecasting.state import spell
from tests.simulator.simulator_cases import Steady

NOW = 1000.0
RESTART = 30.0
ONE_GPU = {"n": NodeInfo({"slots": 1})}


def info(created: float = 0.0, **fields: Any) -> JobInfo:
    given = {"restart_seconds": RESTART, "age": NOW - created, **fields}
    return JobInfo({"slots": 1}, linear_speedup, created, 1, given.pop("most", 1), **given)


def running(name: str, node: str = "n", **fields: Any) -> ForecastJob:
    job = info(**fields)
    return ForecastJob(name, job, Allocation([node], job.all_shapes[0]))


def waiting(name: str, created: float = 500.0, **fields: Any) -> ForecastJob:
    return ForecastJob(name, info(created, **fields), is_new=True)


def forecasts(
    *jobs: ForecastJob,
    nodes: Any = ONE_GPU,
    policy: str = "fifo",
    effort: Effort | None = None,
    error: float = 0.0,
    **fields: Any,
) -> dict[str, JobForecast]:
    state = ForecastState(NOW, nodes, tuple(jobs), **fields)
    made = lambda: make_policy(policy, seed=0)  # noqa: E731  # one line
    return forecast(state, made, seed=3, effort=effort, error=error, start_error=error)


def exactly(moment: float) -> Any:
    return pytest.approx((moment, moment, moment), abs=1e-4)


def test_two_jobs_on_one_gpu_in_the_order_of_arrival() -> None:
    found = forecasts(running("a", remaining_work=100.0), waiting("b", remaining_work=50.0))
    assert found["a"] == JobForecast(None, exactly(NOW + 100), exactly(NOW + 100))
    assert found["b"].start == exactly(NOW + 100)
    assert found["b"].end == exactly(NOW + 100 + RESTART + 50)


def test_a_job_that_starts_trains_when_its_replicas_do() -> None:
    a = replace(running("a", remaining_work=100.0), starts_in=12.0)
    assert forecasts(a)["a"].end == exactly(NOW + 112)


@pytest.mark.parametrize("seed", range(3))
def test_a_queue_on_several_gpus_as_by_brute_force(seed: int) -> None:
    rng = np.random.default_rng(seed)
    work = rng.uniform(50, 5000, 8).tolist()
    nodes = {name: NodeInfo({"slots": 1}) for name in "xyz"}
    jobs = [running(f"j{i}", "xyz"[i], created=float(i), remaining_work=work[i]) for i in range(3)]
    jobs += [waiting(f"j{i}", float(i), remaining_work=work[i]) for i in range(3, 8)]
    found = forecasts(*jobs, nodes=nodes)
    free = [NOW + work[i] for i in range(3)]
    for i in range(3):
        assert found[f"j{i}"].end == exactly(NOW + work[i])
    heapq.heapify(free)
    for i in range(3, 8):
        start = heapq.heappop(free)
        heapq.heappush(free, start + RESTART + work[i])
        assert found[f"j{i}"].start == exactly(start)
        assert found[f"j{i}"].end == exactly(start + RESTART + work[i])


@pytest.mark.parametrize("policy", ["fifo", "exact", "tiresias"])
def test_a_forecast_without_unknowns_is_what_the_simulation_does_next(policy: str) -> None:
    rows = [JobArrival(f"job-{i}", 40.0 * i, "steady", 1 + i % 2, 10) for i in range(7)]
    options = Options(restart_seconds=5.0, decides_at="changes")
    states: list[ForecastState] = []

    def observe(cluster: ObservedCluster) -> None:
        if cluster.now >= 240.0 and not states:
            states.append(cluster.state())

    nodes = {name: NodeInfo({"slots": 2}) for name in "ab"}
    args = rows, {"steady": Steady()}, nodes, make_policy(policy, seed=0), options
    result = ObservedCluster(*args, observe=observe).run()
    # That it is observed changes nothing.
    args = rows, {"steady": Steady()}, nodes, make_policy(policy, seed=0), options
    assert [job.completed for job in Cluster(*args).run().jobs] == [
        job.completed for job in result.jobs
    ]
    [state] = states
    alone = replace(state, arrival_seconds=0.0)
    found = forecast(alone, lambda: make_policy(policy, seed=0), error=0.0, start_error=0.0)
    done = {job.name: job for job in result.jobs}
    assert len(found) >= 3
    for name, job in found.items():
        assert job.end == pytest.approx((done[name].completed,) * 3, abs=0.01)
        if job.start is not None:
            assert job.start == pytest.approx((done[name].started,) * 3, abs=0.01)


@pytest.mark.parametrize(("least", "after"), [(1, 0.0), (4, 600.0)])
def test_a_job_starts_when_the_policy_takes_slots_for_it(least: int, after: float) -> None:
    """All slots are taken: by a job that can shrink, or by one at its minimum, which must make way
    as soon as the new job is behind: after ten minutes.
    """
    held: dict[str, Any] = {"age": NOW, "attained_service": 4 * NOW, "remaining_work": 1e6}
    long = JobInfo({"slots": 1}, linear_speedup, 0.0, least, 4, **held)
    first = ForecastJob("a", long, Allocation(["n"] * 4, long.all_shapes[0]))
    nodes = {"n": NodeInfo({"slots": 4})}
    new = waiting("b", NOW, remaining_work=100.0)
    two = Effort(samples=2)
    start = forecasts(first, new, nodes=nodes, policy="exact", effort=two)["b"].start
    assert start is not None
    assert start.low == start.high
    assert NOW + after <= start.median <= NOW + after + 60.0


class Unmeasured(Steady):
    """The same, whose model knows nothing until the job trains."""

    def __init__(self) -> None:
        self.speed = 0.0

    def new_model(self, batch_size: int | None = None) -> Unmeasured:  # noqa: ARG002  # the protocol's
        return Unmeasured()

    def observe(self, *_: Any) -> None:
        self.speed = 10.0

    def base_goodput(self) -> float:
        return self.speed


class _SeenError(Exception):
    """Nothing more is to be simulated."""


def test_a_long_queue_does_not_push_out_the_jobs_that_have_trained() -> None:
    """The observed cluster knows their lengths; without any, no start in the queue is known."""
    rows = [JobArrival("first", 0.0, "steady", 1, 10)]
    rows += [JobArrival(f"job-{i}", 5.0, "steady", 1, 10) for i in range(MOST_KINDS + 10)]
    states: list[ForecastState] = []
    options = Options(restart_seconds=5.0, decides_at="changes")

    def observe(cluster: ObservedCluster) -> None:
        if cluster.now >= 60.0:
            states.append(cluster.state())
            raise _SeenError

    args = rows, {"steady": Unmeasured()}, ONE_GPU, make_policy("fifo", seed=0), options
    with pytest.raises(_SeenError):
        ObservedCluster(*args, observe=observe).run()
    [state] = states
    assert sum(job.is_new for job in state.jobs) == MOST_KINDS + 10
    assert len(state.kinds) == 1


def test_unknown_lengths_spread_over_their_distribution() -> None:
    left = tuple(100.0 * (i + 1) for i in range(16))
    found = forecasts(running("a", work_left=left), effort=Effort(samples=64))["a"].end
    # One sample lies in each 64th of the distribution.
    for got, place in zip(found, (0.1, 0.5, 0.9), strict=True):
        expected = np.interp(place, (np.arange(16) + 0.5) / 16, left)
        assert got - NOW == pytest.approx(expected, abs=1600 / 64)


def test_without_past_forecasts_times_may_be_wrong_by_the_error() -> None:
    found = forecasts(running("a", remaining_work=1000.0), error=0.3)["a"]
    assert found.uncorrected_end == exactly(NOW + 1000)
    factors = [math.exp(-0.3), 1.0, math.exp(0.3)]
    assert found.end == pytest.approx([NOW + 1000 * factor for factor in factors])


def test_past_errors_move_and_widen_forecasts() -> None:
    """With many of them, the quantiles are those of the times that they saw."""
    rng = np.random.default_rng(0)
    state = ForecastState(NOW, ONE_GPU, (running("a", remaining_work=1000.0),))
    raw = Estimate(NOW + 1000, NOW + 1000, NOW + 1000)
    actual = NOW + 1000 * np.exp(rng.normal(-0.6, 0.5, 4000))
    past = tuple(PastError("", score(raw, NOW, moment) or 0.0) for moment in actual)
    policy = lambda: make_policy("fifo", seed=0)  # noqa: E731  # one line
    found = forecast(replace(state, errors=past), policy)["a"]
    assert found.uncorrected_end == exactly(NOW + 1000)
    expected = np.quantile(actual, [0.1, 0.5, 0.9])
    assert np.array(found.end) - NOW == pytest.approx(expected - NOW, rel=0.02)


def test_errors_of_the_family_count_most() -> None:
    raw = Estimate(NOW + 500, NOW + 1000, NOW + 2000)
    past = [PastError("mine", -1.0)] * 10 + [PastError("other", 1.0)] * 10
    ends = [corrected(raw, NOW, family, past).median for family in ("mine", "", "other")]
    assert ends[0] < ends[1] < ends[2]
    assert ends[1] == pytest.approx(NOW + 1000, rel=0.02)
    least = corrected(raw, NOW, "mine", [PastError("mine", -1.0)] * 1000, error=0.0)
    assert least == pytest.approx((NOW + 500,) * 3, rel=1e-3)


def test_a_corrected_end_beyond_the_horizon_is_not_known() -> None:
    raw = Estimate(NOW + 60, NOW + 3600, NOW + HORIZON / 2)
    past = [PastError("", 0.0), PastError("", 2.0)] * 500
    found = corrected(raw, NOW, past=past)
    assert math.isfinite(corrected(raw, NOW).high)
    assert (found.low < NOW + HORIZON, found.high) == (True, math.inf)


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        ((10.0, 20.0, 40.0), 1.0),
        ((40.0, 80.0, 160.0), -1.0),
        ((10.0, 40.0, math.inf), 0.0),
        ((math.inf, math.inf, math.inf), None),
        ((40.0, 40.0, 40.0), 0.0),
        ((20.0, 20.0, 20.0), 20.0),
    ],
)
def test_scores_by_hand(end: tuple[float, float, float], expected: float | None) -> None:
    assert score(Estimate(*end), 0.0, 40.0, error=0.0) == pytest.approx(expected)


def test_starts_are_corrected_by_their_own_errors() -> None:
    """Those before the median weigh more than the normal scores that were there first."""
    jobs = running("a", remaining_work=1000.0), waiting("b", remaining_work=50.0)
    state = ForecastState(NOW, ONE_GPU, jobs)
    policy = lambda: make_policy("fifo", seed=0)  # noqa: E731  # one line
    first = forecast(state, policy)["b"]
    assert first.start is not None
    factors = [math.exp(place * spread_of_starts(1)) for place in (-1, 0, 1)]
    assert first.start == pytest.approx([NOW + 1000 * factor for factor in factors])
    assert first.uncorrected_start == exactly(NOW + 1000)
    early = tuple(PastError("other", 0.0, start=-1.0) for _ in range(2000))
    found = forecast(replace(state, errors=early), policy)
    assert found["b"].start == pytest.approx([NOW + 1000 * factors[0]] * 3, rel=1e-3)
    assert found["b"].uncorrected_start == exactly(NOW + 1000)
    assert found["a"].end.median == pytest.approx(NOW + 1000)


def test_behind_several_jobs_starts_have_a_smaller_spread() -> None:
    """Of `c`, which waits for `a` or `b`: the spread of an end over the root of 2."""
    two_gpus = {"n": NodeInfo({"slots": 2})}
    jobs = [running(name, remaining_work=1000.0) for name in "ab"]
    state = ForecastState(NOW, two_gpus, (*jobs, waiting("c", remaining_work=50.0)))
    start = forecast(state, lambda: make_policy("fifo", seed=0))["c"].start
    assert start is not None
    factors = [math.exp(place * ERROR / math.sqrt(2)) for place in (-1, 0, 1)]
    assert start == pytest.approx([NOW + 1000 * factor for factor in factors])


def test_running_times_of_new_jobs_are_those_of_their_family() -> None:
    """Jobs of family `slow` took twice as long as predicted, or four times; one trains already."""
    errors = tuple(PastError("slow", None, running=math.log(factor)) for factor in (2.0, 4.0) * 2)
    jobs = [
        replace(running("a", remaining_work=100.0), family="slow"),
        replace(waiting("b", 500.0, remaining_work=1000.0), family="slow"),
        replace(waiting("c", 600.0, remaining_work=1000.0), family="other"),
        waiting("d", 700.0, remaining_work=10.0),
    ]
    found = forecasts(*jobs, errors=errors)
    assert found["a"].end == exactly(NOW + 100)
    assert found["b"].start == exactly(NOW + 100)
    assert found["b"].end == exactly(NOW + 130 + 1000 * math.sqrt(8))
    assert found["c"].end.median - found["b"].end.median == pytest.approx(1030)
    # Predictions to learn from are those without the factors.
    running_seconds = [found[name].running_seconds for name in "abcd"]
    assert running_seconds[0] is None
    assert running_seconds[1:] == pytest.approx([1000 + 10, 1030, 40], abs=10)


@pytest.mark.parametrize("seconds", [36000.0, 100000.0])
def test_arrivals_go_on_for_about_as_long_as_they_have(seconds: float) -> None:
    kind = JobKind(replace(info(), remaining_work=500.0), (500.0,))
    state = ForecastState(
        *(NOW, ONE_GPU, (running("a"),), (kind,)),
        num_arrivals=1000,
        arrival_seconds=1000 * 3600.0,
        spell_seconds=seconds,
    )
    draws = Draws(state, 0, 1000)
    last = [[job.arrives for job in draws.arrivals(i, NOW + 10 * 86400)][-1:] for i in range(1000)]
    ends = sorted(moment[0] - NOW if moment else 0.0 for moment in last)
    # The last one is an hour before the end, on average.
    assert ends[500] == pytest.approx(seconds - 3600, abs=5000)
    assert ends[750] == pytest.approx(3 * seconds - 3600, rel=0.1)
    endless = Draws(replace(state, spell_seconds=math.inf), 0, 5)
    assert all(endless.arrivals(i, NOW + 360000)[-1].arrives > NOW + 320000 for i in range(5))


def test_a_spell_of_arrivals_begins_after_a_pause() -> None:
    assert spell([], 9000.0) == 3600.0
    assert spell([8000.0, 8500.0], 9000.0) == 3600.0
    assert spell([6000.0, 3000.0, 100.0], 9000.0) == 8900.0
    assert spell([6000.0, 2000.0, 100.0], 9000.0) == 3600.0
    with pytest.raises(ValueError, match="spell_seconds"):
        ForecastState(NOW, ONE_GPU, (), spell_seconds=math.nan)


def test_more_work_before_a_job_makes_it_later() -> None:
    ends = []
    for work in (100.0, 200.0, 1000.0):
        left = tuple(work * factor for factor in (0.5, 1.0, 2.0))
        a = running("a", work_left=left)
        found = forecasts(a, waiting("b", work_left=(10.0, 20.0)), error=0.1)["b"]
        assert found.start is not None
        assert list(found.start) == sorted(found.start)
        assert list(found.end) == sorted(found.end)
        assert all(start < end for start, end in zip(found.start, found.end, strict=True))
        ends.append(found.end)
    assert all(a < b for a, b in zip(ends[0], ends[1], strict=True))
    assert all(a < b for a, b in zip(ends[1], ends[2], strict=True))


def test_another_node_makes_no_job_later() -> None:
    rng = np.random.default_rng(0)
    jobs = [waiting(f"j{i}", float(i), work_left=_values(rng)) for i in range(6)]
    nodes = {name: NodeInfo({"slots": 1}) for name in "xyz"}
    fewer = {name: nodes[name] for name in "xy"}
    more, less = forecasts(*jobs, nodes=nodes), forecasts(*jobs, nodes=fewer)
    earlier = [(more[job.name].end.median, less[job.name].end.median) for job in jobs]
    assert all(a <= b + 1e-4 for a, b in earlier)
    assert any(a < b - 1 for a, b in earlier)


def _values(rng: np.random.Generator) -> tuple[float, ...]:
    return tuple(sorted(rng.uniform(10, 1000, 16).tolist()))


def test_future_jobs_delay_only_those_that_share_with_them() -> None:
    jobs = running("a", remaining_work=3000.0, most=2), waiting("b", remaining_work=300.0)
    nodes = {name: NodeInfo({"slots": 1}) for name in "nm"}
    kind = JobKind(replace(info(), remaining_work=500.0), (500.0,))
    more = {"kinds": (kind,), "num_arrivals": 20, "arrival_seconds": 3600.0}
    for policy, delays in (("fifo", False), ("exact", True)):
        alone, crowded = (
            forecasts(*jobs, nodes=nodes, policy=policy, effort=Effort(samples=3), **extra)
            for extra in ({}, more)
        )
        later = [crowded[name].end.median - alone[name].end.median for name in ("a", "b")]
        assert (max(later) > 60) is delays, policy
        if not delays:
            assert later == pytest.approx([0, 0], abs=1e-3)


def test_nobody_knows_when_a_job_of_unknown_length_ends() -> None:
    a, b = running("a"), waiting("b", remaining_work=10.0)
    found = forecasts(replace(a, is_measured=False), b)
    never = Estimate(math.inf, math.inf, math.inf)
    assert found["a"] == JobForecast(None, never, never)
    assert found["b"] == JobForecast(never, never, never, never)


def test_a_job_about_which_nothing_is_known_resembles_the_recent_ones() -> None:
    new = replace(waiting("new", NOW), is_measured=False)
    halves = lambda nodes, replicas: np.asarray(replicas) / 2  # noqa: ARG005, E731  # of speedups
    kind = JobKind(replace(info(), speedup_fn=halves), (200.0,))
    # It trains at half the speed that is assumed for unmeasured jobs.
    assert forecasts(new, kinds=(kind,))["new"].end == exactly(NOW + RESTART + 400)


def test_a_job_that_outlived_all_others_trains_on_in_proportion_to_its_age() -> None:
    a = running("a", work_done=1000.0)
    kind = JobKind(info(), (200.0,))
    found = forecasts(a, kinds=(kind,), effort=Effort(samples=51))["a"].end
    assert found.median == pytest.approx(NOW + 3000, rel=0.05)


def test_an_allocation_on_a_lost_node_starts_again() -> None:
    assert forecasts(running("a", "gone", remaining_work=100.0))["a"].end == exactly(
        NOW + RESTART + 100
    )


def test_what_was_broken_before_is_not_the_fault_of_the_policy() -> None:
    """A job that holds more replicas than it may have by now keeps them."""
    job = info(remaining_work=100.0, preemptible=False)
    wide = ForecastJob("a", job, Allocation(["n", "m"], job.all_shapes[0]))
    nodes = {name: NodeInfo({"slots": 1}) for name in "nm"}
    assert forecasts(wide, nodes=nodes)["a"].end == exactly(NOW + 50)

    class Greedy:
        def allocate_job(self, *_: Any) -> list[str]:
            return ["n"]

        def optimize(self, jobs: Any, nodes: Any, *_: Any) -> Any:
            return {name: ["n"] for name in jobs}, len(nodes)

    state = ForecastState(NOW, ONE_GPU, (running("a"), waiting("c", remaining_work=1.0)))
    with pytest.raises(SimulationError, match="broke a rule"):
        forecast(state, Greedy)


def test_coarse_steps_stay_within_their_share_of_the_time() -> None:
    jobs = [waiting(f"j{i}", float(i), remaining_work=1000.0 + 313 * i) for i in range(9)]
    exact = forecasts(*jobs, effort=Effort(exact_changes=100))
    coarse = forecasts(*jobs, effort=Effort(samples=9, exact_changes=0, stretch=0.05))
    late = [
        (coarse[job.name].end.median - NOW) / (exact[job.name].end.median - NOW) for job in jobs
    ]
    # Each start waits for a step: for the ninth job, eight steps of up to 5 %.
    assert min(late) >= 1 - 1e-6
    assert max(late) < 1.05**2 + 0.1


def test_equal_seeds_give_equal_forecasts_and_others_different_ones() -> None:
    jobs = running("a", work_left=(10.0, 1000.0)), waiting("b", work_left=(10.0, 500.0))
    state = ForecastState(NOW, ONE_GPU, jobs)

    def of(seed: int) -> Sequence[float]:
        return forecast(state, lambda: make_policy("fifo", seed=0), seed=seed)["b"].end

    assert of(1) == of(1)
    assert of(1) != of(2)


@pytest.mark.parametrize(
    "wrong", [{"samples": 0}, {"exact_changes": -1}, {"stretch": math.nan}, {"horizon": 0.0}]
)
def test_an_effort_out_of_range_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match="must be"):
        Effort(**wrong)
