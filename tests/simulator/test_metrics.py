"""What a simulation is judged by, against numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipollux_policies import Contention, NodeInfo
from pipollux_sched.report.simulation.table import HEADERS, cells
from pipollux_simulator import (
    JOB_COLUMNS,
    IsolatedTimes,
    JobArrival,
    PipelineApplication,
    SimulationMetrics,
    job_rows,
    make_nodes,
    measure,
    outcome,
    scale_load,
)
from tests.simulator.simulator_cases import Give, Steady, simulate

APPLICATIONS = {"steady": Steady()}


def measured(policy: Give, *jobs: tuple[str, float]) -> SimulationMetrics:
    result = simulate(policy, *jobs)
    isolated = IsolatedTimes(result.nodes, 30.0)
    found = outcome(result, APPLICATIONS, isolated, workload="w", policy="give", seed=5)
    return measure(replace(found, policy_seconds=(0.5, 0.1, 0.3)))


def test_one_job_by_hand() -> None:
    row = measured(Give(j=["a", "a"]), ("j", 10.0))
    # Starts at 60, trains from 90 to 240; alone it would have had all eight slots.
    assert row.avg_jct_s == row.median_jct_s == row.p99_jct_s == pytest.approx(230.0)
    assert (row.makespan_s, row.avg_wait_s) == (pytest.approx(230.0), 50.0)
    assert row.gpu_utilization == pytest.approx(2 * 180 / (8 * 230))
    assert row.gpu_hours == pytest.approx(0.1)
    assert row.finish_time_fairness == pytest.approx(230 / (30 + 300 / 8))
    assert row.unfair_share == 1.0
    assert (row.policy_seconds, row.policy_seconds_median) == (pytest.approx(0.9), 0.3)
    assert (row.policy_seconds_max, row.policy_calls) == (0.5, 3)
    assert (row.jobs, row.gpus, row.seed, row.restarts_per_job) == (1, 8, 5, 0.0)


def test_two_jobs_share_by_hand() -> None:
    row = measured(Give(j=["a"] * 4, k=["b"] * 4), ("j", 60.0), ("k", 60.0))
    # Each has what an equal share is, from the round at which it comes on: 30 s and 75 s.
    assert row.avg_jct_s == pytest.approx(105.0)
    assert row.finish_time_fairness == row.finish_time_fairness_worst == pytest.approx(1.0)
    assert row.gpu_utilization == pytest.approx(1.0)


def test_percentiles_are_between_jobs() -> None:
    names = "jkmn"
    jobs = [(name, 60.0 * index) for index, name in enumerate(names)]
    slots = {"j": ["a"], "k": ["a"], "m": ["b"], "n": ["b", "b"]}
    row = measured(Give(**slots), *jobs)
    # j waits for the round at 60 s, the others come at one: 390, 330, 330 and 180 s.
    assert row.avg_jct_s == pytest.approx((390 + 330 + 330 + 180) / 4)
    assert row.median_jct_s == pytest.approx(330.0)
    assert row.p99_jct_s == pytest.approx(330 + 0.97 * 60)


def test_the_first_nine_fields_are_those_that_others_read() -> None:
    row = measured(Give(j=["a"]), ("j", 0.0))
    assert list(row.to_dict())[:9] == [
        *("workload", "policy", "avg_jct_s", "median_jct_s", "p99_jct_s", "makespan_s"),
        *("restarts_per_job", "gpu_utilization", "policy_seconds"),
    ]
    assert len(cells(row)) == len(HEADERS)


def test_rows_of_jobs_have_the_columns() -> None:
    result = simulate(Give(j=["a"]), ("j", 0.0))
    isolated = IsolatedTimes(result.nodes, 30.0)
    found = outcome(result, APPLICATIONS, isolated, workload="w", policy="give", seed=0)
    (row,) = job_rows(found)
    values = dict(zip(JOB_COLUMNS, row, strict=True))
    assert (values["name"], values["started_s"], values["restarts"]) == ("j", 60.0, 0)
    assert values["jct_s"] == pytest.approx(390.0)
    assert values["isolated_s"] == pytest.approx(30 + 300 / 8)


@pytest.mark.parametrize(
    ("share", "replicas"), [(0.2, 0.2), (1.0, 1), (2.9, 2.9), (8 / 3 * 3, 8), (100.0, 8)]
)
def test_a_share_is_replicas_for_a_part_of_the_time(share: float, replicas: float) -> None:
    isolated = IsolatedTimes({name: NodeInfo({"slots": 4}) for name in "abc"}, 10.0)
    assert isolated.num_slots == 12
    # No job of it uses more than eight.
    assert isolated.seconds(Steady(), share) == pytest.approx(10 + 300 / replicas)


def test_rates_alone_add_up_to_the_time_alone() -> None:
    isolated = IsolatedTimes(make_nodes({"": (2, 8)}), 30.0)
    application = PipelineApplication("gpt-6.7b")
    for share in (4, 16):
        rates = isolated.rates(application, share)
        ends = [application.progress(epoch) for epoch in range(application.max_epochs + 1)]
        seconds = sum(np.diff(ends) / rates)
        assert isolated.seconds(application, share) == pytest.approx(30.0 + seconds)


def test_a_pipeline_alone_has_replicas_of_its_stages() -> None:
    isolated = IsolatedTimes(make_nodes({"": (2, 8)}), 30.0)
    application = PipelineApplication("gpt-6.7b")
    times = [isolated.seconds(application, share) for share in (1, 4, 7.9, 8, 16)]
    # A replica is four stages, so that 1 GPU is one for a quarter of the time, and 7.9 are two for
    # nearly all of it.
    assert times[0] - 30 == pytest.approx(4 * (times[1] - 30))
    assert times[1] > 1.5 * times[2] > 1.5 * times[3] > 1.5 * times[4]
    assert times[2] == pytest.approx(times[3], rel=0.02)
    # The initial batch takes 30 GPU-hours; larger ones, alone and late, less.
    assert 20 < 4 * times[1] / 3600 < 30


@given(
    st.lists(
        st.tuples(st.floats(0, 100), st.floats(1, 100)).map(lambda pair: (pair[0], sum(pair))),
        min_size=1,
        max_size=8,
    )
)
def test_contention_is_the_mean_of_what_overlaps(lifetimes: list[tuple[float, float]]) -> None:
    contention = Contention(lifetimes)
    for begin, end in lifetimes:
        overlap = sum(max(min(e, end) - max(b, begin), 0.0) for b, e in lifetimes)
        assert contention.mean(begin, end) == pytest.approx(overlap / (end - begin), rel=1e-6)
    now = max(end for _, end in lifetimes)
    means = contention.means({str(n): begin for n, (begin, _) in enumerate(lifetimes)}, now)
    for number, (begin, _) in enumerate(lifetimes):
        assert means[str(number)] == pytest.approx(max(contention.mean(begin, now), 1.0))
    assert contention.means({"new": now}, now) == {}


def arrivals(number: int) -> list[JobArrival]:
    return [JobArrival(f"j{index}", 10.0 * index, "steady", 1, 10) for index in range(number)]


def test_half_the_load_is_every_second_job_and_twice_is_two_of_each() -> None:
    jobs = arrivals(6)
    assert [job.name for job in scale_load(jobs, 0.5)] == ["j1", "j3", "j5"]
    assert scale_load(jobs, 1.0) == tuple(jobs)
    twice = scale_load(jobs, 2.0)
    assert [(job.name, job.time) for job in twice[:4]] == [
        *(("j0", 0.0), ("j0~2", 5.0), ("j1", 10.0), ("j1~2", 15.0))
    ]


@given(st.integers(1, 40), st.floats(0.05, 4.0))
def test_a_load_is_that_many_jobs_with_names_of_their_own(number: int, load: float) -> None:
    jobs = arrivals(number)
    if int(number * load + 1e-6) == 0:
        with pytest.raises(ValueError, match="leaves none of"):
            scale_load(jobs, load)
        return
    scaled = scale_load(jobs, load)
    assert abs(len(scaled) - number * load) < 1
    assert len({job.name for job in scaled}) == len(scaled)
    assert [job.time for job in scaled] == sorted(job.time for job in scaled)
    assert max(job.time for job in scaled) <= jobs[-1].time
