"""What code written for AdaptDL's policy relies on: its names, arguments and habits."""

from __future__ import annotations

import copy
from collections import Counter
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest

from pipollux_perfmodel import GoodputFunction, GradParams, PerfParams, SpeedupFunction
from pipollux_policies import JobInfo, NodeInfo, PolluxPolicy
from tests.extent import first
from tests.policies.policy_cases import Case, violations

NOW = datetime(2021, 7, 14, tzinfo=UTC)


@pytest.fixture(scope="module")
def speedup() -> SpeedupFunction:
    """A job whose synchronisation costs as much as its computation from four replicas on."""
    times = PerfParams(0.1, 0.006, 0.03, 0.005, 0.01, 0.003, 1.2)
    goodput = GoodputFunction(times, GradParams(sqr=0.002, var=0.0008), 128)
    return SpeedupFunction(goodput, max_batch_size=1280, atomic_bsz_range=(64, 256))


@pytest.mark.parametrize("num_nodes", first(1, [4, 1]))
def test_numbered_jobs_and_nodes_through_rounds_in_which_jobs_end(
    num_nodes: int, speedup: SpeedupFunction
) -> None:
    """Time stamps in a tuple, positional arguments, lists copied between rounds, pinned jobs."""
    nodes = {n: NodeInfo({"nvidia.com/gpu": 2, "pods": 32}, False) for n in range(num_nodes)}
    needs, policy, base = (
        {"nvidia.com/gpu": 1, "pods": 1},
        PolluxPolicy(population=20, generations=10),
        {},
    )
    left = np.random.default_rng(num_nodes).permutation(10).tolist()
    for _ in range(3):
        jobs = {
            j: JobInfo(needs, speedup, (NOW + timedelta(minutes=j),), 2 * (j % 2), 8 - 4 * (j % 2))
            if j % 3
            else JobInfo(needs, speedup, NOW + timedelta(minutes=j), 2, 4, preemptible=False)
            for j in left
        }
        answer, desired = policy.optimize(jobs, nodes, base, nodes[0])
        assert violations(Case(jobs, nodes, base), answer) == []
        assert Counter(n for held in answer.values() for n in held).total() == 2 * num_nodes
        assert type(desired) is int
        base = copy.deepcopy(answer)
        base.pop(left.pop(), None)


def test_a_job_for_which_no_node_is_left_asks_for_more(speedup: SpeedupFunction) -> None:
    """One of three nodes has too few CPUs, so one of three jobs waits."""
    nodes = {n: NodeInfo({"gpu": 1, "cpu": 500 if n == 0 else 8000}, False) for n in range(3)}
    jobs = {
        j: JobInfo({"gpu": 1, "cpu": 1000}, speedup, NOW + timedelta(minutes=j), 0, 1)
        for j in range(3)
    }
    answer, desired = PolluxPolicy(population=20, generations=10).optimize(
        jobs, nodes, {}, NodeInfo({"gpu": 1, "cpu": 8000})
    )
    assert sorted(map(len, answer.values())) == [0, 1, 1]
    assert {node for held in answer.values() for node in held} == {1, 2}
    assert desired > 3
