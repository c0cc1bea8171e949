"""Sweeps and jobs that wait for others under `pipollux serve --backend slurm`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from pipollux_sched.client.client import Client
from pipollux_sched.lifecycle import Phase
from pipollux_sched.spec.job import JobSpec
from pipollux_sched.store import StateDir, TrialState
from tests.cli.runner import LIGHT
from tests.cli.slurm_serving import serving, steps
from tests.hosts.harness.hosts import Hosts
from tests.hosts.harness.slurm import SlurmCluster
from tests.programs import free_port
from tests.sched.scripts import TRIAL
from tests.services import require_slurm
from tests.waiting import until

pytestmark = pytest.mark.exhaustive


def test_a_search_is_pruned_and_goes_on_after_a_scheduler_is_killed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, repository: Path
) -> None:
    """Trials are steps on two nodes; a pruned one, which never ends by itself, frees its slots.

    The jobs that wait for the sweep start when it has ended, or can never start.
    """
    require_slurm()
    monkeypatch.setenv("PYTHONPATH", str(repository))
    state_dir = StateDir(tmp_path / "state")
    never = tmp_path / "never"
    jobs: list[dict[str, Any]] = [
        {
            "name": "rates",
            "script": str(TRIAL),
            "args": ["--lr", "{lr}", "--hold", str(never)],
            "preemptible": False,
            "max_restarts": 3,  # a trial whose report meets no scheduler ends
            "sweep": {
                "list": [*[{"lr": 0.02}] * 6, {"lr": 0.9}, {"lr": 0.01}],
                "metric": "error",
                "pruner": "median",
                "max_parallel": 2,
            },
        },
        {"name": "last", "command": "true", "after": ["rates"]},
        {"name": "alarm", "command": "true", "after": [{"job": "rates", "when": "failed"}]},
    ]
    given = {"resources": {"cpus": 9}, "max_replicas": 1}  # a node has 16, and so takes one
    specs = [JobSpec.model_validate({**given, **job}) for job in jobs]
    with Hosts(2) as hosts, SlurmCluster(hosts, gpus=0) as cluster:
        for name, value in cluster.environment.items():
            monkeypatch.setenv(name, value)
        address = (f"--host={hosts.gateway}", f"--port={free_port(hosts.gateway)}")
        nodes = (*address, "--nodes=2", "--time=60")
        program = (sys.executable, str(LIGHT))
        with serving(state_dir, *nodes, program=program) as scheduler:
            with Client.of(state_dir) as client:
                client.submit_all(specs)
            until(lambda: ended(state_dir) >= 2)
            scheduler.kill()
            scheduler.wait()
        with serving(state_dir, *nodes, program=program), Client.of(state_dir) as client:
            until(lambda: client.job("rates").phase.ended)
            found = client.sweep("rates")
            until(lambda: client.job("last").phase.ended)
            last, alarm = client.job("last"), client.job("alarm")
            until(lambda: not [step for step in steps(cluster) if step.startswith("rates-")])
            most = most_at_once(client)
    assert [trial.state for trial in found.trials] == [
        *[TrialState.COMPLETE] * 6,
        *(TrialState.PRUNED, TrialState.COMPLETE),
    ]
    assert found.best is not None
    assert (found.best.number, found.best.value) == (7, 0.5)
    assert most == 2
    assert last.phase is Phase.COMPLETE
    assert (alarm.phase, alarm.reason) == (Phase.FAILED, "DependencyNotMet")


def ended(state_dir: StateDir) -> int:
    """Return the number of trials that have ended."""
    with Client.of(state_dir) as client:
        return sum(trial.state.ended for trial in client.sweep("rates").trials)


def most_at_once(client: Client) -> int:
    """Return how many trials held slots at the same time, at most."""
    spans = [
        (attempt.created_at, attempt.ended_at or float("inf"))
        for number in range(8)
        for attempt in client.job(f"rates-{number}").attempts
    ]
    return max(sum(begin <= start < end for begin, end in spans) for start, _ in spans)
