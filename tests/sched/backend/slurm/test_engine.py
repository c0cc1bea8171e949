"""The engine on a real Slurm: placement, signals, exit statuses, adoption."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from pipollux_sched.backend.base import BackendError, ClusterUnavailableError, ReplicaKey, Signal
from pipollux_sched.backend.slurm.engine import SlurmEngine
from pipollux_sched.backend.slurm.pools import OwnAllocation
from pipollux_sched.backend.slurm.record import ReplicaFiles
from pipollux_sched.store import StateDir
from tests.hosts.harness.hosts import Hosts
from tests.hosts.harness.slurm import SlurmCluster
from tests.sched.backend.slurm.conftest import MakeEngine
from tests.sched.backend.slurm.steps import ended, environment, log, runs, start, state, step_names
from tests.waiting import until

pytestmark = pytest.mark.exhaustive


def test_the_nodes_are_those_of_the_allocation(engine: SlurmEngine) -> None:
    nodes = engine.nodes()
    assert {
        name: (node.slots, node.spec.kind, node.spec.cpus) for name, node in nodes.items()
    } == dict.fromkeys(("n1", "n2", "n3"), (4, "gpu", 16))
    assert all(node.ready and not node.draining for node in nodes.values())


def test_replicas_run_where_they_were_placed_with_gpus_of_their_own(
    cluster: SlurmCluster, engine: SlurmEngine, state_dir: StateDir
) -> None:
    first = start(engine, "first", "n2", stages=2)
    second = start(engine, "second", "n2", stages=1)
    third = start(engine, "third", "n2", stages=1)
    other = start(engine, "other", "n3", stages=4, attempt=7)
    keys = (first, second, third, other)
    for key in keys:
        runs(engine, state_dir, key)
    assert {name: node for name, node in step_names(cluster).items() if ".a" in name} == {
        "first.a1.r0": "n2",
        "second.a1.r0": "n2",
        "third.a1.r0": "n2",
        "other.a7.r0": "n3",
    }
    variables = {key: environment(state_dir, key) for key in keys}
    gpus = {key: variables[key]["CUDA_VISIBLE_DEVICES"].split(",") for key in keys}
    assert {key.job: len(held) for key, held in gpus.items()} == {
        "first": 2,
        "second": 1,
        "third": 1,
        "other": 4,
    }
    assert sorted(gpus[first] + gpus[second] + gpus[third]) == ["0", "1", "2", "3"]
    assert variables[first]["PIPOLLUX_DEVICES"] == "cuda:0,cuda:1"


def test_a_replica_that_is_told_to_stop_before_it_has_begun_never_trains(
    engine: SlurmEngine, state_dir: StateDir
) -> None:
    key = start(engine, "toy", "n1")
    engine.signal(key, Signal.STOP)
    assert ended(engine, key).status == 143


def test_a_job_that_fits_nowhere_is_refused_in_the_words_of_slurm(
    engine: SlurmEngine, state_dir: StateDir
) -> None:
    key = start(engine, "toy", "n1", stages=9)
    how = ended(engine, key)
    assert (how.status, how.lost) == (1, "")
    assert "srun: error: " in log(state_dir, key)
    with pytest.raises(ClusterUnavailableError, match="no allocation of Slurm's has node n9"):
        start(engine, "other", "n9")


def test_why_a_step_does_not_begin_is_told_in_the_words_of_slurm(
    engine: SlurmEngine, state_dir: StateDir
) -> None:
    first = start(engine, "first", "n1", stages=4)
    runs(engine, state_dir, first)
    second = start(engine, "second", "n1")
    waiting = "Slurm has not yet begun its step. It says: srun: Job .*step creation"
    until(lambda: re.match(waiting, state(engine, second).waiting))
    engine.signal(first, Signal.STOP)
    runs(engine, state_dir, second)


def test_no_command_shows_what_is_secret(
    engine: SlurmEngine, state_dir: StateDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pipollux_sched.backend.base import Launch, ReplicaProgram
    from tests.sched.backend.slurm.steps import TOY
    from tests.sched.backends import assignments

    program = ReplicaProgram(
        job="toy", script=TOY, environment={"PIPOLLUX_TOKEN": "very-secret-indeed"}
    )
    folder = engine.checkpoints(program)
    Path(folder).mkdir(parents=True)
    launch = Launch(
        job="toy",
        attempt=1,
        assignments=assignments(["n1"]),
        num_first=1,
        scheduler_url="",
        checkpoints=folder,
    )
    engine.start(program, launch, 0)
    key = launch.keys[0]
    runs(engine, state_dir, key)
    commands = [
        " ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])
    ]
    assert any("--job-name=toy.a1.r0" in command for command in commands)
    assert not any("very-secret-indeed" in command for command in commands)
    assert environment(state_dir, key)["PIPOLLUX_TOKEN"] == "very-secret-indeed"


DRIVER = """
import sys
from pathlib import Path
from pipollux_sched.backend.slurm.engine import SlurmEngine
from pipollux_sched.backend.slurm.pools import OwnAllocation
from pipollux_sched.store import StateDir
from tests.sched.backend.slurm.steps import start
from tests.waiting import until
from tests.sched.backends import assignments
engine = SlurmEngine(StateDir(Path(sys.argv[1])), OwnAllocation(int(sys.argv[2])), interval=0.5)
start(engine, "long", "n1")
start(engine, "short", "n2", "--steps=40")
start(engine, "orphan", "n3", "--prints")
until(lambda: not any(x.waiting for x in engine.listing().replicas.values()))
print("started", flush=True)
until(lambda: False)
"""


def test_a_killed_scheduler_is_followed_by_one_that_adopts_its_steps(
    pool: int, make_engine: MakeEngine, state_dir: StateDir, repository: Path
) -> None:
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(state_dir.path), str(pool)],
        cwd=repository,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(repository), *sys.path))},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert driver.stdout is not None
    with driver:
        assert driver.stdout.readline() == "started\n"
        driver.kill()
    long, short = ReplicaKey("long", 1, 0), ReplicaKey("short", 1, 0)
    orphan = ReplicaKey("orphan", 1, 0)
    # The step of one whose srun died with the scheduler's machine runs on.
    # (All at once: a second process of srun would end the step for want of the first.)
    srun = json.loads((state_dir.attempt("orphan", 1) / "replica-0.json").read_text())
    os.killpg(srun["pid"], signal.SIGKILL)
    before = log(state_dir, orphan)
    until(lambda: len(log(state_dir, orphan)) > len(before) + 1000)  # beyond any pipe's rest
    files = ReplicaFiles(state_dir.attempt("short", 1) / "replica-0")
    until(lambda: files.read_exit() is not None)
    engine = make_engine(OwnAllocation(pool))
    assert set(engine.listing().replicas) == {long, short, orphan}
    assert ended(engine, short)[::2] == (0, "")
    runs(engine, state_dir, long)
    found = engine.recover({("long", 1), ("short", 1)}, 30.0)
    assert [line.partition(" of ")[2] for line in found] == ["job orphan (orphan.a1.r0)"]
    assert orphan not in engine.listing().replicas
    assert state(engine, long).ended is None
    engine.signal(long, Signal.STOP)
    assert ended(engine, long).result.stopped_step


def test_a_node_that_does_not_share_the_state_directory_is_named(
    pool: int, make_engine: MakeEngine, state_dir: StateDir, hosts: Hosts
) -> None:
    hosts.call("n2", "mount", "-t", "tmpfs", "none", str(state_dir.path))
    try:
        with pytest.raises(BackendError, match=f"node n2 does not see {state_dir.path}; keep"):
            make_engine(OwnAllocation(pool))
    finally:
        hosts.call("n2", "umount", str(state_dir.path))


def test_an_allocation_that_is_not_there_is_refused(
    cluster: SlurmCluster, make_engine: MakeEngine
) -> None:
    with pytest.raises(BackendError, match="no running allocation 999 of yours"):
        make_engine(OwnAllocation(999))
