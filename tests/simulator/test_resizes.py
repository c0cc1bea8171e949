"""Elastic resizes in the simulated cluster, held against numbers computed by hand.

`Steady` trains an iteration a second per replica, 300 in all; a replica starts in 30 s, an
elastic resize pauses the surviving replicas for 2 s, and decisions are made every 60 s.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from pipollux_policies import Allocation, NodeInfo, ReplicaShape
from pipollux_sched.report.simulation.table import metrics_table
from pipollux_simulator import (
    JOB_COLUMNS,
    Cluster,
    Experiment,
    JobArrival,
    NodeEvent,
    Options,
    SimulatedJob,
    Workload,
    job_rows,
    make_nodes,
    measure,
)
from pipollux_simulator.applications.trace_model import linear_speedup
from tests.simulator.simulator_cases import Give, Steady


def run(*rounds: Sequence[str], **options: Any) -> SimulatedJob:
    """Give a job these nodes, one list for each round, the last from then on."""
    (job,) = run_all({"j": rounds}, **options)
    return job


def run_all(rows: dict[str, Sequence[Sequence[str]]], **options: Any) -> tuple[SimulatedJob, ...]:
    left = {name: list(rounds) for name, rounds in rows.items()}
    policy = Give(**{name: list(rounds.pop(0)) for name, rounds in left.items()})

    def next_round(now: float, done: int) -> None:  # a watch's
        for name, rounds in left.items():
            if rounds:
                policy.rows[name] = list(rounds.pop(0))

    workload = [JobArrival(name, 0.0, "steady", 1, 10) for name in rows]
    nodes = {name: NodeInfo({"slots": 4}) for name in "ab"}
    told = Options(**{"rescale_seconds": 2.0, **options})
    return Cluster(workload, {"steady": Steady()}, nodes, policy, told).run(next_round).jobs


def holds(job: SimulatedJob) -> list[tuple[float, float, str, bool]]:
    return [(hold.start, hold.end, "".join(hold.nodes), hold.elastic) for hold in job.history]


def test_a_job_that_grows_trains_on_while_the_joining_replica_starts() -> None:
    job = run("a", "aa")
    # 30 s to 120 s, alone until 150 s, a pause of 2 s, then two: 60 iterations in 60 s, 240 in 120.
    assert job.completed == pytest.approx(150 + 2 + 240 / 2)
    assert (job.num_restarts, job.num_rescales) == (0, 1)
    assert holds(job) == [(60.0, 120.0, "a", False), (120.0, pytest.approx(272.0), "aa", True)]
    # What starts is held: two slots from the decision on.
    assert job.attained_service == pytest.approx(60 + 2 * 152)


def test_a_restart_takes_the_same_growth_longer() -> None:
    job = run("a", "aa", rescale_seconds=None)
    assert job.completed == pytest.approx(150 + 270 / 2)
    assert (job.num_restarts, job.num_rescales) == (1, 0)
    assert [hold.elastic for hold in job.history] == [False, False]


def test_a_job_that_shrinks_pauses_at_once_and_starts_nothing() -> None:
    job = run("ab", "a")
    # Two from 90 s to 120 s: 60 iterations; one from 122 s on.
    assert job.completed == pytest.approx(122 + 240)
    assert (job.num_restarts, job.num_rescales) == (0, 1)
    assert holds(job) == [(60.0, 120.0, "ab", False), (120.0, 362.0, "a", True)]


def test_what_leaves_goes_at_once_and_what_comes_is_waited_for() -> None:
    job = run("ab", "aaa")
    # 60 iterations by 120 s; a pause, one until 150 s: 28 more; a pause, then three.
    assert job.completed == pytest.approx(152 + (300 - 60 - 28) / 3)
    assert (job.num_restarts, job.num_rescales) == (0, 1)


def test_a_move_of_all_replicas_is_a_restart() -> None:
    job = run("a", "bb")
    assert job.completed == pytest.approx(150 + 270 / 2)
    assert (job.num_restarts, job.num_rescales) == (1, 0)
    assert [hold.elastic for hold in job.history] == [False, False]


def test_another_number_of_stages_is_a_restart() -> None:
    class Stages(Steady):
        def shapes(self) -> tuple[ReplicaShape, ...]:
            one, *_ = super().shapes()
            return (one, ReplicaShape(2, {"slots": 2}, linear_speedup))

    class Policy(Give):
        def optimize(self, jobs: Any, nodes: Any, base: Any, template: Any) -> Any:
            there, count = super().optimize(jobs, nodes, base, template)
            stages = 1 if len(self.seen) == 1 else 2
            for name in there:
                shape = next(s for s in jobs[name].all_shapes if s.num_stages == stages)
                there[name] = Allocation(there[name], shape)
            return there, count

    workload = [JobArrival("j", 0.0, "steady", 1, 10)]
    cluster = Cluster(
        *(workload, {"steady": Stages()}, {"a": NodeInfo({"slots": 4})}, Policy(j=["a"])),
        Options(rescale_seconds=2.0),
    )
    (job,) = cluster.run().jobs
    assert (job.num_restarts, job.num_rescales) == (1, 0)
    assert job.completed == pytest.approx(150 + 270)


def test_joining_that_are_no_longer_wanted_hurt_nobody() -> None:
    # They would join at 120 + 90 s; at 180 s they are sent away.
    job = run("a", "aa", "a", restart_seconds=90.0)
    assert job.completed == pytest.approx(60 + 90 + 300)
    assert (job.num_restarts, job.num_rescales) == (0, 2)


def test_joining_go_on_starting_where_more_leave() -> None:
    # The joining replica on a joins at 120 + 90 s, whatever leaves at 180 s.
    job = run("abb", "aabb", "aa", restart_seconds=90.0)
    # Three from 150 s to 180 s, a pause, one from 182 s to 210 s, a pause, two.
    assert job.completed == pytest.approx(212 + (300 - 90 - 28) / 2)
    # One that comes later takes its own time, and the other waits for it.
    job = run("a", "aa", "aaa", restart_seconds=90.0)
    assert job.completed == pytest.approx(270 + 2 + (300 - 120) / 3)


def test_a_lost_node_takes_joining_and_those_that_train_stop() -> None:
    events = (NodeEvent(130.0, "b", "lost"), NodeEvent(140.0, "b", "back"))
    (job,) = run_all({"j": ["a", "ab"]}, node_events=events, restart_seconds=30.0)
    # The joining replica is lost while it starts, and comes again with the next round, at 180 s.
    assert job.completed == pytest.approx(210 + 2 + (300 - 120) / 2)
    assert (job.num_restarts, job.num_rescales) == (0, 2)
    events = (NodeEvent(170.0, "b", "lost"), NodeEvent(175.0, "b", "back"))
    (job,) = run_all({"j": ["a", "ab"]}, node_events=events)
    # It trained there: 60 s alone and 18 s together are lost, as nothing was saved.
    assert job.lost_progress == pytest.approx(60 + 2 * 18)
    assert (job.num_restarts, job.num_rescales) == (1, 1)


def test_slots_that_are_left_are_free_at_once() -> None:
    left, came = run_all({"j": ["aaaa", "aa"], "k": ["", "aa"]})
    assert left.completed == pytest.approx(122 + (300 - 4 * 30) / 2)
    assert came.completed == pytest.approx(150 + 300 / 2)


def test_joining_do_not_slow_others_before_they_train() -> None:
    slow = run_all({"j": ["a", "ab"], "k": ["ab", "ab"]}, interference=0.5)
    # k is alone in being distributed until j's joining replica trains with it from 152 s on; what
    # is shared is looked at again with the next round, at 180 s.
    alone = 2 * (180 - 90)
    assert slow[1].completed == pytest.approx(180 + (300 - alone) / 1.0)


def test_policies_are_told_both_prices() -> None:
    policy = Give(j=["a"])

    def grow(now: float, done: int) -> None:  # a watch's
        policy.rows["j"] = ["a", "a"]

    workload = [JobArrival("j", 0.0, "steady", 1, 10)]
    nodes = {"a": NodeInfo({"slots": 4})}
    options = Options(rescale_seconds=2.0)
    Cluster(workload, {"steady": Steady()}, nodes, policy, options).run(grow)
    infos = [seen["j"] for seen in policy.seen[:3]]
    assert [info.num_rescales for info in infos] == [0, 0, 1]
    assert {(info.restart_seconds, info.rescale_seconds) for info in infos} == {(30.0, 2.0)}


@pytest.mark.parametrize("seconds", [-1.0, 31.0, float("nan")])
def test_a_wrong_price_is_refused(seconds: float) -> None:
    message = rf"rescale_seconds: {seconds} must be between 0 and restart_seconds = 30.0"
    with pytest.raises(ValueError, match=message):
        Options(rescale_seconds=seconds)


@pytest.mark.exhaustive
def test_resizes_are_counted_in_results() -> None:
    jobs = tuple(JobArrival(f"p{i}", 600.0 * i, "gpt-1.3b", 2, 64) for i in range(3))
    nodes = make_nodes({"": (2, 2)})
    plain = Experiment(nodes).run(Workload("w", jobs), "exact")
    elastic = Experiment(nodes, Options(rescale_seconds=1.0)).run(Workload("w", jobs), "exact")
    assert measure(plain).rescales_per_job == 0
    row = measure(elastic)
    assert row.rescales_per_job > 0
    assert row.rescales_per_job == sum(job.num_rescales for job in elastic.jobs) / 3
    counted = [dict(zip(JOB_COLUMNS, cells, strict=True))["resizes"] for cells in job_rows(elastic)]
    assert counted == [job.num_rescales for job in elastic.jobs]
    for job in elastic.jobs:
        assert sum(hold.elastic for hold in job.history) == job.num_rescales
    table = metrics_table([row])
    index = [column.header for column in table.columns].index("Elastic resizes per job")
    assert [str(cell) for cell in table.columns[index].cells] == [f"{row.rescales_per_job:.1f}"]
