"""Scripts that never take a step hold a node and slots no longer than a start may take."""

from __future__ import annotations

import pytest

from .runner import LIGHT, Cli, wait_until

SILENT = """
import signal, time

signal.signal(signal.SIGTERM, signal.SIG_IGN)  # nor does it stop when it is asked to
print("waiting for the licence server", flush=True)
while True:
    time.sleep(0.05)
"""
TEAMS = """
notice: 0
teams:
  - {name: text, quota: 2}
  - {name: vision, quota: 2}
"""


@pytest.fixture
def silent(cli: Cli) -> Cli:
    (cli.folder / "silent.py").write_text(SILENT)
    cli.program = LIGHT
    return cli


def run_job(cli: Cli, name: str, **fields: str) -> None:
    """Submit a job that fills a node, and wait until it runs."""
    given = "".join(f", {key}: {value}" for key, value in fields.items())
    job = f"{{name: {name}, script: silent.py, max_restarts: 0, max_replicas: 1, num_stages: 2"
    (cli.folder / "jobs.yaml").write_text(f"jobs: [{job}{given}}}]\n")
    submitted = cli("submit", "jobs.yaml")
    assert submitted.returncode == 0, submitted.stderr
    wait_until(lambda: cli.jobs()[name]["phase"] == "Running")


def test_drain_waits_no_longer_than_a_start_may_take(silent: Cli) -> None:
    silent.serve("--grace", "2")
    run_job(silent, "silent", start_timeout="4")
    (node,) = silent.jobs()["silent"]["running_on"]
    drained = silent("drain", node, "--reason", "new fans", "--wait", "--timeout", "200")
    assert drained.returncode == 0, drained.stderr
    assert node in drained.stdout
    wait_until(lambda: silent.jobs()["silent"]["phase"] == "Failed")
    said = silent("describe", "silent").stdout
    assert "It ran for 4 s (start_timeout) and reported no" in said


@pytest.mark.exhaustive
def test_a_team_gets_its_quota_back_from_a_script_that_takes_no_step(silent: Cli) -> None:
    (silent.folder / "teams.yaml").write_text(TEAMS)
    silent.serve("--grace", "2", "--teams", "teams.yaml")
    run_job(silent, "mine", team="text", start_timeout="200")
    run_job(silent, "borrows", team="text", start_timeout="6")
    run_job(silent, "owner", team="vision", start_timeout="200")
    jobs = silent.jobs()
    assert jobs["mine"]["phase"] == "Running"
    borrows = jobs["borrows"]
    assert "start_timeout" in borrows["message"] or borrows["phase"] == "Queued", borrows
