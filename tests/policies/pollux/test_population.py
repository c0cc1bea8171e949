"""The population that one call leaves to the next, while jobs and nodes come and go."""

from __future__ import annotations

import numpy as np
import pytest

from pipollux_policies import JobInfo, NodeInfo, PolluxPolicy
from pipollux_policies.pollux.arrays import build_cluster
from pipollux_policies.pollux.policy import carry_over
from tests.extent import first
from tests.policies.policy_cases import (
    TEMPLATE,
    Case,
    current,
    fitness,
    random_case,
    violations,
)


def cluster(jobs: str, nodes: str) -> object:
    node = NodeInfo({"slots": 8})
    infos = {name: JobInfo({"slots": 1}, lambda _, r: r, 0.0, 1, 8) for name in jobs}
    return build_cluster(infos, dict.fromkeys(nodes, node), {}, node, len(nodes))


def test_rows_and_columns_follow_their_jobs_and_nodes() -> None:
    """Two states of jobs a, b on nodes x, y and two templates; then b goes, c comes, x goes."""
    old = cluster("ab", "xy")
    states = np.array(
        [
            [[1, 2, 3, 4], [5, 6, 7, 8]],
            [[0, 1, 0, 0], [0, 0, 1, 0]],
        ]
    )
    new = cluster("ac", "y")
    assert carry_over(states, old, new).tolist() == [
        [[2, 3], [0, 0]],
        [[1, 0], [0, 0]],
    ]


def test_a_node_that_comes_takes_over_a_template() -> None:
    old, new = cluster("a", "x"), cluster("a", "xz")
    states = np.array([[[1, 7]]])
    assert carry_over(states, old, new).tolist() == [[[1, 7, 0, 0]]]


def test_nothing_in_common() -> None:
    states = np.array([[[1, 7]]])
    carried = carry_over(states, cluster("a", "x"), cluster("b", "xy"))
    assert carried.tolist() == [[[0, 0, 0, 0]]]


@pytest.mark.parametrize("seed", first(1, range(6)))
def test_one_policy_through_many_changes(seed: int) -> None:
    """Jobs and nodes come and go between calls; every answer is feasible and no step back."""
    rng = np.random.default_rng(seed)
    policy = PolluxPolicy(seed=seed, population=20, generations=10)
    now = random_case(seed, max_nodes=4, max_jobs=5, max_slots=6)
    for step in range(6):
        answer, _ = policy.optimize(now.jobs, now.nodes, now.base, TEMPLATE)
        assert violations(now, answer) == []
        if not violations(now, current(now)):
            assert fitness(now, answer) >= fitness(now, current(now)) * (1 - 1e-9)
        others = random_case(100 * seed + step, max_nodes=4, max_jobs=5, max_slots=6)
        jobs = {n: j for n, j in now.jobs.items() if rng.random() < 0.8}
        jobs |= {f"{n}s{step}": job for n, job in others.jobs.items() if rng.random() < 0.4}
        nodes = {n: i for n, i in now.nodes.items() if rng.random() < 0.8}
        nodes |= {f"{n}s{step}": node for n, node in others.nodes.items() if rng.random() < 0.4}
        base = {n: a for n, a in answer.items() if n in jobs and a}
        now = Case(jobs, nodes, base)


def test_the_population_helps_the_next_call() -> None:
    """Found once with patience, the best is still there when there is time for one generation."""
    case = random_case(11, max_nodes=4, max_jobs=5, max_slots=6)
    patient = PolluxPolicy(population=60, generations=60)
    best, _ = patient.optimize(case.jobs, case.nodes, case.base, TEMPLATE)
    patient._generations = 1
    again, _ = patient.optimize(case.jobs, case.nodes, case.base, TEMPLATE)
    assert fitness(case, again) >= fitness(case, best) * (1 - 1e-9)
