"""A scheduler whose store another one has taken over: it ends, and touches nothing."""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing

import pytest

from .runner import LIGHT, TOY, Cli, wait_until

TAKEN = "another scheduler has taken over the store"


@pytest.mark.exhaustive
def test_whoever_lost_the_store_leaves_the_jobs_alone(cli: Cli) -> None:
    """The mark of the other is written by hand: the lock of an SQLite file cannot be lost."""
    cli.program = LIGHT
    # Slow steps, so that none is reported while the scheduler that lost has not noticed yet.
    (cli.folder / "jobs.yaml").write_text(
        f'jobs: [{{name: slow, script: {TOY}, args: [--step-seconds, "4"]}}]'
    )
    server = cli.serve("--open-metrics")
    assert cli("submit", "jobs.yaml").returncode == 0
    wait_until(lambda: cli.jobs()["slow"]["reason"] == "Training")
    alive = {process.pid for process in cli.alive()}
    database = cli.state_dir / "pipollux.db"
    with closing(sqlite3.connect(database, isolation_level=None)) as other:
        changed = other.execute("UPDATE meta SET value = 'another' WHERE key = 'scheduler'")
        assert changed.rowcount == 1
    assert server.wait(240) == 1
    said = (server.output + server.errors).splitlines()
    [sentence] = [line for line in said if line.startswith("Error: ")]
    assert sentence.startswith(f"Error: {TAKEN} ")
    assert sentence.endswith("may not write to it any more, and ends without touching the jobs")
    assert {process.pid for process in cli.alive()} == alive
    before = cli.jobs()["slow"]
    assert before["running_on"]

    cli.serve()
    assert {process.pid for process in cli.alive()} == alive, "they are adopted"
    assert cli.jobs()["slow"]["attempt"] == before["attempt"]
    assert cli("cancel", "slow").returncode == 0
    wait_until(lambda: cli.jobs()["slow"]["phase"] == "Failed")
    deadline = time.monotonic() + 240
    while cli.alive():
        assert time.monotonic() < deadline
