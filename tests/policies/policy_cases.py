"""Small clusters, the table of policies, and Pollux's objective written down a second time.

Nothing here uses a policy's own arrays: what is worth what is computed from lists of node names,
one loop at a time, as docs/concepts/policies.md states it; what is feasible, by `violations`.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st

from pipollux_policies import (
    Allocation,
    ExactPolicy,
    FairSpeedup,
    FifoPolicy,
    JobInfo,
    NodeInfo,
    OptimusPolicy,
    PolluxPolicy,
    ReplicaShape,
    SiaPolicy,
    TiresiasPolicy,
    is_pinned,
    must_move,
    shape_of,
    usable_nodes,
)
from pipollux_policies import violations as rules_broken
from pipollux_policies.exact.completion_time import CompletionTime
from pipollux_policies.exact.configurations import NOTHING, build_instance
from pipollux_policies.exact.objective import Held

Allocations = Mapping[Any, Sequence[Any]]
FLOOR = 0.01
TEMPLATE = NodeInfo({"slots": 4, "cpus": 8}, gpu_type="a")


def scaling(serial: float, network: float = 0.1, pace: float = 1.0) -> Callable[[Any, Any], Any]:
    """Amdahl's law, and a loss for every replica once there are several nodes."""

    def speedup(num_nodes: Any, num_replicas: Any) -> Any:
        nodes, replicas = np.asarray(num_nodes), np.asarray(num_replicas, dtype=float)
        cost = 1 + serial * (replicas - 1) + network * serial * (nodes > 1) * replicas
        return np.where(replicas > 0, pace * replicas / cost, 0.0)

    return speedup


@dataclass(frozen=True)
class Case:
    """One question to a policy."""

    jobs: dict[Any, JobInfo]
    nodes: dict[Any, NodeInfo]
    base: dict[Any, Sequence[Any]]


def mirrored(case: Case) -> Case:
    """The same question, put in another order."""
    return Case(*(dict(reversed(part.items())) for part in (case.jobs, case.nodes, case.base)))


def is_broken(case: Case, name: Any) -> bool:
    """Whether a job cannot stay: its nodes take nothing, or its shape is not one of its own."""
    job, here = case.jobs[name], case.base.get(name, ())
    if not here or is_pinned(job, here, case.nodes):
        return False
    shape, stages = shape_of(job, here, case.nodes), getattr(here, "num_stages", None)
    fits = all(shape.runs_on(case.nodes[node]) for node in here if node in case.nodes)
    return must_move(job, here, case.nodes) or not fits or stages not in (None, shape.num_stages)


def current(case: Case) -> dict[Any, Sequence[Any]]:
    """What every job holds now, if it can stay."""
    return {n: [] if is_broken(case, n) else case.base.get(n, []) for n in case.jobs}


def violations(case: Case, allocations: Allocations) -> list[str]:
    """Every rule that allocations break, in words."""
    found = rules_broken(case.jobs, case.nodes, case.base, allocations)
    found += [f"no answer for {name}" for name in case.jobs.keys() - allocations.keys()]
    for name, allocation in allocations.items():
        before = case.base.get(name, ())
        if Counter(before) == Counter(allocation) and list(before) != list(allocation):
            found.append(f"{name}'s ranks changed places")
    return found


def stages(allocations: Allocations) -> dict[Any, int | None]:
    return {name: getattr(nodes, "num_stages", None) for name, nodes in allocations.items()}


def fitness(case: Case, allocations: Allocations) -> float:
    """The harmonic mean of the jobs' values, as docs/concepts/policies.md states it."""
    terms = [loss(case, name, allocations.get(name, [])) for name in case.jobs]
    return len(terms) / sum(terms) if terms else 1.0


def loss(case: Case, name: Any, allocation: Sequence[Any]) -> float:
    return 1 / max(value(case, name, allocation), FLOOR)


def value(case: Case, name: Any, allocation: Sequence[Any]) -> float:
    job = case.jobs[name]
    shape = shape_of(job, allocation, case.nodes)
    speedup = float(shape.speedup_fn(len(set(allocation)), len(allocation)))
    before = case.base.get(name, [])
    moved = Counter(before) != Counter(allocation) or shape is not shape_of(job, before, case.nodes)
    if before and (moved or is_broken(case, name)):
        resize = job.restart_seconds if job.rescale_seconds is None else job.rescale_seconds
        lost = job.num_restarts * job.restart_seconds + job.num_rescales * resize
        cost = resize if survives(case, name, allocation) else job.restart_seconds
        if job.age + cost > 0:
            speedup *= max(job.age - lost, 0) / (job.age + cost)
    return speedup / fair_speedup(case, job)


def survives(case: Case, name: Any, allocation: Sequence[Any]) -> bool:
    """Whether a job that can be resized is, if it gets this allocation."""
    job, before = case.jobs[name], case.base.get(name, [])
    if job.rescale_seconds is None or not before:
        return False
    if any(node not in case.nodes or not case.nodes[node].healthy for node in before):
        return False
    shape, stages = shape_of(job, before, case.nodes), getattr(before, "num_stages", None)
    if stages not in (None, shape.num_stages) or shape is not shape_of(job, allocation, case.nodes):
        return False
    runs = all(shape.runs_on(case.nodes[node]) for node in before)
    return runs and any(node in before for node in allocation)


def fair_speedup(case: Case, job: JobInfo) -> float:
    """The best of its shapes on 1/J of the nodes that the shape can use."""
    usable = list(usable_nodes(case.nodes).values())
    found = [0.0]
    for number, shape in enumerate(job.all_shapes):
        same = [s for s in job.all_shapes[:number] if s.num_stages == shape.num_stages]
        allowed = [
            node
            for node in [*usable, TEMPLATE]
            if shape.runs_on(node) and not any(s.runs_on(node) for s in same)
        ]
        needs = {kind: need for kind, need in shape.resources.items() if need}
        largest = max((_room(needs, node) for node in allowed), default=0)
        if not largest:
            continue
        real = [node for node in usable if node in allowed]
        total = {kind: sum(n.resources.get(kind, 0) for n in real) for kind in needs}
        share = max(need / total[kind] if total[kind] else 1.0 for kind, need in needs.items())
        fair = max(math.ceil(1 / share / len(case.jobs) - 1e-9), job.min_replicas, 1)
        fair = min(fair, job.most_replicas(shape))
        found.append(float(shape.speedup_fn(math.ceil(fair / largest), fair)))
    return max(found) or 1.0


def _room(needs: Mapping[str, int], node: NodeInfo) -> int:
    return min(node.resources.get(kind, 0) // need for kind, need in needs.items())


def completion_gain(case: Case, allocations: Allocations) -> float:
    """The sum of gains that the exact policy makes great, of allocations that it may give."""
    objective = CompletionTime()
    instance = build_instance(case.jobs, case.nodes, case.base, TEMPLATE)
    promises = objective.promise(instance)
    instance = build_instance(case.jobs, case.nodes, case.base, TEMPLATE, promises.closed)
    worth = objective.judge(instance, promises)
    gains = instance.table.split(worth.gains())
    total = 0.0
    for number, configs in enumerate(instance.jobs):
        here, before = allocations[configs.name], case.base.get(configs.name, [])
        shape = shape_of(configs.job, here, case.nodes)
        same = shape is shape_of(configs.job, before, case.nodes)
        if not here or (list(here) == list(before) and same):
            total += float(gains[number][configs.stay if here else NOTHING])
        else:
            speedup = float(shape.speedup_fn(len(set(here)), len(here)))
            held = Held(configs.shapes.index(shape), len(here))
            total += worth.moved(number, speedup, held, elastic=survives(case, configs.name, here))
    return total


class Entry(NamedTuple):
    """One policy in the table of all."""

    make: Callable[[], Any]
    """A new policy; one that searches little where it searches, as the rules hold regardless."""
    seeks: Callable[[Case, Allocations], float] | None = None
    """What it makes great, where it may find something better when it is asked the same again."""


POLICIES: dict[str, Entry] = {
    # A job that is pinned once it runs is not ranked with the others any more, so they are weighed
    # anew; and what was not solved whole may be a little short of the best.
    "exact": Entry(ExactPolicy, seeks=completion_gain),
    # In Pollux's objective only who runs pays for a move: whoever was sent away is weighed anew.
    "exact-fair": Entry(lambda: ExactPolicy(FairSpeedup()), seeks=fitness),
    "pollux": Entry(lambda: PolluxPolicy(population=16, generations=8), seeks=fitness),
    # Without backfilling, an arriving job waits for the next `optimize`
    # (test_fixed_size_policies.py).
    "fifo": Entry(lambda: FifoPolicy(backfill=True)),
    "tiresias": Entry(TiresiasPolicy),
    "optimus": Entry(OptimusPolicy),
    "sia": Entry(SiaPolicy),
}
"""Every policy, by name; test_rules.py holds all of them to docs/concepts/policies.md."""


def all_allocations(case: Case) -> Iterator[dict[Any, Sequence[Any]]]:
    """Every feasible allocation of the whole cluster."""
    for choice in itertools.product(*(_possible(case, name) for name in case.jobs)):
        allocations = dict(zip(case.jobs, choice, strict=True))
        if not rules_broken(case.jobs, case.nodes, case.base, allocations):
            yield allocations


def best_fitness(case: Case) -> float:
    """The greatest fitness of all feasible allocations, found by going from the greatest down."""
    possible = [_possible(case, name) for name in case.jobs]
    losses = [
        np.array([loss(case, name, choice) for choice in choices])
        for name, choices in zip(case.jobs, possible, strict=True)
    ]
    total = losses[0]
    for more in losses[1:]:
        total = np.add.outer(total, more)
    for flat in np.argsort(total, axis=None, kind="stable"):
        indices = np.unravel_index(flat, total.shape)
        choice = [choices[i] for choices, i in zip(possible, indices, strict=True)]
        allocations = dict(zip(case.jobs, choice, strict=True))
        if not rules_broken(case.jobs, case.nodes, case.base, allocations):
            return fitness(case, allocations)
    raise AssertionError("nothing at all is feasible")


def _possible(case: Case, name: Any) -> list[Sequence[Any]]:
    job, here = case.jobs[name], case.base.get(name, ())
    if is_pinned(job, here, case.nodes):
        return [here]
    nodes = usable_nodes(case.nodes)
    return [[], *(row for shape in job.all_shapes for row in _rows(job, shape, nodes))]


def _rows(job: JobInfo, shape: ReplicaShape, nodes: Mapping[Any, NodeInfo]) -> Iterator[Allocation]:
    needs = {kind: need for kind, need in shape.resources.items() if need}
    names = [name for name, node in nodes.items() if shape.runs_on(node)]
    for count in range(max(job.min_replicas, 1), job.most_replicas(shape) + 1):
        for row in itertools.combinations_with_replacement(names, count):
            if all(times <= _room(needs, nodes[node]) for node, times in Counter(row).items()):
                yield Allocation(row, shape)


def random_case(
    seed: int,
    *,
    max_nodes: int,
    max_jobs: int,
    max_slots: int = 4,
    max_replicas: int = 5,
    mixed: bool = False,
    elastic: bool = False,
) -> Case:
    """Draw a cluster in which about half of the jobs run already.

    Args:
        seed: of the draw.
        max_nodes: most nodes.
        max_jobs: most jobs.
        max_slots: most slots of a node.
        max_replicas: most replicas of a job, unless its minimum is larger.
        mixed: with several shapes of a job, two types of GPU, and nodes that drain or are ill.
        elastic: with jobs that can be resized, and run on several nodes.
    """
    rng = np.random.default_rng(seed)
    nodes = {
        f"n{n}": NodeInfo(
            {"slots": int(rng.integers(1, max_slots + 1)), "cpus": int(rng.integers(2, 9))},
            preemptible=bool(rng.random() < 0.2),
            gpu_type=str(rng.choice(["a", "b"])) if mixed else "",
        )
        for n in range(rng.integers(1, max_nodes + 1))
    }
    jobs: dict[Any, JobInfo] = {}
    base: dict[Any, Sequence[Any]] = {}
    for j in range(rng.integers(1, max_jobs + 1)):
        jobs[f"j{j}"] = job = _random_job(rng, j, max_replicas, mixed)
        if rng.random() < 0.6:
            shape = job.all_shapes[rng.integers(len(job.all_shapes))]
            where = str(rng.choice(list(nodes)))
            running = Allocation([where] * max(job.min_replicas, 1), shape)
            if shape_of(job, running, nodes) is shape:
                allocations = {**base, f"j{j}": running}
                if not rules_broken(jobs, nodes, allocations, allocations):
                    base = allocations
    if mixed:
        nodes, base = _with_trouble(rng, jobs, nodes, base)
    return _with_resizes(rng, Case(jobs, nodes, base)) if elastic else Case(jobs, nodes, base)


def _with_resizes(rng: np.random.Generator, case: Case) -> Case:
    """Let most jobs be resized, at a price of their own, and spread what they hold."""
    jobs, base = dict(case.jobs), dict(case.base)
    for name, job in case.jobs.items():
        if rng.random() < 0.75:
            seconds = float(rng.choice([0.0, 1.0, 10.0]))
            count = int(rng.integers(0, 3))
            jobs[name] = replace(job, rescale_seconds=seconds, num_rescales=count)
        if name in base:
            held = base[name]
            more = rng.choice([*held, *case.nodes], size=rng.integers(0, 3)).tolist()
            wider = {**base, name: Allocation([*held, *more], shape_of(job, held, case.nodes))}
            if not is_broken(case, name) and not rules_broken(jobs, case.nodes, wider, wider):
                base = wider
    return Case(jobs, case.nodes, base)


def _random_job(rng: np.random.Generator, number: int, max_replicas: int, mixed: bool) -> JobInfo:
    least = int(rng.integers(0, 3))
    own = _random_shape(rng, int(rng.choice([1, 1, 2, 3])), mixed)
    return JobInfo(
        own.resources,
        own.speedup_fn,
        float(number),
        min_replicas=least,
        max_replicas=max(least, int(rng.integers(1, max_replicas + 1))),
        preemptible=bool(rng.random() < 0.75),
        num_stages=own.num_stages,
        age=float(rng.choice([0.0, 30.0, 300.0, 3000.0])),
        num_restarts=int(rng.integers(0, 3)),
        gpu_type=own.gpu_type,
        shapes=tuple(_further_shapes(rng, own)) if mixed else (),
    )


def _further_shapes(rng: np.random.Generator, own: ReplicaShape) -> Iterator[ReplicaShape]:
    for count in rng.permutation([1, 2, 4])[: rng.integers(0, 3)]:
        shape = _random_shape(rng, int(count), True)
        if count != own.num_stages or (own.gpu_type, shape.gpu_type) in {("a", "b"), ("b", "a")}:
            yield shape


def _random_shape(rng: np.random.Generator, num_stages: int, mixed: bool) -> ReplicaShape:
    return ReplicaShape(
        num_stages,
        {"slots": num_stages, "cpus": int(rng.integers(0, 3))},
        scaling(rng.uniform(0, 0.6), pace=rng.uniform(0.5, 1) * num_stages if mixed else 1.0),
        gpu_type=[None, None, "a", "b"][rng.integers(4)] if mixed else None,
        max_replicas=int(rng.integers(2, 5)) if mixed and rng.random() < 0.3 else None,
    )


def _with_trouble(
    rng: np.random.Generator,
    jobs: Mapping[Any, JobInfo],
    nodes: Mapping[Any, NodeInfo],
    base: Allocations,
) -> tuple[dict[Any, NodeInfo], dict[Any, Sequence[Any]]]:
    """Let nodes drain or fall ill, and jobs run in a shape that they do not have any more."""
    troubled = {
        name: NodeInfo(
            node.resources,
            node.preemptible,
            node.gpu_type,
            draining=bool(rng.random() < 0.2),
            healthy=bool(rng.random() < 0.9),
        )
        for name, node in nodes.items()
    }
    gone = ReplicaShape(7, {"slots": 7}, scaling(0))
    strange = {name: Allocation(held, gone) for name, held in base.items() if rng.random() < 0.1}
    # A pinned job stays where it is, so what its first shape needs has to be there.
    strange = {name: held for name, held in strange.items() if jobs[name].preemptible}
    return troubled, {**base, **strange}


def cases(
    max_nodes: int = 4, max_jobs: int = 5, *, mixed: bool | None = None
) -> st.SearchStrategy[Case]:
    """Random cases for hypothesis; `mixed` None: of either kind."""

    def draw(seed: int, with_shapes: bool, elastic: bool) -> Case:
        return random_case(
            seed,
            max_nodes=max_nodes,
            max_jobs=max_jobs,
            max_slots=6,
            max_replicas=8,
            mixed=with_shapes if mixed is None else mixed,
            elastic=elastic,
        )

    return st.builds(draw, st.integers(0, 2**31), st.booleans(), st.booleans())
