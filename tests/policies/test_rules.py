"""What must hold of every answer of every policy (`POLICIES`), on whatever cluster."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given

from pipollux_policies import Allocation, JobInfo, NodeInfo, ReplicaShape, shape_of
from tests.extent import examples
from tests.policies.policy_cases import (
    POLICIES,
    TEMPLATE,
    Allocations,
    Case,
    cases,
    mirrored,
    random_case,
    scaling,
    stages,
    violations,
)

QUICK = examples(15, 40)
every_policy = pytest.mark.parametrize("policy", POLICIES)


def ask(name: str, case: Case) -> Allocations:
    answer: Allocations
    answer, _ = POLICIES[name].make().optimize(case.jobs, case.nodes, case.base, TEMPLATE)
    return answer


@every_policy
@QUICK
@given(case=cases())
def test_answers_are_feasible(policy: str, case: Case) -> None:
    answer = ask(policy, case)
    assert violations(case, answer) == []
    for name, allocation in answer.items():
        assert isinstance(allocation, Allocation)
        assert not allocation or allocation.shape is shape_of(
            case.jobs[name], allocation, case.nodes
        )


@every_policy
@examples(8, 40)
@given(case=cases())
def test_the_order_of_jobs_and_nodes_does_not_matter(policy: str, case: Case) -> None:
    first, again, other = ask(policy, case), ask(policy, case), ask(policy, mirrored(case))
    assert first == again == other
    assert stages(first) == stages(again) == stages(other)


@every_policy
@QUICK
@given(case=cases())
def test_asked_again_with_nothing_changed_nothing_changes(policy: str, case: Case) -> None:
    made = POLICIES[policy].make()
    first, _ = made.optimize(case.jobs, case.nodes, case.base, TEMPLATE)
    again = Case(case.jobs, case.nodes, {name: nodes for name, nodes in first.items() if nodes})
    second, _ = made.optimize(again.jobs, again.nodes, again.base, TEMPLATE)
    sought = POLICIES[policy].seeks
    if sought is not None and (second != first or stages(second) != stages(first)):
        assert sought(again, second) > sought(again, first)
    else:
        assert (second, stages(second)) == (first, stages(first))


@every_policy
def test_no_global_chance_is_used(policy: str) -> None:
    np.random.seed(3)
    random.seed(3)
    before, plain = np.random.get_state()[1].copy(), random.getstate()
    ask(policy, random_case(5, max_nodes=3, max_jobs=3))
    assert (np.random.get_state()[1] == before).all()
    assert random.getstate() == plain


@every_policy
def test_a_pinned_job_ends_on_a_draining_node_and_others_leave(policy: str) -> None:
    draining = NodeInfo({"slots": 4}, draining=True)
    nodes = {"old": draining, "new": NodeInfo({"slots": 4})}
    stays = JobInfo({"slots": 1}, scaling(0.1), 0.0, 1, 4, preemptible=False, age=1e4)
    leaves = JobInfo({"slots": 1}, scaling(0.1), 1.0, 1, 4, age=1e4)
    jobs, base = {"stays": stays, "leaves": leaves}, {"stays": ["old"], "leaves": ["old"]}
    answer, _ = POLICIES[policy].make().optimize(jobs, nodes, base, draining)
    assert answer["stays"] == ["old"]
    assert set(answer["leaves"]) == {"new"}


@every_policy
def test_a_job_leaves_a_node_that_is_ill_or_gone_pinned_or_not(policy: str) -> None:
    for nodes in ({"old": NodeInfo({"slots": 2}, healthy=False)}, {}):
        for preemptible in (True, False):
            job = JobInfo({"slots": 2}, scaling(0.1), 0.0, 1, 2, preemptible, age=1e4)
            question = {**nodes, "new": NodeInfo({"slots": 2})}
            answer, _ = (
                POLICIES[policy]
                .make()
                .optimize({"j": job}, question, {"j": ["old"]}, question["new"])
            )
            assert answer == {"j": ["new"]}


@every_policy
def test_where_nothing_can_be_put_only_pinned_jobs_hold_something(policy: str) -> None:
    pinned = JobInfo({"slots": 1}, scaling(0), 0.0, 1, 2, preemptible=False)
    jobs = {"pinned": pinned, "other": JobInfo({"slots": 1}, scaling(0), 1.0, 1, 2)}
    nodes = {"n": NodeInfo({"slots": 4}, draining=True)}
    base = {"pinned": ["n", "n"], "other": ["n"]}
    answer, _ = POLICIES[policy].make().optimize(jobs, nodes, base, nodes["n"])
    assert answer == {"pinned": ["n", "n"], "other": []}


@every_policy
def test_names_may_be_any_hashable(policy: str) -> None:
    nodes = {(n, "rack"): NodeInfo({"slots": 3}) for n in range(2)}
    jobs = {j: JobInfo({"slots": 1}, scaling(0.1), float(j), 1, 2) for j in range(3)}
    answer, _ = POLICIES[policy].make().optimize(jobs, nodes, {}, nodes[0, "rack"])
    assert violations(Case(jobs, nodes, {}), answer) == []
    assert all(answer[job] for job in jobs)


@every_policy
def test_a_job_runs_on_the_only_type_of_gpu_that_one_of_its_shapes_is_for(policy: str) -> None:
    shape = ReplicaShape(2, {"slots": 2}, scaling(0, pace=2.0), gpu_type="b")
    job = JobInfo({"slots": 1}, scaling(0), 0.0, 1, 1, gpu_type="c", shapes=(shape,))
    nodes = {t: NodeInfo({"slots": 2}, gpu_type=t) for t in "ab"}
    answer, _ = POLICIES[policy].make().optimize({"j": job}, nodes, {}, nodes["a"])
    assert answer == {"j": ["b"]}
    assert answer["j"].shape is shape


@every_policy
def test_an_arriving_job_gets_its_least_on_one_node(policy: str) -> None:
    nodes = {
        "drains": NodeInfo({"slots": 8}, gpu_type="b", draining=True),
        "ill": NodeInfo({"slots": 8}, gpu_type="b", healthy=False),
        "one": NodeInfo({"slots": 1}, gpu_type="b"),
        "two": NodeInfo({"slots": 5}, gpu_type="b"),
    }
    wide = ReplicaShape(2, {"slots": 2}, scaling(0), gpu_type="b")
    job = JobInfo({"slots": 1}, scaling(0), 0.0, 2, 4, gpu_type="a", shapes=(wide,))
    placed = POLICIES[policy].make().allocate_job(job, nodes)
    assert list(placed) == ["two", "two"]
    assert POLICIES[policy].make().allocate_job(job, {"one": nodes["one"]}) == []
