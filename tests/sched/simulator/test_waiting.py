"""Jobs that hold nothing are placed one by one before all are weighed."""

from __future__ import annotations

from pipollux_sched.policy import Allocation, ExactPolicy, FifoPolicy, JobInfo, NodeInfo
from pipollux_sched.simulator.engine.waiting import place_waiting

NODES = {"a": NodeInfo({"slots": 4}), "b": NodeInfo({"slots": 2})}


def job(least: int) -> JobInfo:
    return JobInfo({"slots": 1}, lambda _, replicas: replicas, 0.0, least, 8)


def placed(
    jobs: dict[str, JobInfo], base: dict[str, Allocation], weighed: tuple[str, ...] = ()
) -> dict[str, list[str]]:
    found = place_waiting(ExactPolicy(), jobs, NODES, base, weighed)
    return {name: list(nodes) for name, nodes in found.items()}


def test_each_gets_its_least_on_what_is_free_and_none_goes_before_one_that_waits() -> None:
    jobs = {"runs": job(1), "one": job(1), "two": job(2), "wide": job(3), "last": job(1)}
    base = {"runs": Allocation(["a", "a"], jobs["runs"].all_shapes[0])}
    assert placed(jobs, base) == {"one": ["a"], "two": ["b", "b"]}


def test_an_heir_and_those_after_it_wait_to_be_weighed() -> None:
    jobs = {name: job(1) for name in ("x", "heir", "y")}
    assert placed(jobs, {}, ("heir",)) == {"x": ["a"]}
    assert placed(jobs, {}) == {name: ["a"] for name in jobs}


def test_a_policy_that_places_none_weighs_them_all() -> None:
    assert place_waiting(FifoPolicy(), {"x": job(1)}, NODES, {}, ()) == {}
