"""The local backend with real torchrun agents: what it starts, and that nothing stays behind."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from pipollux_sched.backend import BackendError, Generations, Node, ReplicaProgram
from pipollux_sched.backend.local.environment import Devices
from pipollux_sched.backend.replica.last_words import last_words
from pipollux_sched.backend.slots import SlotLedger
from pipollux_sched.lifecycle import Exited, Outcome, Started
from pipollux_sched.spec.job import NodeSpec
from pipollux_sched.store import StateDir
from tests.sched.backends import cpu_nodes, local_backend
from tests.sched.processes import processes_of
from tests.sched.scripts import TOY

TWO_NODES = cpu_nodes(node_a=2, node_b=2)


@pytest.fixture
def backend(state_dir: StateDir) -> Iterator[Generations]:
    backend = local_backend(TWO_NODES, state_dir)
    yield backend
    backend.shutdown()


def program(*args: str, job: str = "toy", num_stages: int = 1) -> ReplicaProgram:
    return ReplicaProgram(job=job, script=TOY, args=args, num_stages=num_stages)


def wait_for(backend: Generations, kind: type[Started | Exited], seconds: float = 240.0) -> object:
    """Poll until the backend reports something of this kind."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for report in backend.poll():
            if isinstance(report.event, kind):
                return report.event
        time.sleep(0.05)
    raise AssertionError(f"no {kind.__name__} within {seconds} s")


def wait_for_text(path: Path, text: str, seconds: float = 240.0) -> str:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        content = path.read_text() if path.exists() else ""
        if text in content:
            return content
        time.sleep(0.05)
    raise AssertionError(f"{path} does not say {text!r}")


def environment_of(pid: int, seconds: float = 240.0) -> dict[str, str]:
    """Read the environment of a process that was just started.

    ``Popen`` returns as soon as ``execve`` has closed its pipe, a moment before the kernel has laid
    out the new program's environment: until then it reads as empty.
    """
    deadline = time.monotonic() + seconds
    while not (environment := psutil.Process(int(pid)).environ()):
        assert time.monotonic() < deadline
    return environment


def test_graceful_stop_on_two_nodes(backend: Generations, state_dir: StateDir) -> None:
    """Two replicas of two stages fill both nodes, each with slots of its own; a stop saves."""
    backend.apply(program(num_stages=2), 1, ["node-a", "node-b"])
    started = wait_for(backend, Started)
    assert isinstance(started, Started)
    assert len(started.replicas) == 2
    assert backend.free() == {"node-a": 0, "node-b": 0}
    assert backend.running()["toy"] == (1, ("node-a", "node-b"))
    environments = []
    for replica in range(2):
        said = wait_for_text(state_dir.log("toy", 1, replica), "goes on from step 0")
        environments.append(json.loads(said.splitlines()[0]))
    for environment in environments:
        assert environment["PIPOLLUX_DEVICES"] == "cpu,cpu"
        assert environment["PIPOLLUX_NUM_NODES"] == "2"
        assert environment["PIPOLLUX_NUM_STAGES"] == "2"
        assert environment["OMP_NUM_THREADS"] == "1"
        assert environment["PIPOLLUX_CHECKPOINT_DIR"] == str(state_dir.checkpoints("toy"))

    assert backend.stop("toy", grace=30.0)
    exited = wait_for(backend, Exited)
    assert isinstance(exited, Exited)
    marker = json.loads((state_dir.checkpoints("toy") / "stopped.json").read_text())
    assert exited == Exited(1, Outcome.STOPPED, marker["step"])
    assert processes_of(state_dir.path) == []
    assert backend.free() == {"node-a": 2, "node-b": 2}
    assert not backend.stop("toy", grace=1.0)


def test_a_newer_generation_takes_the_place_of_the_older(
    backend: Generations, state_dir: StateDir
) -> None:
    backend.apply(program(), 1, ["node-a"])
    wait_for_text(state_dir.log("toy", 1, 0), "goes on from step 0")
    backend.apply(program("--steps", "3"), 2, ["node-b"])
    stopped = wait_for(backend, Exited)
    assert isinstance(stopped, Exited)
    assert (stopped.generation, stopped.outcome) == (1, Outcome.STOPPED)
    complete = wait_for(backend, Exited)
    assert complete == Exited(2, Outcome.COMPLETE)
    wait_for_text(state_dir.log("toy", 2, 0), f"goes on from step {stopped.step}")


def test_stubborn_processes_are_killed(backend: Generations, state_dir: StateDir) -> None:
    """Neither a worker that ignores the signal nor its children nor its orphans survive."""
    backend.apply(program("--stubborn"), 1, ["node-a"])
    wait_for_text(state_dir.log("toy", 1, 0), "goes on from step 0")
    assert len(processes_of(state_dir.path)) >= 4  # agent, worker, child, orphan
    backend.stop("toy", grace=0.5)
    exited = wait_for(backend, Exited)
    assert isinstance(exited, Exited)
    assert exited.outcome is Outcome.FAILED
    assert "0.5 s" in exited.message


def test_one_failing_replica_ends_the_generation(backend: Generations, state_dir: StateDir) -> None:
    """The other replica ends too, and the message has the last words of the one at fault."""
    failing = program("--fail-at", "3", "--fail-rank", "1")
    backend.apply(failing, 1, ["node-a", "node-b"])
    exited = wait_for(backend, Exited)
    assert isinstance(exited, Exited)
    assert exited.outcome is Outcome.FAILED
    first, second, *_, last = exited.message.splitlines()
    error = "RuntimeError: step 3 went wrong on replica 1"
    assert first == f"Replica 1 on node-b ended with exit status 1: {error}"
    assert second == "The end of gen-1-replica-1.log:"
    assert last == error


def test_a_stop_that_somebody_else_asked_for(backend: Generations, state_dir: StateDir) -> None:
    """Agents that get the signal from elsewhere stop as agreed: that is no failure."""
    backend.apply(program(), 1, ["node-a", "node-b"])
    started = wait_for(backend, Started)
    assert isinstance(started, Started)
    for replica in range(2):
        wait_for_text(state_dir.log("toy", 1, replica), "goes on from step 0")
    for pid in started.replicas:
        psutil.Process(int(pid)).terminate()
    exited = wait_for(backend, Exited)
    assert isinstance(exited, Exited)
    assert exited.outcome is Outcome.STOPPED


def test_recover_ends_what_another_instance_left(backend: Generations, state_dir: StateDir) -> None:
    backend.apply(program(), 1, ["node-a"])
    wait_for_text(state_dir.log("toy", 1, 0), "goes on from step 0")
    found = local_backend(TWO_NODES, state_dir).recover(grace=20.0)
    assert found
    assert all("of job toy" in line for line in found)
    assert processes_of(state_dir.path) == []
    assert (state_dir.checkpoints("toy") / "stopped.json").exists()


def test_a_generation_waits_for_its_slots(backend: Generations, state_dir: StateDir) -> None:
    """What was decided for two jobs at once need not come about at once."""
    backend.apply(program(job="first"), 1, ["node-a", "node-a"])
    backend.apply(program(job="second"), 1, ["node-a"])
    assert isinstance(wait_for(backend, Started), Started)
    assert backend.free() == {"node-a": 0, "node-b": 2}
    assert backend.running()["second"] == (1, ("node-a",))
    assert backend.stop("second", grace=1.0)
    gone = wait_for(backend, Exited)
    assert isinstance(gone, Exited)
    assert "before it had started" in gone.message


def test_impossible_allocations_are_refused(backend: Generations) -> None:
    with pytest.raises(BackendError, match="needs 3 slots of its node"):
        backend.apply(program(num_stages=3), 1, ["node-a"])
    with pytest.raises(BackendError, match="cannot run on node-c"):
        backend.apply(program(), 1, ["node-c"])
    assert backend.running() == {}
    backend.apply(ReplicaProgram(job="toy", script=None, image="train:2"), 1, ["node-a"])
    refused = wait_for(backend, Exited)
    assert isinstance(refused, Exited)
    assert "cannot run in train:2: the local backend starts" in refused.message
    assert backend.free() == {"node-a": 2, "node-b": 2}


def test_gpus_are_shared_out_among_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica sees the GPUs of its own slots, numbered from 0."""
    sizes = {"node-a": (2, "gpu"), "cpus": (8, "cpu"), "node-b": (2, "gpu")}
    nodes = {
        name: Node(NodeSpec.model_validate({"name": name, "slots": slots, "kind": kind}))
        for name, (slots, kind) in sizes.items()
    }
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    devices = Devices(nodes).of("node-b", (0, 1))
    assert devices == {"PIPOLLUX_DEVICES": "cuda:0,cuda:1", "CUDA_VISIBLE_DEVICES": "6,7"}


def test_slots_are_disjoint_and_come_back() -> None:
    ledger = SlotLedger({"a": 4, "b": 2})
    first = ledger.take("one", ["a", "b"], 2)
    second = ledger.take("two", ["a"], 2)
    assert (first, second) == ([(0, 1), (0, 1)], [(2, 3)])
    assert ledger.take("three", ["a"], 1) is None
    assert ledger.free() == {"a": 0, "b": 0}
    ledger.release("one")
    assert ledger.take("three", ["a", "a"], 1) == [(0,), (1,)]
    assert not ledger.fits(["b", "b"], 2)
    with pytest.raises(ValueError, match="holds slots already"):
        ledger.take("two", ["b"], 1)


@pytest.mark.parametrize(
    ("status", "words"),
    [("1", "ended with exit status 1"), ("-9", "was ended by SIGKILL")],
)
def test_last_words_leave_out_what_torchrun_says(tmp_path: Path, status: str, words: str) -> None:
    log = tmp_path / "log"
    report = (
        "E1121 03:04:08.417000 8566 torch/distributed/elastic/multiprocessing/api.py:1002] "
        f"failed (exitcode: {status}) local_rank: 0 (pid: 8569) of binary: python"
    )
    log.write_text(f"step 1\n\nValueError: no\n\n{report}\nTraceback (most recent call last):\n")
    ended = last_words(log, None, 2)
    assert ended.lines == ["", "ValueError: no"]
    assert ended.describe() == words
    log.write_text(f"{report}\nTraceback (most recent call last):\n{'=' * 54}\n")
    ended = last_words(log, None, 2)
    assert ended.lines == [], "it printed nothing, and torchrun's ruler is not what it said"
    assert ended.describe() == words


def test_nothing_of_the_scheduler_leaks_into_a_job(
    backend: Generations, state_dir: StateDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scheduler that was itself started by torchrun, or by a job, does not confuse its jobs."""
    for name in ("RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "PIPOLLUX_JOB_ID"):
        monkeypatch.setenv(name, "outer")
    backend.apply(program("--steps", "1"), 1, ["node-a"])
    started = wait_for(backend, Started)
    assert isinstance(started, Started)
    environment = environment_of(int(started.replicas[0]))
    assert "RANK" not in environment
    assert "outer" not in environment.values()
    assert environment["PATH"] == os.environ["PATH"]
    assert wait_for(backend, Exited) == Exited(1, Outcome.COMPLETE)
