"""The servers' state, without a network: updates, compression, and the ledger of samples."""

from __future__ import annotations

import copy
import itertools
import json
import math
from collections.abc import Iterator
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import example, given
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor, nn

from pipollux_hybrid.elastic.sampler import parts_of_iteration
from pipollux_hybrid.errors import ConfigurationError
from pipollux_hybrid.job.batch import BatchShape, BatchSlice
from pipollux_hybrid.push_pull.compression import ErrorFeedback, quantize
from pipollux_hybrid.push_pull.fragments import fragments_of, layer_parameters, layer_sizes
from pipollux_hybrid.push_pull.intervals import IntervalSet
from pipollux_hybrid.push_pull.key_range import (
    FENCED,
    PAST,
    KeyRange,
    Push,
    RejectedError,
    layer_content,
    restored,
)
from pipollux_hybrid.push_pull.leases import Leases
from pipollux_hybrid.push_pull.ledger import Ledger
from pipollux_hybrid.push_pull.options import OuterSGD, PushPull
from pipollux_hybrid.push_pull.outer_step import Change, OuterState, share_of
from pipollux_hybrid.push_pull.worker import server_of

SPANS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)), max_size=12)
FLOATS = st.floats(allow_nan=False, allow_infinity=False, width=32)


@given(SPANS, st.tuples(st.integers(0, 50), st.integers(0, 20)))
def test_an_interval_set_is_a_set(spans: list[tuple[int, int]], asked: tuple[int, int]) -> None:
    kept = IntervalSet((start, start + length) for start, length in spans)
    numbers = {x for start, length in spans for x in range(start, start + length)}
    assert {x for start, stop in kept for x in range(start, stop)} == numbers
    assert len(kept) == len(numbers)
    listed = list(kept)
    assert all(a.stop < b.start for a, b in itertools.pairwise(listed))
    start, stop = asked[0], sum(asked)
    missing = {x for hole in kept.missing(start, stop) for x in range(*hole)}
    assert missing == set(range(start, stop)) - numbers


@example([torch.finfo(torch.float32).max], torch.float32)
@example([-torch.finfo(torch.float64).max], torch.float64)
@given(st.lists(FLOATS, min_size=1, max_size=30), st.sampled_from([torch.float32, torch.float64]))
def test_no_element_of_a_compressed_push_is_off_by_more_than_half_a_level(
    values: list[float], dtype: torch.dtype
) -> None:
    tensor = torch.tensor(values, dtype=dtype)
    decoded = quantize(tensor).decoded(dtype)
    bound = float(tensor.abs().max()) / 254
    # Beside the rounding of the product itself, and of quotients below the smallest normal number.
    slack = 4 * torch.finfo(dtype).eps * float(tensor.abs().max()) + torch.finfo(dtype).tiny * 127
    assert float((decoded - tensor).abs().max()) <= bound + slack


@given(st.lists(st.lists(FLOATS, min_size=3, max_size=3), min_size=1, max_size=20))
def test_what_pushes_leave_out_is_what_is_fed_back(pushes: list[list[float]]) -> None:
    feedback, sent = ErrorFeedback(), torch.zeros(3, dtype=torch.float64)
    exact = torch.zeros(3, dtype=torch.float64)
    for values in pushes:
        change = torch.tensor(values, dtype=torch.float64)
        exact += change
        sent += feedback.compress("weight", change).decoded(torch.float64)
    scale = float(torch.tensor(pushes, dtype=torch.float64).abs().sum()) + 1e-300
    torch.testing.assert_close(
        sent + feedback.errors.get("weight", torch.zeros(3)), exact, rtol=0, atol=1e-12 * scale
    )


def test_a_push_that_is_not_finite_stays_visible() -> None:
    for value in (math.nan, math.inf):
        assert torch.isnan(quantize(torch.tensor([1.0, value])).decoded(torch.float32)).all()


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_round_of_all_is_torchs_step(momentum: float, nesterov: bool) -> None:
    nesterov = nesterov and momentum > 0.0
    outer = OuterSGD(lr=0.7, momentum=momentum, nesterov=nesterov)
    generator = torch.Generator().manual_seed(0)
    value = torch.randn(5, dtype=torch.float64, generator=generator)
    theirs = nn.Parameter(value.clone())
    sgd = torch.optim.SGD([theirs], lr=0.7, momentum=momentum, nesterov=nesterov)
    state = OuterState([value])
    for _ in range(6):
        changes = [torch.randn(5, dtype=torch.float64, generator=generator) for _ in range(3)]
        weights = [1.0, 2.0, 5.0]
        weighted = [w * x for w, x in zip(weights, changes, strict=True)]
        theirs.grad = torch.stack(weighted).sum(0) / 8.0
        sgd.step()
        pushed = {n: Change(w, [x]) for n, (w, x) in enumerate(zip(weights, changes, strict=True))}
        state.step(share_of(pushed, 8.0), outer)
        torch.testing.assert_close(state.values[0], theirs.detach(), rtol=0, atol=1e-14)


@pytest.mark.parametrize("nesterov", [True, False])
def test_changes_one_by_one_make_the_round_of_all(nesterov: bool) -> None:
    outer = OuterSGD(lr=0.3, momentum=0.8, nesterov=nesterov)
    at_once, singly = (OuterState([torch.zeros(2, dtype=torch.float64)]) for _ in range(2))
    for number in range(4):
        values = [torch.full((2,), float(number + k), dtype=torch.float64) for k in range(3)]
        changes = {k: Change(k + 1.0, [x]) for k, x in enumerate(values)}
        at_once.step(share_of(changes, 6.0), outer)
        for k, change in changes.items():
            singly.step(share_of({k: change}, 6.0), outer)
        torch.testing.assert_close(singly.values[0], at_once.values[0], rtol=0, atol=1e-12)
        assert singly.fraction == 0.0


def _keys(least: int | None = None, stale: float = 0) -> KeyRange:
    keys = KeyRange(OuterSGD(lr=1.0, momentum=0.0, nesterov=False), least, stale)
    keys.init(0, ["w"], [torch.zeros(1, dtype=torch.float64)])
    for member in (1, 2):
        keys.admit(member)
    keys.count({1: True, 2: True})
    return keys


def _do(keys: KeyRange, name: str, *arguments: Any) -> None:
    """Apply an operation, and take the steps that it makes due."""
    getattr(keys, name)(*arguments)
    for layer in keys.due():
        keys.step(layer, keys.next_step(layer, complete=False))


def _push(member: int, number: int, revision: int = 0, start: int = 0) -> Push:
    return Push(member, number, {0: 4.0}, (0, 0), {0: [(start, start + 4)]}, {0: revision})


def _change(value: float) -> dict[int, list[Tensor]]:
    return {0: [torch.tensor([value], dtype=torch.float64)]}


def test_a_round_waits_for_all_and_a_repeated_push_is_counted_once() -> None:
    keys = _keys()
    _do(keys, "push", _push(1, 1), _change(1.0))
    _do(keys, "push", _push(1, 1), _change(1.0))
    assert keys.layers[0].revision == 0
    assert not keys.may_pull(0, 1, 1)
    _do(keys, "push", _push(2, 1, start=4), _change(3.0))
    assert keys.layers[0].revision == 1
    assert keys.may_pull(0, 1, 1)
    assert float(keys.layers[0].outer.values[0]) == -2.0
    assert list(keys.credits((0, 0))[0]) == [(0, 8)]


def test_a_fenced_member_is_not_waited_for_and_cannot_push() -> None:
    keys = _keys()
    _do(keys, "push", _push(1, 1), _change(1.0))
    _do(keys, "fence", 2, (0, 0))
    assert keys.layers[0].revision == 1
    with pytest.raises(RejectedError, match=FENCED):
        _do(keys, "push", _push(2, 1), _change(1.0))


def test_a_pull_waits_only_for_those_too_far_behind() -> None:
    keys = _keys(least=1, stale=1)
    for number in (1, 2):
        _do(keys, "push", _push(1, number, revision=number - 1), _change(1.0))
        assert keys.may_pull(0, 1, number) is (number == 1)
    _do(keys, "push", _push(2, 1, revision=2), _change(1.0))
    assert keys.may_pull(0, 1, 2)


def test_members_begin_a_loop_in_one_round_whoever_was_ahead() -> None:
    keys = _keys()
    _do(keys, "count", {2: False})  # it has no samples left
    _do(keys, "push", _push(1, 1), _change(1.0))
    _do(keys, "count", {1: False})
    _do(keys, "count", {1: True, 2: True})
    assert keys.layers[0].clocks == {1: 1, 2: 1}
    assert keys.may_pull(0, 1, 1)


def test_a_member_that_begins_takes_part_in_the_round_under_way() -> None:
    keys = _keys()
    keys.admit(3)
    _do(keys, "push", _push(1, 1), _change(1.0))
    _do(keys, "count", {3: True})
    for member in (2, 3):
        _do(keys, "push", _push(member, 1), _change(1.0))
    assert keys.layers[0].revision == 1
    assert all(keys.may_pull(0, member, 1) for member in (1, 2, 3))


def test_revisions_do_not_go_back_when_a_server_is_restored() -> None:
    keys = _keys(least=1)
    _do(keys, "push", _push(1, 1), _change(1.0))
    kept = copy.deepcopy(layer_content(keys.layers[0]))
    _do(keys, "push", _push(2, 1, revision=1), _change(1.0))
    before = keys.layers[0].revision
    keys.layers[0] = restored(kept)
    assert keys.layers[0].revision > before
    with pytest.raises(RejectedError, match=PAST):
        _do(keys, "push", _push(1, 2, revision=before), _change(1.0))
    # Also of the generation before: what it was based on is gone.
    assert float(keys.layers[0].outer.values[0]) == -0.5


def test_servers_own_contiguous_ranges_of_similar_size() -> None:
    owners = server_of([5, 1, 1, 1, 5, 1, 1, 5], 3)
    assert owners == sorted(owners)
    assert set(owners) == {0, 1, 2}


def test_fragments_are_of_similar_size_and_shared_parameters_are_the_first_layers() -> None:
    assert fragments_of({0: 8, 1: 3, 2: 3, 3: 2}, 2) == [[0], [1, 2, 3]]
    first = nn.Linear(3, 3)
    last = nn.Linear(3, 3)
    last.weight = first.weight
    module = nn.Sequential(first, nn.Tanh(), last)
    assert {k: [name for name, _ in x] for k, x in layer_parameters(module).items()} == {
        0: ["0.weight", "0.bias"],
        2: ["2.bias"],
    }
    assert layer_sizes(module) == [48, 0, 12]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"sync_every": 0}, "sync_every=0"),
        ({"sync_every": 4, "fragments": 5}, "fragments=5"),
        ({"sync_every": 4, "overlap": 4}, "overlap=4"),
        ({"max_staleness": -1}, "max_staleness=-1"),
        ({"max_staleness": math.nan}, "max_staleness=nan"),
        ({"quorum": 0}, "quorum=0"),
        ({"compression": "fp4"}, "compression='fp4'"),
        ({"outer_optimizer": torch.optim.SGD}, "outer_optimizer"),
    ],
)
def test_options_are_refused_by_name(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named.replace("(", r"\(")):
        PushPull(**options)


class LedgerMachine(RuleBasedStateMachine):
    """Replicas that join, train, push layers and die at any moment."""

    @initialize(
        samples=st.integers(1, 60),
        layers=st.integers(1, 3),
        steps=st.integers(1, 4),
        lockstep=st.booleans(),
    )
    def start(self, samples: int, layers: int, steps: int, lockstep: bool) -> None:
        self.ledger = Ledger(steps, lockstep=lockstep, adapts=True)
        self.samples, self.layers = samples, layers
        self.turns: dict[int, int] = {}
        self.unpushed: dict[int, list[list[tuple[int, int]]]] = {}
        self.trained = [[0] * samples for _ in range(layers)]
        self.credited = [IntervalSet() for _ in range(layers)]
        self.over = False
        self.join(2)

    @rule(batch=st.integers(1, 5))
    def join(self, batch: int) -> None:
        number = self.ledger.join(len(self.turns), 1, self.layers)
        self.turns[number] = 0
        self.unpushed[number] = [[] for _ in range(self.layers)]
        self.ledger.open(number, 0, (0, 0), self.samples, batch, "data")
        if self.ledger.may_begin(1):
            self.ledger.begin({n: list(x) for n, x in enumerate(self.credited)})

    @precondition(lambda self: self.ledger.members)
    @rule(data=st.data(), restart=st.booleans())
    def lease(self, data: st.DataObject, restart: bool) -> None:
        number = data.draw(st.sampled_from(sorted(self.ledger.members)))
        self.turns[number] += 1
        idle = not any(self.unpushed[number])
        found = self.ledger.answer(number, self.turns[number], 0, idle=idle)
        self.ledger.recount()
        if found is None:
            self.turns[number] -= 1
        elif found["status"] == "leased":
            again = self.ledger.answer(number, self.turns[number], 0, idle=idle)
            assert again == found
            for layer in range(self.layers):
                if layer not in found["skip"]:
                    self.unpushed[number][layer].append(tuple(found["span"]))
        elif found["status"] == "over":
            self.over = True
            assert all(row == [1] * self.samples for row in self.trained)
        if restart:  # of the server, from what its next one has
            self.ledger = Ledger.of(json.loads(json.dumps(self.ledger.content())))

    @precondition(lambda self: self.ledger.members)
    @rule(data=st.data(), confirms=st.booleans())
    def push(self, data: st.DataObject, confirms: bool) -> None:
        number = data.draw(st.sampled_from(sorted(self.ledger.members)))
        layer = data.draw(st.integers(0, self.layers - 1))
        spans, self.unpushed[number][layer] = self.unpushed[number][layer], []
        for start, stop in spans:
            self.credited[layer].add(start, stop)
            for position in range(start, stop):
                self.trained[layer][position] += 1
        if confirms:
            self.ledger.complete([layer], spans)

    @precondition(lambda self: self.ledger.members)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.ledger.members)))
        self.ledger.lose(number, {n: list(x) for n, x in enumerate(self.credited)})
        self.ledger.recount()
        del self.unpushed[number]

    @invariant()
    def nothing_is_trained_twice(self) -> None:
        assert all(max(row) <= 1 for row in self.trained)

    def teardown(self) -> None:
        """Whatever has happened, those that are left end the loop."""
        if not hasattr(self, "ledger"):
            return
        if not self.ledger.members:
            self.join(3)
        for number in list(self.ledger.members)[1:]:
            self.ledger.lose(number, {n: list(x) for n, x in enumerate(self.credited)})
        (number,) = self.ledger.members
        for _ in range(10 * self.samples + 10):
            spans = self.unpushed[number]
            for layer in range(self.layers):
                for start, stop in spans[layer]:
                    self.credited[layer].add(start, stop)
                    for position in range(start, stop):
                        self.trained[layer][position] += 1
                spans[layer] = []
            # Confirmations may have been lost with the connection; credits are what counts.
            for layer in range(self.layers):
                self.ledger.complete([layer], list(self.credited[layer]))
            self.turns[number] += 1
            found = self.ledger.answer(number, self.turns[number], 0, idle=True)
            self.ledger.recount()
            if found is None:
                self.turns[number] -= 1
                continue
            if found["status"] == "over":
                break
            for layer in range(self.layers):
                if layer not in found["skip"]:
                    spans[layer].append(tuple(found["span"]))
        assert all(row == [1] * self.samples for row in self.trained)


TestLedger = LedgerMachine.TestCase


def test_stripes_do_not_depend_on_who_asks_first() -> None:
    found = []
    for order in ([0, 1], [1, 0]):
        ledger = Ledger(2, lockstep=True, adapts=False)
        numbers = {replica: ledger.join(replica, 1, 1) for replica in (0, 1)}
        for number in numbers.values():
            ledger.open(number, 0, (0, 0), 20, 3, "data")
        ledger.begin({0: []})
        spans: dict[int, list[Any]] = {0: [], 1: []}
        for turn in (1, 2, 3):
            for replica in order:
                answer = ledger.answer(numbers[replica], turn, 0, idle=False)
                assert answer is not None
                spans[replica].append(answer.get("span"))
        found.append(spans)
    assert found[0] == found[1] == {0: [[0, 6], [12, 16], None], 1: [[6, 12], [16, 20], None]}


@pytest.mark.parametrize(
    ("samples", "batch", "fewest", "sizes"),
    [
        (18, 8, 2, [[9 - 2, 2], [9 - 2, 2]]),
        (18, 8, 1, [[8, 1], [8, 1]]),
        (3, 8, 2, [[], [3]]),
        (3, 8, 2, [[], [3], []]),
        (1, 8, 2, [[1], []]),
        (9, 2, 2, [[2, 2], [2, 2, 1]]),
    ],
)
def test_iterations_of_one_sample_are_none_if_it_can_be(
    samples: int, batch: int, fewest: int, sizes: list[list[int]]
) -> None:
    """Batch normalization cannot train on them."""
    ledger = Ledger(3, lockstep=True, adapts=False)
    numbers = [ledger.join(replica, 1, 1) for replica in range(len(sizes))]
    for number in numbers:
        ledger.open(number, 0, (0, 0), samples, batch, "data")
    ledger.begin({0: []})

    def found(number: int) -> list[int]:
        turns = itertools.count(1)
        leases = Leases(lambda _: ledger.answer(number, next(turns), 0, idle=False) or {})

        def cut(index: int, count: int, shape: BatchShape) -> Iterator[tuple[range, BatchSlice]]:
            return parts_of_iteration(index, count, shape, 0, is_last=False)

        parts = leases.parts(torch.arange(samples), BatchShape(batch, 1, 0), cut, fewest)
        return [len(part.indices) for part in parts]

    assert [found(number) for number in numbers] == sizes


def test_a_member_in_a_loop_that_others_have_left_does_not_wait_for_the_next_one() -> None:
    """It has joined after the last sample, or its request was under way; they wait for it."""
    ledger = Ledger(2, lockstep=True, adapts=False)
    first = ledger.join(0, 1, 1)
    ledger.open(first, 0, (0, 0), 4, 4, "data")
    ledger.begin({0: []})
    assert (ledger.answer(first, 1, 0, idle=False) or {})["status"] == "leased"
    ledger.complete([0], [[0, 4]])
    late = ledger.join(1, 1, 1)
    assert ledger.open(late, 0, (0, 0), 4, 4, "data") == (0, 0)
    assert ledger.answer(first, 2, 0, idle=True) is None  # rounds count it until then
    ledger.recount()
    assert ledger.answer(first, 2, 0, idle=True) == {"status": "over"}
    ledger.open(first, 0, (0, 1), 4, 4, "data")
    assert not ledger.may_begin(1)
    assert ledger.answer(late, 1, 0, idle=False) == {"status": "none"}
    assert ledger.answer(late, 2, 0, idle=True) == {"status": "over"}
    assert ledger.open(late, 0, (0, 1), 4, 4, "data") == (0, 1)
    assert ledger.may_begin(1)
    assert ledger.answer(late, 3, 0, idle=False) is None


def test_an_outer_step_does_not_depend_on_who_joins_and_pushes_first() -> None:
    """Sums of three changes are rounded: equal trainings have equal bits only in one order."""
    changes = {0: 1.0, 1: 2.0**-24, 2: 2.0**-24}
    found = set()
    for joining, pushing in itertools.product(itertools.permutations(changes), repeat=2):
        ledger, keys = Ledger(1, lockstep=True, adapts=False), KeyRange(OuterSGD(), None, 0)
        keys.init(0, ["w"], [torch.zeros(1)])
        numbers = {replica: ledger.join(replica, 1, 1) for replica in joining}
        for number in numbers.values():
            keys.admit(number)
        keys.count(dict.fromkeys(numbers.values(), True))
        for replica in pushing:
            push = Push(numbers[replica], 1, {0: 1.0}, (0, 0), {0: []}, {0: 0})
            _do(keys, "push", push, {0: [torch.tensor([changes[replica]])]})
        found.add(float(keys.layers[0].outer.values[0]))
    assert len(found) == 1


def test_a_slow_replica_takes_fewer_steps_per_round() -> None:
    ledger = Ledger(12, lockstep=False, adapts=True)
    numbers = [ledger.join(replica, 1, 1) for replica in range(3)]
    for number, time in zip(numbers, (0.1, 0.3, 0.11), strict=True):
        ledger.measure(number, 8, time, 0.0)
    assert [ledger.steps_of(number) for number in numbers] == [12, 4, 12]


def test_auto_takes_the_fewest_steps_for_which_communication_is_5_percent() -> None:
    ledger = Ledger(None, lockstep=True, adapts=True)
    ledger.join(0, 1, 1)
    assert ledger.steps_of(1) == 1
    ledger.measure(1, 8, 0.1, 1.0)
    assert ledger.steps_of(1) == 200
    ledger.measure(1, 8, 0.1, 0.001)
    assert ledger.steps_of(1) == 1
