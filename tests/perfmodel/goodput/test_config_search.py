"""The best configuration, against every configuration there is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipollux_perfmodel import GoodputFunction, GradParams, Optimum, PerfParams
from pipollux_perfmodel.partitioning.layer_profile import Layer, LayerProfile, Link
from pipollux_perfmodel.partitioning.stage_plan import StagePlan, plan_stages
from tests.extent import examples, first
from tests.perfmodel.strategies import allocations, grad_params, pipelines

SEVEN = PerfParams(0.1, 0.01, 0.2, 0.02, 0.05, 0.01, 1.5)
NEAR = 0.995  # of the best goodput


class Choice(NamedTuple):
    """One configuration; the fields of a result in its order."""

    num_microbatches: int
    num_stages: int
    atomic_bsz: int
    accum_steps: int


@dataclass(frozen=True)
class Question:
    """One call of optimize."""

    allocation: tuple[int, int]
    init_batch_size: int
    max_batch_size: int | None
    low: int | None
    high: int | None
    accumulation: bool
    num_microbatches: Sequence[int]
    plans: Sequence[StagePlan] = ()
    memory_limit: float | None = None

    def arguments(self) -> dict[str, Any]:
        return {
            "max_batch_size": self.max_batch_size,
            "atomic_bsz_range": (self.low, self.high),
            "accumulation": self.accumulation,
            "num_microbatches": self.num_microbatches,
            "plans": self.plans,
            "memory_limit": self.memory_limit,
        }

    def ask(self, goodput_fn: GoodputFunction) -> Optimum:
        return goodput_fn.optimize(*self.allocation, **self.arguments())


@dataclass
class Every:
    """Every allowed configuration and its goodput, by the rules alone."""

    goodput_fn: GoodputFunction
    question: Question
    goodput: dict[Choice, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for plan in self.question.plans or [None]:
            function = (
                self.goodput_fn if plan is None else self.goodput_fn.with_params(plan.perf_params)
            )
            for num_microbatches in self.question.num_microbatches:
                self._add(function, plan, num_microbatches)

    def _add(self, function: GoodputFunction, plan: StagePlan | None, count: int) -> None:
        question = self.question
        atomic_bsz, accum_steps = self._sizes(count, self._has_room(plan, count))
        if not atomic_bsz.size:
            return
        values = function.evaluate(*question.allocation, atomic_bsz, accum_steps, count)
        num_stages = function.perf_params.num_stages
        for *sizes, value in zip(
            atomic_bsz.tolist(), accum_steps.tolist(), values.tolist(), strict=True
        ):
            self.goodput[Choice(count, num_stages, *sizes)] = value

    def _sizes(self, num_microbatches: int, has_room: Any) -> tuple[np.ndarray, np.ndarray]:
        question, replicas = self.question, self.question.allocation[1]
        largest = question.max_batch_size or question.init_batch_size
        atomic_bsz, accum_steps = np.meshgrid(
            np.arange(question.low or 1, (question.high or largest) + 1),
            np.arange(largest if question.accumulation else 1),
            indexing="ij",
        )
        batch_size = replicas * atomic_bsz * (accum_steps + 1)
        allowed, room = batch_size <= largest, has_room(atomic_bsz)
        if question.max_batch_size is None:
            # Rounded up by less than a sample a replica, or, in as few steps as possible, a step.
            fewest = np.ceil(largest / (replicas * atomic_bsz[room].max(initial=1)))
            steps = accum_steps + 1
            allowed |= batch_size - largest < replicas
            allowed |= (steps <= fewest) & (batch_size - largest < replicas * steps)
        allowed &= (batch_size >= question.init_batch_size) & room
        if num_microbatches == 1 and replicas == 1:
            allowed &= (accum_steps > 0) | (batch_size <= question.init_batch_size)
        # Multiples of M come first, if there are any.
        multiples = allowed & (atomic_bsz % num_microbatches == 0)
        chosen = multiples if multiples.any() else allowed
        return atomic_bsz[chosen], accum_steps[chosen]

    def _has_room(self, plan: StagePlan | None, count: int) -> Callable[[np.ndarray], np.ndarray]:
        limit = self.question.memory_limit
        if plan is None or limit is None:
            return lambda atomic_bsz: np.ones(atomic_bsz.shape, bool)
        # Memory is counted in whole samples, at least one in each micro-batch.
        return lambda atomic_bsz: (
            (atomic_bsz >= count)
            & np.all(plan.memory(np.ceil(atomic_bsz / count), count) <= limit * (1 + 1e-9), axis=0)
        )


SEQUENCES = st.lists(st.sampled_from([1, 2, 3, 4, 6, 8]), min_size=1, max_size=3, unique=True)


@st.composite
def questions(draw: st.DrawFn) -> Question:
    init_batch_size = draw(st.integers(1, 32))
    low = draw(st.one_of(st.none(), st.integers(1, 8)))
    factor = draw(st.sampled_from([None, 1, 1.25, 2, 4]))
    return Question(
        draw(allocations(6)),
        init_batch_size,
        None if factor is None else int(init_batch_size * factor),
        low,
        draw(st.one_of(st.none(), st.integers(low or 1, 48))),
        draw(st.booleans()),
        draw(SEQUENCES),
    )


def check(goodput_fn: GoodputFunction, question: Question) -> None:
    assert compare(goodput_fn, question) >= NEAR


def compare(goodput_fn: GoodputFunction, question: Question) -> float:
    """Return the goodput of the answer over that of the best, once the answer is proven allowed."""
    every, found = Every(goodput_fn, question).goodput, question.ask(goodput_fn)
    if not every:
        assert found.goodput == 0.0
        return 1.0
    choice = Choice(found.num_microbatches, found.num_stages, found.atomic_bsz, found.accum_steps)
    assert choice in every  # so it breaks no bound
    assert found.goodput == pytest.approx(every[choice])
    return found.goodput / max(every.values())


@examples(60, 500)
@given(pipelines(), grad_params(), questions())
def test_against_every_number_of_micro_batches(
    params: PerfParams, gradient: GradParams, question: Question
) -> None:
    check(GoodputFunction(params, gradient, question.init_batch_size), question)


def compare_random(
    least: int, most: int, several: Sequence[Sequence[int]], count: int
) -> list[float]:
    """Goodput over the best of random jobs with an initial batch size in a range."""
    rng = np.random.default_rng(0)
    near = []
    for _ in range(count):
        init_batch_size, replicas = int(rng.integers(least, most)), int(rng.integers(1, 7))
        question = Question(
            (int(rng.integers(1, replicas + 1)), replicas),
            init_batch_size,
            [None, *(int(x * init_batch_size) for x in (1.25, 2, 4))][rng.integers(4)],
            [None, 1, 4, 8][rng.integers(4)],
            [None, 8, 64, 256][rng.integers(4)],
            bool(rng.integers(4)),
            several[rng.integers(len(several))],
        )
        seven = np.append(np.exp(rng.uniform(np.log(1e-4), np.log(0.5), 6)), rng.uniform(1, 10))
        gradient = GradParams(*np.exp(rng.uniform(-6, 6, 2)).tolist())
        goodput_fn = GoodputFunction(seven.tolist(), gradient, init_batch_size)
        near.append(compare(goodput_fn, question))
    return near


COUNTS = first(1, [150, 500])


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("several", [[[1]], [[1, 3], [4], [2, 8]]], ids=str)
def test_against_every_batch_size_of_small_ranges(
    several: Sequence[Sequence[int]], count: int
) -> None:
    assert min(compare_random(1, 40, several, count)) >= NEAR


@pytest.mark.parametrize("count", COUNTS)
def test_against_every_batch_size_of_large_ranges(count: int) -> None:
    # Too many for optimize to try all of them; what it misses is a batch that many small steps
    # divide evenly, for a job whose steps cost next to nothing.
    near = compare_random(40, 200, [[1], [1, 3], [4], [2, 8]], count)
    assert min(near) > 0.97
    assert np.quantile(near, 0.01) >= NEAR


@pytest.mark.parametrize("replicas", [1, 3, 8, 16, 40])
def test_without_a_largest_batch_size_accumulation_does_not_enlarge_it(replicas: int) -> None:
    goodput_fn = GoodputFunction(SEVEN, (1e-6, 80.0), 16)  # larger batches cost nothing
    found = goodput_fn.optimize(1, replicas, accumulation=True, num_microbatches=2)
    assert found.goodput > 0
    batch_size = replicas * found.atomic_bsz * (found.accum_steps + 1)
    assert 16 <= batch_size < 16 + replicas


@st.composite
def plans(draw: st.DrawFn) -> list[StagePlan]:
    """Cuts of one random model into different numbers of stages."""
    seconds, many = st.floats(1e-4, 0.05), st.integers(0, 100)
    layer = st.builds(Layer, *[seconds] * 4, *[many] * 5)
    profile = LayerProfile.from_layers(draw(st.lists(layer, min_size=2, max_size=5)), 10.0)
    stages = range(1, min(3, profile.num_layers) + 1)
    how: dict[str, Any] = {
        "checkpoint": draw(st.sampled_from(["never", "except_last", "always"])),
        "schedule": draw(st.sampled_from(["gpipe", "1f1b"])),
    }
    return [
        plan_stages(profile, num_stages, 4, SEVEN, micro_bsz=4, **how)
        for num_stages in draw(st.lists(st.sampled_from(stages), min_size=1, unique=True))
    ]


@examples(24, 300)
@given(plans(), grad_params(), questions(), st.floats(0.05, 3.0))
def test_against_every_number_of_stages_within_memory(
    plans: list[StagePlan], gradient: GradParams, question: Question, scarcity: float
) -> None:
    # From less than one sample takes to more than all of them.
    needed = max(plan.memory(question.init_batch_size, 1).max() for plan in plans)
    limited = Question(
        **{
            **vars(question),
            "plans": plans,
            "memory_limit": float(scarcity * needed) + 1.0,
        }
    )
    goodput_fn = GoodputFunction(plans[0].perf_params, gradient, question.init_batch_size)
    check(goodput_fn, limited)


@examples(25)
@given(pipelines(), grad_params(), questions(), st.lists(allocations(12), min_size=1, max_size=8))
def test_arrays_give_what_scalars_give(
    params: PerfParams,
    gradient: GradParams,
    question: Question,
    several: list[tuple[int, int]],
) -> None:
    goodput_fn = GoodputFunction(params, gradient, question.init_batch_size)
    together = goodput_fn.optimize(*np.array(several).T, **question.arguments())
    for index, allocation in enumerate(several):
        alone = goodput_fn.optimize(*allocation, **question.arguments())
        assert alone.goodput == pytest.approx(together.goodput[index], rel=1e-9)
        if alone.goodput > 0:
            assert alone[1:] == (together.atomic_bsz[index], together.accum_steps[index])
            assert alone.num_microbatches == together.num_microbatches[index]
            assert alone.num_stages == together.num_stages[index]


def test_unpacks_to_adaptdls_three_and_knows_three_more() -> None:
    goodput_fn = GoodputFunction(SEVEN, (1.0, 8.0), 32)
    found = goodput_fn.optimize(1, 2, 256, (8, 64), True, num_microbatches=(2, 4))
    goodput, atomic_bsz, accum_steps = found
    assert (goodput, atomic_bsz, accum_steps) == tuple(found)
    assert found.goodput == goodput
    assert goodput == pytest.approx(goodput_fn(1, 2, atomic_bsz, accum_steps, 2))
    assert (found.num_microbatches, found.num_stages, found.plan) == (2, 1, 0)
    types = [type(v) for v in (*found, found.num_microbatches, found.num_stages, found.plan)]
    assert types == [float, int, int, int, int, int]
    shape = goodput_fn.optimize([[1], [2]], [2, 3, 4], num_microbatches=(2, 4))
    for values in (*shape, shape.num_microbatches, shape.num_stages, shape.plan):
        assert values.shape == (2, 3)


def test_nothing_of_nothing() -> None:
    empty = np.zeros(0, int)
    found = GoodputFunction(SEVEN, (1.0, 8.0), 32).optimize(empty, empty)
    assert all(values.shape == (0,) for values in found)


def test_more_choice_is_never_worse() -> None:
    params = SEVEN._replace(forward_shares=(0.2, 0.1), backward_shares=(0.4, 0.3))
    goodput_fn = GoodputFunction(params, (1.0, 8.0), 32)
    nodes, replicas = np.array([1, 1, 2, 4]), np.array([1, 4, 8, 16])
    alone = [goodput_fn.optimize(nodes, replicas, 1024, (4, 64), True, m) for m in (2, 4, 8)]
    among = goodput_fn.optimize(nodes, replicas, 1024, (4, 64), True, (2, 4, 8))
    np.testing.assert_array_equal(among.goodput, np.max([one.goodput for one in alone], axis=0))


def test_scarce_memory_takes_more_stages_or_micro_batches() -> None:
    # One stage holds all of it; two hold half each; and micro-batches go through one by one.
    layer = Layer(1e-3, 1e-3, 1e-3, 2e-3, 1000.0, 2000.0, 10.0, 1.0)
    profile = LayerProfile((layer,) * 4)
    cuts = [plan_stages(profile, k, 8, SEVEN, micro_bsz=4, checkpoint="always") for k in (1, 2, 4)]
    goodput_fn = GoodputFunction(cuts[0].perf_params, (1.0, 8.0), 64)
    ask = {"max_batch_size": 64, "plans": cuts, "num_microbatches": (2, 4, 8)}
    found = [
        goodput_fn.optimize(1, 2, memory_limit=limit, **ask)
        for limit in (1e9, 17_000.0, 8_500.0, 4_300.0, 3_000.0)
    ]
    goodput = [one.goodput for one in found]
    assert goodput == sorted(goodput, reverse=True)
    assert [one.num_stages for one in found[:4]] == [4, 4, 4, 4]
    assert goodput[-1] == 0.0  # parameters alone need 4000 bytes
    only_two = goodput_fn.optimize(1, 2, memory_limit=8_500.0, **{**ask, "plans": cuts[:2]})
    assert only_two.num_stages == 2


def test_1f1b_runs_larger_batches_where_gpipe_does_not_fit() -> None:
    layer = Layer(1e-3, 1e-3, 1e-3, 2e-3, 1000.0, 2000.0, 10.0, 1.0)
    profile = LayerProfile((layer,) * 4)
    gpipe = plan_stages(profile, 4, 8, SEVEN, micro_bsz=4)
    # The request of the parameters counts where none is given.
    other = plan_stages(profile, 4, 8, SEVEN._replace(schedule="1f1b"), micro_bsz=4)
    assert (gpipe.schedule, other.schedule) == ("gpipe", "1f1b")
    ask: dict[str, Any] = {
        "max_batch_size": 512,
        "num_microbatches": 32,
        "memory_limit": float(gpipe.memory(4, 32).max()),
    }
    goodput_fn = GoodputFunction(gpipe.perf_params, (1.0, 1000.0), 64)
    one, two = (goodput_fn.optimize(1, 1, plans=[plan], **ask) for plan in (gpipe, other))
    # Activations of 32 micro-batches, or of the first stage's 4: eight times as many samples.
    assert (one.atomic_bsz, two.atomic_bsz) == (32 * 4, 512)
    assert two.goodput > 1.1 * one.goodput
    # So it runs with a limit that leaves no room for the other.
    ask["memory_limit"] = float(other.memory(2, 32).max())
    one, two = (goodput_fn.optimize(1, 1, plans=[plan], **ask) for plan in (gpipe, other))
    assert one.goodput == 0
    assert two.atomic_bsz == 64
    assert two.goodput > 0
    # Offered both, the search says which.
    assert goodput_fn.optimize(1, 1, plans=[gpipe, other], **ask).plan == 1
    assert goodput_fn.optimize(1, 1, plans=[other, gpipe], **ask).plan == 0


@pytest.mark.parametrize("copies", [None, Link(1e-3, 1e4)])
@pytest.mark.parametrize("contention", [0.0, 0.3])
def test_searches_look_at_each_micro_batch_size_once(
    copies: Link | None, contention: float
) -> None:
    """1F1B is played for a few sizes where GPipe's formula takes all: with the same answer."""
    layers = [Layer(1e-3, k * 1e-3, 1e-3, 2e-3, 1e3, 2e3, 10.0, 1.0) for k in (1, 3, 2, 2)]
    base = SEVEN._replace(schedule="1f1b", contention=contention)
    plan = plan_stages(LayerProfile(tuple(layers)), 3, 8, base, micro_bsz=4, link=copies)
    goodput_fn = GoodputFunction(plan.perf_params, (1.0, 8.0), 32)
    nodes, sizes = np.array([1, 1, 2]), np.arange(32, 160, 16)[:, None]
    found = goodput_fn.step_time(nodes, [1, 2, 6], sizes, 1, [4, 8, 8])
    for row, column in np.ndindex(8, 3):
        place = int(nodes[column]), (1, 2, 6)[column], int(sizes[row, 0]), 1, (4, 8, 8)[column]
        alone = goodput_fn.step_time(*place)
        for many, one in zip(found, alone, strict=True):
            assert np.broadcast_to(many, (8, 3))[row, column] == pytest.approx(one, rel=1e-12)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_microbatches": 0}, "num_microbatches 0; give"),
        ({"num_microbatches": ()}, "num_microbatches >= 1"),
        ({"num_microbatches": (4, 0)}, r"num_microbatches \(4, 0\)"),
        ({"num_nodes": 3}, "num_nodes is 3, num_replicas 2"),
        ({"max_batch_size": -1}, "max_batch_size is -1; give at least 1 or None"),
        ({"memory_limit": 1e9}, r"memory_limit is 1e\+09 but there are no plans"),
    ],
)
def test_wrong_arguments_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    goodput_fn = GoodputFunction(SEVEN, (1.0, 8.0), 32)
    with pytest.raises(ValueError, match=message):
        goodput_fn.optimize(**{"num_nodes": 1, "num_replicas": 2, **change})


def test_with_a_memory_limit_every_micro_batch_has_a_sample() -> None:
    layers = [Layer(0, 1, 0, 2, activation_bytes=1.0)] * 4
    plan = plan_stages(LayerProfile.from_layers(layers), 2, 4, SEVEN, micro_bsz=1)
    goodput_fn = GoodputFunction(plan.perf_params, (1.0, 8.0), 32)
    ask: dict[str, Any] = {"plans": (plan,), "memory_limit": 1e9, "num_microbatches": (4, 16)}
    found = goodput_fn.optimize(4, 8, 32, **ask)
    assert (found.atomic_bsz, found.num_microbatches) == (4, 4)
    assert goodput_fn.optimize(4, 16, 32, **ask).goodput == 0.0
