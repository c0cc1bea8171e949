"""The files and commands of the page about topology do what it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .runner import LIGHT, Cli, wait_until
from .test_cli_jobs_page import block_of, commands_of

TRAIN = """\
import os, signal
print("level", os.environ["PIPOLLUX_NETWORK_LEVEL"], flush=True)
signal.pause()
"""
RUNNING = """\
levels: [zone, rack]
nodes:
  - {name: node-a, slots: 2, kind: cpu, topology: {zone: a, rack: r1}}
  - {name: node-b, slots: 2, kind: cpu, topology: {zone: a, rack: r2}}
"""


def test_the_plan_packs_the_job_that_suffers(cli: Cli, repository: Path) -> None:
    for name in ("cluster", "jobs"):
        (cli.folder / f"{name}.yaml").write_text(block_of(repository, "topology.md", name))
    (cli.folder / "train.py").write_text(TRAIN)
    (command,) = commands_of(block_of(repository, "topology.md", "plan"))
    done = cli(*command, "-o", "json")
    assert done.returncode == 0, done.stderr
    nodes = {job["job"]: set(job["nodes"]) for job in json.loads(done.stdout)["assignments"]}
    assert nodes["chatty"] in ({"node-1", "node-3"}, {"node-2", "node-4"})
    assert len(nodes["quiet"]) == 2


@pytest.mark.exhaustive
def test_a_running_job_knows_its_level_and_explain_prices_it(cli: Cli, repository: Path) -> None:
    cli.program = LIGHT
    (cli.folder / "cluster.yaml").write_text(RUNNING)
    (cli.folder / "jobs.yaml").write_text(block_of(repository, "topology.md", "jobs"))
    (cli.folder / "train.py").write_text(TRAIN)
    cli.serve()
    shown = cli("nodes").stdout.splitlines()
    assert shown[0].split()[:4] == ["Node", "Kind", "zone", "rack"]
    assert shown[1].split()[:4] == ["node-a", "cpu", "a", "r1"]
    done = cli("submit", "jobs.yaml")
    assert done.returncode == 0, done.stderr
    wait_until(lambda: cli.jobs()["chatty"]["phase"] == "Running")
    wait_until(lambda: "level 2" in cli("logs", "chatty").stdout)
    text = " ".join(cli("explain", "chatty").stdout.split())
    for line in block_of(repository, "topology.md", "network").splitlines():
        assert line in text


@pytest.mark.exhaustive
def test_the_simulator_has_levels(cli: Cli, repository: Path) -> None:
    (command,) = commands_of(block_of(repository, "topology.md", "simulate"))
    done = cli(*command)
    assert done.returncode == 0, done.stderr
