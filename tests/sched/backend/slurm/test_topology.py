"""The switches of a real Slurm become levels of the network."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipollux_sched.backend.base import network_level
from pipollux_sched.backend.slurm.engine import SlurmEngine
from pipollux_sched.backend.slurm.pools import OwnAllocation
from pipollux_sched.store import StateDir
from tests.hosts.harness import slurm
from tests.hosts.harness.hosts import Hosts

pytestmark = pytest.mark.exhaustive

SWITCHES = """\
SwitchName=s0 Nodes={0},{1}
SwitchName=s1 Nodes={2}
SwitchName=top Switches=s[0-1]
"""


@pytest.mark.skipif(slurm.why_not() is not None, reason=f"no Slurm: {slurm.why_not()}")
def test_switches_are_levels(state_dir: StateDir, monkeypatch: pytest.MonkeyPatch) -> None:
    with Hosts(3) as hosts:
        folder: Path = hosts.folder / "slurm"
        folder.mkdir(parents=True, exist_ok=True)
        first, second, third = hosts.names
        (folder / "topology.conf").write_text(SWITCHES.format(first, second, third))
        with slurm.SlurmCluster(hosts, settings={"TopologyPlugin": "topology/tree"}) as cluster:
            for name, value in cluster.environment.items():
                monkeypatch.setenv(name, value)
            job = cluster.allocate("-N3", "--gres=gpu:4", "--exclusive", "--no-kill", "--time=60")
            engine = SlurmEngine(state_dir, OwnAllocation(job), interval=0.5)
            try:
                nodes = engine.nodes()
                assert nodes[first].spec.topology == {"switch-1": "top", "switch": "s0"}
                assert network_level(nodes, [first, second]) == 1
                assert network_level(nodes, [first, third]) == 2
            finally:
                engine.close()
                cluster.call("scancel", str(job))
