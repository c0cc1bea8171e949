"""What is lent comes back, after one notice and not before."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipollux_policies import NodeInfo
from pipollux_policies.teams.team import Team, Teams
from pipollux_policies.teams.team_policy import TeamAnswer
from tests.extent import examples
from tests.policies.policy_cases import POLICIES, Case, violations

from .team_cases import NAMES, Fickle, ask, counted, held, job, wanted


def test_the_quota_comes_back_after_the_notice() -> None:
    of = Teams({n: Team(n, quota=4) for n in ("text", "vision")}, notice=60.0)
    case = Case({"t": job("text")}, {"n": NodeInfo({"slots": 8})}, {})
    lent = ask(case, of).allocations
    assert held(case, lent) == {"text": 8}
    case = Case({**case.jobs, "v": job("vision")}, case.nodes, {"t": lent["t"]})
    first = ask(case, of, now=1000.0)
    assert held(case, first.allocations) == {"text": 8, "vision": 0}
    assert first.notices == {"t": 1060.0}
    waits = ask(case, of, now=1059.0, notices=first.notices)
    assert (waits.allocations, waits.notices) == (first.allocations, first.notices)
    after = ask(case, of, now=1060.0, notices=first.notices)
    assert (held(case, after.allocations), after.notices) == ({"text": 4, "vision": 4}, {})


@given(asked=counted())
def test_until_the_notice_is_over_nobody_loses_a_slot_to_another_team(
    asked: tuple[Case, Teams],
) -> None:
    case, of = asked
    before = held(case, case.base)
    wants = wanted(case)
    answer = ask(case, replace(of, notice=60.0), now=5.0)
    has = held(case, answer.allocations)
    for name in NAMES:
        assert has[name] >= min(before[name], wants[name]), (name, dict(before), dict(has))
    assert set(answer.notices.values()) <= {65.0}


def test_notice_is_given_for_what_is_borrowed_alone() -> None:
    of = Teams({n: Team(n, quota=2) for n in ("text", "vision")}, notice=60.0)
    jobs = {name: job("text", 1) for name in "abcd"} | {name: job("vision", 1) for name in "vwx"}
    base = {name: ["mn"[n % 2]] for n, name in enumerate("abcd")}
    case = Case(jobs, {name: NodeInfo({"slots": 2}) for name in "mn"}, base)
    answer = ask(case, of)
    assert (held(case, answer.allocations)["text"], len(answer.notices)) == (4, 2)
    assert all(len(answer.allocations[name]) == 1 for name in "abcd")


def test_a_notice_holds_nobody_on_a_node_that_has_shrunk() -> None:
    of = Teams({"vision": Team("vision", quota=2)}, notice=60.0)
    jobs = {"t": job("text"), "v": job("vision")}
    case = Case(jobs, {"n": NodeInfo({"slots": 2})}, {"t": ["n"] * 3})
    answer = ask(case, of)
    assert violations(case, answer.allocations) == []
    assert (held(case, answer.allocations), answer.notices) == ({"text": 0, "vision": 2}, {})


def test_a_policy_that_takes_from_others_each_time_puts_no_notice_off() -> None:
    of = Teams({n: Team(n, quota=2) for n in ("text", "vision")}, notice=60.0)
    jobs = {name: job("text", 1) for name in "abcd"} | {name: job("vision", 1) for name in "vw"}
    case = Case(jobs, {"n": NodeInfo({"slots": 4})}, {name: ["n"] for name in "abcd"})
    first = ask(case, of, Fickle("abcdvw"), now=0.0)
    assert first.notices == {"c": 60.0, "d": 60.0}
    again = ask(case, of, Fickle("dcbavw"), now=30.0, notices=first.notices)
    assert (again.allocations, again.notices) == (first.allocations, first.notices)
    over = ask(case, of, Fickle("dcbavw"), now=60.0, notices=again.notices)
    assert held(case, over.allocations) == {"text": 2, "vision": 2}
    # Others of the team kept theirs: they have had no notice, and need none now.
    assert (over.allocations["a"], over.allocations["b"], over.notices) == (["n"], ["n"], {})


@examples(100, 1000)
@given(asked=counted(), seed=st.integers(0, 2**31))
def test_the_quota_is_back_after_one_notice_whatever_the_policy_would_take(
    asked: tuple[Case, Teams], seed: int
) -> None:
    case, of = asked
    of, draw = replace(of, notice=60.0), np.random.default_rng(seed)
    answer = TeamAnswer({})
    for now in (0.0, 20.0, 40.0, 60.0):
        order = [str(name) for name in draw.permutation(sorted(case.jobs))]
        answer = ask(case, of, Fickle(order), now=now, notices=answer.notices)
        case = Case(case.jobs, case.nodes, {n: a for n, a in answer.allocations.items() if a})
    has, wants = held(case, answer.allocations), wanted(case)
    slots = case.nodes["n"].resources["slots"]
    due = {name: min(wants[name], of[name].quota) for name in NAMES}
    missing = {name: due[name] - has[name] for name in NAMES if has[name] < due[name]}
    assert sum(due.values()) > slots or not missing, (missing, dict(has), answer.notices)


def test_what_starts_when_its_notice_ends_keeps_it() -> None:
    of = Teams({n: Team(n, quota=2) for n in ("text", "vision")}, notice=60.0)
    jobs = {name: job("text", 1) for name in "abcd"} | {name: job("vision", 1) for name in "vw"}
    starting = {n: replace(j, preemptible=False) if n in "cd" else j for n, j in jobs.items()}
    nodes, base = {"n": NodeInfo({"slots": 4})}, {name: ["n"] for name in "abcd"}
    told = {"c": 60.0, "d": 60.0}
    pinned = ask(Case(starting, nodes, base), of, Fickle("abcdvw"), now=90.0, notices=told)
    assert {name: pinned.notices.get(name) for name in "cd"} == told
    trains = Case(jobs, nodes, {n: a for n, a in pinned.allocations.items() if a})
    after = ask(trains, of, Fickle("abcdvw"), now=95.0, notices=pinned.notices).allocations
    assert held(trains, after)["vision"] == 2


@pytest.mark.parametrize(
    "policy",
    # Pollux searches for two seconds.
    [pytest.param(x, marks=[pytest.mark.exhaustive] * (x == "pollux")) for x in POLICIES],
)
def test_every_policy_gives_what_is_lent_back(policy: str) -> None:
    """Four slots of two nodes are lent; their owner has them after one notice."""
    of = Teams({n: Team(n, quota=4) for n in ("text", "vision")}, notice=60.0)
    jobs = {f"t{n}": job("text", 4, requested_replicas=2) for n in range(4)}
    jobs |= {f"v{n}": job("vision", 4, requested_replicas=2) for n in range(2)}
    nodes = {name: NodeInfo({"slots": 4}) for name in "mn"}
    base = {f"t{n}": ["mn"[n // 2]] * 2 for n in range(4)}
    made = POLICIES[policy].make()
    first = ask(Case(jobs, nodes, base), of, made, now=0.0)
    assert held(Case(jobs, nodes, base), first.allocations)["text"] == 8
    assert first.notices
    again = Case(jobs, nodes, {n: a for n, a in first.allocations.items() if a})
    for now in (30.0, 60.0):
        first = ask(again, of, made, now=now, notices=first.notices)
        again = Case(jobs, nodes, {n: a for n, a in first.allocations.items() if a})
    assert held(again, first.allocations) == {"text": 4, "vision": 4}
