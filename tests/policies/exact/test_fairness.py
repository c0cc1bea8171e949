"""No job later than F times its equal share: claims, what keeps them, and jobs of every width."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipollux_policies import (
    CompletionTime,
    ExactPolicy,
    JobInfo,
    NodeInfo,
    fair_standings,
    make_policy,
    shape_of,
    violations,
)
from pipollux_policies.exact.configurations import build_instance
from pipollux_policies.exact.fair_share import GUARD, claims, equal_share
from pipollux_simulator import (
    Cluster,
    DecidesAt,
    IsolatedTimes,
    JobArrival,
    KnownLength,
    Options,
    make_nodes,
    outcome,
)
from tests.extent import first
from tests.policies.policy_cases import TEMPLATE, all_allocations, random_case, scaling
from tests.simulator.simulator_cases import Steady

FAIR = CompletionTime(fairness=1.25)


def aged(seed: int, *, mixed: bool) -> Any:
    """A small case whose jobs have done more or less of what they were due."""
    rng = np.random.default_rng(seed)
    case = random_case(seed, max_nodes=3, max_jobs=3, mixed=mixed)
    jobs = {
        name: replace(
            job,
            age=float(rng.integers(0, 20000)),
            work_done=float(rng.integers(0, 20000)),
            remaining_work=float(rng.integers(10, 20000)) if rng.random() < 0.5 else None,
            mean_jobs=float(rng.uniform(1, 4)),
        )
        for name, job in case.jobs.items()
    }
    return replace(case, jobs=jobs)


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("seed", first(12, range(25)))
def test_the_most_urgent_job_has_what_keeps_its_promise_if_that_can_be(
    seed: int, mixed: bool
) -> None:
    """Against all feasible allocations; and no answer breaks a rule or depends on anything else.

    Or it stays, where no allocation would save what a change costs.
    """
    case = aged(seed, mixed=mixed)
    policy = ExactPolicy(FAIR)
    answer, _ = policy.optimize(case.jobs, case.nodes, case.base, TEMPLATE)
    assert violations(case.jobs, case.nodes, case.base, answer) == []
    assert policy.optimize(case.jobs, case.nodes, case.base, TEMPLATE)[0] == answer
    instance = build_instance(case.jobs, case.nodes, case.base, TEMPLATE)
    found = claims(instance, 1.25, FAIR.quantum)
    if not found:
        return
    name = instance.jobs[found[0].job].name

    def speedup(held: Any) -> float:
        shape = shape_of(case.jobs[name], held, case.nodes)
        return float(shape.speedup_fn(len(set(held)), len(held))) if held else 0.0

    best = max(speedup(allocation[name]) for allocation in all_allocations(case))
    stayed = list(answer[name]) == list(case.base.get(name, ()))
    needed = found[0].stays if stayed else found[0].moved
    kept = stayed and not found[0].is_worth(speedup(answer[name]), best)
    assert kept or speedup(answer[name]) >= min(needed, best) - 1e-9


@given(
    st.floats(1.0, 3.0),
    st.floats(0.1, 8.0),
    st.floats(1.0, 60.0),
    st.lists(st.tuples(st.floats(1.0, 500.0), st.floats(0.0, 8.0)), min_size=1, max_size=30),
)
def test_progress_in_time_is_the_end_in_time(
    fairness: float, share: float, start: float, parts: list[tuple[float, float]]
) -> None:
    """Wherever a job ends, if its progress was due by then its rho is within the promise."""
    age = work = 0.0
    for seconds, speedup in parts:
        age, work = age + seconds, work + seconds * speedup
        if work >= share * (age / fairness - start):
            assert age / (start + work / share) <= fairness * (1 + 1e-9)


def test_a_standing_is_what_the_formulas_say() -> None:
    job = JobInfo(
        *({"slots": 1}, scaling(0.0), 0.0, 1, 8), age=1000.0, work_done=1200.0,
        remaining_work=2400.0, mean_jobs=2.0, restart_seconds=30.0,
    )  # fmt: skip
    nodes = {"a": NodeInfo({"slots": 8})}
    jobs = {"a": job, "b": replace(job, creation_timestamp=1.0)}
    found = fair_standings(jobs, nodes, {"a": ["a"] * 4}, TEMPLATE, 1.25)
    # Two jobs on 8 slots: 4 each, so 30 + 3600 / 4 seconds alone.
    assert found["a"].share.slots == 4
    assert found["a"].alone == pytest.approx(930.0)
    assert found["a"].finish == pytest.approx(1600.0)
    assert found["b"].finish == pytest.approx(1630.0)  # it has to start first
    # 60 s are kept back, and a late job may have its share.
    assert found["a"].slack == pytest.approx(1.25 * 930 - 60 - 1600)
    assert found["a"].comes_first


def late_job(**fields: Any) -> JobInfo:
    """A job that is late, on at most four slots: it was measured on no more."""
    job = JobInfo(
        *({"slots": 1}, scaling(0.0), 0.0, 1, 4), age=1000.0, work_done=100.0, mean_jobs=1.0,
        remaining_work=4000.0, allowed_replicas=16,
    )  # fmt: skip
    return replace(job, **fields)


@pytest.mark.parametrize("known", [True, False])
def test_a_late_job_is_not_restarted_for_what_it_has_already(known: bool) -> None:
    """On two nodes in part, where as much fits one: a start would only make it later."""
    job = late_job(remaining_work=4000.0 if known else None)
    nodes = {name: NodeInfo({"slots": 8}) for name in "ab"}
    held = ["a", "a", "b", "b"]
    instance = build_instance({"a": job}, nodes, {"a": held}, nodes["a"])
    assert claims(instance, 1.25, FAIR.quantum)  # it is late, and asks for more
    answer, _ = ExactPolicy(FAIR).optimize({"a": job}, nodes, {"a": held}, nodes["a"])
    assert answer["a"] == held


@given(st.floats(1.0, 40.0), st.floats(0.0, 1.0))
def test_a_little_more_of_the_cluster_makes_a_share_a_little_faster(jobs: float, by: float) -> None:
    """Between two numbers of replicas a job has the greater for a part of the time."""
    nodes = {name: NodeInfo({"slots": 8}) for name in "ab"}
    job = late_job(min_replicas=2, max_replicas=16)
    instance = build_instance({"a": job}, nodes, {}, nodes["a"])
    share = equal_share(instance, instance.jobs[0], jobs)
    assert share.slots == pytest.approx(16 / jobs)
    # It is as fast as it has slots, on average, also on less than the least that it runs on.
    assert share.speedup == pytest.approx(16 / jobs)
    more = equal_share(instance, instance.jobs[0], jobs / (1 + 1e-6 * by))
    assert 0 <= more.speedup - share.speedup <= 1e-4


@pytest.mark.parametrize("age", [200.0, 230.0])
def test_a_late_job_claims_no_more_than_its_share(age: float) -> None:
    """8 of 16 slots: 280 s alone, 350 are promised; 30 s to start and 125 s on all slots.

    At 200 s more than its share would bring it home in time, at 230 s nothing does.
    """
    job = late_job(age=age, remaining_work=2000.0, max_replicas=16, mean_jobs=2.0)
    nodes = {name: NodeInfo({"slots": 8}) for name in "ab"}
    instance = build_instance({"a": job, "b": job}, nodes, {}, nodes["a"])
    found = claims(instance, 1.25, FAIR.quantum)
    assert [claim.wanted for claim in found] == [pytest.approx(8.0)] * 2


@pytest.mark.parametrize("rescale_seconds", [None, 1.0])
@pytest.mark.parametrize(("held", "moved"), [(4, math.inf), (8, math.inf), (16, 8.0)])
def test_a_late_job_is_made_to_change_only_for_what_it_has_beyond_its_share(
    held: int, moved: float, rescale_seconds: float | None
) -> None:
    """10 s before its end a start would only make it later, whatever it got."""
    job = late_job(
        age=2000.0, remaining_work=10.0 * held, max_replicas=16, mean_jobs=2.0,
        rescale_seconds=rescale_seconds,
    )  # fmt: skip
    nodes = {name: NodeInfo({"slots": 8}) for name in "ab"}
    base = {"a": ["a"] * min(held, 8) + ["b"] * (held - 8)}
    instance = build_instance({"a": job, "b": late_job(age=0.0)}, nodes, base, nodes["a"])
    (found,) = (claim for claim in claims(instance, 1.25, FAIR.quantum) if claim.job == 0)
    assert found.moved == moved


def test_a_job_in_time_is_served_as_without_a_promise() -> None:
    """While its share from now on would bring it home, the order is that of completion times."""
    job = JobInfo(
        *({"slots": 1}, scaling(0.0), 0.0, 1, 8), age=300.0, work_done=0.0,
        remaining_work=16000.0, mean_jobs=2.0,
    )  # fmt: skip
    short = replace(job, creation_timestamp=1.0, age=0.0, remaining_work=500.0)
    nodes = {"a": NodeInfo({"slots": 8})}
    jobs = {"long": job, "short": short}
    promising, plain = (
        ExactPolicy(CompletionTime(rank_power=0.75, fairness=factor)) for factor in (1.25, None)
    )
    fair, _ = promising.optimize(jobs, nodes, {}, nodes["a"])
    assert fair == plain.optimize(jobs, nodes, {}, nodes["a"])[0]
    late = {**jobs, "long": replace(job, age=2500.0)}
    fair, _ = promising.optimize(late, nodes, {}, nodes["a"])
    assert len(fair["long"]) > len(plain.optimize(late, nodes, {}, nodes["a"])[0]["long"])


def loop(fairness: float | None, widths: list[int], hours: float = 4.0) -> dict[str, float]:
    """Return the greatest age / (start + progress / share) of jobs that never end, after 1 h."""
    nodes = {name: NodeInfo({"slots": 8}) for name in "ab"}
    jobs = {
        f"{n}-{width}": JobInfo(
            {"slots": width}, scaling(0.0), float(n), 1, 1, num_stages=width,
            mean_jobs=float(len(widths)),
        )
        for n, width in enumerate(widths)
    }  # fmt: skip
    share = {n: min(16 / len(jobs) / job.num_stages, 1.0) for n, job in jobs.items()}
    base: dict[str, list[str]] = {}
    worst = dict.fromkeys(jobs, 0.0)
    policy = ExactPolicy(CompletionTime(fairness=fairness))
    for minute in range(int(hours * 60)):
        jobs = {name: replace(job, age=60.0 * minute) for name, job in jobs.items()}
        answer, _ = policy.optimize(jobs, nodes, base, nodes["a"])
        assert violations(jobs, nodes, base, answer) == []
        held = {name: list(found) for name, found in answer.items() if found}
        for name, found in held.items():
            seconds = 60.0 if base.get(name) == found else 30.0
            job = jobs[name]
            jobs[name] = replace(
                job,
                work_done=job.work_done + seconds,
                attained_service=job.attained_service + 60.0 * job.num_stages,
            )
        base = held
        for name, job in jobs.items():
            if minute >= 60:
                rho = 60.0 * (minute + 1) / (30.0 + job.work_done / share[name])
                worst[name] = max(worst[name], rho)
    return worst


@pytest.mark.exhaustive
@pytest.mark.parametrize("widths", [[1, 1, 2, 2, 4, 4, 8, 8], [8, 8, 8, 8]])
def test_jobs_of_one_to_eight_stages_all_have_their_share_in_time(widths: list[int]) -> None:
    """More is needed at once than fits; a decision and a start late at most, 90 of 3600 s."""
    assert max(loop(None, widths).values()) > 1.5
    assert max(loop(1.25, widths).values()) <= 1.25 * (1 + 90 / 3600)


class Trained(Steady):
    """Some epochs of 100 seconds of one replica."""

    def __init__(self, name: str, max_epochs: int) -> None:
        self.name, self.max_epochs = name, max_epochs


APPLICATIONS = {"short": Trained("short", 10), "long": Trained("long", 80)}


def worst(
    fairness: float | None,
    known_length: str,
    gap: float = 400.0,
    rank_power: float | None = None,
    decides_at: DecidesAt = "arrivals",
) -> float:
    """Return the greatest rho of a long job and a stream of short ones on four slots.

    Where it has its due, the long one ends beside the 28th short one at the latest.
    """
    jobs = [JobArrival("long", 0.0, "long", 1, 10)]
    jobs += [JobArrival(f"short-{n}", 10.0 + gap * n, "short", 1, 10) for n in range(30)]
    nodes = make_nodes({"": (1, 4)})
    options = Options(known_length=KnownLength.parse(known_length), decides_at=decides_at)
    power = {} if rank_power is None else {"rank_power": rank_power}
    policy = make_policy(fairness=fairness, **power)
    result = Cluster(jobs, APPLICATIONS, nodes, policy, options).run()
    alone = IsolatedTimes(nodes, options.restart_seconds)
    found = outcome(result, APPLICATIONS, alone, workload="w", policy="exact", seed=0)
    return max(job.finish_time_fairness for job in found.jobs)


STREAMS = [
    ("exact", 360.0, 0.55), ("none", 360.0, None), ("none", 400.0, 0.55), ("exact", 400.0, None),
    ("exact", 420.0, None), ("exact", 450.0, 0.55), ("none", 450.0, None),
    # The other combinations.
    ("none", 360.0, 0.55), ("exact", 360.0, None), ("exact", 400.0, 0.55), ("none", 400.0, None),
    ("none", 420.0, None), ("none", 450.0, 0.55), ("exact", 450.0, None),
]  # fmt: skip


@pytest.mark.parametrize("stream", first(1, STREAMS), ids=str)
def test_a_long_job_beside_a_stream_of_short_ones_is_hardly_late(
    stream: tuple[str, float, float | None],
) -> None:
    """Short ones take 280 of every gap's seconds, so that there is no room for much more.

    Where that is least some are later than promised, by default by a tenth of F at most.
    """
    known_length, gap, rank_power = stream
    most = 1.25 * 1.1 if rank_power is None else 1.3
    assert worst(None, known_length, gap, rank_power) > 2
    assert worst(1.25, known_length, gap, rank_power) <= most


@pytest.mark.parametrize("gap", first(1, [420.0, 340.0, 380.0, 360.0, 400.0, 440.0]))
@pytest.mark.exhaustive
def test_a_long_job_and_a_stream_are_in_time_where_decided_as_by_a_scheduler(gap: float) -> None:
    """Told how long jobs are, and asked whenever one comes or completes."""
    assert worst(None, "exact", gap, decides_at="changes") > 1.7
    assert worst(1.25, "exact", gap, decides_at="changes") <= 1.25


LIKELY = [
    *((380.0, 0.75), (390.0, None), (450.0, 0.75), (450.0, None)),
    *((400.0, 0.75), (400.0, None)),
]


@pytest.mark.parametrize("stream", first(1, LIKELY), ids=str)
@pytest.mark.exhaustive
def test_a_long_job_of_likely_length_is_not_much_later(stream: tuple[float, float | None]) -> None:
    """What is likely for it, the only one of its kind, is far too long most of the time."""
    gap, rank_power = stream
    assert worst(None, "learned", gap, rank_power) > 1.25**GUARD
    assert worst(1.25, "learned", gap, rank_power) <= 1.25**GUARD


@pytest.mark.parametrize("fairness", [0.9, float("inf"), float("nan")])
def test_a_promise_is_a_factor_of_at_least_1(fairness: float) -> None:
    with pytest.raises(
        ValueError, match=r"fairness: .* must be a finite number at least 1, or none"
    ):
        CompletionTime(fairness=fairness)
