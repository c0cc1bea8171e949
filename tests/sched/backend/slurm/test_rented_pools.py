"""Allocations that the scheduler asks a real Slurm for, one node each: grown, shrunk, renewed."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from pipollux_sched.backend import node_checks
from pipollux_sched.backend.base import BackendError, Signal
from pipollux_sched.backend.slurm import rented_pools, snapshot
from pipollux_sched.backend.slurm.engine import SlurmEngine
from pipollux_sched.backend.slurm.rented_pools import PoolOptions, RentedPools
from pipollux_sched.store import StateDir
from tests.hosts.harness.slurm import SlurmCluster
from tests.sched.backend.slurm.conftest import MakeEngine
from tests.sched.backend.slurm.steps import ended, log, runs, start, state
from tests.waiting import until

pytestmark = pytest.mark.exhaustive

NAME = "pipollux-test"


@pytest.fixture(autouse=True)
def nothing_is_rented_for_ever(cluster: SlurmCluster) -> Iterator[None]:
    yield
    cluster.call("scancel", "--name", NAME)
    cluster.wait_until(lambda: not rented(cluster))


def options(num_nodes: int, *more: str, keep: bool = False) -> PoolOptions:
    return PoolOptions(
        name=NAME, num_nodes=num_nodes, gres="gpu:4", time="60", more=more, keep=keep
    )


def rented(cluster: SlurmCluster, states: str = "RUNNING,PENDING") -> list[int]:
    listed = cluster.call("squeue", "-h", "-o", "%i", "--name", NAME, "--states", states)
    return sorted(map(int, listed.split()))


def num_ready(engine: SlurmEngine) -> int:
    return sum(node.ready for node in engine.nodes().values())


def test_a_request_that_is_refused_is_reported_in_the_words_of_slurm(
    make_engine: MakeEngine,
) -> None:
    with pytest.raises(BackendError) as refused:
        make_engine(RentedPools(options(1, "--partition=nope")))
    assert str(refused.value) == (
        "Slurm refused sbatch: sbatch: error: Batch job submission failed: "
        "Invalid partition name specified"
    )


def test_what_many_allocations_hold_is_read_from_one_answer(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "ASKED_FOR_ALONE", 0)
    engine = make_engine(RentedPools(options(2)))
    until(lambda: num_ready(engine) == 2)
    assert [node.spec.slots for node in engine.nodes().values()] == [4, 4]


def test_nodes_come_and_go_as_the_autoscaler_wants(
    cluster: SlurmCluster, make_engine: MakeEngine
) -> None:
    pools = RentedPools(options(1))
    engine = make_engine(pools)
    until(lambda: num_ready(engine) == 1)
    assert pools.num_nodes() == 1
    pools.request(3)
    until(lambda: num_ready(engine) == 3)
    pools.request(3)
    assert len(rented(cluster)) == 3
    pools.request(2, ["n2"])
    until(lambda: set(engine.nodes()) == {"n1", "n3"})
    assert len(rented(cluster)) == 2
    # What is asked for and does not come is taken back.
    pools.request(5)
    until(lambda: len(rented(cluster)) == 5)
    pools.request(3)
    until(lambda: num_ready(engine) == 3 and len(rented(cluster)) == 3)
    engine.close()
    cluster.wait_until(lambda: rented(cluster) == [])


def test_a_scheduler_finds_its_allocations_again(
    cluster: SlurmCluster, make_engine: MakeEngine, state_dir: StateDir
) -> None:
    first = make_engine(RentedPools(options(2, keep=True)))
    until(lambda: num_ready(first) == 2)
    node = next(iter(first.nodes()))
    key = start(first, "toy", node)
    runs(first, state_dir, key)
    jobs = rented(cluster)
    (used,) = map(int, cluster.call("squeue", "-h", "-o", "%i", "--nodelist", node).split())
    (other,) = set(jobs) - {used}
    first.close()
    second = make_engine(RentedPools(options(1)))
    until(lambda: num_ready(second) == 2)
    assert rented(cluster) == jobs
    assert state(second, key).ended is None
    cluster.call("scancel", str(other))  # as if preempted: another takes its place
    until(lambda: other not in rented(cluster) and num_ready(second) == 2)
    second.close()
    cluster.wait_until(lambda: rented(cluster) == [used])


def test_an_allocation_is_renewed_before_its_time_is_over(
    cluster: SlurmCluster, make_engine: MakeEngine, state_dir: StateDir
) -> None:
    engine = make_engine(RentedPools(options(1)))
    until(lambda: num_ready(engine) == 1)
    (job,) = rented(cluster)
    (old,) = engine.nodes()
    key = start(engine, "toy", old)
    runs(engine, state_dir, key)
    cluster.call("scontrol", "update", f"JobId={job}", "TimeLimit=1")
    until(lambda: old not in engine.nodes() or engine.nodes()[old].draining)
    assert engine.nodes()[old].reason == f"its allocation {job} ends in 0 min."
    assert state(engine, key).ended is None
    until(lambda: [node for node in engine.nodes().values() if node.ready and not node.draining])
    engine.signal(key, Signal.STOP)
    how = ended(engine, key)
    assert (how.status, how.lost) == (143, ""), log(state_dir, key)
    until(lambda: old not in engine.nodes())
    assert cluster.call("squeue", "-h", "-j", str(job), "-t", "all", "-o", "%T") == "CANCELLED\n"
    assert num_ready(engine) == 1


def test_it_is_told_why_a_node_does_not_come(
    make_engine: MakeEngine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rented_pools, "PENDING_PATIENCE", 0.0)
    engine = make_engine(RentedPools(options(4)))
    until(lambda: num_ready(engine) == 3)
    said = r"has not yet given 1 of the nodes asked for \(Resources\); see squeue --jobs \d+"
    until(lambda: re.search(said, caplog.text))


def test_a_node_is_used_once_it_sees_what_it_must(
    make_engine: MakeEngine, state_dir: StateDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_checks, "REPEAT_INTERVAL", 0.5)
    pools = RentedPools(options(1))
    engine = make_engine(pools)
    until(lambda: num_ready(engine) == 1)
    (mark,) = state_dir.path.glob(".shared-*")
    elsewhere = mark.rename(state_dir.path / "elsewhere")
    pools.request(2)
    until(lambda: len(engine.nodes()) == 2)
    (broken,) = [node for node in engine.nodes().values() if not node.ready]
    assert f"{broken.spec.name} does not see {state_dir.path}" in broken.reason
    elsewhere.rename(mark)
    until(lambda: num_ready(engine) == 2)
