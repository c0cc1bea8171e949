"""The Slurm of the tests: replicas as steps, nodes that fail, jobs that give way."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.hosts.harness.hosts import Hosts
from tests.hosts.harness.slurm import SlurmCluster
from tests.services import require_slurm

TELLS = 'echo "$(hostname) $CUDA_VISIBLE_DEVICES"; touch {mine}; while ! [ -e {other} ]; do :; done'
"""Prints where it is, and ends when another one is there at the same time."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    require_slurm()
    with Hosts(2) as hosts, SlurmCluster(hosts, preemption="REQUEUE") as made:
        yield made


def job_state(cluster: SlurmCluster, job: str) -> str:
    return cluster.call(
        "squeue", "--jobs", job, "--states=all", "--noheader", "--format=%T"
    ).strip()


def test_replicas_of_an_allocation_get_gpus_of_their_own(cluster: SlurmCluster) -> None:
    job = str(cluster.allocate("-N2", "--gres=gpu:4", "--exclusive"))
    flags = [cluster.folder / "a", cluster.folder / "b"]
    steps = [
        cluster.start(
            *("srun", f"--jobid={job}", "--exact", "-J", f"job.{number}", "-w", "n2", "-N1"),
            *("-n1", "-c2", "--gres=gpu:2", "--mem=0"),
            *("sh", "-c", TELLS.format(mine=flags[number], other=flags[1 - number])),
            stdout=-1,
            text=True,
        )
        for number in range(2)
    ]
    outputs = sorted(step.communicate()[0].strip() for step in steps)
    assert [step.returncode for step in steps] == [0, 0]
    assert outputs == ["n2 0,1", "n2 2,3"]
    cluster.call("scancel", job)


@pytest.mark.exhaustive
def test_jobs_outlive_their_controller(cluster: SlurmCluster) -> None:
    job = str(cluster.allocate("-N1"))
    cluster.restart_controller()
    assert job_state(cluster, job) == "RUNNING"
    assert cluster.call("srun", f"--jobid={job}", "-n1", "echo", "here").strip() == "here"
    cluster.call("scancel", job)


def test_nodes_drain_fail_and_come_back(cluster: SlurmCluster) -> None:
    cluster.wait_until(lambda: set(cluster.states().values()) == {"IDLE"})
    job = str(cluster.allocate("-N1", "-w", "n1"))
    cluster.drain("n1")
    assert cluster.states() == {"n1": "MIXED+DRAIN", "n2": "IDLE"}
    assert job_state(cluster, job) == "RUNNING"
    cluster.fail("n1")
    cluster.wait_until(lambda: job_state(cluster, job) == "NODE_FAIL")
    cluster.kill_node("n1")
    cluster.start_node("n1")
    cluster.resume("n1")
    cluster.wait_until(lambda: cluster.states() == {"n1": "IDLE", "n2": "IDLE"})


@pytest.mark.exhaustive
def test_a_spot_job_gives_way_and_comes_back(cluster: SlurmCluster) -> None:
    spot = cluster.call(
        *("sbatch", "--parsable", "--partition=spot", "-N2", "--exclusive", "--requeue"),
        *("--output=/dev/null", "--wrap=sleep 1000"),
    ).strip()
    cluster.wait_until(lambda: job_state(cluster, spot) == "RUNNING")
    job = str(cluster.allocate("-N2", "--exclusive"))
    cluster.wait_until(lambda: job_state(cluster, spot) == "PENDING")
    cluster.call("scancel", job)
    cluster.wait_until(lambda: job_state(cluster, spot) == "RUNNING")
    assert "Restarts=1" in cluster.call("scontrol", "show", "job", spot)
    cluster.call("scancel", spot)
    cluster.wait_until(lambda: job_state(cluster, spot) == "CANCELLED")
