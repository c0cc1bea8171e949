"""Sia: its program by brute force, its rules by hand."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pipollux_policies import Allocation, JobInfo, NodeInfo, ReplicaShape, SiaPolicy
from tests.extent import first
from tests.policies.baseline_cases import NODE, fixed, sizes
from tests.policies.policy_cases import scaling


def sia_options(job: JobInfo, num_nodes: int, slots: int) -> list[tuple[int, float]]:
    """Every configuration of a job on nodes of so many slots: replicas, and scaled goodput."""
    stages = job.resources["slots"]
    per_node = slots // stages
    counts = [2**i for i in range(10) if 2**i <= per_node]
    counts += [per_node * n for n in range(1, num_nodes + 1)]
    counts = sorted({c for c in counts if job.min_replicas <= c <= job.max_replicas})
    goodputs = [float(job.speedup_fn(-(-c // per_node), c)) for c in counts]
    factor = counts[0] * stages / min(goodputs) if counts else 1.0
    return [(c, goodput * factor) for c, goodput in zip(counts, goodputs, strict=True)]


def sia_sum(
    jobs: Mapping[str, JobInfo],
    base: Mapping[str, Any],
    choice: Mapping[str, tuple[int, float] | None],
) -> float:
    """Σ (restart · G)^-0.5 + 1.1 for every job that waits, plainly."""
    total = 0.0
    for name, job in jobs.items():
        option = choice[name]
        if option is None:
            total += 1.1
            continue
        count, goodput = option
        if base.get(name) and len(base[name]) != count:
            lost = job.num_restarts * job.restart_seconds
            goodput *= (job.age - lost) / (job.age + job.restart_seconds)
        total += goodput**-0.5
    return total


@pytest.mark.parametrize("running", [False, True])
@pytest.mark.parametrize("seed", first(15, range(40)))
def test_sia_finds_the_optimum(seed: int, running: bool) -> None:
    """Nodes and replicas hold powers of two of slots: whatever is chosen can be placed."""
    rng = np.random.default_rng(seed)
    num_nodes, slots = int(rng.integers(1, 4)), int(rng.choice([2, 4]))
    nodes = {f"n{n}": NodeInfo({"slots": slots}) for n in range(num_nodes)}
    jobs = {
        f"j{j}": fixed(
            float(j),
            1,
            stages=int(rng.choice([1, 1, 2])),
            speedup_fn=scaling(rng.uniform(0, 0.5)),
            max_replicas=int(rng.integers(1, 13)),
            age=float(rng.choice([1000.0, 9000.0])),
            num_restarts=int(rng.integers(0, 2)),
        )
        for j in range(rng.integers(2, 5))
    }
    policy = SiaPolicy(relative_gap=0.0)
    base: dict[str, Allocation] = {}
    if running:
        some = dict(list(jobs.items())[: len(jobs) // 2 + 1])
        base = policy.optimize(some, nodes, {}, NODE)[0]
    answer = policy.optimize(jobs, nodes, base, NODE)[0]

    options = {name: sia_options(job, num_nodes, slots) for name, job in jobs.items()}
    best = min(
        sia_sum(jobs, base, dict(zip(jobs, choice, strict=True)))
        for choice in itertools.product(*([None, *options[name]] for name in jobs))
        if sum(
            option[0] * job.resources["slots"]
            for option, job in zip(choice, jobs.values(), strict=True)
            if option
        )
        <= num_nodes * slots
    )
    chosen = {name: dict(options[name]).get(len(held)) for name, held in answer.items()}
    found = sia_sum(
        jobs, base, {n: (len(answer[n]), g) if g is not None else None for n, g in chosen.items()}
    )
    # Of equals the older job runs: λ differs between jobs by one part in 10⁴.
    assert found == pytest.approx(best, abs=2e-4 * len(jobs))


def test_sia_rather_lets_a_job_wait_than_restart_one_too_often() -> None:
    jobs = {"a": fixed(0, 1, age=1000.0), "b": fixed(1, 1, age=10.0)}
    for restarts, expected in ((20, {"a": 4, "b": 0}), (0, {"a": 2, "b": 2})):
        again = {**jobs, "a": replace(jobs["a"], num_restarts=restarts)}
        answer = SiaPolicy().optimize(again, {"n": NODE}, {"a": ["n"] * 4}, NODE)[0]
        assert sizes(answer) == expected


def test_sia_gives_jobs_the_type_of_gpu_that_helps_them_most() -> None:
    def on(gain: float) -> JobInfo:
        def fast(num_nodes: Any, num_replicas: Any) -> Any:
            return gain * np.asarray(num_replicas, dtype=float)

        shapes = (ReplicaShape(1, {"slots": 1}, fast, gpu_type="fast"),)
        return fixed(0, 1, gpu_type="slow", shapes=shapes, max_replicas=2)

    nodes = {
        "f": NodeInfo({"slots": 2}, gpu_type="fast"),
        "s": NodeInfo({"slots": 2}, gpu_type="slow"),
    }
    jobs = {"little": on(1.2), "much": on(4.0)}
    answer = SiaPolicy().optimize(jobs, nodes, {}, nodes["f"])[0]
    assert answer == {"little": ["s", "s"], "much": ["f", "f"]}


def test_sia_chooses_the_number_of_stages_with_the_replicas() -> None:
    """Four stages make 1.5 times what four replicas of one stage make."""

    def deep(num_nodes: Any, num_replicas: Any) -> Any:
        return 6.0 * np.asarray(num_replicas, dtype=float)

    job = fixed(0, 1, shapes=(ReplicaShape(4, {"slots": 4}, deep),))
    allocation = SiaPolicy().optimize({"j": job}, {"n": NODE}, {}, NODE)[0]["j"]
    assert (allocation, allocation.num_stages) == (["n"], 4)


def test_sia_clears_a_node_for_a_distributed_job_by_moving_small_ones() -> None:
    nodes = dict.fromkeys("abc", NODE)
    small = {f"s{j}": fixed(j, 1, max_replicas=1, age=1e5) for j in range(2)}
    big = fixed(9, 1, min_replicas=8, max_replicas=8)
    base = {"s0": ["a"], "s1": ["b"]}
    answer = SiaPolicy().optimize({**small, "big": big}, nodes, base, NODE)[0]
    assert sizes(answer) == {"s0": 1, "s1": 1, "big": 8}
    assert len(set(answer["big"])) == 2
    assert sum(answer[name] == base[name] for name in small) == 1


def test_sia_goes_on_when_the_solver_has_no_answer_in_time() -> None:
    jobs = {"a": fixed(0, 1), "b": fixed(1, 1)}
    hurried = SiaPolicy(time_limit=1e-9)
    answer = hurried.optimize(jobs, {"n": NODE}, {"a": ["n", "n"]}, NODE)[0]
    assert answer == {"a": ["n", "n"], "b": ["n", "n"]}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"power": 0.5}, "power: 0.5"),
        ({"waiting_cost": 0}, "waiting_cost: 0"),
        ({"relative_gap": 1}, "relative_gap: 1"),
        ({"time_limit": float("inf")}, "time_limit: inf"),
    ],
)
def test_sia_names_what_is_out_of_range(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        SiaPolicy(**options)
