"""What a change of an allocation costs, against its definition, and what that does to decisions."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipollux_policies import (
    Allocation,
    ChangeKind,
    ExactPolicy,
    FairSpeedup,
    JobInfo,
    NodeInfo,
    PolluxPolicy,
    ReplicaShape,
    SiaPolicy,
    change_kind,
    change_seconds,
    num_survivors,
)
from pipollux_policies.allocations.change_cost import possible_survivors
from pipollux_policies.placement.node_choice import find_keeping, find_nodes
from tests.extent import examples
from tests.policies.policy_cases import POLICIES, scaling

SHAPES = [
    ReplicaShape(stages, {"slots": stages}, scaling(0), gpu_type=gpu_type)
    for stages in (1, 2)
    for gpu_type in (None, "a")
]


def job(**fields: Any) -> JobInfo:
    return JobInfo({"slots": 1}, scaling(0.1), 0.0, 1, 8, **fields)


@st.composite
def allocations(draw: st.DrawFn) -> Allocation:
    nodes = draw(st.lists(st.sampled_from("abc"), max_size=5))
    return Allocation(nodes, draw(st.sampled_from(SHAPES)) if nodes else None)


@examples(300, 1500)
@given(
    old=allocations(),
    new=allocations(),
    rescale=st.sampled_from([None, 0.0, 1.0, 30.0, 100.0]),
)
def test_the_price_is_as_defined(old: Allocation, new: Allocation, rescale: float | None) -> None:
    """Replicas are matched one by one: every pair of equal nodes is a survivor, once."""
    left = list(new)
    survivors = []
    for node in old:
        if node in left:
            left.remove(node)
            survivors.append(node)
    same = old.shape is new.shape
    if same and sorted(old) == sorted(new):
        expected = 0.0
    elif same and survivors and rescale is not None:
        expected = min(rescale, 30.0)
    else:
        expected = 30.0
    told = job(rescale_seconds=rescale)
    assert num_survivors(old, new) == len(survivors)
    assert change_seconds(told, old, new) == expected
    assert change_kind(told, old, new) is change_kind(told, new, old)
    assert change_kind(job(), old, new) is not ChangeKind.RESIZE


def test_what_can_survive() -> None:
    nodes = {
        "a": NodeInfo({"slots": 4}),
        "drains": NodeInfo({"slots": 4}, draining=True),
        "ill": NodeInfo({"slots": 4}, healthy=False),
    }
    elastic = job(rescale_seconds=1.0)
    assert possible_survivors(elastic, ["a", "a", "drains"], nodes) == Counter(a=2)
    assert possible_survivors(elastic, ["drains"], nodes) == Counter()
    # A replica that is lost takes the others with it.
    assert possible_survivors(elastic, ["a", "ill"], nodes) == Counter()
    assert possible_survivors(elastic, ["a", "gone"], nodes) == Counter()
    assert possible_survivors(job(), ["a"], nodes) == Counter()
    # It runs in a shape that it does not have any more.
    assert possible_survivors(elastic, Allocation(["a"], SHAPES[2]), nodes) == Counter()


@pytest.mark.parametrize("seconds", [-1.0, float("nan")])
def test_a_price_out_of_range_is_named(seconds: float) -> None:
    with pytest.raises(ValueError, match=rf"rescale_seconds: {seconds} must be at least 0 or None"):
        job(rescale_seconds=seconds)


def test_time_lost_counts_both_kinds_of_changes() -> None:
    changed = job(age=100.0, num_restarts=1, num_rescales=5, rescale_seconds=2.0)
    assert changed.num_changes == 6
    assert changed.change_factor(elastic=True) == pytest.approx((100 - 30 - 10) / 102)
    assert changed.change_factor(elastic=False) == pytest.approx((100 - 30 - 10) / 130)


@examples(200, 1000)
@given(
    counts=st.lists(st.integers(0, 4), min_size=1, max_size=5),
    draw=st.randoms(use_true_random=False),
    replicas=st.integers(1, 9),
)
def test_nodes_that_keep_replicas_are_found_if_there_are_any(
    counts: list[int], draw: Any, replicas: int
) -> None:
    held = np.array([draw.randint(0, 2) for _ in counts])
    closed = np.array([draw.random() < 0.2 for _ in counts])
    possible = [
        row
        for row in itertools.product(*(range(most + 1) for most in counts))
        if sum(row) == replicas
        and any(min(here, was) for here, was in zip(row, held, strict=True))
        and not (np.count_nonzero(row) > 1 and (closed & (np.array(row) > 0)).any())
    ]
    found = find_keeping(np.array(counts), closed, replicas, held)
    if found is None:
        assert not possible
        return
    row = tuple(dict(found).get(node, 0) for node in range(len(counts)))
    assert row in possible
    assert len(found) == min(np.count_nonzero(other) for other in possible)
    assert find_keeping(np.array(counts), closed, replicas, held, max_nodes=len(found)) == found
    assert find_nodes(np.array(counts), closed, replicas) is not None
    if np.count_nonzero(row) == 1:
        alone = [o for o in possible if np.count_nonzero(o) == 1]
        assert _kept(row, held) == max(_kept(other, held) for other in alone)


def _kept(row: Any, held: Any) -> int:
    return int(np.minimum(row, held).sum())


PRICED = {
    "exact": ExactPolicy,
    "exact-fair": lambda: ExactPolicy(FairSpeedup()),
    "pollux": PolluxPolicy,
    "sia": SiaPolicy,
}


@pytest.mark.parametrize("policy", PRICED)
@pytest.mark.parametrize(("rescale", "replicas"), [(None, 1), (30.0, 1), (1.0, 2)])
def test_a_job_grows_for_the_price_of_a_resize_and_not_for_a_restart(
    policy: str, rescale: float | None, replicas: int
) -> None:
    """7 % more speed at age 300: a restart costs 9 % (30 of 330 s), an elastic resize 0.3 %."""
    node = NodeInfo({"slots": 2})
    grows = JobInfo(
        {"slots": 1},
        lambda _nodes, count: 1.0 + 0.07 * (np.asarray(count) - 1.0),
        *(0.0, 1, 2),
        age=300.0,
        rescale_seconds=rescale,
    )
    answer, _ = PRICED[policy]().optimize({"j": grows}, {"n": node}, {"j": ["n"]}, node)
    assert answer["j"] == ["n"] * replicas


@pytest.mark.parametrize("policy", PRICED)
def test_the_price_of_a_resize_is_no_price_of_another_number_of_stages(policy: str) -> None:
    """Two stages are 7 % faster, which is worth an elastic resize but not a restart."""
    node = NodeInfo({"slots": 2})
    faster = ReplicaShape(2, {"slots": 2}, scaling(0, pace=1.07))
    one = JobInfo(
        *({"slots": 1}, scaling(0), 0.0, 1, 1),
        age=300.0,
        rescale_seconds=1.0,
        shapes=(faster,),
    )
    base = {"j": Allocation(["n"], one.all_shapes[0])}
    answer, _ = PRICED[policy]().optimize({"j": one}, {"n": node}, base, node)
    assert answer["j"].num_stages == 1
    old = replace(one, age=30_000.0)
    if policy != "exact":  # which has its own estimate of how long an allocation lasts
        answer, _ = PRICED[policy]().optimize({"j": old}, {"n": node}, base, node)
        assert answer["j"].num_stages == 2


@pytest.mark.parametrize("policy", POLICIES)
def test_replicas_stay_where_another_node_would_do_as_well(policy: str) -> None:
    """The job must leave a draining node, and grows on the one that it is on besides."""
    nodes = {
        "drains": NodeInfo({"slots": 4}, draining=True),
        **{name: NodeInfo({"slots": 4}) for name in "abcd"},
    }
    spread = replace(
        job(age=5000.0, rescale_seconds=1.0, remaining_work=1e5), min_replicas=2, max_replicas=4
    )
    for here in "abcd":
        base = {"j": Allocation([here, "drains"], spread.all_shapes[0])}
        answer, _ = POLICIES[policy].make().optimize({"j": spread}, nodes, base, nodes["a"])
        assert set(answer["j"]) == {here}


def test_a_growth_that_can_keep_nothing_takes_no_more_than_was_chosen() -> None:
    """No grown job fits where it is, and of two on a node of four slots both get what is best.

    The choice counts on the price of an elastic resize. Where a job is placed without it, the rest
    of the node is for the jobs that are placed after it.
    """

    def on_one_node(num_nodes: Any, num_replicas: Any) -> Any:
        replicas = np.asarray(num_replicas, dtype=float)
        return np.where(np.asarray(num_nodes) > 1, 0.5, replicas**0.9)

    nodes, jobs, base = {}, {}, {}
    for i in range(4):
        nodes |= {f"a{i}": NodeInfo({"slots": 2}), f"b{i}": NodeInfo({"slots": 4})}
        one = JobInfo({"slots": 1}, on_one_node, 0.0, 0, 1)
        jobs[f"pinned{i}"] = replace(one, preemptible=False)
        jobs[f"grows{i}"] = replace(one, max_replicas=4, age=3000.0, rescale_seconds=1.0)
        jobs[f"new{i}"] = replace(one, resources={"slots": 2}, num_stages=2)
        jobs[f"small{i}"] = one
        base |= {f"pinned{i}": [f"a{i}"], f"grows{i}": [f"a{i}"]}
    answer, certificate = ExactPolicy(FairSpeedup()).solve(jobs, nodes, base, nodes["b0"])
    assert all(answer.values())
    assert certificate.gap < 0.01


@pytest.mark.parametrize("wide", [False, True])
def test_of_jobs_that_all_grow_as_many_as_can_stay_where_they_are(wide: bool) -> None:
    """Four of eight can have a second replica on each full node; wider jobs still find room."""
    nodes = {f"n{number}": NodeInfo({"slots": 8}) for number in range(10)}
    grows = replace(job(age=5000.0, rescale_seconds=1.0, remaining_work=1e5), max_replicas=2)
    names = [f"j{number:02}" for number in range(32)]
    jobs = dict.fromkeys(names, grows)
    base = {name: [f"n{number // 8}"] for number, name in enumerate(names)}
    if wide:
        jobs |= {f"wide{number}": replace(job(), min_replicas=8) for number in range(2)}
    answer, _ = ExactPolicy().optimize(jobs, nodes, base, nodes["n0"])
    assert {len(answer[name]) for name in names} == {2}
    assert sum(base[name][0] in answer[name] for name in names) == 16
    assert all(len(answer[name]) == 8 for name in jobs.keys() - base)


@pytest.mark.parametrize("start", [False, True])
def test_of_nodes_alike_a_job_takes_those_that_no_job_holds_which_is_still_to_be_placed(
    start: bool,
) -> None:
    """Jobs that grow twofold keep all their replicas, beside one that starts, too."""
    nodes = {f"n{number:02}": NodeInfo({"slots": 4}) for number in range(20)}
    grows = replace(job(age=5000.0, rescale_seconds=1.0, remaining_work=1e5), max_replicas=32)
    held = {"a": range(8, 12), "b": range(3), "c": range(4, 6)}
    base = {name: [f"n{node:02}" for node in its for _ in range(4)] for name, its in held.items()}
    jobs = {name: replace(grows, max_replicas=2 * len(its)) for name, its in base.items()}
    if start:
        jobs["new"] = replace(job(), min_replicas=3, max_replicas=3)
    answer, _ = ExactPolicy().optimize(jobs, nodes, base, nodes["n00"])
    for name, its in base.items():
        assert len(answer[name]) == 2 * len(its)
        assert num_survivors(Allocation(its), answer[name]) == len(its)
