"""A scheduler on real raylets while parts of Ray, of a replica or of itself are killed."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipollux_agent import supervisor
from pipollux_sched.backend import ReplicaKey
from pipollux_sched.backend.base import (
    BackendError,
    ClusterUnavailableError,
    Ended,
    NodesGoneError,
    Signal,
)
from pipollux_sched.backend.ray import connection
from pipollux_sched.backend.ray.connection import Actor, RayClient
from pipollux_sched.backend.ray.engine import RayEngine, RayOptions
from pipollux_sched.backend.ray.nodes import SETTLE_TIME
from pipollux_sched.backend.replica import command
from pipollux_sched.lifecycle import Exited, Outcome
from pipollux_sched.store import StateDir
from tests.engines.case import Scheduler
from tests.engines.ray import RayCase
from tests.sched.backends import cpu_nodes, first_membership
from tests.sched.scripts import LIGHT_AGENT
from tests.sched.supervised import Service
from tests.waiting import until

from .cluster import RayCluster

pytestmark = [pytest.mark.exhaustive, pytest.mark.usefixtures("ray_cluster")]
KEY = ReplicaKey("toy", 1, 0)


@pytest.fixture(autouse=True)
def light_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas need no torch of their own."""
    monkeypatch.setattr(command, "_AGENT", LIGHT_AGENT)


@pytest.fixture
def case(ray_cluster: RayCluster, tmp_path: Path) -> Iterator[RayCase]:
    made = RayCase(tmp_path, ray_cluster)
    yield made
    made.close()


@pytest.fixture
def scheduler(case: RayCase, tmp_path: Path) -> Iterator[Scheduler]:
    with Service(tmp_path / "service", nodes=cpu_nodes(n1=4, n2=4)) as service:
        yield Scheduler(case, service)


def run_toy(scheduler: Scheduler, node: str, *args: str, **options: Any) -> dict[str, str]:
    """Start a replica, and return its environment once it trains."""
    scheduler.apply("toy", [node], "--prints", *args, **options)
    scheduler.started("toy")
    said = scheduler.says(KEY, "goes on from step 0")
    environment: dict[str, str] = json.loads(
        next(line for line in said.splitlines() if line.startswith("{"))
    )
    return environment


def ended(scheduler: Scheduler) -> Ended:
    """Return how the replica has ended, once it is listed so."""
    found = scheduler.holds(KEY, lambda state: state.ended, "has ended")
    assert isinstance(found, Ended)
    return found


def above(case: RayCase) -> tuple[psutil.Process, psutil.Process, psutil.Process]:
    """Return the actor of the only replica, the supervisor's guard and the supervisor."""
    base = str(case.state_dir.attempt("toy", 1) / "replica-0")
    found = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if base in process.cmdline():
                found[process.ppid()] = process
    ((guard, supervisor),) = [(x, found[x.pid]) for x in found.values() if x.pid in found]
    actor = guard.parent()
    assert actor is not None
    assert "Holder" in actor.cmdline()[0]
    return actor, guard, supervisor


def client() -> psutil.Process:
    """Return the client of the engine of this process."""
    found = []
    for process in psutil.Process().children():
        with suppress(psutil.Error):
            if any("driver.py" in word for word in process.cmdline()):
                found.append(process)
    return found[-1]


def test_a_replica_whose_actor_is_killed_saves(case: RayCase, scheduler: Scheduler) -> None:
    """As when Ray kills what takes too much memory; it is no failure of the job."""
    run_toy(scheduler, "n2")
    actor, _, _ = above(case)
    actor.send_signal(signal.SIGKILL)
    exited = scheduler.exited("toy")
    assert exited.outcome is Outcome.STOPPED
    assert exited.step, "it has saved"
    found = ended(scheduler)
    assert (found.status, len(found.lost.splitlines())) == (143, 1)
    assert found.lost.startswith("Ray ended actor toy.a1.r0: The actor is dead because its worker")
    until(lambda: case.processes() == [], "its supervisor has ended, too")


def test_nothing_is_left_of_a_replica_without_parents(case: RayCase, scheduler: Scheduler) -> None:
    """Its agent and script run on when all that started them is killed, and ignore SIGTERM."""
    run_toy(scheduler, "n1", "--stubborn")
    for process in reversed(above(case)):
        with suppress(psutil.NoSuchProcess):  # it ends with the one below it
            process.send_signal(signal.SIGKILL)
    scheduler.attempts.stop("toy", 2.0)
    assert scheduler.exited("toy").outcome is Outcome.FAILED
    assert case.processes() == []
    assert scheduler.attempts.free() == {"n1": 4, "n2": 4}


def test_a_supervisor_that_is_stopped_is_killed(case: RayCase, scheduler: Scheduler) -> None:
    run_toy(scheduler, "n1")
    _, _, supervisor = above(case)
    supervisor.suspend()
    scheduler.attempts.kill("toy", "its node is dead")
    until(lambda: scheduler.poll() or len(case.processes()) <= 2, "only the two are left")
    supervisor.resume()
    assert scheduler.exited("toy").message == "its node is dead"


def test_a_node_is_lost_and_another_one_comes(
    case: RayCase, scheduler: Scheduler, ray_cluster: RayCluster
) -> None:
    """With its replica, which saves; the new node has the name of the old one, and its slots."""
    ray_cluster.call("add", "n3", num_cpus=2)

    def slots() -> int:
        scheduler.poll()
        return scheduler.attempts.free().get("n3", 0)

    assert until(slots, "n3 is there") == 2
    run_toy(scheduler, "n3")
    ray_cluster.call("remove", "n3")
    exited = scheduler.exited("toy")
    assert exited.outcome is Outcome.STOPPED
    assert exited.step, "it has saved"
    assert ended(scheduler).lost
    until(lambda: case.processes() == [], "its supervisor has ended, too")
    until(lambda: slots() == 0, "n3 is gone")
    with pytest.raises(NodesGoneError, match="no longer has n3"):
        scheduler.attempts.apply(scheduler.program("other", ["n3"]), 1, ["n3"])
    ray_cluster.call("add", "n3", num_cpus=3)
    assert until(slots, "another n3 is there") == 3
    scheduler.apply("other", ["n3"], "--steps=1")
    assert scheduler.exited("other").outcome is Outcome.COMPLETE
    ray_cluster.call("remove", "n3")


def test_a_node_that_ray_drains(
    case: RayCase, scheduler: Scheduler, ray_cluster: RayCluster
) -> None:
    """Its replica runs on, until the scheduler moves it."""
    ray_cluster.call("add", "n4", num_cpus=2)
    until(lambda: scheduler.poll() or scheduler.attempts.free().get("n4"), "n4 is there")
    run_toy(scheduler, "n4")
    ray_cluster.call("drain", "n4")
    until(lambda: case.engine.nodes()["n4"].draining, "it drains")
    assert case.engine.nodes()["n4"].reason == "Ray drains it"
    assert scheduler.listing().replicas[KEY].ended is None
    scheduler.attempts.stop("toy", 60.0)
    assert scheduler.exited("toy").outcome is Outcome.STOPPED
    ray_cluster.call("remove", "n4")


def test_replicas_do_not_depend_on_the_client(
    case: RayCase, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it is gone the cluster does not answer; the next one finds them."""
    program = scheduler.apply("toy", ["n1"], "--prints")
    scheduler.started("toy")
    scheduler.says(KEY, "goes on from step 0")
    before = case.processes()
    monkeypatch.setattr(connection, "RESTART_INTERVAL", 3600.0)
    client().kill()

    def is_away() -> bool:
        with pytest.raises(ClusterUnavailableError, match="Ray does not answer: its client has"):
            case.engine.listing()
        return True

    until(is_away, "it is noticed", ignored=(pytest.fail.Exception,))
    monkeypatch.undo()
    scheduler.engine.start(program, scheduler.launch("toy"), 0)  # exists already
    assert scheduler.listing().replicas[KEY] == ("toy.a1.r0", "", None)
    assert case.processes() == before
    scheduler.attempts.stop("toy", 60.0)
    assert scheduler.exited("toy").outcome is Outcome.STOPPED


def test_a_start_that_got_lost_is_repeated(case: RayCase, scheduler: Scheduler) -> None:
    """Its client ended before it reached Ray; the record on disk has all that is needed."""
    process = client()
    process.suspend()
    scheduler.apply("toy", ["n1"], "--steps=3")
    scheduler.poll()
    process.kill()
    assert scheduler.exited("toy").outcome is Outcome.COMPLETE
    assert scheduler.log(KEY).count("goes on from step 0") == 1


def test_a_client_that_hangs_is_replaced(
    case: RayCase, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No call waits for it, and the replica runs on."""
    monkeypatch.setattr(connection, "TIMEOUT", 2.0)
    run_toy(scheduler, "n1")
    first = client()
    first.suspend()

    def is_away() -> bool:
        began = time.monotonic()
        try:
            case.engine.listing()
        except ClusterUnavailableError:
            return not first.is_running()
        finally:
            assert time.monotonic() < began + 1.5
        return False

    until(is_away, "it is killed")
    assert scheduler.listing().replicas[KEY].ended is None
    assert client().pid != first.pid


def test_each_replica_has_gpus_of_its_own(
    case: RayCase, scheduler: Scheduler, ray_cluster: RayCluster
) -> None:
    """As many as it has stages, on the node that was chosen; the others are left to others."""
    ray_cluster.call("add", "g1", num_gpus=4, num_cpus=8)
    nodes = until(lambda: "g1" in case.engine.nodes() and case.engine.nodes(), "g1 is there")
    assert (nodes["g1"].spec.kind, nodes["g1"].slots, nodes["g1"].spec.cpus) == ("gpu", 4, 8)
    with suppress(NodesGoneError):
        scheduler.poll()
    until(lambda: scheduler.poll() or scheduler.attempts.free().get("g1"), "it is known")
    scheduler.apply("toy", ["g1", "g1"], "--prints", num_stages=2, cpus=3)
    scheduler.started("toy")
    seen = []
    for key in scheduler.launch("toy").keys:
        said = scheduler.says(key, "goes on from step 0")
        told = json.loads(next(line for line in said.splitlines() if line.startswith("{")))
        assert told["PIPOLLUX_DEVICES"] == "cuda:0,cuda:1"
        seen += told["CUDA_VISIBLE_DEVICES"].split(",")
    assert sorted(seen) == ["0", "1", "2", "3"]
    assert case.engine.nodes()["g1"].spec.cpus == 8, "ours are not others'"
    ray_cluster.call("remove", "g1")
    assert scheduler.exited("toy").outcome is Outcome.STOPPED


def test_what_others_hold_is_not_offered(case: RayCase, ray_cluster: RayCluster) -> None:
    """Also a part of a CPU; and it is offered again when it is free."""
    ray_cluster.call("occupy", "n1", num_cpus=1.5)
    try:
        until(lambda: case.engine.nodes()["n1"].slots == 2, "it is seen", SETTLE_TIME + 60.0)
        assert case.engine.nodes()["n1"].reason == "other work of the Ray cluster holds 2 of 4 CPUs"
        assert case.engine.nodes()["n2"].slots == 4
    finally:
        ray_cluster.call("release", "n1")
    until(lambda: case.engine.nodes()["n1"].slots == 4, "it is free")
    assert case.engine.nodes()["n1"].reason == ""


def test_another_version_of_ray_is_refused(ray_cluster: RayCluster, tmp_path: Path) -> None:
    """In one sentence with both versions."""
    known = ray_cluster.call("pretend", ray_version="2.9.9", python_version="3.10.1")
    try:
        with pytest.raises(BackendError) as refused:
            RayEngine(StateDir(tmp_path), RayOptions(ray_cluster.address))
    finally:
        ray_cluster.call("pretend", **known)
    ours = f"Ray: {known['ray_version']}, Python: {known['python_version']}"
    assert str(refused.value) == (
        f"no Ray cluster can be used at '{ray_cluster.address}': it runs Ray: 2.9.9, Python: "
        f"3.10.1, and this scheduler {ours}; install the cluster's versions of both for the "
        "scheduler"
    )


def test_a_folder_that_a_node_lacks_is_named(ray_cluster: RayCluster, tmp_path: Path) -> None:
    ray = RayClient(ray_cluster.address, "check", tmp_path / "log")
    try:
        node = next(key for key, found in ray.read().nodes.items() if found.name == "n2")
        for words, lost in (
            ((str(tmp_path), [str(tmp_path)]), ""),
            ((str(tmp_path), [str(tmp_path), "/nowhere/python"]), "/nowhere/python"),
            (("/nowhere", []), "/nowhere"),
        ):
            ray.send("check", node, *words)
            found = until(lambda: ray.read().results, "it is checked")
            assert found == [["check", node, lost, ""]]
    finally:
        ray.close()


def test_an_actor_on_another_node_starts_nothing(ray_cluster: RayCluster, tmp_path: Path) -> None:
    """Whatever Ray has made of its placement group."""
    ray = RayClient(ray_cluster.address, "others", tmp_path / "log")
    base = tmp_path / "replica-0"
    base.with_suffix(".json").write_text("{}")
    ray_cluster.call("reserve", "others/toy.a1.r0", "n1")
    try:
        nodes = {found.name: key for key, found in ray.read().nodes.items()}
        holder = supervisor.__file__, str(base), str(tmp_path / "out")
        ray.send("start", "toy.a1.r0", nodes["n2"], {"CPU": 1}, *holder)

        def dead() -> Actor | None:
            found = ray.read().actors.get("toy.a1.r0", Actor())
            return found if found.phase == "dead" else None

        assert until(dead, "it is refused").why == (
            f"RuntimeError: Ray has placed it on node {nodes['n1']}, not {nodes['n2']}"
        )
        assert not base.with_suffix(".begun").exists()
        ray.send("end", "toy.a1.r0")
        until(lambda: not ray.read().actors, "its group is removed")
    finally:
        ray.close()


def test_two_schedulers_are_separate(
    scheduler: Scheduler, ray_cluster: RayCluster, tmp_path: Path
) -> None:
    """Neither ends the replicas of the other, although job, attempt and script are the same."""
    run_toy(scheduler, "n1")
    (tmp_path / "b").mkdir()
    other = RayCase(tmp_path / "b", ray_cluster)
    try:
        beside = Scheduler(other, scheduler._service)
        assert beside.attempts.recover(0.0) == []
        assert beside.listing().replicas == {}
        beside.apply("toy", ["n2"], "--steps=3")
        assert beside.exited("toy") == Exited(1, Outcome.COMPLETE)
    finally:
        other.close()
    assert scheduler.listing().replicas[KEY].ended is None


def test_the_control_plane_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray ends the process that uses it: that is not the scheduler, which goes on asking."""
    monkeypatch.setattr(connection, "TIMEOUT", 5.0)
    monkeypatch.setattr(connection, "CONNECT_TIMEOUT", 20.0)
    with RayCluster() as cluster:
        cluster.call("add", "n1", num_cpus=4)
        case = RayCase(tmp_path, cluster)
        with Service(tmp_path / "service", nodes=cpu_nodes(n1=4)) as service:
            scheduler = Scheduler(case, service)
            run_toy(scheduler, "n1")
            os.kill(cluster.call("control_plane"), signal.SIGKILL)

            def is_away() -> bool:
                try:
                    case.engine.listing()
                except ClusterUnavailableError:
                    return True
                return False

            until(is_away, "it is noticed")
            assert case.processes(), "its replica runs on"
            with suppress(ClusterUnavailableError):
                scheduler.engine.signal(KEY, Signal.STOP)
            until(lambda: not case.processes(), "it has saved and ended")
            assert (Path(scheduler.launch("toy").checkpoints) / "stopped.json").exists()
            case.engine.close()


def test_nothing_listens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "CONNECT_TIMEOUT", 8.0)
    state_dir = StateDir(tmp_path)
    with pytest.raises(BackendError, match=r"no Ray cluster can be used at '127.0.0.2:1': "):
        RayEngine(state_dir, RayOptions("127.0.0.2:1"))


def test_the_next_scheduler_repeats_a_start(scheduler: Scheduler) -> None:
    """The record on disk has all that is needed."""
    process = client()
    process.suspend()
    scheduler.attempts.apply(scheduler.program("toy", ["n2"], "--steps=2"), 1, ["n2"])
    scheduler.poll()
    process.kill()
    again = scheduler.again()
    assert again.attempts.adopt("toy", 1, "", first_membership(1)) is None
    assert again.exited("toy") == Exited(1, Outcome.COMPLETE)
