"""Policies that give a job the replicas it asks for, FIFO and Tiresias: their rules by hand."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from pipollux_policies import FifoPolicy, NodeInfo, ReplicaShape, TiresiasPolicy
from tests.policies.baseline_cases import HOUR, NODE, fixed, sizes
from tests.policies.policy_cases import scaling

# FIFO


def test_fifo_keeps_to_the_order_of_arrival_unless_told_to_fill_up() -> None:
    jobs = {"a": fixed(0, 3), "b": fixed(1, 2), "c": fixed(2, 1)}
    strict, filling = FifoPolicy(), FifoPolicy(backfill=True)
    assert sizes(strict.optimize(jobs, {"n": NODE}, {}, NODE)[0]) == {"a": 3, "b": 0, "c": 0}
    assert sizes(filling.optimize(jobs, {"n": NODE}, {}, NODE)[0]) == {"a": 3, "b": 0, "c": 1}
    assert strict.allocate_job(jobs["c"], {"n": NODE}) == []
    assert filling.allocate_job(jobs["b"], {"n": NODE}) == ["n", "n"]


def test_fifo_is_not_held_up_by_a_job_that_can_never_run() -> None:
    jobs = {"monster": fixed(0, 1, stages=8), "b": fixed(1, 2)}
    answer = FifoPolicy().optimize(jobs, {"n": NODE}, {}, NODE)[0]
    assert answer == {"monster": [], "b": ["n", "n"]}


def test_fifo_preempts_nobody() -> None:
    jobs = {"old": fixed(0, 4), "young": fixed(1, 1, attained_service=1e9)}
    answer = FifoPolicy().optimize(jobs, {"n": NODE}, {"young": ["n"]}, NODE)[0]
    assert answer == {"old": [], "young": ["n"]}


def test_fixed_sizes_stay_within_bounds_and_on_the_job_s_own_stages() -> None:
    wide = ReplicaShape(4, {"slots": 4}, scaling(0))
    jobs = {
        "much": fixed(0, 9, max_replicas=3),
        "little": fixed(1, 1, min_replicas=2),
        "silent": replace(fixed(2, 1), requested_replicas=None, min_replicas=0, shapes=(wide,)),
    }
    nodes = {"a": NODE, "b": NODE}
    answer = FifoPolicy().optimize(jobs, nodes, {}, NODE)[0]
    assert sizes(answer) == {"much": 3, "little": 2, "silent": 1}
    assert answer["silent"].num_stages == 1


def test_another_shape_serves_where_the_job_s_own_is_for_other_gpus() -> None:
    other = ReplicaShape(2, {"slots": 2}, scaling(0), gpu_type="B")
    job = replace(fixed(0, 2), gpu_type="A", shapes=(other,))
    nodes = {"b": NodeInfo({"slots": 4}, gpu_type="B")}
    answer = TiresiasPolicy().optimize({"j": job}, nodes, {}, NODE)[0]
    assert answer == {"j": ["b", "b"]}
    assert answer["j"].num_stages == 2


# Tiresias


def test_tiresias_serves_least_attained_service_first_and_preempts() -> None:
    jobs = {
        "long": fixed(0, 4, attained_service=16 * HOUR),
        "short": fixed(5, 2, attained_service=16 * HOUR - 1),
        "new": fixed(9, 2),
    }
    answer = TiresiasPolicy().optimize(jobs, {"n": NODE}, {"long": ["n"] * 4}, NODE)[0]
    assert sizes(answer) == {"long": 0, "short": 2, "new": 2}


def test_tiresias_is_first_in_first_out_within_a_queue() -> None:
    jobs = {
        "second": fixed(2, 3, attained_service=10 * HOUR),
        "first": fixed(1, 3, attained_service=15 * HOUR),
    }
    running = {"second": ["n"] * 3}
    answer = TiresiasPolicy().optimize(jobs, {"n": NODE}, running, NODE)[0]
    assert sizes(answer) == {"first": 3, "second": 0}


def test_tiresias_lets_smaller_jobs_fill_what_is_left() -> None:
    """A job that does not fit waits; those behind it run, and are preempted when it does fit."""
    jobs = {"a": fixed(0, 3), "b": fixed(1, 2), "c": fixed(2, 1)}
    policy = TiresiasPolicy()
    first = policy.optimize(jobs, {"n": NODE}, {}, NODE)[0]
    assert sizes(first) == {"a": 3, "b": 0, "c": 1}
    del jobs["a"]
    jobs["d"] = fixed(3, 2)
    second = policy.optimize(jobs, {"n": NODE}, {"c": first["c"]}, NODE)[0]
    assert sizes(second) == {"b": 2, "c": 1, "d": 0}


def test_tiresias_has_as_many_queues_as_it_is_told() -> None:
    policy = TiresiasPolicy(queue_thresholds=(100, 1000))
    services = (0, 99, 100, 999, 1000, 1e9)
    jobs = [fixed(0, 1, attained_service=float(service)) for service in services]
    assert [policy.queue(job, running=False) for job in jobs] == [0, 0, 1, 1, 2, 2]


def test_tiresias_promotes_a_job_that_has_waited_long_for_what_it_ran() -> None:
    policy = TiresiasPolicy(promotion=3.0)
    # It has run for 20 h on one slot, and waited for the rest of its age.
    aged = [fixed(0, 1, attained_service=20 * HOUR, age=age * HOUR) for age in (79, 80, 50, 49)]
    assert [policy.queue(job, running=False) for job in aged[:2]] == [1, 0]
    assert [policy.queue(job, running=True) for job in aged[2:]] == [0, 1]


def test_tiresias_moves_less_important_jobs_out_of_the_way_but_no_more_than_needed() -> None:
    nodes = {"a": NODE, "b": NODE}
    late = {f"late{j}": fixed(j, 1, attained_service=20 * HOUR) for j in range(4)}
    base = {"late0": ["a"], "late1": ["b"], "late2": ["a"], "late3": ["b"]}
    answer = TiresiasPolicy().optimize({**late, "new": fixed(9, 5)}, nodes, base, NODE)[0]
    assert Counter(answer["new"]) == {"a": 2, "b": 3}
    assert {name: answer[name] for name in late} == {**base, "late3": []}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"queue_thresholds": (5, 5)}, "queue_thresholds"),
        ({"queue_thresholds": (0,)}, "queue_thresholds"),
        ({"promotion": 0}, "promotion: 0"),
    ],
)
def test_tiresias_names_what_is_out_of_range(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        TiresiasPolicy(**options)
