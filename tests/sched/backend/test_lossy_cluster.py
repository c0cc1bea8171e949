"""Attempts on a cluster whose messages get lost, are delayed, and arrive twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pipollux_sched.backend import BackendError, ReplicaGroupManager, ReplicaKey, ReplicaProgram
from pipollux_sched.lifecycle import (
    ChangeStage,
    Exited,
    JoiningReplicaLost,
    Membership,
    Outcome,
    PendingResize,
    Started,
)
from pipollux_sched.store import StateDir
from tests.extent import examples
from tests.sched.backend.cluster import NODES, Cluster, Replica
from tests.sched.backends import first_membership

FAULTS = ("", "", "", "lost", "unanswered", "late", "silent", "old")
JOBS = st.sampled_from(["one", "two", "three"])
MESSAGES = st.lists(st.sampled_from(FAULTS), max_size=4)
"""What becomes of the messages of the next poll, the first one last."""


LAST = ["silent"] * 9 + [""]


class Launches:
    """Keeps launches for the schedulers that come after."""

    def __init__(self) -> None:
        self.kept: dict[tuple[str, int], dict[str, Any]] = {}

    def note_launch(self, job: str, attempt: int, data: dict[str, Any]) -> None:
        self.kept[job, attempt] = data

    def launch(self, job: str, attempt: int) -> dict[str, Any] | None:
        return self.kept.get((job, attempt))

    def stopped_step(self, *_: object) -> None:
        """No job has told anything."""


class LossyCluster(RuleBasedStateMachine):
    """A scheduler and its cluster; either may fail at any moment."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.faults: list[str] = []
        self.cluster = Cluster(lambda _what: self.faults.pop() if self.faults else "")
        self.launches = Launches()
        self.attempt: Counter[str] = Counter()
        self.expected: dict[tuple[str, int], int] = {}
        """Replicas of each attempt that was asked for and of whose end was not heard yet."""
        self.ends: dict[tuple[str, int], Exited] = {}
        self.started: set[tuple[str, int]] = set()
        self.memberships: dict[tuple[str, int], Membership] = {}
        """Who takes part in each of these attempts, and who is about to."""
        self.backend = self._new_backend()

    def _new_backend(self) -> ReplicaGroupManager:
        self.cluster.meet()
        return ReplicaGroupManager(
            self.cluster,
            self.launches,
            StateDir(Path("/nowhere")),
            grace=5.0,
            start_timeout=60.0,
            clock=lambda: self.now,
        )

    @initialize()
    def begin(self) -> None:
        self.now = 1.0

    @rule(
        job=JOBS,
        nodes=st.lists(st.sampled_from(sorted(NODES)), min_size=1, max_size=3),
        faults=MESSAGES,
    )
    def apply(self, job: str, nodes: list[str], faults: list[str]) -> None:
        """As the executor does: a new attempt only when the one before is over."""
        if any(key[0] == job for key in self.expected):
            return
        number = self.attempt[job] + 1
        try:
            self.backend.apply(ReplicaProgram(job=job, script=None), number, nodes)
        except BackendError:
            return
        self.attempt[job] = number
        self.expected[job, number] = len(nodes)
        self.memberships[job, number] = first_membership(len(nodes))
        self._poll(faults)

    @precondition(lambda self: self.started & self.expected.keys())
    @rule(
        data=st.data(),
        nodes=st.lists(st.sampled_from(sorted(NODES)), min_size=1, max_size=2),
        faults=MESSAGES,
    )
    def join(self, data: st.DataObject, nodes: list[str], faults: list[str]) -> None:
        """Replicas are to join those of an attempt that runs."""
        key = data.draw(st.sampled_from(sorted(self.started & self.expected.keys())))
        membership = self.memberships[key]
        if membership.change is not None:
            return
        ids = range(membership.num_ids, membership.num_ids + len(nodes))
        change = PendingResize(
            membership.highest + 1,
            (*membership.replicas, *ids),
            (*("a" for _ in membership.replicas), *nodes),
            ChangeStage.FORMING,
        )
        self.memberships[key] = replace(
            membership, num_ids=ids.stop, highest=change.number, change=change, why_not=None
        )
        program = ReplicaProgram(job=key[0], script=None)
        self.backend.start_replicas(program, key[1], dict(zip(ids, nodes, strict=True)))
        self._poll(faults)

    @rule(faults=MESSAGES)
    def all_change(self, faults: list[str]) -> None:
        """Joining replicas that run take part from now on, as those who train have met them."""
        for (job, number), membership in self._changing():
            assert membership.change is not None
            all_ = [self._replica(job, number, replica) for replica in membership.change.replicas]
            if all(one and one.runs and one.ended is None for one in all_):
                now = replace(membership, replicas=membership.change.replicas, change=None)
                self.memberships[job, number] = now
                self.backend.admit(job, number, now.replicas, can_survive=True)
        self._poll(faults)

    @precondition(lambda self: self.started & self.expected.keys())
    @rule(data=st.data(), at_once=st.booleans(), faults=MESSAGES)
    def one_leaves(self, data: st.DataObject, at_once: bool, faults: list[str]) -> None:
        """It ends by itself, is killed at once, or was lost before anybody asked."""
        key = data.draw(st.sampled_from(sorted(self.started & self.expected.keys())))
        membership = self.memberships[key]
        if membership.change is not None or len(membership.replicas) == 1:
            return
        leaver = data.draw(st.sampled_from(membership.replicas))
        self.memberships[key] = replace(
            membership, replicas=tuple(set(membership.replicas) - {leaver})
        )
        self.backend.end_replicas(*key, [leaver], at_once=at_once)
        self._poll(faults)

    @rule(job=JOBS, grace=st.sampled_from([0.0, 3.0, 30.0]), faults=MESSAGES)
    def stop(self, job: str, grace: float, faults: list[str]) -> None:
        there = job in self.backend.running()
        assert self.backend.stop(job, grace) is there
        self._poll(faults)

    @rule(job=JOBS, faults=MESSAGES)
    def kill(self, job: str, faults: list[str]) -> None:
        there = job in self.backend.running()
        assert self.backend.kill(job, "why") is there
        self._poll(faults)

    @rule(faults=MESSAGES, seconds=st.sampled_from([0, 1, 5]))
    def time_passes(self, faults: list[str], seconds: float) -> None:
        self.now += seconds
        self._poll(faults)

    @precondition(lambda self: self.cluster.alive())
    @rule(data=st.data(), status=st.sampled_from([0, 0, 1, None]))
    def replica_ends(self, data: st.DataObject, status: int | None) -> None:
        key = data.draw(st.sampled_from(sorted(self.cluster.alive())))
        if self.cluster.there[key].runs:
            self.cluster.end(key, status, lost="" if status is not None else "Its node is down.")

    @rule(faults=MESSAGES)
    def replicas_run(self, faults: list[str]) -> None:
        self.cluster.run_all()
        self._poll(faults)

    @rule(faults=MESSAGES)
    def replicas_obey(self, faults: list[str]) -> None:
        self.cluster.obey()
        self._poll(faults)

    @rule(faults=MESSAGES)
    def late_messages_arrive(self, faults: list[str]) -> None:
        self.cluster.settle()
        self._poll(faults)

    @rule()
    def scheduler_is_killed(self) -> None:
        """The next one adopts what it can, and ends the rest."""
        before, self.backend = self.backend, self._new_backend()
        for (job, number), _ in list(self.expected.items()):
            if self.backend.adopt(job, number, "", self.memberships[job, number]) is not None:
                del self.expected[job, number]
        del before
        self.backend.recover(0.0)

    @invariant()
    def nothing_is_started_twice(self) -> None:
        """Except where a request that was given up arrives when its replica was removed already."""
        starts = [key for key in self.cluster.starts if key not in self.cluster.ambiguous]
        assert len(starts) == len(set(starts))

    @invariant()
    def slots_are_not_shared(self) -> None:
        """Except by a replica whose start had been given up, and that nobody has seen yet."""
        held = Counter(
            (one.node, slot)
            for key, one in self.cluster.there.items()
            if one.ended is None and (self._is_wanted(key) or key not in self.cluster.ambiguous)
            for slot in one.slots
        )
        assert max(held.values(), default=0) <= 1

    def teardown(self) -> None:
        """When all answer again, everything ends, and nothing is left.

        The first signals come to nothing, and nobody is told.
        """
        for job in {key[0] for key in self.expected}:
            self.backend.stop(job, 1.0)
        for number in range(20):
            self.cluster.settle()
            self.now += 5.0
            self._poll([] if number else LAST)
        assert self.expected == {}
        assert self.cluster.alive() == set()
        assert self.backend.running() == {}
        assert self.backend.free() == {name: node.slots for name, node in NODES.items()}

    def _poll(self, faults: Sequence[str] = ()) -> None:
        self.faults = list(faults)
        truth = {key: one.ended for key, one in self.cluster.there.items()}
        for job, event, _ in self.backend.poll():
            key = job, event.attempt
            if isinstance(event, JoiningReplicaLost):
                self._abandon(key, event.replica)
                continue
            if isinstance(event, Started):
                assert key not in self.started
                assert key not in self.ends
                assert len(event.replicas) == self.expected[key]
                self.started.add(key)
                continue
            assert key not in self.ends, "the end is told once"
            self.ends[key] = event
            self._check_end(key, event, truth)
            del self.expected[key]
            self.backend.forget(*key)
        self.faults = []

    def _check_end(
        self, key: tuple[str, int], event: Exited, truth: Mapping[ReplicaKey, Any]
    ) -> None:
        ends = {one: end for one, end in truth.items() if one[:2] == key}
        # One whose start was given up may still arrive.
        given_up = self.cluster.ambiguous & ends.keys()
        if key in self.started:
            given_up = {one for one in given_up if one.replica >= self.expected[key]}
        elif given_up:
            given_up = set(ends)
        assert all(end is not None for one, end in ends.items() if one not in given_up)
        assert "gone without an exit status" not in event.message, "none vanishes here"
        if event.outcome is Outcome.COMPLETE:
            mine = [ends[ReplicaKey(*key, replica)] for replica in self.memberships[key].replicas]
            assert all(end.status == 0 for end in mine)

    def _abandon(self, key: tuple[str, int], replica: int) -> None:
        """As the life cycle does when a joining replica is lost: the others go on without any."""
        membership = self.memberships[key]
        coming = dict(membership.joining)
        if replica not in coming:
            return
        self.memberships[key] = replace(membership, change=None)
        self.backend.end_replicas(*key, list(coming), at_once=True)

    def _changing(self) -> list[tuple[tuple[str, int], Membership]]:
        return [
            (key, self.memberships[key])
            for key in self.expected
            if self.memberships[key].change is not None
        ]

    def _replica(self, job: str, number: int, replica: int) -> Replica | None:
        return self.cluster.there.get(ReplicaKey(job, number, replica))

    def _is_wanted(self, key: ReplicaKey) -> bool:
        if key[:2] not in self.expected:
            return False
        membership = self.memberships[key[:2]]
        return key.replica in membership.replicas or key.replica in dict(membership.joining)


LossyCluster.TestCase.settings = settings(examples(100), stateful_step_count=60)
TestLossyCluster = LossyCluster.TestCase
