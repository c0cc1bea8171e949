"""Policies to be measured against: the rules that all of them keep to, and where replicas go."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipollux_policies import (
    Allocation,
    FifoPolicy,
    NodeInfo,
    OptimusPolicy,
    SiaPolicy,
    TiresiasPolicy,
    is_pinned,
    violations,
)
from pipollux_policies.placement.cluster_state import ClusterState, ReplicaRequest
from tests.extent import examples
from tests.policies.baseline_cases import NODE, World, fixed, random_world

POLICIES: dict[str, Callable[[], Any]] = {
    "fifo": FifoPolicy,
    "fifo, backfill": lambda: FifoPolicy(backfill=True),
    "tiresias": TiresiasPolicy,
    "tiresias, promotion": lambda: TiresiasPolicy(queue_thresholds=(600, 6000), promotion=2.0),
    "optimus": OptimusPolicy,
    "sia": SiaPolicy,
}
ADAPTS = {name: name == "sia" for name in POLICIES}


def ask(name: str, world: World) -> dict[Any, Allocation]:
    template = NodeInfo({"slots": 4})
    return POLICIES[name]().optimize(world.jobs, world.nodes, world.base, template)[0]


worlds = st.integers(0, 2**31).map(random_world)
each_policy = pytest.mark.parametrize("policy", POLICIES)
often = examples(15, 75)


@each_policy
@often
@given(world=worlds)
def test_answers_break_no_rule(policy: str, world: World) -> None:
    answer = ask(policy, world)
    assert answer.keys() == world.jobs.keys()
    assert violations(world.jobs, world.nodes, world.base, answer) == []
    for name, job in world.jobs.items():
        if is_pinned(job, world.base.get(name, ()), world.nodes):
            assert list(answer[name]) == list(world.base[name])


@each_policy
@often
@given(world=worlds)
def test_the_order_of_mappings_is_irrelevant(policy: str, world: World) -> None:
    mirrored = World(
        dict(reversed(world.jobs.items())),
        dict(reversed(world.nodes.items())),
        dict(reversed(world.base.items())),
    )
    assert ask(policy, world) == ask(policy, mirrored)


@each_policy
@often
@given(world=worlds)
def test_asked_again_nothing_changes(policy: str, world: World) -> None:
    first = ask(policy, world)
    second = ask(policy, replace(world, base=first))
    assert second == first
    assert [second[n].num_stages for n in second] == [first[n].num_stages for n in first]


@each_policy
@often
@given(world=worlds)
def test_an_unchanged_allocation_keeps_its_order(policy: str, world: World) -> None:
    for name, allocation in ask(policy, world).items():
        base = world.base.get(name, ())
        stages = getattr(base, "num_stages", None)
        if Counter(base) == Counter(allocation) and stages in (None, allocation.num_stages):
            assert list(base) == list(allocation)


@each_policy
def test_the_simulator_is_told_whose_jobs_choose_their_batch_size(policy: str) -> None:
    assert POLICIES[policy]().adapts_batch_size == ADAPTS[policy]


@each_policy
def test_nothing_to_do(policy: str) -> None:
    job = fixed(0, 1)
    assert POLICIES[policy]().optimize({}, {}, {}, NODE) == ({}, 0)
    assert POLICIES[policy]().optimize({"j": job}, {}, {"j": ["gone"]}, NODE) == ({"j": []}, 1)
    assert POLICIES[policy]().optimize({"j": job}, {"n": NODE}, {}, NODE)[1] == 1


# Where replicas go.


def test_one_node_is_the_tightest_that_holds_all() -> None:
    nodes = {"a": NODE, "b": NodeInfo({"slots": 3}), "spot": NodeInfo({"slots": 2}, True)}
    job = fixed(0, 1)
    state, shapes = ClusterState({"j": job}, nodes, {}), job.all_shapes
    assert state.find("j", ReplicaRequest(shapes, 2)) == ["b", "b"]
    assert state.find("j", ReplicaRequest(shapes, 4)) == ["a"] * 4
    assert state.find("j", ReplicaRequest(shapes, 6)) == ["a"] * 4 + ["b"] * 2
    assert state.find("j", ReplicaRequest(shapes, 9)) == ["a"] * 4 + ["b"] * 3 + ["spot"] * 2
    assert state.find("j", ReplicaRequest(shapes, 9, max_nodes=2)) is None
    assert state.find("j", ReplicaRequest(shapes, 10)) is None


def test_no_two_distributed_jobs_meet() -> None:
    nodes = {"a": NODE, "b": NODE}
    jobs = {"old": fixed(0, 6), "wide": fixed(1, 2, stages=2), "new": fixed(2, 2)}
    answer = FifoPolicy(backfill=True).optimize(jobs, nodes, {}, NODE)[0]
    assert answer == {"old": ["a"] * 4 + ["b"] * 2, "wide": [], "new": ["b", "b"]}
