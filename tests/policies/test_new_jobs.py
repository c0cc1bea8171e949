"""New jobs start on free slots in order of arrival, before a policy weighs all jobs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipollux_policies import Allocation, ExactPolicy, FifoPolicy, JobInfo, NodeInfo, Policy
from pipollux_policies.allocations.allocation import as_allocation
from pipollux_policies.placement.new_jobs import place_in_order

NODES = {"a": NodeInfo({"slots": 4}), "b": NodeInfo({"slots": 2})}
TWO_ARE_HELD = {"a": NodeInfo({"slots": 2}), "b": NodeInfo({"slots": 2})}


def job(least: int) -> JobInfo:
    return JobInfo({"slots": 1}, lambda _, replicas: replicas, 0.0, least, 8)


def placed(
    jobs: Mapping[str, JobInfo],
    free: Mapping[Any, NodeInfo] = NODES,
    weighed: tuple[str, ...] = (),
    *,
    policy: Policy | None = None,
    queue: bool = True,
) -> dict[str, list[str]]:
    asked = policy or ExactPolicy()

    def place(name: str, left: Mapping[Any, NodeInfo]) -> Allocation:
        return as_allocation(jobs[name], asked.allocate_job(jobs[name], left), NODES)

    found = place_in_order(jobs, free, place, weighed, queue=queue)
    return {name: list(nodes) for name, nodes in found.items()}


def test_each_gets_its_minimum_and_none_overtakes_one_that_waits() -> None:
    jobs = {"one": job(1), "two": job(2), "wide": job(3), "last": job(1)}
    assert placed(jobs, TWO_ARE_HELD) == {"one": ["a"], "two": ["b", "b"]}
    alone = placed(jobs, TWO_ARE_HELD, queue=False)
    assert alone == {"one": ["a"], "two": ["b", "b"], "last": ["a"]}


def test_a_job_that_the_policy_weighs_holds_back_those_after_it() -> None:
    jobs = {name: job(1) for name in ("x", "heir", "y")}
    assert placed(jobs, weighed=("heir",)) == {"x": ["a"]}
    assert placed(jobs, weighed=("heir",), queue=False) == {"x": ["a"], "y": ["a"]}
    assert placed(jobs) == {name: ["a"] for name in jobs}


def test_a_policy_that_places_none_weighs_them_all() -> None:
    assert placed({"x": job(1)}, policy=FifoPolicy()) == {}
