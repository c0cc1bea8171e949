"""Jobs that are searched for together get what each gets alone, whatever their neighbours."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipollux_perfmodel import (
    GoodputFunction,
    PerfParams,
    SpeedupFunction,
    search_all,
    speedups_of,
)
from pipollux_perfmodel.goodput import batch_size, stacks
from pipollux_perfmodel.goodput.candidate_goodput import CandidateGoodput
from pipollux_perfmodel.goodput.candidates import Proposal, propose
from pipollux_perfmodel.partitioning.layer_profile import Layer, LayerProfile
from pipollux_perfmodel.partitioning.stage_plan import plan_stages
from tests.extent import examples
from tests.perfmodel.strategies import grad_params, perf_params, pipelines

SEVEN = PerfParams(0.1, 0.01, 0.2, 0.02, 0.05, 0.01, 1.5)
NODES, REPLICAS = np.array([1, 1, 1, 2, 2, 3, 4]), np.array([1, 2, 7, 2, 16, 33, 64])


@st.composite
def limits(draw: st.DrawFn) -> dict[str, Any]:
    """Bounds of a batch, of which some leave few batch sizes, and some none."""
    low = draw(st.sampled_from([None, 1, 8, 20]))
    high = draw(st.sampled_from([None, 24, 128, 1000]))
    counts = st.sampled_from([1, 4, (1, 4), (2, 8)])
    return {
        "max_batch_size": draw(st.sampled_from([None, 32, 50, 700, 4096])),
        "atomic_bsz_range": (low, high),
        "accumulation": draw(st.booleans()),
        "num_microbatches": draw(counts),
    }


def jobs() -> st.SearchStrategy[list[tuple[GoodputFunction, dict[str, Any]]]]:
    """A few jobs: of one stage, pipelines of any schedule, with like powers and unlike ones."""
    params = st.one_of(
        perf_params(1),
        perf_params(),
        pipelines(),
        perf_params(2).map(lambda p: p._replace(gamma=2.0)),
    )
    goodput_fn = st.builds(GoodputFunction, params, grad_params(), st.sampled_from([20, 32]))
    return st.lists(st.tuples(goodput_fn, limits()), min_size=1, max_size=6)


@examples(32, 600)
@given(jobs())
def test_a_search_among_others_finds_what_it_finds_alone(
    asked: list[tuple[GoodputFunction, dict[str, Any]]],
) -> None:
    together = search_all([fn.search(NODES, REPLICAS, **bounds) for fn, bounds in asked])
    for (goodput_fn, bounds), found in zip(asked, together, strict=True):
        alone = goodput_fn.optimize(NODES, REPLICAS, **bounds)
        np.testing.assert_allclose(found.goodput, alone.goodput, rtol=1e-12, atol=0)
        for column, best in enumerate(found.goodput):
            # Of configurations that are as good as each other either may be named.
            sizes = int(found.atomic_bsz[column]), int(found.accum_steps[column])
            if best > 0:
                where = int(NODES[column]), int(REPLICAS[column])
                plan = int(found.num_microbatches[column])
                value = goodput_fn(*where, *sizes, plan)
                assert value == pytest.approx(best, rel=1e-12)


@examples(32, 600)
@given(jobs())
def test_what_is_estimated_first_is_chosen_bit_for_bit_as_if_all_were_evaluated(
    asked: list[tuple[GoodputFunction, dict[str, Any]]],
) -> None:
    found = []
    for few in (0, 10**9):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(batch_size, "_FEW_TO_ESTIMATE", few)
            searches = [fn.search(NODES, REPLICAS, **bounds) for fn, bounds in asked]
            found.append(search_all(searches))
    for estimated, evaluated in zip(*found, strict=True):
        for values, expected in zip(estimated, evaluated, strict=True):
            np.testing.assert_array_equal(values, expected)
        np.testing.assert_array_equal(estimated.num_microbatches, evaluated.num_microbatches)


@examples(32, 600)
@given(jobs())
def test_candidates_passed_over_change_no_bit(
    asked: list[tuple[GoodputFunction, dict[str, Any]]],
) -> None:
    """Neither the bound on neighbours nor the search for equal ones leaves out what is best."""
    found = []
    for thorough in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(batch_size, "_FEW_TO_ESTIMATE", 10**9 if thorough else 0)
            if thorough:
                patch.setattr(batch_size, "propose", propose_all)
                patch.setattr(CandidateGoodput, "most_nearby", lambda *_: None)
            searches = [fn.search(NODES, REPLICAS, **bounds) for fn, bounds in asked]
            found.append(search_all(searches))
    for sparing, thorough in zip(*found, strict=True):
        for values, expected in zip(sparing, thorough, strict=True):
            np.testing.assert_array_equal(values, expected)


def propose_all(*args: Any) -> Proposal:
    """Propose what is equal to another candidate, too."""
    return Proposal(*(part._replace(allowed=np.ones_like(part.allowed)) for part in propose(*args)))


def test_many_jobs_are_bit_for_bit_as_alone_however_they_are_divided(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = np.random.default_rng(0)
    seconds = rng.uniform(0.02, 0.4, 30)
    functions = [
        GoodputFunction(SEVEN._replace(alpha_c=s, beta_c=s / 40, gamma=1 + s), (1.0, 9 * s), 32)
        for s in seconds
    ]
    bounds: list[dict[str, Any]] = [
        {"max_batch_size": 2048, "atomic_bsz_range": (8, 200 + number % 3), "accumulation": True}
        for number in range(30)
    ]
    alone = [fn.optimize(NODES, REPLICAS, **b) for fn, b in zip(functions, bounds, strict=True)]
    for most in (1, 20, 10_000):
        monkeypatch.setattr(stacks, "_MOST_COLUMNS", most)
        asked = [fn.search(NODES, REPLICAS, **b) for fn, b in zip(functions, bounds, strict=True)]
        for found, one in zip(search_all(asked), alone, strict=True):
            for values, expected in zip(found, one, strict=True):
                np.testing.assert_array_equal(values, expected)


def test_what_is_asked_when_the_interpreter_ends_is_answered() -> None:
    """As the last hints of a job are: no thread can be begun then."""
    script = """
import atexit, os, threading
import numpy as np
from pipollux_perfmodel import GoodputFunction, PerfParams
from pipollux_perfmodel.goodput import stacks
from pipollux_perfmodel.goodput.config_search import search_all

def ask():
    stacks._MOST_COLUMNS = 1
    os.sched_getaffinity = lambda _: {0, 1}
    times = PerfParams(0.1, 0.01, 0.2, 0.02, 0.05, 0.01, 1.5)
    fn, bounds = GoodputFunction(times, (1.0, 9.0), 32), {"max_batch_size": 64}
    nodes, replicas = np.array([1, 1]), np.array([1, 2])
    asked = [fn.search(nodes, replicas, **bounds) for _ in range(3)]
    print(len(search_all(asked)), threading.active_count())

ask()
atexit.register(ask)
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout, done.stderr) == ("3 1\n3 1\n", "")


@examples(16, 300)
@given(jobs(), st.booleans(), st.booleans())
def test_speedups_found_together_are_those_that_each_function_would_find(
    asked: list[tuple[GoodputFunction, dict[str, Any]]], monotone: bool, based: bool
) -> None:
    options = {"monotone": monotone, "base_goodput": 3.0 if based else None}
    ones, others = (
        [SpeedupFunction(fn, **bounds, **options) for fn, bounds in asked] for _ in range(2)
    )
    ones[0](1, 2)  # some is known before
    found = speedups_of((one, NODES, REPLICAS) for one in ones)
    for one, other, told in zip(ones, others, found, strict=True):
        assert one.base_goodput == pytest.approx(other.base_goodput, rel=1e-12)
        expected = other(NODES, REPLICAS)
        np.testing.assert_array_equal(told, one(NODES, REPLICAS))
        np.testing.assert_allclose(one(NODES, REPLICAS), expected, rtol=1e-12, atol=0)


def test_what_was_learned_is_not_searched_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    one = SpeedupFunction(GoodputFunction(SEVEN, (1.0, 8.0), 32), 1024, (8, 64), True)
    known, nothing, few = speedups_of([(one, NODES, REPLICAS), (one, 0, 0), (one, 1, [[2], [7]])])
    monkeypatch.setattr(GoodputFunction, "search", None)
    np.testing.assert_array_equal(speedups_of([(one, NODES, REPLICAS)]), [known])
    np.testing.assert_array_equal(one(NODES, REPLICAS), known)
    assert nothing == 0.0
    np.testing.assert_array_equal(few, known[1:3, None])
    with pytest.raises(ValueError, match="num_nodes is 3, num_replicas 2"):
        speedups_of([(one, 3, 2)])


def test_a_goodput_of_its_own_is_asked_alone() -> None:
    class Doubled(GoodputFunction):
        def optimize(self, *args: Any, **kwargs: Any) -> Any:
            best = super().optimize(*args, **kwargs)
            return type(best)(best.goodput * np.asarray(args[1]), *best[1:])

    one, other = (
        SpeedupFunction(Doubled(SEVEN, (1.0, 8.0), 32), 1024, (8, 64), True) for _ in range(2)
    )
    (found,) = speedups_of([(one, NODES, REPLICAS)])
    np.testing.assert_array_equal(found, other(NODES, REPLICAS))


def test_plans_within_memory_are_as_alone() -> None:
    functions: list[tuple[GoodputFunction, dict[str, Any]]] = []
    for number in range(4):
        layers = LayerProfile.from_layers(
            [Layer(0.0, 1.0 + number, 0.0, 2.0, activation_bytes=3.0)] * 6
        )
        plans = tuple(plan_stages(layers, k, 4, SEVEN, micro_bsz=8) for k in (1, 2, 3))
        goodput_fn = GoodputFunction(SEVEN, (1.0, 8.0), 32)
        bounds = {"max_batch_size": 512, "num_microbatches": (4, 8), "memory_limit": 2000.0}
        functions.append((goodput_fn, {**bounds, "plans": plans}))
    found = search_all([fn.search(NODES, REPLICAS, **b) for fn, b in functions])
    for (goodput_fn, b), one in zip(functions, found, strict=True):
        alone = goodput_fn.optimize(NODES, REPLICAS, **b)
        np.testing.assert_array_equal(one.goodput, alone.goodput)
        np.testing.assert_array_equal(one.plan, alone.plan)
        np.testing.assert_array_equal(one.num_stages, alone.num_stages)
