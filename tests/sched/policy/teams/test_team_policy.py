"""Quotas, loans and limits around every policy, against rules written down a second time."""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipollux_sched.policy import ExactPolicy, JobInfo, NodeInfo, ReplicaShape
from pipollux_sched.policy.allocation import as_allocation
from pipollux_sched.policy.rules import is_pinned
from pipollux_sched.policy.teams.restricted import within
from pipollux_sched.policy.teams.shares import fill
from pipollux_sched.policy.teams.team import Team, Teams
from pipollux_sched.policy.teams.team_policy import TeamAnswer, TeamPolicy
from pipollux_sched.policy.teams.team_rules import team_violations
from tests.extent import examples
from tests.sched.policy.policy_cases import POLICIES, TEMPLATE, Case, cases, scaling, violations

every_policy = pytest.mark.parametrize("policy", POLICIES)
NAMES = ("text", "vision", "web")


@st.composite
def teams(draw: st.DrawFn) -> Teams:
    """Three teams at most, with and without limits."""
    few, maybe = st.integers(0, 6), st.none() | st.integers(0, 6)
    found = {}
    for name in draw(st.sets(st.sampled_from(NAMES))):
        found[name] = Team(
            name,
            quota=draw(few),
            borrow=draw(maybe),
            lend=draw(maybe),
            weight=draw(st.sampled_from([0.5, 1.0, 3.0])),
            max_jobs=draw(st.none() | st.integers(0, 3)),
            max_slots_per_job=draw(st.none() | st.integers(1, 6)),
        )
    return Teams(found, notice=draw(st.sampled_from([0.0, 60.0])))


@st.composite
def shared(draw: st.DrawFn) -> Case:
    """Any question to a policy, by jobs of teams."""
    case = draw(cases())
    jobs = {
        name: replace(
            job,
            team=draw(st.sampled_from(NAMES)),
            priority=draw(st.sampled_from([0, 0, 10])),
            preempts=draw(st.booleans()),
        )
        for name, job in case.jobs.items()
    }
    return Case(jobs, case.nodes, case.base)


def ask(case: Case, of: Teams, policy: Any = None, **told: Any) -> TeamAnswer:
    layer = TeamPolicy(policy or ExactPolicy(), of, **told)
    return layer.solve(case.jobs, case.nodes, case.base, TEMPLATE)


@every_policy
@examples(30, 300)
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


# Where every replica takes one slot and any number is better, what is right can be counted.


def job(team: str, most: int = 64, **more: Any) -> JobInfo:
    return JobInfo({"slots": 1}, scaling(0.01), 0.0, 1, most, team=team, age=3600.0, **more)


def held(case: Case, answer: Mapping[Any, Any]) -> Counter[str]:
    found: Counter[str] = Counter()
    for name, nodes in answer.items():
        found[case.jobs[name].team] += len(nodes)
    return found


@st.composite
def counted(draw: st.DrawFn) -> tuple[Case, Teams]:
    """Jobs of one slot a replica on one node, which all want as much as they may have."""
    slots = draw(st.integers(1, 10))
    jobs: dict[Any, JobInfo] = {}
    for number in range(draw(st.integers(1, 5))):
        team = draw(st.sampled_from(NAMES))
        jobs[f"j{number}"] = job(team, draw(st.integers(1, 12)))
    base: dict[Any, list[str]] = {}
    left = slots
    for name, info in jobs.items():
        has = draw(st.integers(0, min(left, info.max_replicas)))
        left -= has
        if has:
            base[name] = ["n"] * has
    quotas = {name: draw(st.integers(0, 5)) for name in NAMES}
    of = {
        name: Team(
            name,
            quota=quota,
            borrow=draw(st.none() | st.integers(0, 4)),
            lend=draw(st.none() | st.integers(0, 4)),
            weight=draw(st.sampled_from([1.0, 2.0])),
        )
        for name, quota in quotas.items()
    }
    return Case(jobs, {"n": NodeInfo({"slots": slots})}, base), Teams(of, notice=0.0)


def wanted(case: Case) -> dict[str, int]:
    """What each team would take of an empty cluster."""
    slots = case.nodes["n"].resources["slots"]
    most: Counter[str] = Counter()
    for info in case.jobs.values():
        most[info.team] += info.max_replicas
    return {name: min(most[name], slots) for name in NAMES}


def best_totals(case: Case, of: Teams) -> set[tuple[int, ...]]:
    """Every division among teams that is allowed, by trying all, and keeps the most of quotas."""
    slots = case.nodes["n"].resources["slots"]
    wants = [
        sum(min(j.max_replicas, slots) for j in case.jobs.values() if j.team == n) for n in NAMES
    ]
    wants = [min(want, slots) for want in wants]

    def allowed(division: tuple[int, ...]) -> bool:
        if sum(division) > slots:
            return False
        for name, has in zip(NAMES, division, strict=True):
            team = of[name]
            if team.most is not None and has > team.most:
                return False
        unlent = sum(max(of[n].kept - h, 0) for n, h in zip(NAMES, division, strict=True))
        lent = sum(max(h - of[n].quota, 0) for n, h in zip(NAMES, division, strict=True))
        return not lent or sum(division) + unlent <= slots

    tried = [d for d in itertools.product(*(range(w + 1) for w in wants)) if allowed(d)]

    def due(division: tuple[int, ...]) -> int:
        return sum(min(h, of[n].quota) for n, h in zip(NAMES, division, strict=True))

    most = max(due(d) for d in tried)
    full = [d for d in tried if due(d) == most]
    used = max(sum(d) for d in full)
    return {d for d in full if sum(d) == used}


@examples(200, 2000)
@given(asked=counted())
def test_quotas_are_kept_and_nothing_is_idle_by_brute_force(asked: tuple[Case, Teams]) -> None:
    case, of = asked
    answer = ask(case, of).allocations
    has = held(case, answer)
    assert tuple(has[name] for name in NAMES) in best_totals(case, of), dict(has)


@examples(200, 2000)
@given(asked=counted())
def test_what_is_borrowed_is_shared_by_weight(asked: tuple[Case, Teams]) -> None:
    """No team could have a borrowed slot more at the cost of one that has more for its weight."""
    case, of = asked
    has = held(case, ask(case, of).allocations)
    slots = case.nodes["n"].resources["slots"]
    wants = {
        n: min(slots, sum(j.max_replicas for j in case.jobs.values() if j.team == n)) for n in NAMES
    }
    loans = {name: max(has[name] - of[name].quota, 0) for name in NAMES}
    for poor, rich in itertools.permutations(NAMES, 2):
        limit = of[poor].most
        if has[poor] >= wants[poor] or has[poor] < of[poor].quota or has[poor] == limit:
            continue
        assert (loans[rich] - 1) / of[rich].weight <= (loans[poor] + 1) / of[poor].weight + 1e-9


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


def test_borrowers_shrink_rather_than_stop() -> None:
    of = Teams({"vision": Team("vision", quota=4, borrow=0)}, notice=0.0)
    jobs = {"a": job("text"), "b": job("text"), "v": job("vision")}
    case = Case(jobs, {"n": NodeInfo({"slots": 8})}, {"a": ["n"] * 4, "b": ["n"] * 4})
    answer = ask(case, of).allocations
    assert held(case, answer) == {"text": 4, "vision": 4}
    assert all(answer.values())


def test_a_wide_replica_of_the_lender_finds_room_among_scattered_loans() -> None:
    of = Teams({"vision": Team("vision", quota=4)}, notice=0.0)
    narrow = {f"t{n}": job("text", 1) for n in range(4)}
    wide = JobInfo({"slots": 4}, scaling(0.01), 0.0, 1, 1, num_stages=4, team="vision", age=3600.0)
    nodes = {name: NodeInfo({"slots": 4}) for name in ("m", "n")}
    base = {f"t{n}": ["mn"[n % 2]] for n in range(4)}
    answer = ask(Case({**narrow, "v": wide}, nodes, base), of).allocations
    assert len(answer["v"]) == 1
    assert sum(map(len, answer.values())) == 5


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
    assert answer.refused == {"a": "team text has the 1 running jobs it may have"}


def test_a_loan_is_filled_by_weight_whatever_the_order() -> None:
    assert fill(7, {"a": 9, "b": 9}, {"a": 2.0, "b": 1.0}) == {"a": 5, "b": 2}
    assert fill(3, {"b": 1, "a": 1}, {"a": 1.0, "b": 1.0}) == {"a": 1, "b": 1}


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


def test_a_notice_holds_nobody_on_a_node_that_has_shrunk() -> None:
    of = Teams({"vision": Team("vision", quota=2)}, notice=60.0)
    jobs = {"t": job("text"), "v": job("vision")}
    case = Case(jobs, {"n": NodeInfo({"slots": 2})}, {"t": ["n"] * 3})
    answer = ask(case, of)
    assert violations(case, answer.allocations) == []
    assert (held(case, answer.allocations), answer.notices) == ({"text": 0, "vision": 2}, {})


@dataclass
class Fickle:
    """A policy that fills one node in an order of jobs that it may change each time."""

    order: Sequence[str]

    def allocate_job(self, _job: JobInfo, _nodes: Any) -> list[str]:
        return []

    def optimize(self, jobs: Any, nodes: Any, base: Any, _template: Any) -> Any:
        left = nodes["n"].resources["slots"]
        fixed = {n for n, j in jobs.items() if is_pinned(j, base.get(n, ()), nodes)}
        given = {name: list(base[name]) for name in fixed}
        left -= sum(map(len, given.values()))
        for name in self.order:
            if name in jobs and name not in fixed:
                count = min(jobs[name].max_replicas, left)
                given[name] = ["n"] * count
                left -= count
        return {name: given.get(name, []) for name in jobs}, len(nodes)


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


def test_a_copy_asks_a_copy_of_its_policy() -> None:
    layer = TeamPolicy(Fickle("ab"), Teams())
    copied = copy.copy(layer)
    assert copied == layer
    assert copied.policy is not layer.policy


@every_policy
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


@pytest.mark.parametrize(("weight", "owners"), [(1.0, "tvtvtv"), (2.0, "tvvtvv")])
def test_teams_take_turns_at_what_cannot_be_divided(weight: float, owners: str) -> None:
    """Each may borrow some of four slots, and has a replica that takes all of them."""
    teams = {"web": Team("web", quota=4), "vision": Team("vision", weight=weight)}
    of = Teams(teams, notice=60.0, turn=3600.0)
    wide = JobInfo({"slots": 4}, scaling(0.01), 0.0, 1, 1, num_stages=4, age=3600.0)
    jobs = {name[0]: replace(wide, team=name) for name in ("text", "vision")}
    case = Case(jobs, {"n": NodeInfo({"slots": 4})}, {})
    answer, found = TeamAnswer({}), ""
    for turn in range(6):
        for now in (3600.0 * turn, 3600.0 * turn + 60.0):
            answer = ask(case, of, now=now, notices=answer.notices)
            (runs,) = [name for name, nodes in answer.allocations.items() if nodes]
            case = Case(jobs, case.nodes, {runs: answer.allocations[runs]})
        found += runs
    assert found == owners
    # Without turns the one that runs goes on.
    still = ask(case, replace(of, turn=0.0), now=0.0).allocations
    assert still[runs]


def test_jobs_wider_than_a_node_and_than_an_even_part_take_turns_too() -> None:
    of = Teams({"web": Team("web", quota=4)}, notice=0.0, turn=3600.0)
    wide = JobInfo({"slots": 1}, scaling(0.01), 0.0, 4, 4, age=3600.0)
    jobs = {name[0]: replace(wide, team=name) for name in ("text", "vision")}
    nodes = {name: NodeInfo({"slots": 2}) for name in "mn"}
    first = ask(Case(jobs, nodes, {}), of, now=0.0).allocations
    assert {name: len(given) for name, given in first.items()} == {"t": 4, "v": 0}
    then = ask(Case(jobs, nodes, {"t": first["t"]}), of, now=3600.0).allocations
    assert {name: len(given) for name, given in then.items()} == {"t": 0, "v": 4}
