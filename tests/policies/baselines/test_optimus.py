"""Optimus: its rules by hand."""

from __future__ import annotations

from typing import Any

import numpy as np

from pipollux_policies import NodeInfo, OptimusPolicy
from tests.policies.baseline_cases import HOUR, NODE, fixed, sizes


def root(num_nodes: Any, num_replicas: Any) -> Any:
    return np.asarray(num_replicas, dtype=float) ** 0.5


def test_optimus_follows_the_marginal_gain() -> None:
    """t = work / √R: the long job gains 264, 117, 71, 47, 35, 27 s, the short one 29, 13 s."""
    jobs = {
        "long": fixed(0, 1, speedup_fn=root, remaining_work=900.0),
        "short": fixed(1, 1, speedup_fn=root, remaining_work=100.0),
    }
    for slots, expected in (
        (1, (0, 1)),
        (2, (1, 1)),
        (5, (4, 1)),
        (7, (6, 1)),
        (8, (6, 2)),
        (9, (7, 2)),
    ):
        nodes = {"n": NodeInfo({"slots": slots})}
        answer = OptimusPolicy().optimize(jobs, nodes, {}, NODE)[0]
        assert tuple(sizes(answer).values()) == expected


def test_optimus_counts_a_replica_of_k_slots_k_times() -> None:
    """The first gain of both jobs is 264 s, but a replica of the wide one holds two slots."""
    jobs = {
        "wide": fixed(0, 1, stages=2, speedup_fn=root, remaining_work=900.0),
        "slim": fixed(1, 1, speedup_fn=root, remaining_work=900.0),
    }
    # 3 slots for one replica each; gains per slot: wide 132, slim 264, 117, 70 ...
    for slots, expected in ((4, (1, 2)), (6, (2, 2)), (7, (2, 3))):
        nodes = {"n": NodeInfo({"slots": slots})}
        answer = OptimusPolicy().optimize(jobs, nodes, {}, NODE)[0]
        assert tuple(sizes(answer).values()) == expected


def test_optimus_gives_nothing_that_does_not_shorten_a_job() -> None:
    flat = fixed(0, 1, speedup_fn=lambda _, replicas: np.ones(np.shape(replicas)))
    assert sizes(OptimusPolicy().optimize({"j": flat}, {"n": NODE}, {}, NODE)[0]) == {"j": 1}


def test_optimus_takes_a_silent_job_to_need_what_it_had_and_an_hour_at_least() -> None:
    jobs = {
        "young": fixed(0, 1, remaining_work=None),
        "old": fixed(1, 1, attained_service=4 * HOUR),
        "said": fixed(2, 1, remaining_work=1.5 * HOUR),
    }
    one = {"n": NodeInfo({"slots": 1})}
    two = {"n": NodeInfo({"slots": 2})}
    assert sizes(OptimusPolicy().optimize(jobs, one, {}, NODE)[0])["young"] == 1
    assert sizes(OptimusPolicy().optimize(jobs, two, {}, NODE)[0])["old"] == 0


def test_optimus_moves_small_jobs_so_that_a_wide_one_has_a_node() -> None:
    nodes = {"a": NodeInfo({"slots": 2}), "b": NodeInfo({"slots": 2})}
    limits: dict[str, Any] = {"max_replicas": 1, "remaining_work": 100.0}
    jobs = {"x": fixed(0, 1, **limits), "y": fixed(1, 1, **limits)}
    jobs["wide"] = fixed(2, 1, stages=2, **limits)
    answer = OptimusPolicy().optimize(jobs, nodes, {"x": ["a"], "y": ["b"]}, NODE)[0]
    assert sizes(answer) == {"x": 1, "y": 1, "wide": 1}
    assert answer["x"] == answer["y"] != answer["wide"]
