"""Policies to be measured against: their rules by hand, Sia's program by brute force."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipollux_sched.policy import (
    Allocation,
    FifoPolicy,
    JobInfo,
    NodeInfo,
    OptimusPolicy,
    ReplicaShape,
    SiaPolicy,
    TiresiasPolicy,
    is_pinned,
    violations,
)
from pipollux_sched.policy.free_space import FreeSpace, Request
from tests.sched.policy_cases import scaling

HOUR = 3600.0
POLICIES: dict[str, Callable[[], Any]] = {
    "fifo": FifoPolicy,
    "fifo, backfill": lambda: FifoPolicy(backfill=True),
    "tiresias": TiresiasPolicy,
    "tiresias, promotion": lambda: TiresiasPolicy(queue_thresholds=(600, 6000), promotion=2.0),
    "optimus": OptimusPolicy,
    "sia": SiaPolicy,
}
ADAPTS = {name: name == "sia" for name in POLICIES}


@dataclass(frozen=True)
class World:
    """One question to a policy."""

    jobs: dict[Any, JobInfo]
    nodes: dict[Any, NodeInfo]
    base: dict[Any, Any]


def ask(name: str, world: World) -> dict[Any, Allocation]:
    template = NodeInfo({"slots": 4})
    return POLICIES[name]().optimize(world.jobs, world.nodes, world.base, template)[0]


def random_world(seed: int) -> World:
    """Mixed K, bounds, types of GPU, draining and broken nodes; about half of the jobs run."""
    rng = np.random.default_rng(seed)
    types = ["", "A", "B"][: int(rng.integers(1, 4))]
    nodes: dict[Any, NodeInfo] = {
        (n if rng.random() < 0.5 else f"n{n}"): NodeInfo(
            {"slots": int(rng.choice([2, 4, 4, 4, 8])), "cpus": int(rng.choice([4, 8, 64]))},
            preemptible=bool(rng.random() < 0.2),
            gpu_type=str(rng.choice(types)),
            draining=bool(rng.random() < 0.1),
            healthy=bool(rng.random() < 0.95),
        )
        for n in range(rng.integers(1, 6))
    }
    jobs: dict[Any, JobInfo] = {}
    base: dict[Any, Any] = {}
    for j in range(rng.integers(1, 9)):
        name: Any = j if rng.random() < 0.5 else f"j{j}"
        jobs[name] = job = _random_job(rng, types)
        for _ in range(int(rng.integers(0, 4))):
            _start_somewhere(rng, World(jobs, nodes, base), name, job)
    if rng.random() < 0.2:
        nodes.pop(list(nodes)[int(rng.integers(len(nodes)))])
    return World(jobs, nodes, base)


def _random_job(rng: np.random.Generator, types: list[str]) -> JobInfo:
    def shape(stages: int) -> ReplicaShape:
        return ReplicaShape(
            stages,
            {"slots": stages, "cpus": int(rng.integers(0, 3))},
            scaling(rng.uniform(0, 0.6)),
            gpu_type=str(rng.choice(types)) if rng.random() < 0.3 else None,
            max_replicas=int(rng.integers(1, 9)) if rng.random() < 0.3 else None,
        )

    own = shape(int(rng.choice([1, 1, 2, 3, 4])))
    least = int(rng.integers(0, 4))
    most = max(least, int(rng.integers(1, 10)))
    return JobInfo(
        own.resources,
        own.speedup_fn,
        float(rng.integers(0, 5)),
        min_replicas=least,
        max_replicas=most,
        preemptible=bool(rng.random() < 0.75),
        num_stages=own.num_stages,
        age=float(rng.choice([0.0, 30.0, 300.0, 3000.0])),
        num_restarts=int(rng.integers(0, 3)),
        gpu_type=own.gpu_type,
        shapes=tuple(shape(int(rng.choice([1, 2, 4]))) for _ in range(rng.integers(0, 3))),
        attained_service=float(rng.choice([0.0, 500.0, 5000.0, 60000.0])),
        remaining_work=float(rng.uniform(0, 5000)) if rng.random() < 0.7 else None,
        requested_replicas=int(rng.integers(1, 9)) if rng.random() < 0.6 else None,
    )


def _start_somewhere(rng: np.random.Generator, world: World, name: Any, job: JobInfo) -> None:
    if name in world.base:
        return
    shape = job.all_shapes[int(rng.integers(len(job.all_shapes)))]
    names = list(world.nodes)
    count = int(rng.integers(max(job.min_replicas, 1), job.max_replicas + 1))
    if rng.random() < 0.6:
        chosen = [names[int(rng.integers(len(names)))]] * min(count, 4)
    else:
        some = rng.permutation(len(names))[: int(rng.integers(2, 4))]
        chosen = [names[int(n)] for n in rng.choice(some, size=count)]
    allocation = Allocation(chosen, shape)
    # A node may have failed or be draining since then.
    then = {n: replace(node, draining=False, healthy=True) for n, node in world.nodes.items()}
    if not violations(world.jobs, then, {}, {**world.base, name: allocation}):
        world.base[name] = allocation if rng.random() < 0.8 else list(allocation)
        if violations(world.jobs, then, {}, world.base):
            del world.base[name]


worlds = st.integers(0, 2**31).map(random_world)
each_policy = pytest.mark.parametrize("policy", POLICIES)
often = settings(max_examples=60, deadline=None, derandomize=True)


@each_policy
@often
@given(world=worlds)
def test_answers_break_no_rule(policy: str, world: World) -> None:
    answer = ask(policy, world)
    assert answer.keys() == world.jobs.keys()
    assert violations(world.jobs, world.nodes, world.base, answer) == []
    for name, job in world.jobs.items():
        if is_pinned(job, world.base.get(name, ()), world.nodes):
            assert list(answer[name]) == list(world.base[name])


@each_policy
@often
@given(world=worlds)
def test_the_order_of_mappings_is_irrelevant(policy: str, world: World) -> None:
    mirrored = World(
        dict(reversed(world.jobs.items())),
        dict(reversed(world.nodes.items())),
        dict(reversed(world.base.items())),
    )
    assert ask(policy, world) == ask(policy, mirrored)


@each_policy
@often
@given(world=worlds)
def test_asked_again_nothing_changes(policy: str, world: World) -> None:
    first = ask(policy, world)
    second = ask(policy, replace(world, base=first))
    assert second == first
    assert [second[n].num_stages for n in second] == [first[n].num_stages for n in first]


@each_policy
@often
@given(world=worlds)
def test_an_unchanged_allocation_keeps_its_order(policy: str, world: World) -> None:
    for name, allocation in ask(policy, world).items():
        base = world.base.get(name, ())
        stages = getattr(base, "num_stages", None)
        if Counter(base) == Counter(allocation) and stages in (None, allocation.num_stages):
            assert list(base) == list(allocation)


@each_policy
def test_the_simulator_is_told_whose_jobs_choose_their_batch_size(policy: str) -> None:
    assert POLICIES[policy]().adapts_batch_size == ADAPTS[policy]


@each_policy
def test_nothing_to_do(policy: str) -> None:
    job = fixed(0, 1)
    assert POLICIES[policy]().optimize({}, {}, {}, NODE) == ({}, 0)
    assert POLICIES[policy]().optimize({"j": job}, {}, {"j": ["gone"]}, NODE) == ({"j": []}, 1)
    assert POLICIES[policy]().optimize({"j": job}, {"n": NODE}, {}, NODE)[1] == 1


NODE = NodeInfo({"slots": 4})


def fixed(created: float, replicas: int, stages: int = 1, **more: Any) -> JobInfo:
    """A job whose user asks for so many replicas."""
    return JobInfo(
        {"slots": stages},
        more.pop("speedup_fn", scaling(0)),
        created,
        min_replicas=more.pop("min_replicas", 1),
        max_replicas=more.pop("max_replicas", 64),
        num_stages=stages,
        requested_replicas=replicas,
        **more,
    )


def sizes(answer: Mapping[Any, Allocation]) -> dict[Any, int]:
    return {name: len(allocation) for name, allocation in answer.items()}


# Where replicas go.


def test_one_node_is_the_tightest_that_holds_all() -> None:
    nodes = {"a": NODE, "b": NodeInfo({"slots": 3}), "spot": NodeInfo({"slots": 2}, True)}
    job = fixed(0, 1)
    space, shapes = FreeSpace({"j": job}, nodes, {}), job.all_shapes
    assert space.find("j", Request(shapes, 2)) == ["b", "b"]
    assert space.find("j", Request(shapes, 4)) == ["a"] * 4
    assert space.find("j", Request(shapes, 6)) == ["a"] * 4 + ["b"] * 2
    assert space.find("j", Request(shapes, 9)) == ["a"] * 4 + ["b"] * 3 + ["spot"] * 2
    assert space.find("j", Request(shapes, 9, max_nodes=2)) is None
    assert space.find("j", Request(shapes, 10)) is None


def test_no_two_distributed_jobs_meet() -> None:
    nodes = {"a": NODE, "b": NODE}
    jobs = {"old": fixed(0, 6), "wide": fixed(1, 2, stages=2), "new": fixed(2, 2)}
    answer = FifoPolicy(backfill=True).optimize(jobs, nodes, {}, NODE)[0]
    assert answer == {"old": ["a"] * 4 + ["b"] * 2, "wide": [], "new": ["b", "b"]}


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


# Optimus


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


# Sia


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
@pytest.mark.parametrize("seed", range(40))
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
