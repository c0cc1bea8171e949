"""`pipollux serve --backend slurm`, from nodes that it asks for to a job that is complete."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pipollux_sched.cli.app import app
from pipollux_sched.client.client import Client
from pipollux_sched.lifecycle import Phase
from pipollux_sched.spec.job import JobSpec
from pipollux_sched.store import StateDir
from tests.cli.slurm_serving import serving, step_of, steps
from tests.hosts.harness.hosts import Hosts
from tests.hosts.harness.slurm import SlurmCluster
from tests.programs import free_port
from tests.services import require_slurm
from tests.waiting import until


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    require_slurm()
    with Hosts(2) as made:
        yield made


@pytest.fixture
def cluster(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmCluster]:
    with SlurmCluster(hosts, gpus=0) as made:
        for name, value in made.environment.items():
            monkeypatch.setenv(name, value)
        yield made


@pytest.mark.exhaustive
def test_a_job_over_two_hosts_completes_though_its_scheduler_is_killed(
    cluster: SlurmCluster, hosts: Hosts, tmp_path: Path, repository: Path
) -> None:
    state_dir = StateDir(tmp_path / "state")
    address = (f"--host={hosts.gateway}", f"--port={free_port(hosts.gateway)}")
    nodes = ("--nodes=2", "--partition=main", "--time=60")
    # A node has 16 CPUs, so it takes one replica.
    job = JobSpec.model_validate(
        {
            "name": "digits",
            "script": str(repository / "examples" / "digits.py"),
            "args": ["--epochs", "4"],
            "min_replicas": 2,
            "max_replicas": 2,
            "resources": {"cpus": 9},
        }
    )
    with serving(state_dir, *address, *nodes) as scheduler:
        with Client.of(state_dir) as client:
            client.submit(job)
        until(lambda: step_of(state_dir, "digits") >= 10)
        assert {"digits.g1.r0 n1", "digits.g1.r1 n2"} <= set(steps(cluster)) or {
            "digits.g1.r0 n2",
            "digits.g1.r1 n1",
        } <= set(steps(cluster))
        scheduler.kill()
        scheduler.wait()
    with serving(state_dir, *address, *nodes), Client.of(state_dir) as client:
        until(lambda: client.job("digits").phase is Phase.COMPLETE)
        details = client.job("digits")
        log = client.read_log("digits", 1, 0, 0).content.decode()
    assert (details.generation, details.failures) == (1, 0)
    for epoch in range(4):
        assert log.count(f"epoch {epoch}: accuracy") == 1
    cluster.wait_until(lambda: cluster.call("squeue", "-h", "-t", "PENDING,RUNNING") == "")
    assert not [host for host in hosts.names if "python" in commands(hosts, host)]


def commands(hosts: Hosts, host: str) -> str:
    return " ".join(
        Path(f"/proc/{pid}/comm").read_text()
        for pid in hosts.pids(host)
        if os.path.exists(f"/proc/{pid}")
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--backend", "slurm"], "SLURM_JOB_ID is not set"),
        (["--nodes", "2"], "needs --backend slurm"),
        (["--backend", "slurm", "--gres", "gpu:4"], "needs --nodes, too"),
        (["--backend", "slurm", "--nodes", "3:2"], "'3:2' is not MIN or MIN:MAX"),
        (
            ["--backend", "slurm", "--nodes", "1", "--sbatch-option=--nodes=4"],
            "'--nodes=4' is not an option that may be added",
        ),
    ],
)
def test_options_that_make_no_sense_are_refused(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    result = CliRunner().invoke(app, ["serve", "--state-dir", str(tmp_path / "state"), *arguments])
    assert result.exit_code != 0
    assert message in " ".join((result.output + str(result.exception)).replace("│", " ").split())
