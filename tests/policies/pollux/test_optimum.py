"""How good the answers are: against brute force where that is possible, and at scale."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import numpy as np
import pytest

from pipollux_policies import JobInfo, NodeInfo, PolluxPolicy, usable_nodes
from pipollux_policies.allocations.fitness import FLOOR
from pipollux_policies.pollux import nsga2
from pipollux_policies.pollux.arrays import ClusterArrays, build_cluster
from pipollux_policies.pollux.problem import AllocationProblem
from tests.extent import first
from tests.policies.policy_cases import (
    TEMPLATE,
    Case,
    all_allocations,
    best_fitness,
    current,
    fitness,
    random_case,
    scaling,
    violations,
)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(40))
def test_the_best_of_all_allocations_is_found(seed: int) -> None:
    """On every one of these: up to 3 nodes of up to 4 slots and 3 jobs, some of them running."""
    case = random_case(seed, max_nodes=3, max_jobs=3, max_replicas=4)
    answer, _ = PolluxPolicy().optimize(case.jobs, case.nodes, case.base, TEMPLATE)
    assert violations(case, answer) == []
    assert fitness(case, answer) == pytest.approx(best_fitness(case), rel=1e-9)


@pytest.mark.parametrize("seed", first(1, range(40)))
def test_the_best_of_resizes_and_restarts_is_found(seed: int) -> None:
    case = random_case(2000 + seed, max_nodes=3, max_jobs=3, max_replicas=4, elastic=True)
    answer, _ = PolluxPolicy().optimize(case.jobs, case.nodes, case.base, TEMPLATE)
    assert violations(case, answer) == []
    assert fitness(case, answer) == pytest.approx(best_fitness(case), rel=1e-9)


@pytest.mark.parametrize("seed", first(2, range(40)))
def test_the_best_of_all_shapes_and_types_is_found(seed: int) -> None:
    """The same where jobs have up to 3 shapes, GPUs are of 2 types, and nodes drain or are ill."""
    case = random_case(1000 + seed, max_nodes=3, max_jobs=3, max_replicas=4, mixed=True)
    answer, _ = PolluxPolicy().optimize(case.jobs, case.nodes, case.base, TEMPLATE)
    assert violations(case, answer) == []
    assert fitness(case, answer) == pytest.approx(best_fitness(case), rel=1e-9)


@pytest.mark.parametrize("elastic", [False, True])
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("seed", first(8, range(20)))
def test_the_objective_is_the_stated_one(seed: int, mixed: bool, elastic: bool) -> None:
    case = random_case(seed, max_nodes=3, max_jobs=2, max_replicas=3, mixed=mixed, elastic=elastic)
    if not usable_nodes(case.nodes):
        return
    problem = AllocationProblem(build_cluster(case.jobs, case.nodes, case.base, TEMPLATE, 3))
    some = list(all_allocations(case))[:: 1 + seed]
    for allocations in some[:50]:
        cluster = build_cluster(case.jobs, case.nodes, allocations, TEMPLATE, 3)
        keys = [row_key(cluster, row) for row in range(len(cluster.shapes))]
        rows = range(problem.shape[0])
        state = cluster.base[[keys.index(row_key(problem.cluster, row)) for row in rows]]
        assert problem.fitness(state[None])[0] == pytest.approx(fitness(case, allocations))


def row_key(cluster: ClusterArrays, row: int) -> tuple[object, ...]:
    return cluster.job_names[cluster.job_of[row]], id(cluster.shapes[row])


def test_the_power_mean_by_hand() -> None:
    """Two jobs on 4 slots: 3 and 1 replicas against fair shares of 2, and one with nothing."""
    node = NodeInfo({"slots": 4})
    jobs = {name: JobInfo({"slots": 1}, scaling(0), 0.0, 1, 4) for name in ("a", "b")}
    for power, expected in ((-1.0, 2 / (1 / 1.5 + 1 / 0.5)), (1.0, 1.0), (-2.0, 0.6708203932)):
        problem = AllocationProblem(build_cluster(jobs, {"n": node}, {}, node, 0), power)
        assert problem.fitness(np.array([[[3], [1]]]))[0] == pytest.approx(expected)
    problem = AllocationProblem(build_cluster(jobs, {"n": node}, {}, node, 0))
    assert problem.fitness(np.array([[[4], [0]]]))[0] == pytest.approx(2 / (1 / 2 + 1 / FLOOR))


@pytest.mark.parametrize(
    ("age", "restarts", "cost", "factor"),
    [(0, 0, 30, 0.0), (30, 0, 30, 0.5), (90, 1, 30, 0.5), (60, 3, 30, 0.0), (0, 0, 0, 1.0)],
)
def test_the_restart_factor_by_hand(age: float, restarts: int, cost: float, factor: float) -> None:
    job = JobInfo(
        {"slots": 1}, scaling(0), 0.0, 1, 2, age=age, num_restarts=restarts, restart_seconds=cost
    )
    assert job.change_factor(elastic=False) == pytest.approx(factor)


def test_growing_must_be_worth_the_restart() -> None:
    """From one replica to two, 1.8 times as fast: not at age 30 (half is lost), but at age 300."""
    node = NodeInfo({"slots": 2})
    for age, replicas in ((30.0, 1), (300.0, 2)):
        job = JobInfo({"slots": 1}, scaling(1 / 9), 0.0, 1, 2, age=age)
        answer, _ = PolluxPolicy().optimize({"j": job}, {"n": node}, {"j": ["n"]}, node)
        assert len(answer["j"]) == replicas


def test_starting_costs_no_restart_and_goes_before_growing() -> None:
    node = NodeInfo({"slots": 2})
    old = JobInfo({"slots": 1}, scaling(0), 0.0, 1, 2, age=1e5)
    new = JobInfo({"slots": 1}, scaling(0), 1.0, 1, 2, age=0.0)
    answer, _ = PolluxPolicy().optimize({"o": old, "n": new}, {"a": node}, {"o": ["a", "a"]}, node)
    assert answer == {"o": ["a"], "n": ["a"]}


def test_speedups_of_zero_or_none_at_all_are_survived() -> None:
    node = NodeInfo({"slots": 4})
    jobs = {
        "zero": JobInfo({"slots": 1}, lambda _, r: np.zeros(len(r)), 0.0, 1, 4),
        "nan": JobInfo({"slots": 1}, lambda _, r: np.full(len(r), np.nan), 0.0, 1, 4),
        "scalar": JobInfo({"slots": 1}, lambda *_: 1.0, 0.0, 1, 4),
        "dated": JobInfo({"slots": 1}, scaling(0), datetime(2020, 1, 1, tzinfo=UTC), 1, 4),
    }
    policy = PolluxPolicy(population=16, generations=8)
    answer, _ = policy.optimize(jobs, {"n": node}, {}, node)
    assert answer == {"zero": [], "nan": [], "scalar": ["n"], "dated": ["n"] * 3}


@pytest.mark.parametrize(
    ("size", "limit"), [(1, 2000), pytest.param(2, 8000, marks=pytest.mark.exhaustive)]
)
def test_tiny_clusters_are_not_searched_for_what_is_not_there(
    size: int, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With fewer states than the population has members pymoo alone mates on.

    It would breed 20 000 children for one job on one node, and 11 000 for two on two.
    """
    children = 0
    repair = nsga2._Repair._do

    def count(self: Any, problem: Any, X: Any, **options: Any) -> Any:
        nonlocal children
        children += len(X)
        return repair(self, problem, X, **options)

    monkeypatch.setattr(nsga2._Repair, "_do", count)
    node = NodeInfo({"slots": 2})
    nodes = {f"n{n}": node for n in range(size)}
    jobs = {f"j{j}": JobInfo({"slots": 1}, scaling(0.1), j, 1, 4) for j in range(size)}
    PolluxPolicy().optimize(jobs, nodes, {}, node)
    assert 0 < children < limit


def large_case(num_nodes: int, num_jobs: int) -> Case:
    rng = np.random.default_rng(num_jobs)
    nodes = {f"n{n:02}": NodeInfo({"slots": 4}) for n in range(num_nodes)}
    jobs = {
        f"j{j:02}": JobInfo(
            {"slots": int(rng.choice([1, 1, 1, 2, 4]))},
            scaling(rng.uniform(0, 0.3)),
            float(j),
            1,
            16,
            age=3000.0,
        )
        for j in range(num_jobs)
    }
    return Case(jobs, nodes, {})


@pytest.mark.exhaustive
def test_it_still_moves_at_64_gpus_under_load() -> None:
    """AdaptDL's search freezes here; ours fills the cluster, and again when a job has finished."""
    case = large_case(16, 40)
    policy = PolluxPolicy()
    first, _ = policy.optimize(case.jobs, case.nodes, case.base, NodeInfo({"slots": 4}))
    assert violations(case, first) == []
    slots = {name: job.resources["slots"] for name, job in case.jobs.items()}
    assert sum(slots[name] * len(nodes) for name, nodes in first.items()) == 64

    done = max(first, key=lambda name: slots[name] * len(first[name]))
    jobs = {name: job for name, job in case.jobs.items() if name != done}
    later = Case(jobs, case.nodes, {n: a for n, a in first.items() if a and n != done})
    second, _ = policy.optimize(later.jobs, later.nodes, later.base, NodeInfo({"slots": 4}))
    assert violations(later, second) == []
    assert sum(slots[name] * len(nodes) for name, nodes in second.items()) == 64
    assert fitness(later, second) > fitness(later, current(later))


@pytest.mark.exhaustive
def test_the_utility_band_advises_a_number_of_nodes() -> None:
    node = NodeInfo({"slots": 4})
    nodes = {f"n{n}": node for n in range(4)}

    def advise(count: int, serial: float, most: int) -> int:
        jobs = {f"j{j}": JobInfo({"slots": 1}, scaling(serial), j, 1, most) for j in range(count)}
        return PolluxPolicy(population=40, generations=40).optimize(jobs, nodes, {}, node)[1]

    assert advise(20, 0.0, 4) > 4  # everybody scales perfectly, and some wait
    assert advise(2, 0.9, 8) < 4  # two jobs that hardly scale
    assert advise(4, 0.25, 4) == 4  # speedup 2.29 on 4 slots each: a utility of 0.57
