"""examples/slurm/train.sbatch on a real Slurm: past its time limit, and past a lost node."""

from __future__ import annotations

import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts.harness.hosts import Hosts
from tests.hosts.harness.slurm import SlurmCluster
from tests.hybrid.elastic import training
from tests.services import require_slurm

pytestmark = pytest.mark.exhaustive
HELD_AT = 20
EAGER = "PIPOLLUX_CHECKPOINT_INTERVAL=0.001"
"""Saves as often as it can."""


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    require_slurm()
    with Hosts(3) as made:
        yield made


@pytest.fixture
def cluster(hosts: Hosts) -> Iterator[SlurmCluster]:
    with SlurmCluster(hosts) as made:
        yield made


def submit(
    cluster: SlurmCluster,
    repository: Path,
    results: Path,
    *options: str,
    script: str | None = training.__file__,
) -> str:
    """Submit a script, the one that `training` is, as a user does; the number of the job."""
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return cluster.call(
        *("sbatch", "--parsable", f"--chdir={repository}", f"--output={results}/%j.log"),
        *(*options, "examples/slurm/train.sbatch", str(script)),
        env={
            "PATH": programs,
            "RESULTS": str(results),
            "PIPOLLUX_CHECKPOINT_DIR": str(results / "checkpoints"),
        },
    ).strip()


def fields(cluster: SlurmCluster, job: str) -> dict[str, str]:
    said = cluster.call("scontrol", "--oneliner", "show", "job", job)
    return dict(re.findall(r"(\S+?)=(\S*)", said))


def limit_to(cluster: SlurmCluster, job: str, minutes: int) -> None:
    cluster.call("scontrol", "update", f"JobId={job}", f"TimeLimit={minutes}")


def reached(results: Path, what: str) -> int:
    return len(list(results.glob(f"{what}-{HELD_AT}-*")))


def test_it_goes_on_after_its_time_limit(
    cluster: SlurmCluster, repository: Path, tmp_path: Path
) -> None:
    gate = tmp_path / f"hold-{HELD_AT}"
    gate.touch()
    job = submit(cluster, repository, tmp_path, "--time=60", "--signal=B:USR1@180")
    log = tmp_path / f"{job}.log"
    cluster.wait_until(lambda: reached(tmp_path, "reached") == 2)
    # Now the limit is so near that Slurm says so as soon as it looks, which is twice a minute.
    hours, minutes, _ = fields(cluster, job)["RunTime"].split(":")
    limit_to(cluster, job, 60 * int(hours) + int(minutes) + 3)
    cluster.wait_until(lambda: reached(tmp_path, "asked") == 2)  # both have SIGTERM
    gate.unlink()
    cluster.wait_until(lambda: int(fields(cluster, job)["Restarts"]) > 0)
    limit_to(cluster, job, 60)
    cluster.wait_until(lambda: fields(cluster, job)["JobState"] == "COMPLETED")
    assert re.search(r"pipollux: stopped at step \d+ as asked", log.read_text()), log.read_text()
    assert (tmp_path / "final.pt").exists()
    rows = [
        [int(x) for x in line.split()]
        for path in tmp_path.glob("samples-0-*.txt")
        for line in path.read_text().splitlines()
    ]
    for epoch in range(training.EPOCHS):
        taken = Counter(index for _, e, *indices in rows if e == epoch for index in indices)
        assert taken == Counter(range(training.SIZE))


def test_it_goes_on_without_a_lost_node(
    hosts: Hosts, cluster: SlurmCluster, repository: Path, tmp_path: Path
) -> None:
    gate = tmp_path / f"hold-{HELD_AT}"
    gate.touch()
    job = submit(cluster, repository, tmp_path)
    cluster.wait_until(lambda: reached(tmp_path, "reached") == 2)
    nodes = cluster.call("scontrol", "show", "hostnames", fields(cluster, job)["NodeList"]).split()
    hosts.link_down(nodes[1])
    cluster.wait_until(lambda: fields(cluster, job)["Restarts"] == "1")
    gate.unlink()
    cluster.wait_until(lambda: fields(cluster, job)["JobState"] == "COMPLETED")
    assert nodes[1] not in fields(cluster, job)["NodeList"]
    assert (tmp_path / "final.pt").exists()


def test_one_that_has_saved_nothing_is_not_queued_again(
    cluster: SlurmCluster, repository: Path, tmp_path: Path
) -> None:
    """A script that is still reading its data when the time is over would do so for ever."""
    script = tmp_path / "reads.py"
    script.write_text(
        "import os, pathlib, time\n"
        f"pathlib.Path({str(tmp_path)!r}, 'began-' + os.environ['RANK']).touch()\n"
        "time.sleep(10_000)\n"
    )
    options = ("--time=60", "--signal=B:USR1@180")
    job = submit(cluster, repository, tmp_path, *options, script=str(script))
    cluster.wait_until(lambda: len(list(tmp_path.glob("began-*"))) == 2)
    hours, minutes, _ = fields(cluster, job)["RunTime"].split(":")
    limit_to(cluster, job, 60 * int(hours) + int(minutes) + 3)
    passing = ("RUNNING", "SIGNALING", "COMPLETING")
    cluster.wait_until(lambda: fields(cluster, job)["JobState"] not in passing)
    assert fields(cluster, job)["JobState"] == "FAILED"
    assert fields(cluster, job)["Restarts"] == "0"
    said = (tmp_path / f"{job}.log").read_text()
    assert "no checkpoint was written in this run, so it is not queued again" in said


def test_one_that_is_cancelled_says_which_step_it_has_saved(
    hosts: Hosts, repository: Path, tmp_path: Path
) -> None:
    with SlurmCluster(hosts, settings={"KillWait": "60"}) as cluster:
        gate = tmp_path / f"hold-{HELD_AT}"
        gate.touch()
        job = submit(cluster, repository, tmp_path)
        cluster.wait_until(lambda: reached(tmp_path, "reached") == 2)
        cluster.call("scancel", job)
        cluster.wait_until(lambda: reached(tmp_path, "asked") == 2)
        gate.unlink()
        cluster.wait_until(lambda: fields(cluster, job)["JobState"] == "CANCELLED")
    said = (tmp_path / f"{job}.log").read_text()
    step = json.loads((tmp_path / "checkpoints" / "stopped.json").read_text())["step"]
    assert f"pipollux: stopped at step {step} as asked" in said
    last = [line for line in said.splitlines() if "checkpoint" in line][-1]
    assert last.startswith("Slurm has ended this job: the newest checkpoint is checkpoint-"), said
    assert last.endswith(f", of step {step}")


def test_one_that_is_killed_says_which_step_it_had_saved(
    cluster: SlurmCluster, repository: Path, tmp_path: Path
) -> None:
    """Its step is longer than what Slurm waits."""
    (tmp_path / f"hold-{HELD_AT}").touch()
    job = submit(cluster, repository, tmp_path, f"--export=ALL,{EAGER}")
    cluster.wait_until(lambda: reached(tmp_path, "reached") == 2)
    cluster.call("scancel", job)
    cluster.wait_until(lambda: fields(cluster, job)["JobState"] == "CANCELLED")
    said = (tmp_path / f"{job}.log").read_text()
    assert "stopped at step" not in said
    newest = max((tmp_path / "checkpoints").glob("checkpoint-*"))
    step = json.loads((newest / "metrics.json").read_text())["step"]
    assert 0 < step <= HELD_AT
    assert f"so far the newest checkpoint is {newest.name}, of step {step}\n" in said
