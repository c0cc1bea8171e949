"""What must hold of every answer of the policy, on whatever cluster."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipollux_sched.policy import JobInfo, NodeInfo, PolluxPolicy
from pipollux_sched.policy.cluster import build_cluster
from pipollux_sched.policy.problem import AllocationProblem
from pipollux_sched.policy.repair import repair
from tests.sched.policy_cases import (
    TEMPLATE,
    Case,
    cases,
    current,
    fitness,
    random_case,
    scaling,
    violations,
)

QUICK = settings(max_examples=40, deadline=None, derandomize=True)


def small_policy(seed: int = 0) -> PolluxPolicy:
    """A policy that searches little: the rules must hold whatever it finds."""
    return PolluxPolicy(seed=seed, population=16, generations=8)


def ask(case: Case, policy: PolluxPolicy | None = None) -> dict[str, list[str]]:
    return (policy or small_policy()).optimize(case.jobs, case.nodes, case.base, TEMPLATE)[0]


@QUICK
@given(cases())
def test_answers_are_feasible(case: Case) -> None:
    assert violations(case, ask(case)) == []


@QUICK
@given(cases())
def test_answers_are_never_worse_than_what_is(case: Case) -> None:
    assert violations(case, current(case)) == []
    assert fitness(case, ask(case)) >= fitness(case, current(case)) * (1 - 1e-9)


@QUICK
@given(cases())
def test_same_seed_same_answer_whatever_the_order(case: Case) -> None:
    mirrored = Case(
        dict(reversed(case.jobs.items())),
        dict(reversed(case.nodes.items())),
        dict(reversed(case.base.items())),
    )
    assert ask(case) == ask(case) == ask(mirrored)


@QUICK
@given(cases())
def test_what_is_unchanged_and_as_good_stays(case: Case) -> None:
    policy = small_policy()
    first = ask(case, policy)
    again = Case(case.jobs, case.nodes, {name: nodes for name, nodes in first.items() if nodes})
    second = ask(again, policy)
    if second != first:
        assert fitness(again, second) > fitness(again, first)


@QUICK
@given(cases(), st.integers(0, 2**31))
def test_repair_makes_anything_feasible_and_leaves_alone_what_is(case: Case, seed: int) -> None:
    rng = np.random.default_rng(seed)
    cluster = build_cluster(case.jobs, case.nodes, case.base, TEMPLATE, len(case.nodes))
    problem = AllocationProblem(cluster)
    wild = rng.integers(0, 7, size=(20, *problem.shape)) * (rng.random((20, *problem.shape)) < 0.5)
    states = repair(problem, wild, rng)
    templates = {f"t{n}": TEMPLATE for n in range(len(case.nodes))}
    larger = Case(case.jobs, {**case.nodes, **templates}, case.base)
    names = [*cluster.node_names, *templates]
    for state in states:
        rows = [
            [name for name, count in zip(names, row, strict=True) for _ in range(count)]
            for row in state
        ]
        found = violations(larger, dict(zip(cluster.job_names, rows, strict=True)))
        assert [text for text in found if "pinned" not in text] == []
    assert (states[:, cluster.pinned] == cluster.base[cluster.pinned]).all()
    assert (repair(problem, states, rng) == states).all()


def test_a_replica_is_never_split_over_nodes() -> None:
    """Six slots are free, but no two of them on one node."""
    nodes = {f"n{n}": NodeInfo({"slots": 1}) for n in range(6)}
    job = JobInfo({"slots": 2}, scaling(0), 0.0, 1, 4, num_stages=2)
    assert PolluxPolicy().optimize({"wide": job}, nodes, {}, nodes["n0"])[0] == {"wide": []}


def test_cpus_and_memory_limit_as_slots_do() -> None:
    node = NodeInfo({"slots": 8, "cpus": 5, "memory": 2**34})
    job = JobInfo({"slots": 1, "cpus": 2, "memory": 2**30}, scaling(0), 0.0, 1, 8)
    assert PolluxPolicy().optimize({"a": job}, {"n": node}, {}, node)[0] == {"a": ["n", "n"]}
    hungry = JobInfo({"slots": 1, "memory": 2**34}, scaling(0), 0.0, 1, 8)
    assert PolluxPolicy().optimize({"a": hungry}, {"n": node}, {}, node)[0] == {"a": ["n"]}
    without = NodeInfo({"slots": 8})
    assert PolluxPolicy().optimize({"a": job}, {"n": without}, {}, node)[0] == {"a": []}


def test_an_unchanged_allocation_keeps_its_order() -> None:
    """The order of replicas is that of their ranks."""
    nodes = {"a": NodeInfo({"slots": 1}), "b": NodeInfo({"slots": 1})}
    job = JobInfo({"slots": 1}, scaling(0), 0.0, 1, 2, age=1000.0)
    answer, _ = PolluxPolicy().optimize({"job": job}, nodes, {"job": ["b", "a"]}, nodes["a"])
    assert answer == {"job": ["b", "a"]}


def test_a_pinned_job_stays_even_where_it_is_in_the_way() -> None:
    node = NodeInfo({"slots": 4})
    pinned = JobInfo({"slots": 1}, scaling(0.9), 0.0, 1, 4, preemptible=False, age=1e4)
    wide = JobInfo({"slots": 4}, scaling(0), 1.0, 1, 4, age=1e4)
    jobs = {"pinned": pinned, "wide": wide}
    answer, _ = PolluxPolicy().optimize(jobs, {"n": node}, {"pinned": ["n", "n"]}, node)
    assert answer == {"pinned": ["n", "n"], "wide": []}


def test_a_job_that_lost_a_node_is_placed_anew_pinned_or_not() -> None:
    node = NodeInfo({"slots": 2})
    for preemptible in (True, False):
        job = JobInfo({"slots": 2}, scaling(0.1), 0.0, 1, 2, preemptible, age=1e4)
        answer, _ = PolluxPolicy().optimize({"j": job}, {"new": node}, {"j": ["gone"]}, node)
        assert answer == {"j": ["new"]}


def test_nothing_to_do() -> None:
    node = NodeInfo({"slots": 2})
    job = JobInfo({"slots": 1}, scaling(0), 0.0, 1, 2)
    assert PolluxPolicy().optimize({}, {"n": node}, {}, node) == ({}, 0)
    assert PolluxPolicy().optimize({"j": job}, {}, {"j": ["gone"]}, node) == ({"j": []}, 1)


def test_numpys_global_generator_is_left_alone() -> None:
    np.random.seed(3)
    before = np.random.get_state()[1].copy()
    ask(random_case(5, max_nodes=3, max_jobs=3))
    assert (np.random.get_state()[1] == before).all()


def test_one_job_is_placed_on_the_first_node_with_room() -> None:
    nodes = {
        "a": NodeInfo({"slots": 4, "cpus": 1}, preemptible=True),
        "b": NodeInfo({"slots": 1, "cpus": 8}),
        "c": NodeInfo({"slots": 4, "cpus": 8}),
    }

    def place(stages: int, cpus: int, least: int) -> list[str]:
        job = JobInfo({"slots": stages, "cpus": cpus}, scaling(0), 0.0, least, 4)
        return PolluxPolicy().allocate_job(job, nodes)

    assert place(1, 1, 0) == ["b"]
    assert place(2, 1, 1) == ["c"]
    assert place(2, 1, 2) == ["c", "c"]
    assert place(1, 0, 4) == ["c"] * 4
    assert place(4, 16, 1) == []


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"min_replicas": 5}, "min_replicas: 5 must be between 0 and max_replicas = 4"),
        ({"max_replicas": 0, "min_replicas": 0}, "max_replicas: 0"),
        ({"resources": {}}, "resources"),
        ({"resources": {"slots": -1}}, "resources"),
        ({"resources": {"slots": 0}}, "resources"),
        ({"age": -1.0}, "age: -1.0"),
        ({"age": float("nan")}, "age: nan"),
        ({"num_stages": 0}, "num_stages: 0"),
    ],
)
def test_a_job_out_of_bounds_is_named(change: dict[str, object], named: str) -> None:
    fields: dict[str, object] = {
        "resources": {"slots": 1},
        "speedup_fn": scaling(0),
        "creation_timestamp": 0.0,
        "min_replicas": 1,
        "max_replicas": 4,
    }
    with pytest.raises(ValueError, match="must") as caught:
        JobInfo(**{**fields, **change})
    assert str(caught.value).startswith(named)
