"""How slots are divided among teams, against the best of all divisions.

Where every replica takes one slot and any number is better, what is right can be counted.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given

from pipollux_policies import JobInfo, NodeInfo
from pipollux_policies.teams.shares import fill
from pipollux_policies.teams.team import Team, Teams
from pipollux_policies.teams.team_policy import TeamAnswer
from tests.extent import examples
from tests.policies.policy_cases import Case, scaling

from .team_cases import NAMES, ask, counted, held, job


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


@examples(100, 2000)
@given(asked=counted())
def test_quotas_are_kept_and_nothing_is_idle_by_brute_force(asked: tuple[Case, Teams]) -> None:
    case, of = asked
    answer = ask(case, of).allocations
    has = held(case, answer)
    assert tuple(has[name] for name in NAMES) in best_totals(case, of), dict(has)


@examples(100, 2000)
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


def test_a_loan_is_filled_by_weight_whatever_the_order() -> None:
    assert fill(7, {"a": 9, "b": 9}, {"a": 2.0, "b": 1.0}) == {"a": 5, "b": 2}
    assert fill(3, {"b": 1, "a": 1}, {"a": 1.0, "b": 1.0}) == {"a": 1, "b": 1}


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
