"""Steps that have ended, and that a slurmctld which was killed lists for ever."""

from __future__ import annotations

import pytest

from pipollux_sched.backend import base
from pipollux_sched.backend.base import ReplicaKey, Signal
from pipollux_sched.backend.slurm import orphans, replica_step
from pipollux_sched.backend.slurm.engine import SlurmEngine
from pipollux_sched.backend.slurm.pools import OwnAllocation
from pipollux_sched.backend.slurm.rented_pools import PoolOptions, RentedPools
from pipollux_sched.store import StateDir
from tests.hosts.harness.slurm import SlurmCluster
from tests.sched.backend.slurm.conftest import MakeEngine
from tests.sched.backend.slurm.steps import ended, runs, start, state, step_names
from tests.waiting import until

pytestmark = pytest.mark.exhaustive


@pytest.fixture(autouse=True)
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_step, "LISTED_PATIENCE", 1.0)
    monkeypatch.setattr(base, "KILL_PATIENCE", 2.0)
    monkeypatch.setattr(orphans, "STUCK_AFTER", 3.0)


def end_and_forget(cluster: SlurmCluster, engine: SlurmEngine, key: ReplicaKey) -> None:
    """Let a replica end; then kill slurmctld, which does not know of that any more.

    Its job must have a name of its own: what slurmctld has saved is looked for by it.
    """
    name = f"{key.job}.a{key.attempt}.r{key.replica}"
    saved = cluster.saved_with(name)
    engine.signal(key, Signal.STOP)
    assert ended(engine, key).status == 143
    cluster.wait_until(lambda: name not in step_names(cluster))
    cluster.go_back_to(saved)
    assert name in step_names(cluster)


def leaves(engine: SlurmEngine, node: str) -> str:
    """Return why a node is left, once it is."""

    def why() -> str:
        engine.listing()
        found = engine.nodes()[node]
        return found.reason if found.draining else ""

    return until(why)


def test_a_replica_that_has_ended_is_not_waited_for(
    cluster: SlurmCluster, make_engine: MakeEngine, state_dir: StateDir, pool: int
) -> None:
    first = make_engine(OwnAllocation(pool))
    key = start(first, "ended", "n1")
    runs(first, state_dir, key)
    end_and_forget(cluster, first, key)
    second = make_engine(OwnAllocation(pool))
    assert ended(second, key).status == 143
    second.recover((), 0.0)
    why = leaves(second, "n1")
    assert why.endswith("(ended.a1.r0) there, which is over and cannot be ended.")
    assert not second.nodes()["n2"].draining


def test_a_scheduler_starts_though_a_forgotten_replica_is_listed(
    cluster: SlurmCluster, make_engine: MakeEngine, state_dir: StateDir, pool: int
) -> None:
    first = make_engine(OwnAllocation(pool))
    key = start(first, "forgotten", "n1")
    runs(first, state_dir, key)
    end_and_forget(cluster, first, key)
    first.forget(key.job, key.attempt)
    second = make_engine(OwnAllocation(pool))
    (line,) = second.recover((), 0.0)
    assert line.endswith("of job forgotten (forgotten.a1.r0)")
    other = start(second, "other", "n2")
    assert runs(second, state_dir, other).ended is None
    assert "(forgotten.a1.r0)" in leaves(second, "n1")
    assert state(second, other).ended is None
    second.signal(other, Signal.KILL)  # the patience of the end is short here
    assert ended(second, other).status == -9


def test_an_allocation_with_a_stuck_step_is_replaced(
    cluster: SlurmCluster, make_engine: MakeEngine, state_dir: StateDir
) -> None:
    options = PoolOptions(name="pipollux-stuck", num_nodes=1, gres="gpu:4", time="60")
    engine = make_engine(RentedPools(options))
    until(engine.nodes)
    (node,) = engine.nodes()
    key = start(engine, "rented", node)
    runs(engine, state_dir, key)
    engine.recover({key[:2]}, 0.0)
    (before,) = allocations(cluster)
    end_and_forget(cluster, engine, key)
    assert before in allocations(cluster)
    until(lambda: engine.listing() and before not in allocations(cluster))
    until(lambda: [node for node in engine.nodes().values() if not node.draining])
    engine.close()
    cluster.wait_until(lambda: not allocations(cluster))


def allocations(cluster: SlurmCluster) -> list[str]:
    """Return the jobs that run or wait under our name."""
    return cluster.call("squeue", "-h", "--name=pipollux-stuck", "--format=%i").split()
