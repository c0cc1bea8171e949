"""The local backend with real torchrun agents: what it starts, and that nothing stays behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from pipollux_sched.backend import BackendError, Node, ReplicaGroupManager, ReplicaProgram
from pipollux_sched.backend.base import Launch, SlotAssignment
from pipollux_sched.backend.local import ports
from pipollux_sched.backend.local.attempt_folder import AttemptFolder, LocalPlacement
from pipollux_sched.backend.local.engine import LocalEngine
from pipollux_sched.backend.local.environment import Devices
from pipollux_sched.backend.replica.last_words import last_words
from pipollux_sched.backend.slots import SlotLedger
from pipollux_sched.lifecycle import Exited, JoiningReplicaLost, Outcome, Started
from pipollux_sched.spec.cluster import ClusterSpec, NodeSpec
from pipollux_sched.store import StateDir
from tests.programs import free_port
from tests.sched.backends import cpu_nodes, local_backend
from tests.sched.scripts import TOY
from tests.waiting import until

TWO_NODES = cpu_nodes(node_a=2, node_b=2)
NODES = {node.name: Node(node) for node in cpu_nodes(a=4, b=2)}


@pytest.fixture
def backend(state_dir: StateDir) -> Iterator[ReplicaGroupManager]:
    backend = local_backend(TWO_NODES, state_dir)
    yield backend
    backend.shutdown()


def program(*args: str, job: str = "toy", num_stages: int = 1) -> ReplicaProgram:
    return ReplicaProgram(job=job, script=TOY, args=args, num_stages=num_stages)


def wait_for(
    backend: ReplicaGroupManager, kind: type[Started | Exited | JoiningReplicaLost]
) -> object:
    """Poll until the backend reports something of this kind."""

    def look() -> object:
        events = (report.event for report in backend.poll())
        return next((event for event in events if isinstance(event, kind)), None)

    return until(look, f"there is {kind.__name__}")


def wait_for_text(path: Path, text: str) -> str:
    until(lambda: path.exists() and text in path.read_text(), f"{path} says {text!r}")
    return path.read_text()


def test_a_stop_that_somebody_else_asked_for(
    backend: ReplicaGroupManager, state_dir: StateDir
) -> None:
    """An agent that gets the signal from elsewhere stops as agreed: that is no failure."""
    backend.apply(program(), 1, ["node-a"])
    started = wait_for(backend, Started)
    assert isinstance(started, Started)
    wait_for_text(state_dir.log("toy", 1, 0), "goes on from step 0")
    (pid,) = started.replicas
    psutil.Process(int(pid)).terminate()
    exited = wait_for(backend, Exited)
    assert isinstance(exited, Exited)
    assert exited.outcome is Outcome.STOPPED


@pytest.mark.usefixtures("light_agent")
def test_no_two_attempts_are_given_one_port(
    backend: ReplicaGroupManager, state_dir: StateDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also before their agents listen, and all ports are given in the end."""
    few = [free_port() for _ in range(4)]
    monkeypatch.setattr(ports, "_PORTS", few)
    for number in range(4):
        backend.apply(program(job=f"toy-{number}"), 1, ["node-a" if number < 2 else "node-b"])
    folders = [AttemptFolder(state_dir, f"toy-{number}", 1) for number in range(4)]

    def given() -> list[int]:
        backend.poll()
        placements = [folder.placement() for folder in folders]
        return [found.port for found in placements if found is not None]

    until(lambda: len(given()) == 4, "all are given a port")
    assert sorted(given()) == sorted(few)


def test_impossible_allocations_are_refused(backend: ReplicaGroupManager) -> None:
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
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    gpus = {"node-a": ("4", "5"), "node-b": ("6", "7")}
    devices = Devices(nodes, gpus).of("node-b", (1, 0))
    assert devices == {
        "PIPOLLUX_DEVICES": "cuda:0,cuda:1",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": "7,6",
    }
    counted_by_torch = Devices(nodes, gpus, in_pci_order=False).of("node-b", (0,))
    assert counted_by_torch["CUDA_DEVICE_ORDER"] == "FASTEST_FIRST"
    assert Devices(nodes, gpus).of("cpus", (3,))["CUDA_VISIBLE_DEVICES"] == ""


def test_slots_are_disjoint_and_come_back() -> None:
    ledger = SlotLedger(NODES)
    first = ledger.take("one", {0: "a", 1: "b"}, 2)
    second = ledger.take("two", {0: "a"}, 2)
    assert first == {0: SlotAssignment("a", (0, 1)), 1: SlotAssignment("b", (0, 1))}
    assert second == {0: SlotAssignment("a", (2, 3))}
    assert ledger.take("three", {0: "a"}, 1) is None
    assert ledger.free() == {"a": 0, "b": 0}
    ledger.release("one")
    assert ledger.take("three", {0: "a", 1: "a"}, 1) == {
        0: SlotAssignment("a", (0,)),
        1: SlotAssignment("a", (1,)),
    }
    assert not ledger.fits(["b", "b"], 2)
    with pytest.raises(ValueError, match="replica 0 of two holds slots already"):
        ledger.take("two", {0: "b"}, 1)


def test_replicas_take_and_free_slots_of_a_holder_one_by_one() -> None:
    ledger = SlotLedger(NODES)
    ledger.take("one", {0: "a", 1: "b"}, 2)
    assert ledger.take("one", {2: "a"}, 2) == {2: SlotAssignment("a", (2, 3))}
    assert ledger.take("one", {3: "a"}, 2) is None
    ledger.release("one", [0, 7])
    assert ledger.free() == {"a": 2, "b": 0}
    assert ledger.take("one", {3: "a"}, 2) == {3: SlotAssignment("a", (0, 1))}
    ledger.release("one")
    assert ledger.free() == {"a": 4, "b": 2}


def test_slots_that_others_take_are_never_those_of_a_holder() -> None:
    """How many there are is known, and not which."""
    ledger = SlotLedger(NODES)
    ledger.take("ended", {0: "a"}, 2)
    held = ledger.take("one", {0: "a"}, 2)
    assert held == {0: SlotAssignment("a", (2, 3))}
    ledger.release("ended")
    shared = NODES | {"a": Node(NODES["a"].spec, taken=1)}
    ledger.resize(shared)
    assert ledger.free() == {"a": 1, "b": 2}
    assert (ledger.fits(["a"], 3), ledger.fits(["a"], 4)) == (True, False)
    assert ledger.take("two", {0: "a"}, 2) is None
    for number, free in ((1, 1), (2, 0), (4, 0)):
        after_a_crash = SlotLedger(NODES | {"a": Node(NODES["a"].spec, taken=number)})
        assert after_a_crash.restore("one", held)
        assert after_a_crash.free() == {"a": free, "b": 2}
        assert after_a_crash.held() == {("a", 2): "one", ("a", 3): "one"}
    assert not after_a_crash.restore("two", {0: SlotAssignment("a", (3,))}), "it has a holder"
    assert not after_a_crash.restore("two", {0: SlotAssignment("b", (0, 0))})
    assert not after_a_crash.restore("two", {0: SlotAssignment("b", (0, 1, 2))}), "too small"
    assert not after_a_crash.restore("two", {0: SlotAssignment("c", (0,))}), "it is gone"


def test_slots_that_a_node_has_no_more_are_not_adopted(state_dir: StateDir) -> None:
    engine = LocalEngine(ClusterSpec(nodes=tuple(cpu_nodes(a=2))), state_dir)
    folder = AttemptFolder(state_dir, "toy", 1)
    folder.create()
    folder.write(LocalPlacement(devices={0: Devices(engine.nodes(), {}).of("a", (0,))}, port=1))

    def holds(node: str, slot: int) -> bool:
        launch = Launch(
            job="toy",
            attempt=1,
            assignments={0: SlotAssignment(node, (slot,))},
            num_first=1,
            scheduler_url="",
            checkpoints="",
        )
        return engine.holds(launch)

    assert (holds("a", 1), holds("a", 2), holds("b", 1)) == (True, False, False)


@pytest.mark.parametrize(
    ("status", "words"), [("1", "ended with exit status 1"), ("-9", "was ended by SIGKILL")]
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
