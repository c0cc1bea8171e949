"""What is above single replicas, on a cluster in memory; and the engines by name."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from pipollux_sched.backend import (
    BackendError,
    Node,
    ReplicaGroupManager,
    ReplicaKey,
    ReplicaProgram,
    Report,
)
from pipollux_sched.backend.base import NodesGoneError, Signal
from pipollux_sched.backend.local.engine import LocalEngine
from pipollux_sched.backend.registry import EngineOptions, make_engine
from pipollux_sched.lifecycle import Exited, Outcome, Started
from pipollux_sched.spec.cluster import ClusterSpec
from pipollux_sched.store import StateDir
from tests.sched.backend.cluster import NODES, Cluster, Replica, never
from tests.sched.backends import LaunchFiles, cpu_nodes


class Clock:
    """Stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


@pytest.fixture
def launches(state_dir: StateDir) -> LaunchFiles:
    return LaunchFiles(state_dir)


@pytest.fixture
def backend(
    cluster: Cluster, state_dir: StateDir, clock: Clock, launches: LaunchFiles
) -> ReplicaGroupManager:
    return ReplicaGroupManager(cluster, launches, state_dir, grace=7.0, clock=clock)


def program(job: str, **fields: object) -> ReplicaProgram:
    return ReplicaProgram(job=job, script=None, **fields)  # type: ignore[arg-type]  # any of its fields


def run(backend: ReplicaGroupManager, cluster: Cluster) -> list[Report]:
    """Let all that waits run; return what is reported."""
    reports = backend.poll()
    cluster.run_all()
    return [*reports, *backend.poll()]


def exited(reports: list[Report]) -> Exited:
    (report,) = reports
    return cast(Exited, report.event)


def test_an_attempt_waits_for_the_slots_of_another_job(
    backend: ReplicaGroupManager, cluster: Cluster
) -> None:
    backend.apply(program("one"), 1, ["a", "a"])
    backend.apply(program("two"), 1, ["a", "c"])
    assert run(backend, cluster) == [Report("one", Started(1, ("replica 0", "replica 1")))]
    assert backend.free() == {"a": 0, "b": 2, "c": 1}
    assert backend.running()["two"].nodes == ("a", "c")
    for replica in range(2):
        cluster.end(ReplicaKey("one", 1, replica))
    assert backend.poll() == [Report("one", Exited(1, Outcome.COMPLETE))]
    assert run(backend, cluster) == [Report("two", Started(1, ("replica 0", "replica 1")))]
    assert backend.free() == {"a": 1, "b": 2, "c": 0}
    backend.forget("one", 1)
    assert cluster.forgotten == [("one", 1)]


def test_an_attempt_takes_the_place_of_the_one_before(
    backend: ReplicaGroupManager, cluster: Cluster
) -> None:
    backend.apply(program("one"), 1, ["a"])
    run(backend, cluster)
    backend.apply(program("one"), 2, ["b"])
    backend.poll()
    assert cluster.there[ReplicaKey("one", 1, 0)].told == {Signal.STOP}
    assert len(cluster.there) == 1, "one of a job at a time"
    cluster.obey()
    assert exited(backend.poll()) == Exited(1, Outcome.STOPPED, 7)
    assert backend.running() == {"one": (2, ("b",))}
    assert run(backend, cluster) == [Report("one", Started(2, ("replica 0",)))]


def test_what_has_not_started_is_stopped_without_a_trace(
    backend: ReplicaGroupManager, cluster: Cluster
) -> None:
    backend.apply(program("one"), 1, ["a", "a"])
    backend.apply(program("two"), 1, ["a"])
    run(backend, cluster)
    assert backend.stop("two", 1.0)
    assert exited(backend.poll()).message == "It was stopped before it had started."
    assert not backend.stop("two", 1.0)
    assert backend.kill("one", "its node is dead")
    assert backend.poll() == []
    assert exited(backend.poll()).message == "its node is dead"
    assert backend.free() == {"a": 2, "b": 2, "c": 1}


@pytest.mark.parametrize("saved", [True, False])
def test_what_a_killed_attempt_has_saved_is_told(
    backend: ReplicaGroupManager,
    cluster: Cluster,
    launches: LaunchFiles,
    tmp_path: Path,
    saved: bool,
) -> None:
    """Its node may be gone for the scheduler before its processes are."""
    backend.apply(program("one", checkpoints=tmp_path), 1, ["a"])
    run(backend, cluster)
    newest = tmp_path / "checkpoint-00000012"
    newest.mkdir()
    (newest / "metrics.json").write_text('{"step": 40}')
    if saved:
        launches.stopped["one", 1] = 43
    assert backend.kill("one", "its node is dead")
    assert backend.poll() == []
    told = exited(backend.poll())
    assert (told.outcome, told.message) == (Outcome.FAILED, "its node is dead")
    assert (told.step, told.checkpoint) == ((43, None) if saved else (None, 40))


def test_only_small_regular_files_say_what_is_saved(
    backend: ReplicaGroupManager, cluster: Cluster, tmp_path: Path
) -> None:
    """The folder may be another user's, who could have this process read or wait for anything."""
    backend.apply(program("one", checkpoints=tmp_path), 1, ["a"])
    run(backend, cluster)
    secret = tmp_path / "secret"
    secret.write_text('{"step": 40, "attempt": 1}')
    (tmp_path / "checkpoint-00000001").mkdir()
    (tmp_path / "checkpoint-00000001" / "metrics.json").symlink_to(secret)
    os.mkfifo(tmp_path / "stopped.json")
    assert backend.saved_step("one", 1) is None
    assert backend.newest_checkpoint("one", 1) is None
    (tmp_path / "stopped.json").unlink()
    (tmp_path / "stopped.json").symlink_to(secret)
    assert backend.saved_step("one", 1) is None
    (tmp_path / "stopped.json").unlink()
    secret.rename(tmp_path / "stopped.json")
    assert backend.saved_step("one", 1) == 40


def test_a_node_that_is_gone_is_told_from_one_that_never_was(
    backend: ReplicaGroupManager, cluster: Cluster, clock: Clock
) -> None:
    cluster.nodes_now = {name: node for name, node in NODES.items() if name != "a"}
    clock.now += 5.0
    backend.poll()
    with pytest.raises(NodesGoneError, match="the cluster no longer has a"):
        backend.apply(program("one"), 1, ["a", "b"])
    with pytest.raises(BackendError, match="cannot run on z") as never_there:
        backend.apply(program("one"), 1, ["z"])
    assert not isinstance(never_there.value, NodesGoneError)


def test_a_grace_period_is_enforced(
    backend: ReplicaGroupManager, cluster: Cluster, clock: Clock
) -> None:
    """The signal is repeated, and a shorter grace counts."""
    backend.apply(program("one"), 1, ["a", "b"])
    run(backend, cluster)
    backend.stop("one", 30.0)
    backend.poll()
    first, second = cluster.there.values()
    assert first.told == second.told == {Signal.STOP}
    first.told.clear()
    backend.poll()
    assert first.told == set()
    clock.now += 2.0
    backend.poll()
    assert first.told == {Signal.STOP}, "it may have been lost"
    backend.stop("one", 5.0)
    backend.stop("one", 60.0)
    clock.now += 5.0
    backend.poll()
    assert first.told == {Signal.STOP, Signal.KILL}
    ended = exited(backend.poll())
    assert ended.outcome is Outcome.FAILED
    assert ended.message == "The replicas left no agreed checkpoint within 30 s."


def test_killed_after_it_has_saved(
    backend: ReplicaGroupManager, cluster: Cluster, clock: Clock, launches: LaunchFiles
) -> None:
    """Its agent left nothing; the job itself told the step of its checkpoint."""
    backend.apply(program("one"), 1, ["a"])
    run(backend, cluster)
    backend.stop("one", 5.0)
    launches.stopped["one", 1] = 12
    clock.now += 5.0
    backend.poll()
    assert exited(backend.poll()) == Exited(1, Outcome.STOPPED, 12)


@pytest.mark.parametrize(
    ("status", "lost", "outcome", "says"),
    [
        (3, "", Outcome.FAILED, "Replica 1 on b ended with exit status 3"),
        (-9, "", Outcome.FAILED, "Replica 1 on b was ended by SIGKILL"),
        (None, "Node b is down.", Outcome.STOPPED, "Node b is down."),
        (143, "", Outcome.STOPPED, ""),
    ],
)
def test_one_takes_the_others_with_it(
    backend: ReplicaGroupManager,
    cluster: Cluster,
    clock: Clock,
    status: int | None,
    lost: str,
    outcome: Outcome,
    says: str,
) -> None:
    """And whose fault it was is told: a node's, the job's, or nobody's."""
    backend.apply(program("one"), 1, ["a", "b", "c"])
    run(backend, cluster)
    step, asked = (7, True) if status == 143 else (None, False)
    cluster.end(ReplicaKey("one", 1, 1), status, step, lost, asked=asked)
    backend.poll()
    assert cluster.there[ReplicaKey("one", 1, 0)].told == {Signal.STOP}
    if status == 143:
        cluster.obey()
    clock.now += 5.0
    backend.poll()
    ended = exited(backend.poll() if backend.running() else [Report("one", Exited(1, outcome))])
    assert ended.outcome is outcome
    assert says in ended.message


@pytest.mark.parametrize("asked", [False, True])
def test_replicas_that_agree_to_stop_are_asked_by_somebody_or_fail(
    backend: ReplicaGroupManager, cluster: Cluster, asked: bool
) -> None:
    """A script that sends itself SIGTERM makes them agree; the scheduler must not hide that."""
    backend.apply(program("one"), 1, ["a", "b"])
    run(backend, cluster)
    cluster.end(ReplicaKey("one", 1, 0), 143, 7)
    backend.poll()
    assert cluster.there[ReplicaKey("one", 1, 1)].told == set()
    cluster.end(ReplicaKey("one", 1, 1), 143, 7, asked=asked)
    ended = exited(backend.poll())
    if asked:
        assert ended == Exited(1, Outcome.STOPPED, 7)
    else:
        assert ended.outcome is Outcome.FAILED
        assert "Replica 0 on a ended with exit status 143, but was not asked" in ended.message


def test_replicas_that_agreed_to_stop_and_do_not_end_are_killed(
    backend: ReplicaGroupManager, cluster: Cluster, clock: Clock
) -> None:
    backend.apply(program("one"), 1, ["a", "b"])
    run(backend, cluster)
    cluster.end(ReplicaKey("one", 1, 0), 143, 7)
    backend.poll()
    clock.now += 30.0
    backend.poll()
    assert cluster.there[ReplicaKey("one", 1, 1)].told == {Signal.KILL}
    assert exited(backend.poll()).outcome is Outcome.FAILED


def test_all_run_within_a_time_or_none(
    backend: ReplicaGroupManager, cluster: Cluster, clock: Clock
) -> None:
    backend.apply(program("one"), 1, ["a", "b"])
    backend.poll()
    cluster.run(ReplicaKey("one", 1, 0))
    clock.now += 599.0
    assert backend.poll() == []
    clock.now += 1.0
    assert backend.poll() == []
    ended = exited(backend.poll())
    assert ended.outcome is Outcome.FAILED
    assert "1 of 2 replicas did not run within 600 s" in ended.message
    assert ended.message.endswith("Replica 1 on b: It waits.")
    assert cluster.alive() == set()


def test_a_replica_that_vanishes_is_lost(backend: ReplicaGroupManager, cluster: Cluster) -> None:
    backend.apply(program("one"), 1, ["a"])
    run(backend, cluster)
    cluster.there.clear()
    ended = exited(backend.poll())
    assert (ended.outcome, ended.message) == (
        Outcome.STOPPED,
        "replica 0 is gone without an exit status.",
    )


def test_what_cannot_be_started_gives_its_slots_back(
    backend: ReplicaGroupManager, cluster: Cluster
) -> None:
    backend.apply(program("broken"), 3, ["a", "b"])
    assert backend.poll() == backend.poll() == []
    ended = exited(backend.poll())
    assert ended.message == "The processes could not be started: no such program"
    assert cluster.alive() == set(), "nor does the other one stay"
    backend.apply(program("nowhere"), 1, ["a"])
    assert exited(backend.poll()).message == "there is no folder that all nodes share"
    assert backend.free() == {"a": 2, "b": 2, "c": 1}
    with pytest.raises(BackendError, match=r"each replica needs 2 slots .* a: 2, b: 2, c: 1"):
        backend.apply(program("wide", num_stages=2), 1, ["c"])


def test_an_old_listing_is_not_believed(backend: ReplicaGroupManager, cluster: Cluster) -> None:
    """It does not show what was started after it was made."""
    backend.apply(program("one"), 1, ["a"])
    backend.poll()
    cluster.fault = lambda what: "old" if what == "listing" else ""
    assert backend.poll() == []
    cluster.fault = never
    assert run(backend, cluster) == [Report("one", Started(1, ("replica 0",)))]


def test_strays_are_killed(backend: ReplicaGroupManager, cluster: Cluster) -> None:
    """A request that had been given up arrives after all."""
    backend.apply(program("one"), 1, ["a"])
    run(backend, cluster)
    cluster.there[ReplicaKey("one", 2, 0)] = Replica("a", (1,), runs=True)
    cluster.there[ReplicaKey("two", 1, 0)] = Replica("b", (0,))
    backend.poll()
    assert cluster.alive() == {ReplicaKey("one", 1, 0)}


def test_nodes_come_and_go(backend: ReplicaGroupManager, cluster: Cluster, clock: Clock) -> None:
    """Slots that are held stay held; a node's size counts as it is seen."""
    backend.apply(program("one", num_stages=2), 1, ["a"])
    run(backend, cluster)
    cluster.nodes_now = {"d": Node(cpu_nodes(d=4)[0], taken=1), "b": NODES["b"]}
    clock.now += 10.0
    backend.poll()
    assert backend.free() == {"d": 3, "b": 2}
    cluster.nodes_now = NODES
    clock.now += 10.0
    backend.poll()
    assert backend.free() == {"a": 0, "b": 2, "c": 1}


def test_an_engine_that_does_not_answer(backend: ReplicaGroupManager, cluster: Cluster) -> None:
    """Nothing is concluded from silence."""
    backend.apply(program("one"), 1, ["a"])
    run(backend, cluster)
    cluster.fault = lambda _: "lost"
    backend.stop("one", 5.0)
    assert backend.poll() == []
    assert backend.running() == {"one": (1, ("a",))}
    cluster.fault = lambda _: ""
    backend.poll()
    cluster.obey()
    assert exited(backend.poll()).outcome is Outcome.STOPPED


def test_engines_by_name(state_dir: StateDir) -> None:
    cluster = ClusterSpec(nodes=tuple(cpu_nodes(a=2)))
    engine = make_engine("local", EngineOptions(state_dir=state_dir, cluster=cluster))
    assert isinstance(engine, LocalEngine)
    assert (engine.name, list(engine.nodes())) == ("local", ["a"])
    with pytest.raises(
        BackendError, match="there is no backend 'mesos'; choose from kubernetes, local, ray, slurm"
    ):
        make_engine("mesos", EngineOptions(state_dir=state_dir))
    with pytest.raises(BackendError, match="has no nodes; give it a cluster"):
        make_engine("local", EngineOptions(state_dir=state_dir))


def test_an_attempt_of_which_all_were_let_go_has_failed(
    backend: ReplicaGroupManager, cluster: Cluster
) -> None:
    """Each so that the others could go on; whatever their statuses, nobody has completed it."""
    backend.apply(program("one"), 1, ["a", "b"])
    run(backend, cluster)
    backend.end_replicas("one", 1, [0], at_once=True)
    assert backend.poll() == []
    backend.end_replicas("one", 1, [1], at_once=True)
    reports = [*backend.poll(), *backend.poll()]
    assert exited(reports) == Exited(1, Outcome.FAILED, message="All of its replicas were lost.")
    assert backend.free() == {name: node.slots for name, node in NODES.items()}


def test_a_replica_that_has_failed_ends_the_others_unless_they_go_on(
    backend: ReplicaGroupManager, cluster: Cluster, clock: Clock
) -> None:
    """For a minute they may say so; then their attempt ends as any other."""
    for job, node in (("one", "a"), ("two", "b")):
        backend.apply(program(job), 1, [node, node])
        run(backend, cluster)
        backend.admit(job, 1, [0, 1], can_survive=True)
        cluster.end(ReplicaKey(job, 1, 1), 1)
    assert backend.poll() == []
    backend.end_replicas("one", 1, [1], at_once=True)
    clock.now += 61.0
    backend.poll()
    clock.now += 61.0
    reports = [*backend.poll(), *backend.poll()]
    assert [report.job for report in reports] == ["two"]
    assert backend.running() == {"one": (1, ("a",))}
    assert cluster.alive() == {ReplicaKey("one", 1, 0)}


def test_a_replica_for_which_the_others_end_is_named_though_it_was_let_go(
    backend: ReplicaGroupManager, cluster: Cluster, clock: Clock
) -> None:
    """It had failed and the others were told to end, when the job's going on without it came."""
    backend.apply(program("one"), 1, ["a", "a"])
    run(backend, cluster)
    cluster.end(ReplicaKey("one", 1, 1), 1)
    assert backend.poll() == []
    backend.end_replicas("one", 1, [1], at_once=False)
    clock.now += 61.0
    reports = [*backend.poll(), *backend.poll()]
    event = exited(reports)
    assert event.outcome is Outcome.FAILED
    assert "eplica 1" in event.message
    assert cluster.alive() == set()
    assert backend.free() == {name: node.slots for name, node in NODES.items()}


def test_a_slot_that_is_left_out_stays_with_its_job(
    backend: ReplicaGroupManager, cluster: Cluster, clock: Clock
) -> None:
    """Nothing is ended, and no room is missing, until the job itself has left."""
    backend.apply(program("one"), 1, ["a"])
    run(backend, cluster)
    broken = replace(cluster.nodes_now["a"], left_out={0: "it is broken", 1: "it is, too"})
    cluster.nodes_now = {**cluster.nodes_now, "a": broken}
    clock.now += 2.0
    assert backend.poll() == []
    node = backend.nodes()["a"]
    assert (node.kept, node.slots, backend.free()["a"]) == ({0}, 1, 0)
    with pytest.raises(BackendError, match="each replica needs 1 slots of its node"):
        backend.apply(program("two"), 1, ["a", "a"])
    backend.apply(program("two"), 1, ["a"])
    assert run(backend, cluster) == []
    cluster.end(ReplicaKey("one", 1, 0))
    assert backend.poll() == [Report("one", Exited(1, Outcome.COMPLETE))]
    assert backend.nodes()["a"].slots == 0
    assert run(backend, cluster) == [], "the other job waits"
    cluster.nodes_now = {**cluster.nodes_now, "a": replace(broken, left_out={0: "it is broken"})}
    clock.now += 2.0
    assert run(backend, cluster) == [Report("two", Started(1, ("replica 0",)))]
    (held,) = cluster.there[ReplicaKey("two", 1, 0)].slots
    assert held == 1
