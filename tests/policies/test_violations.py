"""The judge of all policies: every rule that is broken is named, and nothing else."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

from pipollux_policies import Allocation, JobInfo, NodeInfo, ReplicaShape, violations
from tests.policies.policy_cases import scaling

WIDE = ReplicaShape(2, {"slots": 2}, scaling(0), gpu_type="b", max_replicas=1)
JOBS = {
    "free": JobInfo({"slots": 1, "cpus": 1}, scaling(0), 0.0, 2, 3, shapes=(WIDE,)),
    "pinned": JobInfo({"slots": 1}, scaling(0), 0.0, 0, 4, preemptible=False),
    "typed": JobInfo({"slots": 1}, scaling(0), 0.0, 0, 4, gpu_type="b"),
}
NODES = {
    "a": NodeInfo({"slots": 2, "cpus": 2}, gpu_type="a"),
    "b": NodeInfo({"slots": 4, "cpus": 2}, gpu_type="b"),
    "drains": NodeInfo({"slots": 4, "cpus": 4}, gpu_type="b", draining=True),
    "ill": NodeInfo({"slots": 4, "cpus": 4}, gpu_type="b", healthy=False),
}


@pytest.mark.parametrize(
    ("base", "answer", "named"),
    [
        ({}, {"free": ["a", "a"], "typed": ["b", "b"]}, None),
        ({}, {"free": ["a", "b"], "typed": ["b"]}, None),
        ({"pinned": ["drains"]}, {"pinned": ["drains"]}, None),
        ({"pinned": ["a", "b"]}, {"pinned": ["b", "a"], "free": ["a", "b"]}, None),
        ({"pinned": ["ill"]}, {"pinned": ["a"]}, None),
        ({"pinned": ["gone"]}, {}, None),
        ({}, {"nobody": ["a"]}, "'nobody' is not one of the jobs"),
        ({"pinned": ["a"]}, {"pinned": ["b"]}, r"pinned to \['a'\] but is given \['b'\]"),
        ({"pinned": ["a"]}, {}, r"pinned to \['a'\] but is given \[\]"),
        ({"typed": ["drains"]}, {"typed": ["drains"]}, "nodes that take no new replicas: drains"),
        ({"pinned": ["ill"]}, {"pinned": ["ill"]}, "nodes that take no new replicas: ill"),
        ({}, {"typed": ["gone"]}, "nodes that take no new replicas: gone"),
        ({}, {"typed": ["a"]}, r"for GPUs of type b but is on \['a'\]"),
        ({}, {"free": ["a"]}, "has 1 replica, allowed are 2 to 3"),
        ({}, {"free": ["b"] * 4}, "has 4 replicas, allowed are 2 to 3|2 cpus but 4 are allocated"),
        ({}, {"free": Allocation(["b", "b"], WIDE)}, "has 2 replicas, allowed are 2 to 1"),
        ({}, {"free": ["a", "a", "a"]}, "node 'a' has 2 slots but 3|node 'a' has 2 cpus but 3"),
        ({}, {"free": ["a", "b"], "pinned": ["a", "b"]}, "'[ab]' carries 2 distributed jobs"),
    ],
)
def test_each_rule(
    base: dict[str, Sequence[str]], answer: dict[str, Sequence[str]], named: str | None
) -> None:
    found = violations(JOBS, NODES, base, answer)
    if named is None:
        assert found == []
    else:
        assert found
        assert all(re.search(named, text) for text in found), found
