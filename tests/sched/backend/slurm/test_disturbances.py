"""What happens to a real Slurm while replicas run: nodes fail, drain, allocations end."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from pipollux_agent.supervisor import step_processes
from pipollux_sched.backend.base import ClusterUnavailableError, ReplicaKey, Signal
from pipollux_sched.backend.slurm.engine import SlurmEngine
from pipollux_sched.backend.slurm.record import ReplicaFiles
from pipollux_sched.store import StateDir
from tests.hosts.harness.hosts import Hosts
from tests.hosts.harness.slurm import SlurmCluster
from tests.sched.backend.slurm.steps import ended, log, runs, start, state
from tests.waiting import until

pytestmark = pytest.mark.exhaustive


@pytest.fixture
def broken(slurm: SlurmCluster, hosts: Hosts) -> Iterator[list[str]]:
    """Nodes that a test breaks: they are started again, and nothing of theirs is left."""
    nodes: list[str] = []
    yield nodes
    for node in nodes:
        hosts.link_up(node)
        hosts.kill(node)
        until(lambda node=node: started(slurm, node))
        slurm.wait_until(lambda node=node: is_up(slurm, node))


def is_up(slurm: SlurmCluster, node: str) -> bool:
    """Whether a node is in use again; one that was declared down is resumed."""
    if slurm.states()[node].startswith("DOWN"):
        slurm.resume(node)
    return slurm.states()[node] in ("IDLE", "MIXED", "ALLOCATED")


def started(slurm: SlurmCluster, node: str) -> bool:
    try:
        slurm.start_node(node)
    except subprocess.CalledProcessError:  # what the old one had is not yet free
        return False
    return True


def test_a_drained_node_takes_nothing_new_and_keeps_what_it_has(
    cluster: SlurmCluster, engine: SlurmEngine, state_dir: StateDir
) -> None:
    key = start(engine, "toy", "n2")
    runs(engine, state_dir, key)
    cluster.drain("n2", "a new fan")
    until(lambda: engine.nodes()["n2"].draining)
    node = engine.nodes()["n2"]
    assert (node.ready, node.reason) == (True, "DRAIN, a new fan")
    assert state(engine, key).ended is None
    cluster.resume("n2")
    until(lambda: not engine.nodes()["n2"].draining)


def test_what_ran_on_a_failed_node_is_lost(
    broken: list[str], cluster: SlurmCluster, engine: SlurmEngine, state_dir: StateDir
) -> None:
    broken.append("n2")
    failed, other = start(engine, "failed", "n2"), start(engine, "other", "n3")
    for key in (failed, other):
        runs(engine, state_dir, key)
    cluster.fail("n2", "it burns")
    assert "n2" in ended(engine, failed).lost
    until(lambda: "n2" not in engine.nodes() or not engine.nodes()["n2"].ready)
    assert state(engine, other).ended is None


def test_what_ran_on_a_host_without_link_is_lost(
    broken: list[str], engine: SlurmEngine, state_dir: StateDir, hosts: Hosts
) -> None:
    broken.append("n3")
    key = start(engine, "toy", "n3")
    runs(engine, state_dir, key)
    hosts.link_down("n3")
    assert "n3" in ended(engine, key).lost


def test_a_step_that_slurm_cannot_reach_is_stopped_all_the_same(
    broken: list[str], cluster: SlurmCluster, engine: SlurmEngine, state_dir: StateDir
) -> None:
    broken.append("n1")
    key = start(engine, "toy", "n1")
    runs(engine, state_dir, key)
    cluster.kill_node("n1")  # its slurmd
    engine.signal(key, Signal.STOP)
    how = ended(engine, key)
    assert how.result.stopped_step


def test_nothing_runs_any_more_of_what_is_told_as_lost(
    broken: list[str], cluster: SlurmCluster, engine: SlurmEngine, state_dir: StateDir
) -> None:
    """Only slurmd is dead, and the node is taken for down: others are about to take its place."""
    broken.append("n1")
    key = start(engine, "toy", "n1")
    runs(engine, state_dir, key)
    base = ReplicaFiles.of(state_dir, key).base
    assert step_processes(base)
    cluster.kill_node("n1")
    cluster.fail("n1", "its slurmd does not answer")
    assert "n1" in ended(engine, key).lost
    assert step_processes(base) == []


def test_what_ran_in_a_revoked_allocation_is_lost(
    cluster: SlurmCluster, pool: int, engine: SlurmEngine, state_dir: StateDir
) -> None:
    key = start(engine, "toy", "n1")
    runs(engine, state_dir, key)
    cluster.call("scancel", str(pool))
    how = ended(engine, key)
    assert how.lost.startswith(f"Slurm's allocation {pool} with node n1 has ended")
    assert how.result.stopped_step, "Slurm gives it some seconds to save"
    until(lambda: not engine.nodes())


def test_what_an_admin_cancels_is_no_failure_of_the_job(
    cluster: SlurmCluster, engine: SlurmEngine, state_dir: StateDir
) -> None:
    key = start(engine, "toy", "n1")
    cluster.call("scancel", "--signal=KILL", runs(engine, state_dir, key).handle)
    assert "Slurm ended it" in ended(engine, key).lost


def test_steps_run_on_while_the_controller_is_away(
    cluster: SlurmCluster, engine: SlurmEngine, state_dir: StateDir
) -> None:
    key = start(engine, "toy", "n1")
    runs(engine, state_dir, key)
    cluster.stop_controller()

    until(lambda: is_away(engine))
    with pytest.raises(ClusterUnavailableError, match="Slurm does not answer"):
        start(engine, "other", "n2")
    assert set(engine.nodes()) == {"n1", "n2", "n3"}
    cluster.start_controller()
    cluster.wait_until(lambda: "UP" in cluster.call("scontrol", "ping"))

    until(lambda: not is_away(engine))
    assert state(engine, key).ended is None
    engine.signal(key, Signal.STOP)
    how = ended(engine, key)
    assert (how.status, how.lost) == (143, "")
    assert how.result.stopped_step


def test_nothing_is_started_where_a_new_controller_would_refuse_it(
    cluster: SlurmCluster, engine: SlurmEngine, state_dir: StateDir
) -> None:
    key = start(engine, "toy", "n1")
    runs(engine, state_dir, key)
    cluster.stop_controller()
    until(lambda: is_away(engine))
    cluster.start_controller()
    # It does not know its nodes for some seconds, and says that they lack memory.
    until(lambda: is_started(engine, "other", "n2"))
    other = ReplicaKey("other", 1, 0)
    until(lambda: "goes on from step" in log(state_dir, other) or state(engine, other).ended)
    assert state(engine, other).ended is None
    assert state(engine, key).ended is None


def is_started(engine: SlurmEngine, job: str, node: str) -> bool:
    try:
        start(engine, job, node)
    except ClusterUnavailableError:
        return False
    return True


def is_away(engine: SlurmEngine) -> bool:
    try:
        engine.listing()
    except ClusterUnavailableError:
        return True
    return False
