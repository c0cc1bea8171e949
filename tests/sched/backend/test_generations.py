"""What is above single replicas, with an engine that starts nothing; and the backends by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import pytest

from pipollux_sched.backend import Backend, BackendError, LocalBackend, Node, ReplicaProgram, Report
from pipollux_sched.backend.generations import Generations
from pipollux_sched.backend.registry import BACKENDS, make_backend
from pipollux_sched.lifecycle import Exited, Outcome, Started
from pipollux_sched.store import StateDir

NODES = {"a": Node(2, "cpu"), "b": Node(1, "cpu")}


@dataclass
class Group:
    """Replicas that end when they are told how."""

    generation: int
    nodes: tuple[str, ...]
    asked: list[float] = field(default_factory=list)
    exited: Exited | None = None

    @property
    def started(self) -> Started:
        return Started(self.generation, (), 0)

    def stop(self, grace: float) -> None:
        self.asked.append(grace)

    def kill(self, why: str = "") -> None:
        self.exited = Exited(self.generation, Outcome.FAILED, message=why)

    def poll(self) -> Exited | None:
        return self.exited


class Engine(Generations):
    """Starts nothing, and keeps what it was asked to start."""

    def __init__(self) -> None:
        super().__init__(NODES, grace=7.0)
        self.groups: dict[tuple[str, int], Group] = {}

    def check_program(self, program: ReplicaProgram) -> None:
        if program.image is not None:
            raise BackendError("no containers")

    def start(
        self,
        program: ReplicaProgram,
        generation: int,
        nodes: tuple[str, ...],
        slots: Sequence[tuple[int, ...]],
    ) -> Group:
        if program.job == "broken":
            raise OSError("no such program")
        assert len(slots) == len(nodes)
        group = self.groups[program.job, generation] = Group(generation, nodes)
        return group


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setattr(Engine, "__abstractmethods__", frozenset())
    return Engine()


def program(job: str, **fields: object) -> ReplicaProgram:
    return ReplicaProgram(job=job, script=None, **fields)  # type: ignore[arg-type]  # any of its fields


def test_a_generation_waits_for_the_slots_of_another_job(engine: Engine) -> None:
    engine.apply(program("one"), 1, ["a", "a"])
    engine.apply(program("two"), 1, ["a", "b"])
    assert engine.poll() == [Report("one", Started(1, (), 0))]
    assert engine.free() == {"a": 0, "b": 1}
    assert engine.running()["two"].nodes == ("a", "b")
    engine.groups["one", 1].exited = Exited(1, Outcome.COMPLETE)
    assert engine.poll() == [
        Report("one", Exited(1, Outcome.COMPLETE)),
        Report("two", Started(1, (), 0)),
    ]
    assert engine.free() == {"a": 1, "b": 0}


def test_a_generation_takes_the_place_of_the_one_before(engine: Engine) -> None:
    engine.apply(program("one"), 1, ["a"])
    engine.apply(program("one"), 2, ["b"])
    assert engine.groups["one", 1].asked == [7.0]
    engine.poll()
    assert list(engine.groups) == [("one", 1)], "one of a job at a time"
    engine.groups["one", 1].exited = Exited(1, Outcome.STOPPED, 5)
    engine.poll()
    assert engine.running() == {"one": (2, ("b",))}


def test_what_has_not_started_is_stopped_without_a_trace(engine: Engine) -> None:
    engine.apply(program("one"), 1, ["a", "a"])
    engine.apply(program("two"), 1, ["a"])
    engine.poll()
    assert engine.stop("two", 1.0)
    (report,) = engine.poll()
    assert report.job == "two"
    assert cast(Exited, report.event).message == "It was stopped before it had started."
    assert not engine.stop("two", 1.0)
    assert engine.kill("one", "its node is dead")
    (report,) = engine.poll()
    assert cast(Exited, report.event).message == "its node is dead"
    assert engine.free() == {"a": 2, "b": 1}


def test_what_cannot_be_started_gives_its_slots_back(engine: Engine) -> None:
    engine.apply(program("broken"), 3, ["a"])
    (report,) = engine.poll()
    why = "The processes could not be started: no such program"
    assert report == Report("broken", Exited(3, Outcome.FAILED, message=why))
    assert engine.free() == {"a": 2, "b": 1}
    with pytest.raises(BackendError, match="no containers"):
        engine.apply(program("boxed", image="x"), 1, ["a"])
    with pytest.raises(BackendError, match=r"each replica needs 2 slots .* a: 2, b: 1"):
        engine.apply(program("wide", num_stages=2), 1, ["b"])


def test_backends_by_name(state_dir: StateDir) -> None:
    for name in BACKENDS:
        backend = make_backend(name, NODES, state_dir, grace=1.0)
        assert isinstance(backend, Backend)
        assert (backend.name, backend.nodes()) == (name, NODES)
    assert isinstance(make_backend("local", NODES, state_dir, grace=1.0), LocalBackend)
    with pytest.raises(BackendError, match="there is no backend 'mesos'; known are: local"):
        make_backend("mesos", NODES, state_dir, grace=1.0)
