"""What the genetic policy promises beyond the rules of all policies, and its parts."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipollux_policies import Allocation, JobInfo, NodeInfo, PolluxPolicy, ReplicaShape
from pipollux_policies.placement.node_choice import Ints
from pipollux_policies.pollux.arrays import ClusterArrays, build_cluster
from pipollux_policies.pollux.problem import AllocationProblem
from pipollux_policies.pollux.repair import repair
from tests.extent import examples
from tests.policies.policy_cases import (
    TEMPLATE,
    Allocations,
    Case,
    cases,
    current,
    fitness,
    random_case,
    scaling,
    violations,
)

QUICK = examples(25, 80)


@QUICK
@given(cases())
def test_answers_are_never_worse_than_what_is(case: Case) -> None:
    policy = PolluxPolicy(population=16, generations=8)
    answer, _ = policy.optimize(case.jobs, case.nodes, case.base, TEMPLATE)
    assert violations(case, current(case)) == []
    assert fitness(case, answer) >= fitness(case, current(case)) * (1 - 1e-9)


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
    for state in states:
        found = violations(larger, as_allocations(cluster, state, list(templates)))
        # Which replica is the first on its node no state says.
        found = [text for text in found if "changed places" not in text]
        assert [text for text in found if "pinned" not in text] == []
    assert (states[:, cluster.pinned] == cluster.base[cluster.pinned]).all()
    assert (repair(problem, states, rng) == states).all()


def as_allocations(cluster: ClusterArrays, state: Ints, templates: list[str]) -> Allocations:
    """Read a state; a job must hold something in one row at most."""
    names = [*cluster.node_names, *templates]
    found: dict[str, Allocation] = {}
    for row, cells in enumerate(state):
        if cells.any():
            job = cluster.job_names[cluster.job_of[row]]
            assert job not in found
            nodes = [name for name, count in zip(names, cells, strict=True) for _ in range(count)]
            found[job] = Allocation(nodes, cluster.shapes[row])
    return {name: found.get(name, Allocation()) for name in cluster.job_names}


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


def test_stages_and_replicas_are_chosen_together() -> None:
    """Two stages do more per slot, but nodes of three slots hold only one such replica."""
    two = ReplicaShape(2, {"slots": 2}, scaling(0, pace=2.2))
    job = JobInfo({"slots": 1}, scaling(0), 0.0, 1, 8, shapes=(two,))
    for slots, replicas, stages in ((2, 1, 2), (3, 3, 1), (4, 2, 2)):
        node = NodeInfo({"slots": slots})
        policy = PolluxPolicy(population=16, generations=8)
        answer, _ = policy.optimize({"j": job}, {"n": node}, {}, node)
        assert (len(answer["j"]), answer["j"].num_stages) == (replicas, stages)


def test_the_type_of_gpu_that_is_worth_most_is_chosen() -> None:
    fast = ReplicaShape(1, {"slots": 1}, scaling(0, pace=3.0), gpu_type="fast")
    flexible = JobInfo({"slots": 1}, scaling(0), 0.0, 1, 1, gpu_type="slow", shapes=(fast,))
    bound = JobInfo({"slots": 1}, scaling(0), 1.0, 1, 1, gpu_type="fast")
    nodes = {t: NodeInfo({"slots": 1}, gpu_type=t) for t in ("fast", "slow")}
    optimize = PolluxPolicy().optimize
    assert optimize({"f": flexible}, nodes, {}, nodes["fast"])[0] == {"f": ["fast"]}
    both, _ = optimize({"f": flexible, "b": bound}, nodes, {}, nodes["fast"])
    assert both == {"f": ["slow"], "b": ["fast"]}


def test_another_number_of_stages_on_the_same_nodes_is_a_restart() -> None:
    """At age 30 half is lost: 1.8 times the speed is not worth it, 2.2 times is."""
    node = NodeInfo({"slots": 2})
    for pace, stages in ((1.8, 1), (2.2, 2)):
        two = ReplicaShape(2, {"slots": 2}, scaling(0, pace=pace))
        job = JobInfo({"slots": 2}, scaling(0), 0.0, 1, 1, age=30.0, shapes=(two,))
        for base in (["n"], Allocation(["n"], job.all_shapes[0])):
            policy = PolluxPolicy(population=16, generations=8)
            answer, _ = policy.optimize({"j": job}, {"n": node}, {"j": base}, node)
            assert (answer["j"], answer["j"].num_stages) == (["n"], stages)


def test_a_job_in_a_shape_that_it_has_no_more_is_restarted_in_one_that_it_has() -> None:
    node = NodeInfo({"slots": 4})
    job = JobInfo({"slots": 1}, scaling(0.9), 0.0, 1, 1, age=1e4)
    gone = Allocation(["n"], ReplicaShape(4, {"slots": 4}, scaling(0)))
    answer, _ = PolluxPolicy().optimize({"j": job}, {"n": node}, {"j": gone}, node)
    assert answer["j"].shape is job.all_shapes[0]


def test_of_two_shapes_with_as_many_stages_the_first_that_runs_on_a_node_counts() -> None:
    """Node names and stages do not tell them apart, so the answer must not need more."""
    special = ReplicaShape(1, {"slots": 1}, scaling(0, pace=9.0), gpu_type="a")
    job = JobInfo({"slots": 2}, scaling(0), 0.0, 1, 4, shapes=(special,))
    node = NodeInfo({"slots": 4}, gpu_type="a")
    answer, _ = PolluxPolicy().optimize({"j": job}, {"n": node}, {}, node)
    assert answer["j"] == ["n", "n"]
    assert answer["j"].shape is job.all_shapes[0]


def test_a_copy_answers_the_same_and_leaves_the_policy_as_it_was() -> None:
    case = random_case(9, max_nodes=4, max_jobs=5, max_slots=6, mixed=True)
    question = (case.jobs, case.nodes, case.base, TEMPLATE)
    policy, twin = (PolluxPolicy(population=8, generations=3) for _ in range(2))
    for one in (policy, twin):
        one.optimize(*question)
    fork = copy.copy(policy)
    for _ in range(3):
        fork.optimize(*question)
    assert policy.optimize(*question) == twin.optimize(*question)


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
