"""An allocation of a real Slurm, and engines whose steps are ended with the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from pipollux_sched.backend.slurm.engine import SlurmEngine
from pipollux_sched.backend.slurm.pools import OwnAllocation, Pools
from pipollux_sched.store import StateDir
from tests.hosts.harness.slurm import SlurmCluster

MakeEngine = Callable[[Pools], SlurmEngine]


@pytest.fixture
def cluster(slurm_cluster: SlurmCluster) -> SlurmCluster:
    """Slurm, found by its commands."""
    return slurm_cluster


@pytest.fixture
def pool(cluster: SlurmCluster) -> Iterator[int]:
    """An allocation of all nodes."""
    job = cluster.allocate("-N3", "--gres=gpu:4", "--exclusive", "--no-kill", "--time=60")
    yield job
    cluster.call("scancel", str(job))


@pytest.fixture
def make_engine(cluster: SlurmCluster, state_dir: StateDir) -> Iterator[MakeEngine]:
    """Makes engines of the same state directory; what runs in the end is ended."""
    with ExitStack() as stack:

        def make(pools: Pools) -> SlurmEngine:
            engine = SlurmEngine(state_dir, pools, interval=0.5)
            stack.callback(engine.close)
            stack.callback(engine.recover, (), 0.0)
            return engine

        yield make


@pytest.fixture
def engine(pool: int, make_engine: MakeEngine) -> SlurmEngine:
    """An engine on the allocation of all nodes."""
    return make_engine(OwnAllocation(pool))
