"""From specs to a plan, and the sentences that say why."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipollux_perfmodel import SchedHints
from pipollux_policies import JobInfo, NodeInfo, Policy, make_policy
from pipollux_sched.allocator.job_infos import (
    UNSTATED,
    count_fitting,
    free_resources,
    job_info,
    linear_speedup,
    node_info,
    node_template,
    replica_cap,
)
from pipollux_sched.allocator.reasons import Others, explain, misfit
from pipollux_sched.planning import dry_run
from pipollux_sched.planning.plan import PlanError, plan
from pipollux_sched.scheduler import Scheduler
from pipollux_sched.spec.cluster import ClusterSpec, NodeSpec, load_cluster
from pipollux_sched.spec.job import JobSpec, SpecError, load_jobs, parse_job
from tests.policies.policy_cases import scaling

HINTS = {
    "initBatchSize": 32,
    "maxBatchSize": 1024,
    "localBszBounds": [8, 128],
    "maxProfiledReplicas": 2,
    "gradientAccumulation": True,
    "gradParams": {"norm": 0.002, "var": 0.04},
    "perfParams": {
        "alpha_c": 0.02,
        "beta_c": 0.005,
        "alpha_n": 0.06,
        "beta_n": 0.009,
        "alpha_r": 0.02,
        "beta_r": 0.003,
        "gamma": 1.8,
    },
}


def job(name: str = "a", **fields: Any) -> JobSpec:
    return parse_job({"name": name, "script": "a.py", **fields})


def cluster(*slots: int, **fields: Any) -> ClusterSpec:
    return ClusterSpec(
        nodes=tuple(NodeSpec(name=f"n{n}", slots=s, **fields) for n, s in enumerate(slots))
    )


def test_four_times_what_was_measured_and_no_more() -> None:
    assert replica_cap(job(max_replicas=9), None) == 1
    assert replica_cap(job(max_replicas=9, min_replicas=3), None) == 3
    assert replica_cap(job(max_replicas=20), SchedHints(max_profiled_replicas=3)) == 12
    assert replica_cap(job(max_replicas=4), SchedHints(max_profiled_replicas=3)) == 4


def test_a_job_in_the_policys_form() -> None:
    spec = job(
        num_stages=2, resources={"cpus": 3, "memory": "1GiB"}, hints=HINTS, preemptible=False
    )
    info = job_info(spec, spec.hints, age=5.0, created=7.0, num_restarts=1, restart_seconds=9.0)
    assert info.resources == {"slots": 2, "cpus": 3, "memory": 2**30}
    assert (info.num_stages, info.min_replicas, info.max_replicas) == (2, 1, 8)
    assert (info.age, info.created, info.num_restarts, info.restart_seconds) == (5.0, 7.0, 1, 9.0)
    assert not info.preemptible
    assert float(info.speedup_fn(1, 1)) == 1.0
    unknown = job_info(job(), SchedHints(init_batch_size=4), age=0.0)
    assert unknown.speedup_fn is linear_speedup
    assert unknown.resources == {"slots": 1}


def test_a_node_has_plenty_of_what_it_does_not_state() -> None:
    info = node_info(NodeSpec(name="a", slots=2, memory=5, preemptible=True))
    amounts = {"slots": 2, "cpus": UNSTATED, "memory": 5, "gpu_slots": 2, "wide_slots": 2}
    assert info == NodeInfo(amounts, preemptible=True)
    small, large = NodeInfo({"slots": 2, "cpus": 9}), NodeInfo({"slots": 4, "cpus": 1})
    assert node_template({"a": small, "b": large}).resources == {"slots": 4, "cpus": 9}


def test_the_examples_make_an_interesting_plan() -> None:
    examples = Path(__file__).parents[3] / "examples"
    jobs = load_jobs(examples / "jobs.yaml")
    made = plan(load_cluster(examples / "cluster.yaml"), jobs)
    rows = {row.job: row for row in made.assignments}
    assert list(rows) == [spec.name for spec in jobs]
    assert rows["char-lm"].why.startswith("grows from 1 to ")
    assert rows["char-lm-wide"].nodes == rows["char-lm-wide"].previous == ("node-b",)
    assert "not preemptible" in rows["char-lm-wide"].why
    assert rows["char-lm-new"].num_replicas == 2
    assert rows["char-lm-new"].why.endswith("(assumed, not measured yet)")
    for row, spec in zip(made.assignments, jobs, strict=True):
        assert (row.num_stages, row.num_microbatches) == (spec.num_stages, spec.num_microbatches)
        assert row.num_replicas == len(row.nodes)
        if row.batch_size is not None:
            assert row.atomic_bsz is not None
            assert row.accum_steps is not None
            assert row.batch_size == row.num_replicas * row.atomic_bsz * (row.accum_steps + 1)
    used = {node.node: node.used for node in made.nodes}
    for node in made.nodes:
        held = sum(r.num_stages * r.nodes.count(node.node) for r in made.assignments)
        assert used[node.node] == held <= node.slots
    assert json.loads(json.dumps(made.to_dict()))["assignments"][0]["job"] == "char-lm"


def test_the_same_seed_gives_the_same_plan() -> None:
    jobs = [job(f"j{n}", hints=HINTS) for n in range(4)]
    assert plan(cluster(4, 4), jobs, seed=3) == plan(cluster(4, 4), jobs, seed=3)


def test_predictions_are_those_of_the_hints() -> None:
    spec = job(hints=HINTS, max_replicas=2)
    (row,) = plan(cluster(2), [spec]).assignments
    assert spec.hints is not None
    speedup_fn = spec.hints.speedup_function()
    assert speedup_fn is not None
    expected = speedup_fn.configuration(1, 2)
    assert (row.atomic_bsz, row.accum_steps) == (expected.atomic_bsz, expected.accum_steps)
    assert (row.speedup, row.goodput) == (expected.speedup, expected.goodput)


def test_without_hints_nothing_is_predicted() -> None:
    (row,) = plan(cluster(8), [job(max_replicas=8)]).assignments
    assert row.nodes == ("n0",)
    assert row.batch_size is row.speedup is row.goodput is row.atomic_bsz is None


def test_a_job_that_fits_no_node_is_an_error() -> None:
    with pytest.raises(PlanError) as caught:
        plan(cluster(2, 4), [job(), job("wide", num_stages=8)])
    assert str(caught.value) == (
        "job 'wide' fits no node: one replica needs 8 slots on one node, and the largest node, n1, "
        "has 4 slots; ask for less (num_stages, resources) or add a larger node"
    )
    with pytest.raises(
        PlanError, match=r"needs 1 slot and 64 GiB of memory .* n0, has 4 slots and"
    ):
        plan(cluster(4, memory="32GiB"), [job(resources={"memory": "64GiB"})])


def test_a_job_whose_least_never_fits_is_an_error() -> None:
    with pytest.raises(PlanError) as caught:
        plan(cluster(4, 4), [job(num_stages=3, min_replicas=3)])
    assert str(caught.value) == (
        "job 'a' never runs: min_replicas is 3, with 3 slots each, and the empty cluster holds 2; "
        "lower min_replicas or add nodes"
    )
    nodes = {"n": NodeInfo({"slots": 4})}
    assert misfit("a", job_info(job(num_stages=4), None, age=0.0), nodes) is None


def test_current_allocations_must_be_possible() -> None:
    with pytest.raises(SpecError) as caught:
        plan(cluster(4), [job(allocation=["n7"])])
    assert str(caught.value) == (
        "job 'a': allocation names the node 'n7', which the cluster does not have; its nodes are n0"
    )
    with pytest.raises(SpecError) as caught:
        plan(cluster(4), [job(num_stages=2, allocation=["n0", "n0"]), job("b", allocation=["n0"])])
    assert str(caught.value) == (
        "jobs a, b: allocation puts 5 slots on the node 'n0', which has 4; remove some"
    )


def info(
    stages: int = 1, least: int = 1, preemptible: bool = True, serial: float = 0.15
) -> JobInfo:
    return JobInfo({"slots": stages}, scaling(serial, 0.0), 0.0, least, 8, preemptible)


def why(
    job: JobInfo, previous: Sequence[str], new: Sequence[str], free: Mapping[str, int] | None = None
) -> str:
    left = {name: {"slots": slots} for name, slots in (free or {"a": 0, "b": 0}).items()}
    nodes = {name: NodeInfo({"slots": 4}) for name in left}
    return explain(job, previous, new, nodes, left)


def test_every_outcome_has_its_sentence() -> None:
    assert why(info(), [], ["a", "a", "b"]) == "starts on 3 replicas on a ×2, b: speedup 2.31"
    assert why(info(), ["a"], ["a", "b"]) == "grows from 1 to 2 replicas: speedup 1.00 → 1.74"
    assert why(info(), ["a", "b"], ["a"]) == "shrinks from 2 to 1 replica: speedup 1.74 → 1.00"
    assert why(info(), ["a"], ["b"]) == "moves from a to b: speedup 1.00 → 1.00"
    assert why(info(), ["a"], ["a"]) == "stays on 1 replica on a: speedup 1.00"
    assert (
        why(info(preemptible=False), ["a"], ["a"])
        == "stays on 1 replica on a: not preemptible, speedup 1.00"
    )
    assert why(info(), ["gone", "a"], ["a", "b"]) == "moves to 2 replicas on a, b: gone is gone"


def test_a_job_beside_free_slots_is_told_who_waits_for_them() -> None:
    job, nodes = info(), {"a": NodeInfo({"slots": 4})}
    free = {"a": {"slots": 1}}
    room = "waits: there is room for 1 replica; "
    not_yet = "the policy has not assigned it, and decides again at the next change"

    def told(*waiting: tuple[str, float]) -> str:
        wide = functools.partial(JobInfo, {"slots": 4}, scaling(0.15, 0.0))
        ages = [(name, wide(at, 1, 8, True)) for name, at in waiting]
        return explain(
            job,
            [],
            [],
            nodes,
            free,
            Others({}, sorted([("this", job), *ages], key=lambda entry: entry[1].created)),
        )

    assert told() == room + not_yet
    assert told(("wide", 5.0)) == room + "job wide is also waiting"
    several = told(("d", 4.0), ("a", 1.0), ("c", 3.0), ("b", 2.0), ("e", 5.0))
    assert several == room + "jobs a, b, c and 2 more are also waiting"


def test_who_waits_is_told_what_for() -> None:
    assert (
        why(info(stages=4), [], [], {"a": 0, "b": 2})
        == "waits: needs 4 slots free on one node, and b, the freest, has 2 slots"
    )
    assert (
        why(info(stages=2), ["a"], [], {"a": 1})
        == "is suspended: needs 2 slots free on one node, and a, the freest, has 1 slot"
    )
    assert (
        why(info(stages=2, least=3), [], [], {"a": 3, "b": 2})
        == "waits: needs 2 slots on one node 3 times, there is room for 2"
    )
    assert why(info(stages=8), [], [], {"a": 0, "b": 2}).startswith(
        "waits: fits no node: one replica needs 8 slots on one node, and the largest node, "
    )
    assert why(info(least=2), [], [], {"a": 1, "b": 1}) == (
        "waits: there is room for 2 replicas, but only on nodes of another job that spans several"
    )
    hopeless = JobInfo({"slots": 1}, lambda _, r: np.zeros_like(r), 0.0, 1, 4)
    assert (
        why(hopeless, [], [], {"a": 4})
        == "waits: no batch size within its bounds works on 1 replica"
    )


def test_a_plan_says_why_a_job_waits() -> None:
    wide = job("wide", num_stages=4, preemptible=False, allocation=["n0"])
    rows = plan(cluster(4, 2), [wide, job("late", num_stages=4)]).assignments
    assert rows[0].nodes == ("n0",)
    assert rows[1].nodes == ()
    assert rows[1].why == "waits: needs 4 slots free on one node, and n1, the freest, has 2 slots"


@pytest.mark.parametrize(("present", "advised"), [(2, 3), (3, 3), (12, 3)])
def test_no_more_nodes_are_advised_than_the_jobs_can_use(present: int, advised: int) -> None:
    jobs = [job(name, min_replicas=2, max_replicas=2) for name in "abc"]
    assert plan(cluster(*[2] * present), jobs).desired_nodes == advised


def test_a_sweep_is_planned_by_its_first_trials() -> None:
    """Those that the scheduler would submit: as many as fit, or as the sweep allows."""
    grid = {"grid": {"lr": [0.1, 0.2, 0.3], "width": [1, 2]}}
    rates = job("rates", num_stages=2, sweep=grid)
    found = plan(cluster(4, 5), [rates, job("b")])
    assert [one.job for one in found.assignments] == [*(f"rates-{n}" for n in range(4)), "b"]
    assert all(one.num_stages == 2 for one in found.assignments[:4])
    assert found.to_dict()["sweeps"] == [{"sweep": "rates", "num_planned": 4, "num_trials": 6}]
    for limit in ({"max_parallel": 2}, {"max_replicas": 2}):
        few = plan(cluster(4, 5), [job("rates", sweep={**grid, **limit})])
        assert [one.job for one in few.assignments] == ["rates-0", "rates-1"]
    search = {"search": {"lr": {"low": 1e-3, "high": 1.0}}, "trials": 2}
    whole = plan(cluster(4, 5), [job("rates", sweep=search, args=["{lr}"], after=["b"]), job("b")])
    first, second, b = whole.assignments
    assert first.why.startswith("waits for job b to complete; then: ")
    assert second.why.startswith("waits for job b to complete; then: ")
    assert not b.why.startswith("waits")


def test_what_is_left_and_what_fits() -> None:
    nodes = {"a": NodeInfo({"slots": 4, "cpus": 8}), "b": NodeInfo({"slots": 2})}
    jobs = {"x": JobInfo({"slots": 2, "cpus": 3}, linear_speedup, 0.0, 1, 4)}
    free = free_resources(nodes, jobs, {"x": ["a", "gone"]})
    assert free == {"a": {"slots": 2, "cpus": 5}, "b": {"slots": 2}}
    assert count_fitting(jobs["x"].resources, free["a"]) == 1
    assert count_fitting(jobs["x"].resources, free["b"]) == 0


def test_a_plan_promises_and_charges_what_the_scheduler_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = ClusterSpec(nodes=(NodeSpec(name="a", slots=1, kind="cpu"),))
    chosen = {"fairness": 1.25, "scarcity": 0.5, "tail": 1.0, "rank_power": 0.25}
    policy = make_policy(**chosen)
    with Scheduler(tmp_path / "state", cluster, policy) as scheduler:
        asked: list[tuple[Any, ...]] = []

        def made(name: str, **given: Any) -> Policy:
            found = make_policy(name, **given)
            asked.append((name, given["seed"], getattr(found, "options", {})))
            return found

        monkeypatch.setattr(dry_run, "make_policy", made)
        dry_run.live_plan(scheduler.store)
        dry_run.live_plan(scheduler.store, "sia", 3)
        plan = dry_run.live_plan(scheduler.store, "exact:tail=2")
    tail = {"tail": 2.0}
    assert asked == [("exact", 0, chosen), ("sia", 3, {}), ("exact", 0, tail)]
    assert plan.policy == "exact:tail=2"
