"""`pipollux serve --backend slurm`, from nodes that it asks for to a job that is complete."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from pipollux_sched.cli.app import app
from pipollux_sched.client.client import Client
from pipollux_sched.lifecycle import Phase
from pipollux_sched.report.event_text import event_text
from pipollux_sched.spec.job import JobSpec
from pipollux_sched.store import StateDir
from tests.cli.slurm_serving import PIPOLLUX, serving, step_of, steps
from tests.hosts.harness.hosts import Hosts
from tests.hosts.harness.slurm import SlurmCluster
from tests.programs import Command, free_port
from tests.services import require_slurm
from tests.waiting import PATIENCE, until


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


@pytest.fixture
def patient(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmCluster]:
    """A Slurm that gives what it ends a minute to save."""
    with SlurmCluster(hosts, gpus=0, settings={"KillWait": "60"}) as made:
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
        assert {"digits.a1.r0 n1", "digits.a1.r1 n2"} <= set(steps(cluster)) or {
            "digits.a1.r0 n2",
            "digits.a1.r1 n1",
        } <= set(steps(cluster))
        scheduler.kill()
        scheduler.wait()
    with serving(state_dir, *address, *nodes), Client.of(state_dir) as client:
        until(lambda: client.job("digits").phase is Phase.COMPLETE)
        details = client.job("digits")
        log = client.read_log("digits", 1, 0, 0).content.decode()
    assert (details.attempt, details.failures) == (1, 0)
    for epoch in range(4):
        assert log.count(f"epoch {epoch}: accuracy") == 1
    cluster.wait_until(lambda: cluster.call("squeue", "-h", "-t", "PENDING,RUNNING") == "")
    assert not [host for host in hosts.names if "python" in commands(hosts, host)]


def endless(repository: Path, **fields: object) -> JobSpec:
    """Return a job that trains until it is told to stop."""
    return JobSpec.model_validate(
        {
            "name": "digits",
            "script": str(repository / "examples" / "digits.py"),
            "args": ["--epochs", "100000"],
            "max_replicas": 1,
            **fields,
        }
    )


def saved_step(state_dir: StateDir) -> int:
    """Return the step at which a job has saved and stopped, as its own marker says."""
    marker = state_dir.checkpoints("digits") / "stopped.json"
    return int(json.loads(marker.read_text())["step"])


def stops(state_dir: StateDir) -> list[str]:
    """Return what is said of each stop of the job."""
    with Client.of(state_dir) as client:
        events = client.events(types=("stopped",))
    return [str(event_text(event)) for event in events]


@pytest.mark.exhaustive
def test_what_a_job_has_saved_whose_allocation_is_cancelled_is_said(
    patient: SlurmCluster, hosts: Hosts, tmp_path: Path, repository: Path
) -> None:
    """Slurm gives it some seconds, and it goes on in another allocation after that step."""
    state_dir = StateDir(tmp_path / "state")
    address = (f"--host={hosts.gateway}", f"--port={free_port(hosts.gateway)}")
    with serving(state_dir, *address, "--nodes=1", "--partition=main", "--time=60"):
        with Client.of(state_dir) as client:
            client.submit(endless(repository, max_restarts=0))
        until(lambda: step_of(state_dir, "digits") >= 10)
        (pool,) = patient.call("squeue", "-h", "-t", "RUNNING", "-o", "%i").split()
        patient.call("scancel", pool)
        until(lambda: stops(state_dir))
        step = saved_step(state_dir)
        assert stops(state_dir) == [f"stopped and saved at step {step}"]
        until(lambda: step_of(state_dir, "digits") > step)
        with Client.of(state_dir) as client:
            client.cancel("digits")
            until(lambda: client.job("digits").phase.ended)


@pytest.mark.exhaustive
def test_what_a_job_has_not_saved_that_is_killed_is_said(
    cluster: SlurmCluster, hosts: Hosts, tmp_path: Path, repository: Path
) -> None:
    """It does not heed SIGTERM before Slurm kills it."""
    state_dir = StateDir(tmp_path / "state")
    address = (f"--host={hosts.gateway}", f"--port={free_port(hosts.gateway)}")
    script = tmp_path / "stuck.py"
    script.write_text(
        "import sys\n"
        f"sys.argv[0] = {str(repository / 'examples' / 'digits.py')!r}\n"
        "from pipollux_hybrid.job import signals\n"
        "signals.request_stop = lambda *_: print('deaf', flush=True)\n"
        "exec(compile(open(sys.argv[0]).read(), sys.argv[0], 'exec'))\n"
    )
    with serving(state_dir, *address, "--nodes=1", "--partition=main", "--time=60"):
        with Client.of(state_dir) as client:
            client.submit(endless(repository, script=str(script)))
        checkpoints = state_dir.checkpoints("digits")
        until(lambda: step_of(state_dir, "digits") >= 10 and list(checkpoints.glob("check*")))
        (pool,) = cluster.call("squeue", "-h", "-t", "RUNNING", "-o", "%i").split()
        cluster.call("scancel", pool)
        (said,) = until(lambda: stops(state_dir))
        assert re.fullmatch(r"stopped without saving; its newest checkpoint is of step \d+", said)
        first = until(lambda: training_since(state_dir, 2))
        assert said.endswith(f" {first - 1}")


def training_since(state_dir: StateDir, attempt: int) -> int | None:
    """Return the first step of an attempt."""
    with Client.of(state_dir) as client:
        events = client.events(types=("first_step",))
    steps = [event["step"] for event in events if event["attempt"] == attempt]
    return steps[0] if steps else None


@pytest.mark.parametrize("how", ["scancel", "time limit"])
@pytest.mark.exhaustive
def test_a_scheduler_whose_allocation_ends_says_so_and_ends(
    patient: SlurmCluster,
    hosts: Hosts,
    tmp_path: Path,
    repository: Path,
    monkeypatch: pytest.MonkeyPatch,
    how: str,
) -> None:
    """Its jobs go on when another is started in a new allocation, and none has failed."""
    state_dir, log = StateDir(tmp_path / "state"), tmp_path / "serve.log"
    address = (f"--host={hosts.gateway}", f"--port={free_port(hosts.gateway)}")
    options = ("-N2", "--exclusive", "--no-kill")

    def allocate() -> str:
        number = str(patient.allocate(*options, "--time=60"))
        monkeypatch.setenv("SLURM_JOB_ID", number)
        return number

    job = endless(repository, max_restarts=0)
    file = tmp_path / "jobs.yaml"
    file.write_text(yaml.safe_dump({"jobs": [job.model_dump(mode="json", exclude_unset=True)]}))
    first = allocate()
    command = [str(PIPOLLUX), "submit", "--wait", f"--state-dir={state_dir.path}", str(file)]
    with serving(state_dir, *address, log=log) as scheduler, Command(command) as waiting:
        until(lambda: state_dir.path.exists() and step_of_first(state_dir) >= 10)
        if how == "scancel":
            patient.call("scancel", first)
        else:
            patient.call("scontrol", "update", f"JobId={first}", "TimeLimit=1")
        assert scheduler.wait(PATIENCE) == 1
        until(lambda: "No scheduler answers; waiting" in waiting.errors)
        assert waiting.poll() is None
    state = "CANCELLED" if how == "scancel" else "TIMEOUT"
    said = f"Slurm's allocation {first}, whose nodes were the cluster, has ended"
    assert f"ERROR: {said}" in log.read_text()
    last = log.read_text().splitlines()[-1]
    assert last.startswith(f"Error: {said} ({state}"), last
    assert f"the state directory {state_dir.path} in a new one" in last
    step = saved_step(state_dir)
    assert f"digits: stopped and saved at step {step}" in log.read_text()
    allocate()
    with serving(state_dir, *address), Client.of(state_dir) as client:
        assert until(lambda: training_since(state_dir, 2)) == step + 1
        assert client.job("digits").failures == 0
        client.cancel("digits")
        until(lambda: client.job("digits").phase.ended)


def step_of_first(state_dir: StateDir) -> int:
    """Return the step that the job is at, 0 where it is not yet there."""
    with Client.of(state_dir) as client:
        found = [job.progress for job in client.jobs() if job.progress]
    return found[0].step if found else 0


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
