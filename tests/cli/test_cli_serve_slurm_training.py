"""Training under `pipollux serve --backend slurm`: preempted nodes, uneven placement."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from benchmarks.clusters.counted import fault
from pipollux_sched.client.client import Client
from pipollux_sched.lifecycle import Phase
from pipollux_sched.spec.job import JobSpec
from pipollux_sched.store import StateDir
from pipollux_sched.views.models import JobDetails
from tests.cli.slurm_serving import serving, step_of, steps
from tests.hosts.harness.hosts import Hosts
from tests.hosts.harness.slurm import SlurmCluster
from tests.programs import free_port
from tests.services import require_slurm
from tests.waiting import until

pytestmark = pytest.mark.exhaustive

NUM_EPOCHS = 12


def counted(repository: Path, **fields: Any) -> JobSpec:
    """Return a job that accounts for each sample that it is trained on."""
    return JobSpec.model_validate(
        {
            "name": "digits",
            "script": str(repository / "benchmarks" / "clusters" / "counted.py"),
            "args": [str(repository / "examples" / "digits.py"), "--epochs", str(NUM_EPOCHS)],
            **fields,
        }
    )


def is_complete(state_dir: StateDir) -> JobDetails | None:
    with Client.of(state_dir) as client:
        details = client.job("digits")
    assert details.phase is not Phase.FAILED, details.message
    return details if details.phase is Phase.COMPLETE else None


def test_a_job_whose_nodes_are_preempted_goes_on_when_there_are_some_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, repository: Path
) -> None:
    require_slurm()
    state_dir = StateDir(tmp_path / "state")
    with Hosts(1) as hosts, SlurmCluster(hosts, gpus=0, preemption="REQUEUE") as cluster:
        for name, value in cluster.environment.items():
            monkeypatch.setenv(name, value)
        address = (f"--host={hosts.gateway}", f"--port={free_port(hosts.gateway)}")
        with serving(state_dir, *address, "--nodes=1", "--partition=spot", "--time=60"):
            with Client.of(state_dir) as client:
                client.submit(counted(repository, max_replicas=1))
            until(lambda: step_of(state_dir, "digits") >= 10)
            urgent = cluster.call(
                *("sbatch", "--parsable", "--partition=main", "--nodes=1", "--exclusive"),
                *("--output=/dev/null", "--wrap=exec sleep infinity"),
            ).strip()
            # It has the node, and the pool that gave way is followed by one that waits.
            until(lambda: states(cluster) == {"main": "RUNNING", "spot": "PENDING"})
            with Client.of(state_dir) as client:
                assert client.job("digits").phase is not Phase.COMPLETE
            cluster.call("scancel", urgent)
            details = until(lambda: is_complete(state_dir))
    assert details.attempt > 1
    assert fault(state_dir.checkpoints("digits"), NUM_EPOCHS) is None


def states(cluster: SlurmCluster) -> dict[str, str]:
    """Return the state of the job of each partition that has one."""
    lines = cluster.call("squeue", "-h", "-t", "PENDING,RUNNING", "-o", "%P %T").splitlines()
    return dict(line.split() for line in lines)


def test_replicas_of_a_job_are_placed_unevenly(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, repository: Path
) -> None:
    require_slurm()
    state_dir = StateDir(tmp_path / "state")
    with Hosts(2) as hosts, SlurmCluster(hosts, gpus=0) as cluster:
        for name, value in cluster.environment.items():
            monkeypatch.setenv(name, value)
        address = (f"--host={hosts.gateway}", f"--port={free_port(hosts.gateway)}")
        # A node has 16 CPUs, so it takes two replicas.
        job = counted(repository, min_replicas=3, max_replicas=3, resources={"cpus": 6})
        with serving(state_dir, *address, "--nodes=2", "--time=60"):
            with Client.of(state_dir) as client:
                client.submit(job)
            until(lambda: step_of(state_dir, "digits") >= 1)
            nodes = Counter(line.split()[1] for line in steps(cluster) if ".a1.r" in line)
            details = until(lambda: is_complete(state_dir))
    assert sorted(nodes.values()) == [1, 2]
    assert (details.failures, details.attempt) == (0, 1)
    assert fault(state_dir.checkpoints("digits"), NUM_EPOCHS) is None


def test_replicas_push_and_pull_over_the_network(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, repository: Path
) -> None:
    """With a server on each of two hosts, by the page's script."""
    require_slurm()
    page = (repository / "docs" / "howto" / "push-pull.md").read_text()
    (text,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    script = tmp_path / "train.py"
    script.write_text(text)
    state_dir = StateDir(tmp_path / "state")
    with Hosts(2) as hosts, SlurmCluster(hosts, gpus=0) as cluster:
        for name, value in cluster.environment.items():
            monkeypatch.setenv(name, value)
        address = (f"--host={hosts.gateway}", f"--port={free_port(hosts.gateway)}")
        sizes = {"servers": 2, "min_replicas": 2, "max_replicas": 2, "resources": {"cpus": 10}}
        job = JobSpec.model_validate({"name": "digits", "script": str(script), **sizes})
        with serving(state_dir, *address, "--nodes=2", "--time=60"):
            with Client.of(state_dir) as client:
                client.submit(job)
            details = until(lambda: is_complete(state_dir))
            logs = [state_dir.log("digits", 1, replica).read_text() for replica in (0, 1)]
    assert (details.failures, details.attempt) == (0, 1)
    places = [re.findall(r"pipollux server (\d) of 2: ([0-9.]+):", log) for log in logs]
    assert [index for ((index, _),) in places] == ["0", "1"]
    assert len({host for ((_, host),) in places}) == 2
    assert "127.0.0.1" not in str(places)
    kept = state_dir.checkpoints("digits") / "servers"
    assert (kept / "ledger.json").exists()
