"""What makes the simulated cluster behave as a scheduler: decisions at changes, prices, teams."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipollux_policies import ExactPolicy, NodeInfo
from pipollux_sched.spec.teams import TeamsSpec, parse_teams
from pipollux_simulator import (
    Cluster,
    JobArrival,
    JobTerms,
    KnownLength,
    NodeEvent,
    Options,
    Result,
    measure_teams,
    outcome,
    read_workload,
    write_workload,
)
from pipollux_simulator.engine.isolated import IsolatedTimes
from tests.simulator.simulator_cases import Give, Steady

NODES = {name: NodeInfo({"slots": 4}) for name in "ab"}
TEAMS = {
    "notice": 20.0,
    "teams": [{"name": "text", "quota": 4}, {"name": "vision", "quota": 4, "users": ["ana"]}],
    "priorities": [{"name": "urgent", "value": 10}],
}


def run(policy: Any, *jobs: JobArrival, **options: Any) -> Result:
    """Simulate as a scheduler decides; only changes lead to decisions."""
    chosen = Options(
        **{"interval": 1e5, "restart_seconds": 1.0, "decides_at": "changes", **options}
    )
    return Cluster(jobs, {"steady": Steady()}, NODES, policy, chosen).run()


def row(name: str, time: float, **fields: Any) -> JobArrival:
    return JobArrival(name, time, "steady", 1, 10, **fields)


def spans(result: Result, number: int) -> list[tuple[float, float, int]]:
    """When a job held how many slots."""
    found = result.jobs[number].history
    return [(pytest.approx(hold.start), pytest.approx(hold.end), len(hold.nodes)) for hold in found]


class InTurn(Give):
    """Gives node a to the job that arrived first, of those that are there."""

    def optimize(self, jobs: Any, nodes: Any, base: Any, template: Any) -> Any:  # noqa: ARG002  # a policy's
        self.seen.append(dict(jobs))
        return ({min(jobs): ["a"]} if "a" in nodes else {}), len(nodes)


def test_the_policy_is_asked_when_something_changes() -> None:
    """Each job trains 300 s, and the next one starts the moment that it is done."""
    policy = InTurn()
    result = run(policy, row("j", 70.0), row("k", 80.0))
    assert spans(result, 0) == [(70, 371, 1)]
    assert spans(result, 1) == [(371, 672, 1)]
    assert len(policy.seen) == 3
    assert policy.seen[1]["j"].preemptible  # it trains by then


def test_a_job_that_starts_is_left_alone() -> None:
    policy = InTurn()
    run(policy, row("j", 70.0), row("k", 70.5))
    assert [seen["j"].preemptible for seen in policy.seen[:2]] == [True, False]


def test_a_suspended_job_starts_again_with_what_the_policy_gives_it() -> None:
    """Not with its least first, which would be one start more."""
    result = run(Suspending(), row("j", 0.0), row("k", 100.0))
    assert spans(result, 0) == [(0, 100, 1), (401, 401 + 1 + (300 - 99) / 2, 2)]
    assert spans(result, 1) == [(100, 401, 1)]


class Suspending(Give):
    """Suspends job j when k comes, and gives it two replicas when that is done."""

    allocate_job = staticmethod(ExactPolicy.allocate_job)

    def optimize(self, jobs: Any, nodes: Any, base: Any, template: Any) -> Any:  # noqa: ARG002  # a policy's
        self.seen.append(dict(jobs))
        if "k" in jobs:
            return {"k": ["a"]}, len(nodes)
        return {"j": ["a"] * (2 if len(self.seen) > 1 else 1)}, len(nodes)


def test_a_node_that_is_lost_is_a_change() -> None:
    events = (NodeEvent(100.0, "a", "lost"), NodeEvent(150.0, "a", "back"))
    result = run(InTurn(), row("j", 0.0), node_events=events, checkpoint_seconds=9.0)
    assert spans(result, 0) == [(0, 100, 1), (150, 150 + 1 + 300 - 99, 1)]


def test_jobs_have_prices_of_their_own_which_the_policy_learns_by_paying() -> None:
    terms = JobTerms(start_seconds=5.0, restart_seconds=7.0, assumed_restart_seconds=30.0)
    policy = Moving()
    result = run(policy, row("j", 0.0, terms=terms), row("k", 100.0), row("l", 200.0))
    assert spans(result, 0) == [(0, 100, 1), (100, 5 + 7 + 300, 1)]
    told = [seen["j"].restart_seconds for seen in policy.seen[:3]]
    assert told == [30.0, 30.0, 7.0]
    assert next(seen["l"].restart_seconds for seen in policy.seen if "l" in seen) == 1.0


class Moving(Give):
    """Moves job j to node b when k comes; the others wait for it."""

    def optimize(self, jobs: Any, nodes: Any, base: Any, template: Any) -> Any:  # noqa: ARG002  # a policy's
        self.seen.append(dict(jobs))
        if "j" in jobs:
            return {"j": ["b" if "k" in jobs else "a"]}, len(nodes)
        return {name: ["a"] for name in jobs}, len(nodes)


def test_bounds_that_were_declared_bind() -> None:
    terms = JobTerms(min_replicas=2, max_replicas=3, preemptible=False)
    policy = Give(j=["a", "a"])
    run(policy, row("j", 0.0, terms=terms))
    info = policy.seen[0]["j"]
    assert (info.min_replicas, info.max_replicas, info.preemptible) == (2, 3, False)


def test_declared_lengths_are_told_of_those_that_declare_them() -> None:
    policy = Give(j=["a"], k=["b"], late=["a"])
    jobs = row("j", 0.0, terms=JobTerms(declares_length=True)), row("k", 0.0), row("late", 400.0)
    run(policy, *jobs, interval=100.0, known_length=KnownLength.parse("declared"))
    left = [(seen["j"].remaining_work, seen["k"].likely_work) for seen in policy.seen[:3]]
    assert left == [(None, ()), (pytest.approx(201.0), ()), (pytest.approx(101.0), ())]
    # By then both have completed, so that lengths can be learned.
    late = next(seen["late"] for seen in policy.seen if "late" in seen)
    assert late.work_left


def test_what_one_declares_is_known_of_its_family() -> None:
    policy = Give(**{"a-1": ["a"], "a-2": ["b"], "b-1": ["a"]})
    declares = JobTerms(declares_length=True)
    jobs = [row(name, 0.0, terms=declares) for name in ("a-1", "a-2", "b-1")]
    run(policy, *jobs[::2], interval=100.0, known_length=KnownLength.parse("declared"))
    assert [seen["b-1"].likely_work for seen in policy.seen[:1]] == [()]
    policy.seen.clear()
    jobs[1] = row("a-2", 150.0, terms=declares)
    run(policy, *jobs, interval=100.0, known_length=KnownLength.parse("declared"))
    told = next(seen for seen in policy.seen if "a-2" in seen)
    assert told["a-1"].remaining_work == pytest.approx(151.0)
    assert told["a-2"].work_left[5] == pytest.approx(300.0), "as long as all of the other"
    assert told["a-2"].family == "a"


def teams() -> TeamsSpec:
    return parse_teams(TEAMS)


def test_what_is_borrowed_comes_back_when_the_notice_is_over() -> None:
    """A decision is due exactly then; without teams it would be made when the other job comes."""
    jobs = row("t", 0.0, team="text"), row("v", 10.0, user="ana")
    result = run(ExactPolicy(), *jobs, teams=teams())
    held = spans(result, 0)
    assert held[:2] == [(0, 30, 8), (30, 30 + 1 + (300 - 29 * 8) / 4, 4)]
    assert spans(result, 1)[0][0] == 30
    made = outcome(
        result,
        {"steady": Steady()},
        IsolatedTimes(NODES, 1.0),
        workload="w",
        policy="exact",
        seed=0,
        teams=teams(),
    )
    told = {team.team: team for team in measure_teams(made)}
    assert told["text"].avg_jct_s == pytest.approx(48.0)
    assert told["text"].slot_hours == pytest.approx((30 * 8 + 18 * 4) / 3600)
    assert (told["vision"].jobs, set(told)) == (1, {"text", "vision"})


def test_priorities_and_teams_are_those_of_rows() -> None:
    policy = Give(j=["a"], k=["b"])
    run(policy, row("j", 0.0, priority="urgent"), row("k", 0.0, user="ana"), teams=teams())
    infos = {name: info for seen in policy.seen for name, info in seen.items()}
    assert (infos["j"].team, infos["j"].priority) == ("default", 10)
    assert (infos["k"].team, infos["k"].priority) == ("vision", 0)


def test_owners_are_columns_that_may_be_there(tmp_path: Path) -> None:
    jobs = row("j", 0.0, team="text", priority="urgent"), row("k", 1.0, user="ana"), row("l", 2.0)
    write_workload(tmp_path / "w.csv", jobs)
    header, first, *_ = (tmp_path / "w.csv").read_text().splitlines()
    assert header == "name,time,application,num_replicas,batch_size,team,user,priority"
    assert first == "j,0,steady,1,10,text,,urgent"
    assert read_workload(tmp_path / "w.csv") == jobs
    write_workload(tmp_path / "plain.csv", jobs[2:])
    assert (tmp_path / "plain.csv").read_text().splitlines()[0].endswith(",batch_size")
