"""Several numbers of stages in the running scheduler: who is offered which, and what follows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipollux_perfmodel import LayerProfile, PerfParams, SchedHints, SpeedupFunction
from pipollux_perfmodel.partitioning.layer_profile import Layer
from pipollux_policies import POLICIES, Allocation, NodeInfo, ReplicaShape, make_policy
from pipollux_sched.allocator.allocator import Allocator
from pipollux_sched.allocator.decide import place_new, reallocate
from pipollux_sched.allocator.job_infos import (
    free_resources,
    job_info,
    linear_speedup,
    node_info,
    preferring,
    replica_cap,
    shape_with,
)
from pipollux_sched.allocator.snapshot import SnapshotReader
from pipollux_sched.allocator.strategy import FixedStrategy, PolicyStrategy, SchedulableJob
from pipollux_sched.lifecycle import Exited, Outcome, Phase, Recover, Start
from pipollux_sched.planning.plan import plan
from pipollux_sched.spec.cluster import ClusterSpec, NodeSpec
from pipollux_sched.spec.job import JobSpec, SpecError, parse_job
from pipollux_sched.store import Point, Store
from tests.sched.store.stores import serve_nodes

LAYERS = LayerProfile.from_layers(
    [Layer(1e-4, 1e-3, 1e-4, 2e-3, parameter_bytes=1e6, activation_bytes=1e4) for _ in range(8)]
)
HINTS = SchedHints(
    init_batch_size=64,
    max_batch_size=1024,
    local_bsz_bounds=(16, 256),
    gradient_accumulation=True,
    max_profiled_replicas=1,
    grad_params=SchedHints.from_json_object({"gradParams": {"norm": 1, "var": 8}}).grad_params,
    perf_params=PerfParams(0.0016, 0.024, 0.2, 0.02, 0.05, 0.01, 1.5),
    layers=LAYERS,
)
NODES = {"a": NodeInfo({"slots": 4}), "b": NodeInfo({"slots": 4})}


def job(**fields: Any) -> JobSpec:
    return parse_job({"name": "toy", "script": "x.py", **fields})


def test_which_stages_a_job_is_offered() -> None:
    spec = job(stage_choices=[1, 2, 4, 16], resources={"cpus": 2}, gpu_type="a100")
    info = job_info(spec, HINTS, age=0.0)
    assert [shape.num_stages for shape in info.all_shapes] == [1, 2, 4]  # there are eight layers
    assert info.shapes[1].resources == {"slots": 4, "cpus": 2}
    assert {shape.gpu_type for shape in info.all_shapes} == {"a100"}
    assert float(info.speedup_fn(1, 1)) == 1.0
    assert (
        1.5 < float(info.shapes[0].speedup_fn(1, 1)) < 2.0 < float(info.shapes[1].speedup_fn(1, 1))
    )
    # Nothing to price them by: only its own.
    assert job_info(spec, None, age=0.0).shapes == ()
    assert job_info(spec, HINTS.model_copy(update={"layers": None}), age=0.0).shapes == ()
    assert job_info(job(), HINTS, age=0.0).shapes == ()


def test_what_runs_is_always_among_the_shapes() -> None:
    """Its slots are counted, though nobody would choose it again."""
    unknown = job_info(job(), None, age=0.0, num_stages=2)
    assert [(s.num_stages, s.speedup_fn) for s in unknown.shapes] == [(2, linear_speedup)]
    known = job_info(job(), HINTS, age=0.0, num_stages=2)
    assert isinstance(known.shapes[0].speedup_fn, SpeedupFunction)
    assert job_info(job(), HINTS, age=0.0, num_stages=1).shapes == ()
    assert shape_with(known, None).num_stages == 1
    assert shape_with(known, 2) is known.all_shapes[1]
    assert shape_with(known, 4).resources == {"slots": 4}
    first, *rest = preferring(known, 2).all_shapes
    assert (first.num_stages, [shape.num_stages for shape in rest]) == (2, [1])
    assert preferring(known, 8) is known


def test_progress_and_requests_reach_the_policy() -> None:
    info = job_info(job(), HINTS, age=0.0, attained_service=77.0)
    assert (info.attained_service, info.remaining_work, info.requested_replicas) == (
        77.0,
        None,
        None,
    )
    told = HINTS.model_copy(update={"remaining_samples": 5000.0})
    info = job_info(job(requested_replicas=5, max_replicas=6), told, age=0.0)
    assert isinstance(info.speedup_fn, SpeedupFunction)
    goodput = info.speedup_fn.configuration(1, 1).goodput
    assert info.remaining_work == pytest.approx(5000.0 / goodput)
    assert (info.requested_replicas, info.max_replicas) == (5, 5)
    assert replica_cap(job(requested_replicas=5, max_replicas=6), None) == 5
    # Without a goodput nobody knows how long samples take.
    assert job_info(job(), SchedHints(remaining_samples=5.0), age=0.0).remaining_work is None


def test_nodes_tell_their_gpus_and_whether_they_drain() -> None:
    spec = NodeSpec(name="a", slots=2, gpu_type="a100", draining=True)
    assert (node_info(spec).gpu_type, node_info(spec).draining) == ("a100", True)
    plain = node_info(NodeSpec(name="a", slots=2))
    assert (plain.gpu_type, plain.draining) == ("", False)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"num_stages": 2, "stage_choices": [1, 4]}, r"\[1, 4\] lacks num_stages = 2"),
        ({"stage_choices": [1, 2, 2]}, "names a number twice"),
        ({"stage_choices": [0, 1]}, "stage_choices"),
        ({"stage_choices": 2}, "stage_choices"),
        ({"requested_replicas": 65}, "65 is not between min_replicas = 1 and max_replicas = 64"),
        ({"gpu_type": " "}, "is not a type of GPU"),
    ],
)
def test_wrong_wishes_are_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecError, match=says):
        job(**fields)


def test_chosen_shapes_are_counted() -> None:
    info = job_info(job(stage_choices=[1, 4]), HINTS, age=0.0)
    allocations = {"toy": Allocation(["a"], info.shapes[0])}
    assert free_resources(NODES, {"toy": info}, allocations)["a"] == {"slots": 0}
    assert free_resources(NODES, {"toy": info}, {"toy": ["a"]})["a"] == {"slots": 3}


def candidate(*nodes: str, num_stages: int | None = None, **fields: Any) -> SchedulableJob:
    spec = job(stage_choices=[1, 2, 4], max_replicas=1)
    info = job_info(spec, HINTS, age=1e5, num_stages=num_stages)
    return SchedulableJob("toy", info, nodes, num_stages=num_stages, **fields)


def test_another_number_of_stages_is_a_change() -> None:
    running = candidate("a", num_stages=1)

    class Cut(FixedStrategy):
        def optimize(self, *_: object) -> dict[str, Sequence[str]]:
            return {"toy": Allocation(["a"], shape_with(running.info, 4))}

    (decision,) = reallocate([running], NODES, Cut({}))
    assert (decision.nodes, decision.num_stages) == (("a",), 4)
    known = shape_with(running.info, 4).speedup_fn.configuration(1, 1)
    assert decision.details == {
        "num_stages": 4,
        "num_microbatches": known.num_microbatches,
        "atomic_bsz": known.atomic_bsz,
        "accum_steps": known.accum_steps,
        "batch_size": known.batch_size,
        "speedup": known.speedup,
        "previous_speedup": 1.0,
    }
    assert decision.why.startswith("changes from 1 replica of 1 stage to 1 replica of 4 stages")
    assert reallocate([candidate("a", num_stages=4)], NODES, Cut({})) == []
    with pytest.raises(ValueError, match="'toy' is pinned to 1 stages but is given 4"):
        reallocate([replace(running, pinned=True)], NODES, Cut({}))
    # A policy that tells nothing of stages leaves them as they are.
    plain = FixedStrategy({"toy": ["a"]})
    assert reallocate([candidate("a", num_stages=4)], NODES, plain) == []


def test_more_stages_than_there_are_slots_are_refused() -> None:
    eight = ReplicaShape(8, {"slots": 8}, linear_speedup)
    assert place_new([candidate()], NODES, FixedStrategy({"toy": Allocation(["a"], eight)})) == []

    class Blind(FixedStrategy):
        def place(self, *_: object) -> Sequence[str]:
            return Allocation(["a"], eight)

    with pytest.raises(ValueError, match="node 'a' has 4 slots but 8 are allocated"):
        place_new([candidate()], NODES, Blind({}))


@pytest.mark.parametrize("name", sorted(POLICIES.keys() - {"fifo"}))  # it starts in rounds only
def test_every_policy_starts_a_job_as_it_ran_last(name: str) -> None:
    strategy = PolicyStrategy(make_policy(name))
    (decision,) = place_new([candidate(num_stages=4)], NODES, strategy)
    assert decision.num_stages == 4
    (decision,) = place_new([candidate()], NODES, strategy)
    assert decision.num_stages in (1, 2, 4)


@pytest.mark.parametrize("name", ["exact", "pollux", "sia"])
def test_policies_choose_the_stages(name: str) -> None:
    """One replica is allowed, and four stages are worth three."""
    (decision,) = reallocate(
        [candidate("a", num_stages=1)], NODES, PolicyStrategy(make_policy(name))
    )
    assert (len(decision.nodes), decision.num_stages) == (1, 4)
    again = candidate(*decision.nodes, num_stages=4)
    assert reallocate([again], NODES, PolicyStrategy(make_policy(name))) == []


# With a store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path / "pipollux.db", create=True, clock=lambda: 1000.0) as store:
        yield store


def reader(store: Store) -> SnapshotReader:
    serve_nodes(store, a=4, b=4)
    return SnapshotReader(store, restart_seconds=30.0, clock=lambda: 2e5)


def first_step(store: Store, attempt: int) -> None:
    numbers = {"batch_size": 64, "atomic_bsz": 64, "accum_steps": 0, "num_replicas": 1}
    unknown = dict.fromkeys(("loss", "predicted_step_time", "goodput", "efficiency"))
    point = Point(time=0.0, step=attempt, epoch=0, samples=64, step_time=1, **numbers, **unknown)
    store.add_report("toy", attempt, [point])


def test_stages_outlive_the_scheduler(store: Store) -> None:
    """The store keeps what was decided: state, attempt, event; through a recovery."""
    spec = job(stage_choices=[1, 2, 4], max_replicas=1)
    store.submit("toy", spec.model_dump(mode="json"), "token", 3)
    reads, strategy = reader(store), PolicyStrategy(make_policy("exact"))
    decides = Allocator(reads, strategy, carry_out=store.transition_all)
    decides.run_once()
    assert store.job("toy").state.running_stages == 1
    first_step(store, 1)
    store.put_hints("toy", 1, json.loads(json.dumps(HINTS.to_json_object())))
    (decision,) = decides.run_once()
    assert decision.num_stages == 4
    state = store.job("toy").state
    assert (state.phase, state.num_stages, state.running_stages) == (Phase.RESTARTING, 4, 1)
    allocated = store.events(types=["allocated"])[-1]
    assert {key: allocated[key] for key in decision.details} == decision.details
    change = store.transition("toy", Exited(1, Outcome.STOPPED, step=1))
    assert change.actions == (Start(2, ("a",), 4),)
    assert [entry.num_stages for entry in store.attempts("toy")] == [1, 4]
    first_step(store, 2)
    (known,) = reads.read().candidates
    assert known.held.num_stages == 4
    assert decides.run_once() == []
    store.transition("toy", Recover())
    assert store.job("toy").state.assigned == ()
    (again,) = decides.run_once()
    assert again.num_stages == 4
    assert store.job("toy").state.running_stages == 4


def test_a_plan_tells_the_stages() -> None:
    wire = HINTS.to_json_object()
    spec = job(stage_choices=[1, 2, 4], max_replicas=1, allocation=["a"], hints=wire)
    cluster = ClusterSpec(nodes=(NodeSpec(name="a", slots=4),))
    made = plan(cluster, [spec], policy=make_policy("exact"))
    (toy,) = made.assignments
    assert (toy.num_stages, toy.nodes, made.nodes[0].used) == (4, ("a",), 4)
    assert toy.allocation.num_stages == 4
    assert toy.num_microbatches in (1, 16)
    assert "allocation" not in made.to_dict()["assignments"][0]
    drains = ClusterSpec(nodes=(NodeSpec(name="a", slots=4, draining=True), *cluster.nodes[1:]))
    (waits,) = plan(drains, [spec], policy=make_policy("exact")).assignments
    assert (waits.nodes, waits.why) == ((), "is suspended: no node accepts new replicas")
