"""A scheduler that takes over what the one before had started, wherever that was interrupted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from pipollux_sched.backend import ReplicaGroupManager, ReplicaProgram
from pipollux_sched.backend.local.attempt_folder import AttemptFolder
from pipollux_sched.lifecycle import ChangeStage, Exited, JoiningReplicaLost, Outcome, Started
from pipollux_sched.lifecycle.state import PendingResize
from pipollux_sched.store import StateDir
from tests.extent import first_points
from tests.programs import Forked
from tests.sched.backend.local.test_backend import TOY, TWO_NODES, wait_for, wait_for_text
from tests.sched.backends import LaunchFiles, cpu_nodes, first_membership, local_backend
from tests.sched.processes import processes_of

pytestmark = pytest.mark.usefixtures("light_agent")

URL = "http://127.0.0.1:9"
BOTH = first_membership(2)

LAUNCHER = """
import os, sys, time
from pathlib import Path
from pipollux_sched.backend import ReplicaProgram
from pipollux_sched.backend.replica import command
from pipollux_sched.store import StateDir
from tests.sched.backends import cpu_nodes, local_backend
from tests.sched.scripts import LIGHT_AGENT

command._AGENT = LIGHT_AGENT
directory = StateDir(Path(sys.argv[1]))
nodes = cpu_nodes(node_a=2, node_b=2)
work = ReplicaProgram(job="toy", script=Path(sys.argv[2]), args=tuple(sys.argv[4:]), num_stages=2,
                environment={"PIPOLLUX_SCHEDULER_URL": sys.argv[3], "PIPOLLUX_TOKEN": "t"})
backend = local_backend(nodes, directory)
backend.apply(work, 1, ["node-b", "node-a"])
os._exit(9)
"""
"""Starts an attempt and dies, as a scheduler does that is killed."""


@pytest.fixture
def backend(state_dir: StateDir) -> Iterator[ReplicaGroupManager]:
    backend = local_backend(TWO_NODES, state_dir)
    yield backend
    backend.recover(0.0)
    backend.shutdown()


def start(state_dir: StateDir, *args: str) -> None:
    """Start attempt 1 of `toy` from a process that then is no more."""
    script = state_dir.path.parent / "launcher.py"
    script.write_text(LAUNCHER)
    with Forked(script, [str(state_dir.path), str(TOY), URL, *args]) as launcher:
        assert launcher.wait() == 9, launcher.errors


def wait_for_training(state_dir: StateDir) -> None:
    for replica in range(2):
        wait_for_text(state_dir.log("toy", 1, replica), "goes on from step 0")


def test_what_runs_is_adopted(backend: ReplicaGroupManager, state_dir: StateDir) -> None:
    start(state_dir)
    wait_for_training(state_dir)
    assert backend.adopt("toy", 1, URL, BOTH) is None
    assert backend.free() == {"node-a": 0, "node-b": 0}
    assert backend.running()["toy"] == (1, ("node-b", "node-a"))
    assert backend.recover(5.0) == []
    assert backend.poll() == []
    assert backend.stop("toy", grace=30.0)
    exited = wait_for(backend, Exited)
    assert isinstance(exited, Exited)
    assert (exited.attempt, exited.outcome) == (1, Outcome.STOPPED)
    assert exited.step is not None
    assert backend.free() == {"node-a": 2, "node-b": 2}


@pytest.mark.parametrize(
    ("args", "outcome", "says"),
    first_points(
        1,
        [
            (["--fail-at", "1"], Outcome.FAILED, "step 1 went wrong on replica 0"),
            (["--steps", "2"], Outcome.COMPLETE, ""),
        ],
    ),
)
def test_what_ended_meanwhile_is_told_as_it_ended(
    backend: ReplicaGroupManager, state_dir: StateDir, args: list[str], outcome: Outcome, says: str
) -> None:
    start(state_dir, *args)
    # Where one has failed the other goes on until somebody ends it.
    for replica in range(2 if outcome is Outcome.COMPLETE else 1):
        wait_for_text(state_dir.attempt("toy", 1) / f"replica-{replica}.json", "code")
    wait_for_text(state_dir.attempt("toy", 1) / "replica-1.json", "pid")
    assert backend.adopt("toy", 1, URL, BOTH) is None
    exited = wait_for(backend, Exited)
    assert isinstance(exited, Exited)
    assert exited.outcome is outcome
    assert says in exited.message
    again = local_backend(TWO_NODES, state_dir)
    assert again.adopt("toy", 1, "http://127.0.0.1:10", BOTH) is None, (
        "who reports nowhere may have ended"
    )
    exited = wait_for(again, Exited)
    assert isinstance(exited, Exited)
    assert exited.outcome is outcome


def test_slots_of_what_has_ended_may_be_another_ones(state_dir: StateDir) -> None:
    """The scheduler gave them away and died before it had stored the end; or the node has left."""
    program = ReplicaProgram(job="toy", script=TOY, args=("--steps", "1"))
    first = local_backend(cpu_nodes(node_a=1), state_dir)
    first.apply(program, 1, ["node-a"])
    assert isinstance(wait_for(first, Exited), Exited)
    first.apply(replace(program, job="next", args=()), 1, ["node-a"])
    assert isinstance(wait_for(first, Started), Started)
    wait_for_text(state_dir.log("next", 1, 0), "goes on from step 0")
    again = local_backend(cpu_nodes(node_a=1), state_dir)
    one = first_membership(1)
    assert [again.adopt(job, 1, "", one) for job in ("toy", "next")] == [None, None]
    assert again.free() == {"node-a": 0}
    elsewhere = local_backend(cpu_nodes(node_b=1), state_dir)
    assert elsewhere.adopt("toy", 1, "", one) is None
    for backend in (again, elsewhere):
        exited = wait_for(backend, Exited)
        assert isinstance(exited, Exited)
        assert exited.outcome is Outcome.COMPLETE
    assert again.free() == {"node-a": 0}, "the other one runs"
    assert elsewhere.free() == {"node-b": 1}
    again.shutdown()
    assert isinstance(wait_for(first, Exited), Exited), "its child is no more"


def test_what_cannot_be_looked_after_is_ended(
    backend: ReplicaGroupManager, state_dir: StateDir
) -> None:
    start(state_dir)
    wait_for_training(state_dir)
    assert backend.adopt("toy", 2, URL, BOTH), "another attempt"
    assert backend.adopt("toy", 1, "http://127.0.0.1:10", BOTH), "it reports elsewhere"
    smaller = local_backend(cpu_nodes(node_a=1, node_b=2), state_dir)
    assert smaller.adopt("toy", 1, URL, BOTH), "its slots are gone"
    others = local_backend(cpu_nodes(node_a=2, node_c=2), state_dir)
    assert others.adopt("toy", 1, URL, BOTH), "its node is gone"
    assert others.free() == {"node-a": 2, "node-c": 2}
    assert backend.recover(30.0)
    assert processes_of(state_dir.path) == []
    assert (state_dir.checkpoints("toy") / "stopped.json").exists()


@pytest.mark.exhaustive
def test_what_was_only_half_started_is_ended(
    backend: ReplicaGroupManager, state_dir: StateDir
) -> None:
    """The scheduler died between two replicas: the one that is there waits for the other."""
    start(state_dir)
    wait_for_training(state_dir)
    (state_dir.attempt("toy", 1) / "replica-1.json").unlink()
    assert backend.adopt("toy", 1, URL, BOTH)
    assert backend.recover(30.0)


@pytest.mark.exhaustive
def test_a_joining_replica_whose_supervisor_is_unknown_is_ended(
    backend: ReplicaGroupManager, state_dir: StateDir
) -> None:
    """The scheduler died before the supervisor had written its identity, and the job goes on."""
    start(state_dir)
    wait_for_training(state_dir)
    (state_dir.attempt("toy", 1) / "replica-1.json").unlink()
    joins = PendingResize(2, (0, 1), ("node-b", "node-a"), ChangeStage.STARTING)
    assert backend.adopt("toy", 1, URL, replace(first_membership(1), change=joins)) is None
    (line,) = {line.split(" (")[0].split()[-1] for line in backend.recover(30.0)}
    assert line == "toy"
    left = {process.environ()["PIPOLLUX_REPLICA"] for process in processes_of(state_dir.path)}
    assert left == {"0"}
    lost = wait_for(backend, JoiningReplicaLost)
    assert isinstance(lost, JoiningReplicaLost)
    assert lost.replica == 1
    assert backend.running()["toy"] == (1, ("node-b",))


def test_an_attempt_that_was_only_written_down(
    backend: ReplicaGroupManager, state_dir: StateDir
) -> None:
    """Or of which only the first words were written, or by another version."""
    launches = LaunchFiles(state_dir)
    backend.apply(ReplicaProgram(job="toy", script=TOY, args=("--steps", "1")), 2, ["node-a"])
    assert isinstance(wait_for(backend, Exited), Exited)
    launch = launches.launch("toy", 2)
    assert launch is not None
    launches.note_launch("toy", 3, launch)
    assert backend.adopt("toy", 3, URL, BOTH)
    launches.note_launch("toy", 2, {"nodes": ["node-a"]})
    assert backend.adopt("toy", 2, URL, BOTH)
    placed = AttemptFolder(state_dir, "toy", 2)
    assert placed.placement() is not None
    (placed.path / "attempt.json").write_text('{"port": 1}')
    assert placed.placement() is None


@pytest.mark.exhaustive
def test_folders_of_earlier_attempts_are_dropped(
    backend: ReplicaGroupManager, state_dir: StateDir
) -> None:
    for attempt in (1, 2):
        work = ReplicaProgram(job="toy", script=TOY, args=("--steps", "1"))
        backend.apply(work, attempt, ["node-a"])
        exited = wait_for(backend, Exited)
        assert isinstance(exited, Exited)
        assert exited.outcome is Outcome.COMPLETE
    assert [path.name for path in state_dir.attempt("toy", 1).parent.iterdir()] == ["attempt-2"]
