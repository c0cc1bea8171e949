"""The allocator: what it asks of a policy, what it refuses to do, and what it leaves alone."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from pipollux_policies import ExactPolicy, JobInfo, NodeInfo, PolluxPolicy, make_policy
from pipollux_sched.allocator.allocator import Allocator
from pipollux_sched.allocator.decide import place_new, reallocate, why_waiting
from pipollux_sched.allocator.job_infos import linear_speedup
from pipollux_sched.allocator.snapshot import SnapshotReader, is_pinned
from pipollux_sched.allocator.strategy import FixedStrategy, PolicyStrategy, SchedulableJob
from pipollux_sched.lifecycle import (
    Allocate,
    Cancel,
    Event,
    Exited,
    Outcome,
    Phase,
    Recover,
    Resume,
    Suspend,
)
from pipollux_sched.spec.job import JobSpec
from pipollux_sched.store import Point, Store
from tests.sched.allocator.test_hints import NOTHING_FITS
from tests.sched.store.stores import serve_nodes

NODES = {"a": NodeInfo({"slots": 2}), "b": NodeInfo({"slots": 2})}


@dataclass
class Answer:
    """A policy that gives the first free node, and answers as it was told."""

    allocations: Mapping[str, Sequence[str]] = field(default_factory=dict)
    asked: list[Mapping[str, JobInfo]] = field(default_factory=list)

    def allocate_job(self, job_info: JobInfo, nodes: Mapping[str, NodeInfo]) -> list[str]:
        need = job_info.resources["slots"]
        fitting = [name for name, node in nodes.items() if node.resources["slots"] >= need]
        return fitting[:1]

    def optimize(
        self,
        jobs: Mapping[str, JobInfo],
        nodes: Mapping[str, NodeInfo],
        base_allocations: Mapping[str, Sequence[str]],
        _node_template: NodeInfo,
    ) -> tuple[dict[str, list[str]], int]:
        self.asked.append(jobs)
        given = {name: list(base_allocations.get(name, ())) for name in jobs}
        return {**given, **{n: list(v) for n, v in self.allocations.items()}}, len(nodes)


def job(
    name: str, *nodes: str, stages: int = 1, pinned: bool = False, least: int = 1
) -> SchedulableJob:
    info = JobInfo({"slots": stages}, linear_speedup, 0.0, least, 8, num_stages=stages)
    return SchedulableJob(name, info, nodes, pinned)


def test_new_jobs_start_on_what_is_free_in_the_order_they_came() -> None:
    candidates = [job("old", "a", stages=2), job("one"), job("two"), job("three")]
    decisions = place_new(candidates, NODES, PolicyStrategy(Answer()))
    assert [(d.job, d.nodes) for d in decisions] == [("one", ("b",)), ("two", ("b",))]
    assert decisions[0].why.startswith("starts on 1 replica on b")
    assert decisions[0].details["num_stages"] == 1
    waiting = candidates[3]
    held = [replace(job("x", "b", "b"))]
    (why,) = why_waiting([waiting], [*candidates[:1], *held], NODES)
    assert why.startswith("waits: needs 1 slot")


def test_only_changes_are_decisions() -> None:
    candidates = [job("one", "a"), job("two", "a", "b")]
    policy = Answer({"two": ["b", "a"]})  # the same nodes in another order are the same
    assert reallocate(candidates, NODES, PolicyStrategy(policy)) == []
    policy = Answer({"one": ["b"], "two": []})
    decisions = reallocate(candidates, NODES, PolicyStrategy(policy))
    assert [(d.job, d.previous, d.nodes) for d in decisions] == [
        ("one", ("a",), ("b",)),
        ("two", ("a", "b"), ()),
    ]
    assert reallocate([], NODES, PolicyStrategy(policy)) == []


def test_jobs_that_are_starting_are_shown_as_not_preemptible() -> None:
    policy = Answer()
    reallocate([job("new", "a", pinned=True), job("old", "b")], NODES, PolicyStrategy(policy))
    assert {name: info.preemptible for name, info in policy.asked[0].items()} == {
        "new": False,
        "old": True,
    }


@pytest.mark.parametrize(
    ("allocations", "says"),
    [
        ({"one": ["a", "a", "a"]}, "node 'a' has 2 slots but 3 are allocated"),
        ({"two": ["a"]}, "node 'a' has 2 slots but 3 are allocated"),  # one holds a half of it
        ({"one": ["c"]}, "job 'one' is placed on nodes that take no new replicas: c"),
        ({"starting": []}, r"job 'starting' is pinned to \['b'\] but is given \[\]"),
        ({"pair": ["b"]}, "job 'pair' has 1 replica, allowed are 2 to 8"),
    ],
)
def test_impossible_answers_are_refused(
    allocations: Mapping[str, Sequence[str]], says: str
) -> None:
    candidates = [
        job("one", "a"),
        job("two", stages=2),
        job("starting", "b", pinned=True),
        job("pair", least=2),
    ]
    with pytest.raises(ValueError, match=says):
        reallocate(candidates, NODES, PolicyStrategy(Answer(allocations)))


def test_a_strategy_that_places_on_what_is_taken_is_refused() -> None:
    class Blind(Answer):
        def allocate_job(self, *_: object) -> list[str]:
            return ["a"]

    with pytest.raises(ValueError, match="node 'a' has 2 slots but 3 are allocated"):
        place_new([job("one", stages=2), job("two")], NODES, PolicyStrategy(Blind()))


def test_a_suspended_job_is_started_by_the_policy_alone() -> None:
    """Or what it has just stopped would start again where it was."""
    suspended = replace(job("one"), suspended=True)
    assert place_new([suspended], NODES, PolicyStrategy(Answer())) == []
    (decision,) = reallocate([suspended], NODES, PolicyStrategy(Answer({"one": ["b"]})))
    assert decision.nodes == ("b",)


def test_fixed_allocations_are_given_whole_or_not_at_all() -> None:
    fixed = FixedStrategy({"one": ["a", "b"], "two": ["b", "b"]})
    assert [
        (d.job, d.nodes) for d in place_new([job("one"), job("two"), job("three")], NODES, fixed)
    ] == [("one", ("a", "b"))]
    assert reallocate([job("one", "a", "b"), job("two")], NODES, fixed) == []


def test_what_was_fixed_is_not_held_to_what_was_measured_since() -> None:
    """Hints of an earlier run may say that one replica was all it ever ran on."""
    small = job("one")
    small = replace(small, info=replace(small.info, max_replicas=1))
    (decision,) = place_new([small], NODES, FixedStrategy({"one": ["a", "b"]}))
    assert decision.nodes == ("a", "b")
    with pytest.raises(ValueError, match="'one' has 2 replicas, allowed are 1 to 1"):
        reallocate([small], NODES, PolicyStrategy(Answer({"one": ["a", "b"]})))


def test_pollux_itself_leaves_a_starting_job_alone() -> None:
    """With the real policy: one that starts stays, one that waits gets the rest."""
    candidates = [job("new", "a", stages=2, pinned=True), job("waiting", stages=2)]
    decisions = reallocate(candidates, NODES, PolicyStrategy(PolluxPolicy()))
    assert [(d.job, d.nodes) for d in decisions] == [("waiting", ("b",))]


# With a store


class World:
    """A store whose jobs are allocated, and whose time is moved by hand."""

    def __init__(self, path: Path) -> None:
        self.now = 1000.0
        self.store = Store(path, create=True, clock=lambda: self.now)
        serve_nodes(self.store, a=2, b=2)
        self.reader = SnapshotReader(self.store, restart_seconds=30.0, clock=lambda: self.now)

    def submit(self, name: str, **fields: object) -> None:
        spec = JobSpec.model_validate({"name": name, "script": "x.py", **fields})
        self.store.submit(name, spec.model_dump(mode="json"), "token", 3)

    def allocator(self, policy: Answer | PolluxPolicy) -> Allocator:
        carry_out = self.store.transition_all
        return Allocator(self.reader, PolicyStrategy(policy), carry_out=carry_out)

    def candidates(self) -> list[SchedulableJob]:
        return list(self.reader.read().candidates)

    def step(self, name: str, step: int) -> None:
        point = Point(
            time=self.now,
            step=step,
            epoch=0,
            samples=step,
            loss=None,
            batch_size=1,
            atomic_bsz=1,
            accum_steps=0,
            num_replicas=1,
            step_time=0.1,
            predicted_step_time=None,
            goodput=None,
            efficiency=None,
        )
        self.store.add_report(name, self.store.job(name).state.attempt, [point])


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path / "pipollux.db")
    yield world
    world.store.close()


def test_from_submission_to_a_move(world: World) -> None:
    """A job starts at once, is left alone until its first step, then shares with one that waits."""
    world.submit("first", num_stages=2)
    policy = Answer()
    allocator = world.allocator(policy)
    assert [(d.job, d.nodes) for d in allocator.run_once()] == [("first", ("a",))]
    policy.allocations = {"first": ["b"]}
    assert allocator.run_once() == []  # refused: it has not taken its first step
    world.step("first", 1)
    world.now += 60
    (moved,) = allocator.run_once()
    assert (moved.nodes, moved.previous) == (("b",), ("a",))
    state = world.store.job("first").state
    assert (state.phase, state.assigned, state.running_on) == (Phase.RESTARTING, ("b",), ("a",))
    allocated = world.store.events(types=["allocated"])[-1]
    assert allocated["attempt"] == 2
    assert (allocated["nodes"], allocated["previous"]) == (["b"], ["a"])
    assert allocated["why"] == moved.why != ""


def test_what_the_policy_is_told(world: World) -> None:
    """Age, restarts, what they cost, and the cap of four times the replicas that were measured."""
    world.submit("toy", max_replicas=16)
    policy = Answer()
    allocator = world.allocator(policy)
    allocator.run_once()
    world.now += 10
    world.step("toy", 1)
    hints = {"initBatchSize": 8, "maxProfiledReplicas": 3}
    world.store.put_hints("toy", 1, hints)
    world.now += 10
    policy.allocations = {"toy": ["a", "b"]}
    allocator.run_once()
    world.now += 4
    world.store.transition("toy", Exited(1, Outcome.STOPPED, step=1))
    world.now += 6
    world.step("toy", 2)
    (candidate,) = world.candidates()
    assert candidate.allocation == ("a", "b")
    assert not candidate.pinned
    info = candidate.info
    assert (info.age, info.num_restarts, info.restart_seconds) == (30.0, 1, 10.0)
    assert (info.max_replicas, info.creation_timestamp) == (12, 1000.0)


def test_jobs_that_get_nothing_are_told_why(world: World) -> None:
    for name in ("one", "two", "three"):
        world.submit(name, num_stages=2)
    world.allocator(Answer()).run_once()
    job = world.store.job("three")
    assert (job.phase, job.state.reason) == (Phase.QUEUED, "NoRoom")
    assert job.state.message == (
        "waits: needs 2 slots free on one node, and a, the freest, has 0 slots beside job one"
    )


@pytest.mark.parametrize(
    "events", [[Recover()], [Suspend(), Resume()]], ids=["restarted", "resumed"]
)
def test_jobs_that_are_queued_without_a_decision_are_told_why(
    world: World, events: Sequence[Event]
) -> None:
    """By a new scheduler, or by their user."""
    for name in ("one", "two", "three"):
        world.submit(name, num_stages=2)
    world.allocator(Answer()).run_once()
    for event in events:
        world.store.transition("three", event)
    assert "waits:" not in world.store.job("three").state.message
    world.allocator(Answer()).run_once()
    state = world.store.job("three").state
    assert (state.phase, state.reason) == (Phase.QUEUED, "NoRoom")
    assert state.message == (
        "waits: needs 2 slots free on one node, and a, the freest, has 0 slots beside job one"
    )


def test_jobs_that_are_being_stopped_are_not_decided_on(world: World) -> None:
    world.submit("toy")
    allocator = world.allocator(Answer({"toy": []}))
    allocator.run_once()
    world.step("toy", 1)
    allocator.run_once()
    assert world.store.job("toy").state.intent is not None
    assert world.candidates() == []
    world.store.transition("toy", Exited(1, Outcome.STOPPED, step=1))
    assert world.store.job("toy").phase is Phase.SUSPENDED
    assert [candidate.pinned for candidate in world.candidates()] == [False]
    world.store.transition("toy", Cancel())
    assert world.candidates() == []


def test_a_policy_that_fails_changes_nothing(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(Answer):
        def optimize(self, *_: object) -> tuple[dict[str, list[str]], int]:
            raise RuntimeError("the policy is broken")

    world.submit("toy")
    with caplog.at_level(logging.ERROR):
        decisions = world.allocator(Broken()).run_once()
    assert [d.job for d in decisions] == ["toy"]  # placing it worked
    assert "all allocations stay as they are" in caplog.text


def test_hints_that_cannot_be_read_are_left_aside(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.submit("toy")
    allocator = world.allocator(Answer())
    allocator.run_once()
    world.store.put_hints("toy", 1, {"fromAnotherVersion": True})
    with caplog.at_level(logging.WARNING):
        (candidate,) = world.candidates()
    assert candidate.info.speedup_fn is linear_speedup
    assert "fromAnotherVersion" in caplog.text


def test_hints_that_are_not_believed_are_left_aside_and_told_of_once(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.submit("toy", max_replicas=4)
    allocator = world.allocator(PolluxPolicy(population=20, generations=10))
    allocator.run_once()
    world.store.put_hints("toy", 1, NOTHING_FITS.to_json_object())
    world.step("toy", 1)
    for _ in range(3):
        allocator.run_once()
    [told] = [record.getMessage() for record in caplog.records]
    assert told == (
        "the hints of job toy say that up to 4 replicas are all worth nothing; they are ignored"
    )
    assert world.store.job("toy").state.assigned == ("a",)


def test_pinned_states(world: World) -> None:
    world.submit("toy")
    state = world.store.job("toy").state
    assert not is_pinned(state)
    state = world.store.transition("toy", Allocate(["a"], "free")).job.state
    assert is_pinned(state)
    assert not is_pinned(replace(state, training=True))
    state = world.store.transition("toy", Exited(1, Outcome.FAILED, message="boom")).job.state
    assert is_pinned(state)


def test_what_starts_gives_slots_back_once_its_notice_is_over(world: World) -> None:
    """A job that fails again and again never trains, and would keep what it has borrowed."""
    teams = {"teams": [{"name": n, "quota": 2} for n in ("text", "vision")], "notice": 60.0}
    world.store.teams.set_spec(teams)
    for name in ("t0", "t1", "t2", "t3"):
        world.submit(name, team="text")
        world.store.transition(name, Allocate(["ab"[int(name[1]) // 2]], "free"))
    world.store.teams.set_notices({"t2": world.now + 60})
    world.store.transition("t2", Exited(1, Outcome.FAILED, message="boom"))
    assert {c.name for c in world.candidates() if c.pinned} == {"t0", "t1", "t2", "t3"}
    world.now += 60
    assert {c.name for c in world.candidates() if c.pinned} == {"t0", "t1", "t3"}
    world.submit("v0", team="vision")
    allocator = Allocator(
        world.reader,
        PolicyStrategy(ExactPolicy()),
        carry_out=world.store.transition_all,
        keep_notices=world.store.teams.set_notices,
    )
    allocator.run_once()
    assert world.store.job("t2").phase is Phase.QUEUED
    assert world.store.job("v0").phase is Phase.RUNNING


def test_a_job_that_no_team_keeps_waiting_any_longer_is_told_so(world: World) -> None:
    """Its message is of its team only as long as there are teams."""
    borrows = {"name": "text", "quota": 1, "borrow": 0}
    world.store.teams.set_spec({"teams": [borrows, {"name": "vision", "quota": 3}]})
    allocator = world.allocator(PolluxPolicy(population=20, generations=10))
    for number in range(6):
        world.submit(f"job-{number}", team="text", max_replicas=1)
    allocator.run_once()
    jobs = [world.store.job(f"job-{number}") for number in range(6)]
    waits = [job.name for job in jobs if not job.state.assigned]
    assert len(waits) == 5
    assert all("team text holds its quota" in world.store.job(x).state.message for x in waits)
    world.store.teams.set_spec(None)
    allocator.run_once()
    allocator.run_once()
    left = [world.store.job(name) for name in waits]
    assert not any("team" in job.state.message for job in left), [x.state.message for x in left]


def test_a_job_behind_others_of_the_only_team_waits_for_slots(world: World) -> None:
    world.store.teams.set_spec({"teams": [{"name": "text"}]})
    allocator = world.allocator(make_policy("fifo"))
    for number in range(5):
        world.submit(f"job-{number}", team="text", max_replicas=1)
    allocator.run_once()
    waits = [job for job in world.store.jobs() if not job.state.assigned]
    assert [job.name for job in waits] == ["job-4"]
    assert "beside jobs" in waits[0].state.message
    assert "team" not in waits[0].state.message
