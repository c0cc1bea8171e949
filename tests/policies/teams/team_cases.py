"""Jobs of teams, for the tests of what teams hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import strategies as st

from pipollux_policies import ExactPolicy, JobInfo, NodeInfo
from pipollux_policies.allocations.rules import is_pinned
from pipollux_policies.teams.team import Team, Teams
from pipollux_policies.teams.team_policy import TeamAnswer, TeamPolicy
from tests.policies.policy_cases import POLICIES, TEMPLATE, Case, cases, scaling

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
