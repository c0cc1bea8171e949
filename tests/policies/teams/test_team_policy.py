"""Quotas, loans and limits around every policy, against rules written down a second time."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hypothesis import given

from pipollux_policies import NodeInfo, ReplicaShape
from pipollux_policies.allocations.allocation import as_allocation
from pipollux_policies.allocations.rules import is_pinned
from pipollux_policies.teams.restricted import within
from pipollux_policies.teams.team import Team, Teams
from pipollux_policies.teams.team_policy import TeamPolicy
from pipollux_policies.teams.team_rules import team_violations
from tests.extent import examples
from tests.policies.policy_cases import POLICIES, TEMPLATE, Case, cases, scaling, violations

from .team_cases import Fickle, ask, every_policy, job, shared, teams


@every_policy
@examples(8, 300)
@given(case=shared(), of=teams())
def test_no_policy_breaks_a_rule(policy: str, case: Case, of: Teams) -> None:
    answer = ask(case, of, POLICIES[policy].make())
    assert violations(case, answer.allocations) == []
    if not answer.notices:
        assert team_violations(of, case.jobs, case.nodes, case.base, answer.allocations) == []
    for name in answer.notices:
        assert Counter(answer.allocations[name]) == Counter(case.base[name])


@every_policy
@examples(15, 60)
@given(case=cases())
def test_one_team_without_limits_is_as_none(policy: str, case: Case) -> None:
    if any(is_pinned(j, case.base.get(n, ()), case.nodes) for n, j in case.jobs.items()):
        return
    # What runs does so in one of its shapes: the scheduler adds one that is not (`job_info`).
    base = {n: as_allocation(case.jobs[n], a, case.nodes) for n, a in case.base.items() if a}
    plain, _ = POLICIES[policy].make().optimize(case.jobs, case.nodes, base, TEMPLATE)
    if len({job.preemptible for job in case.jobs.values()}) < 2 and all(
        job.preemptible for job in case.jobs.values()
    ):
        answer = ask(case, Teams(notice=0.0), POLICIES[policy].make()).allocations
        assert (answer, stages(answer)) == (plain, stages(plain))


def stages(answer: Mapping[Any, Any]) -> dict[Any, int | None]:
    return {name: given.num_stages for name, given in answer.items()}


def test_higher_priority_goes_first_and_preempts_where_it_may() -> None:
    of = Teams({"text": Team("text", quota=4, borrow=0)}, notice=60.0)
    nodes = {"n": NodeInfo({"slots": 8})}
    base = {"low": ["n"] * 4}
    for preempts, expected in ((True, {"low": 1, "high": 3}), (False, {"low": 4, "high": 0})):
        jobs = {"low": job("text", 4), "high": job("text", 3, priority=5, preempts=preempts)}
        answer = ask(Case(jobs, nodes, base), of).allocations
        assert {name: len(given) for name, given in answer.items()} == expected


def test_jobs_that_cannot_be_stopped_do_not_borrow() -> None:
    of = Teams({"text": Team("text", quota=3)})
    jobs = {"fixed": job("text", 8, preemptible=False), "other": job("text", 2)}
    case = Case(jobs, {"n": NodeInfo({"slots": 8})}, {})
    assert {n: len(a) for n, a in ask(case, of).allocations.items()} == {"fixed": 3, "other": 2}


def test_limits_on_jobs_say_what_they_refuse() -> None:
    of = Teams({"text": Team("text", quota=8, max_jobs=1, max_slots_per_job=2)})
    jobs = {"a": job("text"), "b": job("text")}
    answer = ask(Case(jobs, {"n": NodeInfo({"slots": 8})}, {"b": ["n"]}), of)
    assert {n: len(a) for n, a in answer.allocations.items()} == {"a": 0, "b": 2}
    assert answer.refused == {"a": "team text runs 1 job already, its max_jobs"}


def test_a_limit_does_not_change_which_shape_an_allocation_means() -> None:
    """Of several shapes of as many stages that run on a node, the first counts (`shape_of`)."""
    narrow, other = (ReplicaShape(1, {"slots": 1}, scaling(0.01), gpu_type=t) for t in (None, "b"))
    wide = replace(job("text"), resources={"slots": 3}, gpu_type="a", shapes=(narrow,))
    assert within(wide, 2) is None
    beside = within(replace(wide, shapes=(other,)), 2)
    assert beside is not None
    assert [(shape.slots, shape.gpu_type) for shape in beside.all_shapes] == [(1, "b")]
    kept = within(replace(wide, shapes=(narrow,)), 3, narrow)
    assert kept is not None
    assert [shape.slots for shape in kept.all_shapes] == [3, 1]


def test_a_copy_asks_a_copy_of_its_policy() -> None:
    layer = TeamPolicy(Fickle("ab"), Teams())
    copied = copy.copy(layer)
    assert copied == layer
    assert copied.policy is not layer.policy
