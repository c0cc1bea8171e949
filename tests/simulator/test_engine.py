"""The simulated cluster, held against numbers computed by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipollux_policies import FifoPolicy, NodeInfo, PolluxPolicy
from pipollux_simulator import (
    Cluster,
    Constants,
    JobArrival,
    NodeEvent,
    Options,
    RunningJob,
    SimulationError,
    TraceApplication,
    TraceError,
)
from tests.simulator.simulator_cases import Give, Steady, simulate


def test_a_job_waits_for_the_round_restarts_and_trains() -> None:
    result = simulate(Give(j=["a", "a"]), ("j", 70.0))
    job = result.jobs[0]
    assert job.started == 120.0
    assert job.completed == pytest.approx(120 + 30 + 300 / 2)
    assert job.attained_service == pytest.approx(2 * (30 + 150))
    assert (job.num_restarts, job.epoch, result.makespan) == (0, 3, pytest.approx(230.0))


def test_remaining_work_and_service_are_told() -> None:
    policy = Give(j=["a"])
    simulate(policy, ("j", 0.0))
    infos = [seen["j"] for seen in policy.seen]
    # 30 s of the first minute go to the start.
    assert [info.remaining_work for info in infos[:3]] == pytest.approx([300.0, 270.0, 210.0])
    assert [info.attained_service for info in infos[:3]] == pytest.approx([0.0, 60.0, 120.0])
    assert [info.age for info in infos[:3]] == [60.0, 120.0, 180.0]


def test_distributed_jobs_slow_each_other_on_a_shared_node() -> None:
    slow = simulate(Give(j=["a", "b"], k=["a"]), ("j", 0.0), ("k", 0.0), interference=0.5)
    assert [job.completed for job in slow.jobs] == pytest.approx([90 + 150, 90 + 300])


def test_a_distributed_job_beside_small_ones_keeps_its_pace() -> None:
    rows = Give(j=["a", "b"], k=["a"], m=["b"])
    done = simulate(rows, ("j", 0.0), ("k", 0.0), ("m", 0.0), interference=0.5)
    assert [job.completed for job in done.jobs] == pytest.approx([90 + 150, 90 + 300, 90 + 300])


def test_two_distributed_jobs_slow_each_other_while_both_run() -> None:
    rows = Give(j=["a", "b"], k=["a", "b"])
    done = simulate(rows, ("j", 0.0), ("k", 90.0), interference=0.5)
    # j trains alone from 90 to 120 s, then both at half their pace, then k alone.
    j_done = 120 + (300 - 30 * 2) / 1.0
    assert done.jobs[0].completed == pytest.approx(j_done)
    # What is shared is looked at again with the next round at the latest.
    assert done.jobs[1].completed == pytest.approx(j_done + (300 - (j_done - 150) * 1.0) / 2)


def test_epochs_end_between_rounds_and_lengths_add_up() -> None:
    result = simulate(Give(j=["a"] * 3), ("j", 0.0), interval=40.0, restart_seconds=7.0)
    (job,) = result.jobs
    assert job.completed == pytest.approx(40 + 7 + 300 / 3)
    assert job.epoch == 3
    assert result.makespan == pytest.approx(job.completed)


def test_a_move_costs_a_restart_and_loses_nothing() -> None:
    policy = Give(j=["a"])
    rounds = 0

    def move(now: float, done: int) -> None:
        nonlocal rounds
        rounds += 1
        policy.rows["j"] = ["a"] if rounds < 3 else ["b", "b"]

    workload = [JobArrival("j", 0.0, "steady", 1, 10)]
    nodes = {name: NodeInfo({"slots": 4}) for name in "ab"}
    (job,) = Cluster(workload, {"steady": Steady()}, nodes, policy).run(move).jobs
    # Trains from 90 to 240 s on one GPU, and from 270 s on two.
    assert job.completed == pytest.approx(270 + (300 - 150) / 2)
    assert (job.num_restarts, job.lost_progress) == (1, 0.0)
    assert [hold.nodes for hold in job.history] == [("a",), ("b", "b")]


def test_rounds_without_jobs_are_skipped() -> None:
    policy = Give(j=["a"], k=["a"])
    result = simulate(policy, ("j", 0.0), ("k", 1_000_000.0))
    assert [job.started for job in result.jobs] == [60.0, 1_000_020.0]
    # Six minutes of each job and no more are decided about.
    assert len(policy.seen) == len(result.policy_seconds) == 12


def test_a_job_that_comes_at_a_round_is_part_of_it() -> None:
    assert simulate(Give(j=["a"]), ("j", 120.0)).jobs[0].started == 120.0
    assert simulate(Give(j=["a"]), ("j", 121.0)).jobs[0].started == 180.0


def test_the_order_of_the_rows_does_not_matter() -> None:
    jobs = [("j", 0.0), ("k", 30.0), ("m", 30.0)]
    tables = [Give(j=["a", "a"], k=["b"], m=["b"]) for _ in range(2)]
    first, second = simulate(tables[0], *jobs), simulate(tables[1], *reversed(jobs))
    assert [(j.name, j.completed, j.history) for j in first.jobs] == [
        (j.name, j.completed, j.history) for j in second.jobs
    ]


@pytest.mark.exhaustive
def test_the_same_seed_gives_the_same_and_jobs_keep_to_their_nodes() -> None:
    jobs = [(name, 100.0 * index) for index, name in enumerate("jkmn")]
    first, second = (simulate(PolluxPolicy(seed=3), *jobs) for _ in range(2))
    assert [job.history for job in first.jobs] == [job.history for job in second.jobs]
    for moment in range(0, 1000, 7):
        held = [
            node
            for job in first.jobs
            for hold in job.history
            if hold.start <= moment < hold.end
            for node in hold.nodes
        ]
        assert all(held.count(node) <= 4 for node in "ab")


def test_a_draining_node_is_told_and_its_end_takes_what_stays() -> None:
    class Watching(Give):
        draining: list[tuple[str, ...]]

        def optimize(self, jobs: Any, nodes: Any, base: Any, template: Any) -> Any:
            self.draining.append(tuple(name for name in nodes if nodes[name].draining))
            return super().optimize(jobs, nodes, base, template)

    policy = Watching(j=["a"])
    policy.draining = []
    events = (
        NodeEvent(130.0, "b", "drain"),
        NodeEvent(190.0, "b", "lost"),
        NodeEvent(250.0, "b", "back"),
    )
    result = simulate(policy, ("j", 0.0), node_events=events)
    assert policy.draining == [(), (), ("b",), (), (), ()]
    # The job on the other node notices nothing.
    assert result.jobs[0].completed == pytest.approx(390.0)
    assert sorted(result.nodes) == ["a", "b"]


def test_a_policy_of_fixed_sizes_is_told_what_was_asked_for() -> None:
    policy = Give(j=["a"])
    simulate(policy, ("j", 0.0))
    assert policy.seen[0]["j"].requested_replicas is None
    policy = Give(j=["a"])
    policy.adapts_batch_size = False  # type: ignore[attr-defined]  # as such policies have it
    simulate(policy, ("j", 0.0))
    assert policy.seen[0]["j"].requested_replicas == 1


def test_an_application_that_is_not_there_is_named() -> None:
    workload = [JobArrival("j", 0.0, "unsteady", 1, 10)]
    nodes = {"a": NodeInfo({"slots": 4})}
    with pytest.raises(SimulationError, match="'unsteady' is not known; choose from steady"):
        Cluster(workload, {"steady": Steady()}, nodes, Give())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"interval": 0.0}, "interval: 0.0 must be above 0"),
        ({"restart_seconds": -1.0}, "restart_seconds: -1.0 must be at least 0"),
        ({"interference": 1.0}, "interference: 1.0 must be at least 0 and below 1"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Options(**options)  # type: ignore[arg-type]  # all of them floats


def test_a_lost_node_takes_what_was_not_saved() -> None:
    events = (NodeEvent(200.0, "a", "lost"), NodeEvent(400.0, "a", "back"))
    result = simulate(Give(j=["a"]), ("j", 0.0), node_events=events, checkpoint_seconds=50.0)
    job = result.jobs[0]
    # 110 s trained, 100 s saved; back on the node at 420 s, with 200 s to go.
    assert job.lost_progress == pytest.approx(10.0)
    assert job.completed == pytest.approx(420 + 30 + 200)
    assert job.num_restarts == 1
    assert [(hold.start, hold.end) for hold in job.history] == [(60.0, 200.0), (420.0, 650.0)]


def test_a_policy_that_breaks_a_rule_is_stopped() -> None:
    with pytest.raises(SimulationError, match=r"at 60 s the policy broke a rule: .*'a' has 4"):
        simulate(Give(j=["a"] * 5), ("j", 0.0))


def test_a_job_that_never_runs_ends_the_simulation() -> None:
    with pytest.raises(SimulationError, match=r"after 0.5 days 1 jobs are not done \(j\)"):
        simulate(Give(j=[]), ("j", 0.0), most_days=0.5)


def write(path: Path, text: str) -> None:
    path.write_text(text.replace(" ", "\n") + "\n", encoding="utf-8")


@pytest.fixture
def traced(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny"
    folder.mkdir()
    write(
        folder / "placements.csv",
        "placement,local_bsz,step_time,sync_time 1,4,1.0,0.0 1,8,2.0,0.0 12,4,1.5,0.5 12,8,2.5,0.5",
    )
    write(
        folder / "scalability.csv",
        "num_nodes,num_replicas,local_bsz,step_time,sync_time 4,8,4,3.0,2.0 4,8,8,4.0,2.0 "
        "4,16,4,5.0,4.0 4,16,8,6.0,4.0",
    )
    for size, scale in ((4, 1.0), (16, 2.0)):
        rows = f"progress,iteration,metric,grad_sqr,grad_var 10,10,0,{scale},{2 * scale} "
        write(folder / f"validation-{size}.csv", rows + f"{20 * scale},20,0,{scale},{4 * scale}")
    return folder


def test_traces_are_interpolated(traced: Path) -> None:
    app = TraceApplication(traced, Constants(max_epochs=2))
    assert (app.init_batch_size, app.max_batch_size) == (4, 16)
    assert app.step_times(RunningJob((1,), atomic_bsz=6)) == pytest.approx((1.5, 1.5))
    # A placement was measured once for all its rotations.
    assert app.step_times(RunningJob((2, 1), atomic_bsz=4)) == pytest.approx((1.5, 1.0))
    # Half-way between 8 and 16 replicas on four nodes.
    assert app.step_times(RunningJob((3, 3, 3, 3), atomic_bsz=4)) == pytest.approx((4.0, 1.0))
    assert app.gradients(10, 1) == pytest.approx((1.5, 6.0))
    assert [app.progress(epoch) for epoch in range(3)] == [0.0, 10.0, 20.0]


def test_what_traces_do_not_say_is_an_error(traced: Path) -> None:
    app = TraceApplication(traced, Constants(max_epochs=2))
    with pytest.raises(TraceError, match="tiny: the traces lack placement"):
        app.step_times(RunningJob((1,), atomic_bsz=9))
    with pytest.raises(TraceError, match="batch size 17 lies outside"):
        app.gradients(17, 0)
    write(traced / "placements.csv", "placement,local_bsz,step_time,sync_time 1,4,soon,0.0")
    with pytest.raises(TraceError, match=r"placements.csv, line 2: step_time is 'soon'"):
        TraceApplication(traced, Constants(max_epochs=2))


@pytest.mark.parametrize("batch_size", [3, 17, 1_000_000])
def test_a_batch_size_outside_the_traces_names_the_job(traced: Path, batch_size: int) -> None:
    app = TraceApplication(traced, Constants(max_epochs=2))
    row = JobArrival("late", 0.0, "tiny", 1, batch_size)
    nodes = {"a": NodeInfo({"slots": 4})}
    cluster = Cluster([row], {"tiny": app}, nodes, FifoPolicy())
    text = f"job 'late' of the workload: batch_size is {batch_size}, .* tiny cover 4 to 16; give"
    with pytest.raises(SimulationError, match=text):
        cluster.run()


def test_users_ask_for_what_scales_but_not_perfectly(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    folder.mkdir()
    rows = (
        "1,4,1.0,0.0 1,8,2.0,0.0 1,16,4.0,0.0 2,4,1.3,0.3 2,16,4.25,0.25 4,4,1.5,0.5 4,16,4.5,0.5 "
        "24,4,1.6,0.6 24,16,4.6,0.6 44,4,1.9,0.9 44,16,4.9,0.9"
    )
    write(folder / "placements.csv", f"placement,local_bsz,step_time,sync_time {rows}")
    for size, iterations in ((8, 400), (32, 120)):
        rows = f"10,{iterations // 2},0,1,1 20,{iterations},0,1,1"
        write(
            folder / f"validation-{size}.csv", f"progress,iteration,metric,grad_sqr,grad_var {rows}"
        )
    app = TraceApplication(folder, Constants(max_epochs=2))
    # One replica: 800 s at 8. Two: 510 s at 32, 78 %. Four: 300 s, 67 %. Six, five samples each,
    # interpolated: 222 s, 60 %. Eight: 228 s, 44 %.
    assert app.configurations == ((2, 32), (4, 32), (6, 32))
