"""The simulated cluster, held against numbers computed by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pipollux_perfmodel import GradParams
from pipollux_sched.policy import JobInfo, NodeInfo, ReplicaShape
from pipollux_sched.simulator import JobArrival, NodeEvent, Running, StepTimes
from pipollux_sched.simulator.engine import Cluster, Options, SimulationError
from pipollux_sched.simulator.trace_model import linear_speedup
from pipollux_sched.simulator.traces import Constants, TraceApplication, TraceError


class Steady:
    """Trains an iteration a second per replica, in epochs of 100; its model knows that."""

    name = "steady"
    init_batch_size = 10
    max_batch_size = 10
    max_epochs = 3
    max_profiled_replicas = 8

    def step_times(self, running: Running) -> StepTimes:
        return StepTimes(1.0 / running.num_replicas, 1.0 / running.num_replicas)

    def gradients(self, batch_size: int, epoch: int) -> GradParams:  # noqa: ARG002  # the protocol's
        return GradParams(1.0, 0.0)

    def progress(self, epoch: int) -> float:
        return 100.0 * epoch

    def completion_epoch(self, batch_size: int) -> int:  # noqa: ARG002  # the protocol's
        return self.max_epochs - 1

    def max_replicas(self, batch_size: int | None = None) -> int:  # noqa: ARG002  # the protocol's
        return 8

    def new_model(self, batch_size: int | None = None) -> Steady:  # noqa: ARG002  # the protocol's
        return self

    def observe(self, *_: Any) -> None:
        pass

    def shapes(self) -> tuple[ReplicaShape, ...]:
        return (ReplicaShape(1, {"slots": 1}, linear_speedup),)

    def configure(self, _: ReplicaShape, placement: Sequence[int], gpu_type: str = "") -> Running:
        return Running(tuple(placement), 1, 1, 10, 0, gpu_type)

    def goodput(self, running: Running) -> float:
        return 10.0 * running.num_replicas

    def base_goodput(self) -> float:
        return 10.0


class Give:
    """Gives every job the nodes that a table names, as long as they are there."""

    def __init__(self, **rows: list[str]) -> None:
        self.rows = rows
        self.seen: list[dict[str, JobInfo]] = []

    def optimize(self, jobs: Any, nodes: Any, base: Any, template: Any) -> Any:  # noqa: ARG002  # a policy's
        self.seen.append(dict(jobs))
        there = {name: self.rows[name] for name in jobs if set(self.rows[name]) <= nodes.keys()}
        return there, len(nodes)


def simulate(policy: Any, *jobs: tuple[str, float], **options: Any) -> Any:
    workload = [JobArrival(name, time, "steady", 1, 10) for name, time in jobs]
    nodes = {name: NodeInfo({"slots": 4}) for name in "ab"}
    return Cluster(workload, {"steady": Steady()}, nodes, policy, Options(**options)).run()


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
    assert app.step_times(Running((1,), atomic_bsz=6)) == pytest.approx((1.5, 1.5))
    # A placement was measured once for all its rotations.
    assert app.step_times(Running((2, 1), atomic_bsz=4)) == pytest.approx((1.5, 1.0))
    # Half-way between 8 and 16 replicas on four nodes.
    assert app.step_times(Running((3, 3, 3, 3), atomic_bsz=4)) == pytest.approx((4.0, 1.0))
    assert app.gradients(10, 1) == pytest.approx((1.5, 6.0))
    assert [app.progress(epoch) for epoch in range(3)] == [0.0, 10.0, 20.0]


def test_what_traces_do_not_say_is_an_error(traced: Path) -> None:
    app = TraceApplication(traced, Constants(max_epochs=2))
    with pytest.raises(TraceError, match="tiny: the traces say nothing of placement"):
        app.step_times(Running((1,), atomic_bsz=9))
    with pytest.raises(TraceError, match="batch size 17 lies outside"):
        app.gradients(17, 0)
    write(traced / "placements.csv", "placement,local_bsz,step_time,sync_time 1,4,soon,0.0")
    with pytest.raises(TraceError, match=r"placements.csv, line 2: step_time is 'soon'"):
        TraceApplication(traced, Constants(max_epochs=2))
