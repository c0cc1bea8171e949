"""Members that begin while others train: in one round on all servers, which hold a layer each."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from contextlib import suppress

import hypothesis.strategies as st
import pytest
import torch
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pipollux_hybrid.push_pull.key_range import (
    FENCED,
    ROUND_OVER,
    KeyRange,
    Push,
    RejectedError,
)
from pipollux_hybrid.push_pull.options import OuterSGD


class Servers:
    """Two servers with a layer each, of one fragment; a message reaches one of them."""

    def __init__(self) -> None:
        self.keys = [KeyRange(OuterSGD(), None, 0) for _ in range(2)]
        self.sums: list[list[dict[int, int]]] = [[], []]
        """Of each server, and each of its rounds, the numbers of the pushes by member."""
        for layer, keys in enumerate(self.keys):
            keys.init(layer, ["w"], [torch.zeros(1)])

    def push(self, server: int, member: int, number: int) -> None:
        spans = {server: [(100 * member + number, 100 * member + number + 1)]}
        push = Push(member, number, {server: 1.0}, (0, 0), spans, {server: 0})
        self.keys[server].push(push, {server: [torch.ones(1)]})
        self.step(server)

    def step(self, server: int) -> None:
        keys = self.keys[server]
        for layer in keys.due():
            state = keys.layers[layer]
            self.sums[server].append({x: state.numbers[x] for x in state.pending})
            keys.step(layer, keys.next_step(layer, complete=False))

    def admit(self, member: int) -> None:
        for keys in self.keys:
            keys.admit(member)

    def count(self, server: int, members: Iterable[int], after: int | None) -> None:
        given = None if after is None else {server: after}
        self.keys[server].count(dict.fromkeys(members, True), given)
        self.step(server)

    def round(self) -> int:
        return max(keys.rounds([layer])[layer] for layer, keys in enumerate(self.keys))

    def begin(self, member: int) -> None:
        """Count a member as the first server does, with nothing in between."""
        after = self.round()
        for server in range(2):
            self.count(server, [member], after)

    def may_pull(self, member: int, after: int) -> bool:
        return all(keys.may_pull(layer, member, after) for layer, keys in enumerate(self.keys))


def started(*members: int) -> Servers:
    servers = Servers()
    for member in members:
        servers.admit(member)
    for server in range(2):
        servers.count(server, members, None)
    return servers


def test_a_member_begins_after_the_round_that_has_ended_on_one_server_only() -> None:
    servers = started(1, 2)
    servers.push(0, 1, 1)
    servers.push(0, 2, 1)  # on server 0, round 1 has ended
    servers.admit(3)
    servers.begin(3)
    assert not servers.may_pull(3, 0)  # it would begin with another round of layer 1
    servers.push(1, 1, 1)
    servers.push(1, 2, 1)
    assert servers.may_pull(3, 0)
    for member, server in itertools.product((1, 2), range(2)):
        servers.push(server, member, 2)
    assert not servers.may_pull(1, 2)
    for server in range(2):
        servers.push(server, 3, 1)
    assert all(servers.may_pull(member, number) for member, number in ((1, 2), (2, 2), (3, 1)))
    assert servers.sums[0] == servers.sums[1] == [{1: 1, 2: 1}, {1: 2, 2: 2, 3: 1}]


def test_a_round_that_ends_before_all_servers_count_a_member_is_noticed() -> None:
    servers = started(1)
    servers.admit(2)
    servers.count(0, [2], 0)
    servers.push(1, 1, 1)
    with pytest.raises(RejectedError, match=ROUND_OVER):
        servers.count(1, [2], 0)
    assert not servers.keys[1].counted[2]


@pytest.mark.parametrize("how", ["fenced", "idle"])
def test_a_member_that_waits_for_others_begins_when_they_have_gone(how: str) -> None:
    servers = started(1)
    servers.push(0, 1, 1)
    servers.admit(2)
    servers.begin(2)
    assert not servers.may_pull(2, 0)
    for keys in servers.keys:
        if how == "fenced":
            keys.fence(1, (0, 0))
        else:
            keys.count({1: False})
    assert servers.may_pull(2, 0)


class Rounds(RuleBasedStateMachine):
    """Replicas push to both servers, begin, and die; messages arrive in any order."""

    @initialize()
    def start(self) -> None:
        self.servers = started(1, 2)
        self.numbers = {1: 0, 2: 0}
        self.sent: list[tuple[int, int, int]] = []
        """Server, member and number of pushes under way."""
        self.lost: set[int] = set()

    def _members(self) -> list[int]:
        return [member for member in self.numbers if member not in self.lost]

    @rule(data=st.data())
    def train(self, data: st.DataObject) -> None:
        """A member takes the steps of a round, and sends its pushes."""
        free = [
            member
            for member in self._members()
            if not any(x[1] == member for x in self.sent)
            and self.servers.may_pull(member, self.numbers[member])
        ]
        if free:
            member = data.draw(st.sampled_from(free))
            self.numbers[member] += 1
            self.sent += [(server, member, self.numbers[member]) for server in range(2)]

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def arrive(self, data: st.DataObject) -> None:
        push = data.draw(st.sampled_from(self.sent))
        self.sent.remove(push)
        self.servers.push(*push)

    @precondition(lambda self: len(self.numbers) < 5)
    @rule(between=st.integers(0, 2), data=st.data())
    def begin(self, between: int, data: st.DataObject) -> None:
        """A member begins; pushes may arrive between the two messages that say so."""
        member = max(self.numbers) + 1
        self.servers.admit(member)
        after = self.servers.round()
        self.servers.count(0, [member], after)
        for _ in range(min(between, len(self.sent))):
            self.arrive(data)
        if self.servers.keys[1].rounds([1])[1] <= after:
            self.servers.count(1, [member], after)
        else:
            with pytest.raises(RejectedError, match=ROUND_OVER):
                self.servers.count(1, [member], after)
            for server, keys in enumerate(self.servers.keys):
                keys.count({member: False})
                self.servers.step(server)
            self.servers.begin(member)
        self.numbers[member] = 0

    @precondition(lambda self: len(self._members()) > 1)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        member = data.draw(st.sampled_from(self._members()))
        self.lost.add(member)
        self.sent = [x for x in self.sent if x[1] != member]
        for server, keys in enumerate(self.servers.keys):
            keys.fence(member, (0, 0))
            with suppress(RejectedError):
                self.servers.push(server, member, 99)
                raise AssertionError(FENCED)
            self.servers.step(server)

    @invariant()
    def rounds_are_equal(self) -> None:
        """Members that live have pushed the same in the rounds of both servers."""
        first, second = (
            [{x: n for x, n in each.items() if x not in self.lost} for each in several]
            for several in self.servers.sums
        )
        ours, theirs = ([each for each in several if each] for several in (first, second))
        assert all(a == b for a, b in zip(ours, theirs, strict=False))

    def teardown(self) -> None:
        """All go on: nobody waits for others that wait for it."""
        if not hasattr(self, "servers"):
            return
        before = dict(self.numbers)
        for _ in range(4):
            for push in self.sent:
                self.servers.push(*push)
            self.sent = []
            for member in self._members():
                if self.servers.may_pull(member, self.numbers[member]):
                    self.numbers[member] += 1
                    self.sent += [(server, member, self.numbers[member]) for server in range(2)]
        assert all(self.numbers[x] > before[x] + 1 for x in self._members())
        self.rounds_are_equal()


TestRounds = Rounds.TestCase
