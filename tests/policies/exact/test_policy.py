"""The exact policy: the optimum by brute force, its bound, and that nobody starves."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from pipollux_policies import (
    CompletionTime,
    ExactPolicy,
    FairSpeedup,
    JobInfo,
    NodeInfo,
    violations,
)
from pipollux_policies.exact.knapsack import knapsack
from tests.extent import first, first_points
from tests.policies.policy_cases import TEMPLATE, best_fitness, fitness, random_case, scaling


@pytest.mark.parametrize("elastic", [False, True])
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("seed", first(15, range(60)))
def test_pollux_objective_is_solved_to_its_optimum(seed: int, mixed: bool, elastic: bool) -> None:
    case = random_case(seed, max_nodes=3, max_jobs=3, mixed=mixed, elastic=elastic)
    policy = ExactPolicy(FairSpeedup())
    answer, certificate = policy.solve(case.jobs, case.nodes, case.base, TEMPLATE)
    assert fitness(case, answer) == pytest.approx(best_fitness(case), rel=1e-9)
    assert certificate.value <= certificate.bound + 1e-9 * abs(certificate.bound)


@pytest.mark.parametrize("seed", range(40))
def test_the_knapsack_is_exact(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 5, size=4)
    costs = [np.concatenate([[0], rng.integers(0, 6, size)]) for size in sizes]
    values = [np.concatenate([[0.0], rng.normal(size=size)]) for size in sizes]
    capacity = int(rng.integers(0, 12))
    best = max(
        sum(float(v[i]) for v, i in zip(values, pick, strict=True))
        for pick in itertools.product(*(range(len(v)) for v in values))
        if sum(int(c[i]) for c, i in zip(costs, pick, strict=True)) <= capacity
    )
    chosen, total = knapsack(costs, values, capacity)
    assert total == pytest.approx(best, abs=1e-12)
    assert sum(int(c[i]) for c, i in zip(costs, chosen, strict=True)) <= capacity
    assert sum(float(v[i]) for v, i in zip(values, chosen, strict=True)) == pytest.approx(total)


def test_a_large_cluster_is_within_its_own_bound() -> None:
    rng = np.random.default_rng(0)
    nodes = {f"n{n:02}": NodeInfo({"slots": 4}) for n in range(16)}
    jobs = {
        f"j{j:02}": JobInfo({"slots": int(rng.choice([1, 1, 2, 4]))}, scaling(0.05), j, 0, 16)
        for j in range(40)
    }
    base: dict[str, list[str]] = {}
    for _ in range(3):
        answer, certificate = ExactPolicy(FairSpeedup()).solve(jobs, nodes, base, nodes["n00"])
        assert violations(jobs, nodes, base, answer) == []
        assert certificate.gap < 0.02
        base = {name: nodes_of for name, nodes_of in list(answer.items())[3:] if nodes_of}


def test_distributed_jobs_that_are_in_each_others_way_get_whole_nodes() -> None:
    # An equal share is 6.4 slots, and no two such jobs may share a node. With whole nodes the
    # shares are as even as they can be: who shares a node takes from the other what it gets.
    jobs = {f"j{i}": JobInfo({"slots": 1}, scaling(0.05, 0.0), float(i), 0, 64) for i in range(10)}
    nodes = {f"n{i:02}": NodeInfo({"slots": 4}) for i in range(16)}
    answer, _ = ExactPolicy(FairSpeedup()).optimize(jobs, nodes, {}, nodes["n00"])
    assert sorted(map(len, answer.values())) == [4] * 4 + [8] * 6


@pytest.mark.parametrize("extra", [0, 1])
def test_bytes_of_memory_may_be_the_scarcest_resource(extra: int) -> None:
    """Whether they have a large common divisor or none: no table has an entry for each byte."""
    gib = 2**30
    node = NodeInfo({"slots": 64, "memory": 512 * gib})
    jobs = {
        f"j{i}": JobInfo({"slots": 1, "memory": (40 + i) * gib + i * extra}, scaling(0.0), i, 0, 9)
        for i in range(4)
    }
    answer, certificate = ExactPolicy(FairSpeedup()).solve(jobs, {"n": node}, {}, node)
    assert violations(jobs, {"n": node}, {}, answer) == []
    assert all(len(nodes) >= 2 for nodes in answer.values())
    assert certificate.value <= certificate.bound + 1e-9 * abs(certificate.bound)


def test_a_move_that_gains_less_than_it_costs_is_not_made() -> None:
    nodes = {"n": NodeInfo({"slots": 4})}

    def ask(remaining: float) -> list[str]:
        job = JobInfo({"slots": 1}, scaling(0.0), 0.0, 1, 4, age=500.0, remaining_work=remaining)
        answer, _ = ExactPolicy().optimize({"j": job}, nodes, {"j": ["n"] * 3}, nodes["n"])
        return answer["j"]

    assert len(ask(30.0)) == 3  # done in 10 s as it is; 30 s of restart would gain 2.5 s
    assert len(ask(1e6)) == 4


@pytest.mark.parametrize("left", [1e-6, 1.0])
def test_a_job_that_is_about_to_end_takes_no_slots_of_others(left: float) -> None:
    def job(work: float) -> JobInfo:
        return JobInfo({"slots": 1}, scaling(0.1), 0.0, 1, 4, age=100.0, remaining_work=work)

    jobs = {"ends": job(left), "a": job(100.0), "b": job(50.0)}
    nodes = {name: NodeInfo({"slots": 2}) for name in ("n0", "n1")}
    base = {"ends": ["n0"], "a": ["n0", "n1"], "b": ["n1"]}
    answer, _ = ExactPolicy().optimize(jobs, nodes, base, TEMPLATE)
    assert {name: sorted(held) for name, held in answer.items()} == base


def test_the_shorter_job_comes_first() -> None:
    nodes = {"n": NodeInfo({"slots": 4})}
    jobs = {
        name: JobInfo({"slots": 1}, scaling(0.0), 0.0, 0, 4, remaining_work=work)
        for name, work in (("long", 1e5), ("short", 1e3))
    }
    answer, _ = ExactPolicy().optimize(jobs, nodes, {}, nodes["n"])
    assert {name: len(nodes_of) for name, nodes_of in answer.items()} == {"long": 0, "short": 4}


@pytest.mark.parametrize(
    ("rank_power", "work"),
    first_points(1, [(CompletionTime.rank_power, 150.0), (0.75, 60.0), (0.55, 120.0)]),
)
def test_a_long_job_is_not_starved_by_a_stream_of_short_ones(
    rank_power: float, work: float
) -> None:
    """One slot, a new short job at every decision: the long one still gets its part."""
    nodes = {"n": NodeInfo({"slots": 1})}
    options = CompletionTime(rank_power=rank_power, part=0.2, patience=300.0, quantum=300.0)
    policy, interval = ExactPolicy(options), 60.0
    base: dict[str, list[str]] = {}
    held = 0.0
    for decision in range(200):
        age = decision * interval
        jobs = {
            "long": JobInfo(
                {"slots": 1}, scaling(0.0), 0.0, 0, 1, age=age, attained_service=held,
                remaining_work=1e6,
            ),
            f"short-{decision}": JobInfo(
                {"slots": 1}, scaling(0.0), age, 0, 1, remaining_work=work
            ),
        }  # fmt: skip
        current = {name: nodes_of for name, nodes_of in base.items() if name in jobs}
        answer, _ = policy.optimize(jobs, nodes, current, nodes["n"])
        base = {name: list(nodes_of) for name, nodes_of in answer.items() if nodes_of}
        assert held >= 0.2 * (age - 300.0) - interval
        held += interval * ("long" in base)
    assert held < 0.5 * 200 * interval  # and the short ones are not starved by it either


@pytest.mark.parametrize(("age", "restarts", "replicas"), [(600, 1, 1), (600, 0, 2), (6000, 9, 2)])
def test_a_small_gain_is_worth_a_restart_to_a_job_that_is_left_alone(
    age: float, restarts: int, replicas: int
) -> None:
    """7 % on a slot that nobody wants: D / (H + D) is 9 % for H = 300 s, and 5 % for H = 600 s."""
    node = NodeInfo({"slots": 2})
    job = JobInfo(
        {"slots": 1},
        lambda _nodes, replicas: 1.0 + 0.07 * (np.asarray(replicas) - 1.0),
        0.0,
        1,
        2,
        age=age,
        num_restarts=restarts,
        restart_seconds=30.0,
    )
    answer, _ = ExactPolicy().optimize({"j": job}, {"n": node}, {"j": ["n"]}, node)
    assert len(answer["j"]) == replicas


@pytest.mark.parametrize(
    ("option", "value"), [("rank_power", 1.5), ("part", -0.1), ("horizon", -1.0)]
)
def test_an_option_out_of_range_is_named(option: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"{option}: {value}"):
        CompletionTime(**{option: value})
