"""Placement by network levels against brute force, and the decisions that users expect."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import numpy as np
import pytest

from pipollux_policies import (
    ExactPolicy,
    FairSpeedup,
    JobInfo,
    NodeInfo,
    PolluxPolicy,
    SiaPolicy,
)
from pipollux_policies.allocations.fitness import power_terms
from pipollux_policies.exact.policy import Certificate
from pipollux_policies.jobs.topology import build_topology
from pipollux_policies.placement.node_choice import find_nodes
from tests.extent import first

SLOTS = 2


class Levels:
    """Speedup R / (1 + cost · (R - 1)), with a cost per network level; 0 on one node."""

    def __init__(self, *costs: float) -> None:
        self.costs = costs
        self._at = {1: self}

    def __call__(self, nodes, replicas):
        cost = np.where(np.asarray(nodes) > 1, self.costs[0], 0.0)
        return np.asarray(replicas) / (1 + cost * (np.asarray(replicas) - 1))

    def at_level(self, level):
        level = min(level, len(self.costs))
        if level not in self._at:
            self._at[level] = Levels(*self.costs[level - 1 :])
        return self._at[level]


def job(speedup_fn, *, created=0.0, most=4, least=1, **more) -> JobInfo:
    return JobInfo({"slots": 1}, speedup_fn, created, least, most, **more)


def cluster(*paths: tuple[str, ...], slots: int = SLOTS) -> dict[str, NodeInfo]:
    return {
        f"n{number}": NodeInfo({"slots": slots}, topology=path) for number, path in enumerate(paths)
    }


def rack_of(nodes, names) -> int:
    topology = build_topology(list(nodes.values()))
    index = list(nodes)
    return topology.level(index.index(name) for name in set(names))


def possible(info: JobInfo, num_nodes: int):
    """Return every allocation of a job as replicas per node."""
    for cells in itertools.product(range(SLOTS + 1), repeat=num_nodes):
        if sum(cells) == 0 or info.min_replicas <= sum(cells) <= info.max_replicas:
            yield cells


def brute_force(jobs, nodes, base) -> float:
    """Return the best sum of Pollux's terms over all allocations that keep the rules."""
    names, topology = list(nodes), build_topology(list(nodes.values()))
    per_job = []
    for name, info in jobs.items():
        held = tuple(Counter(base.get(name, ()))[n] for n in names)
        options = []
        for cells in possible(info, len(names)):
            used = [n for n, count in enumerate(cells) if count]
            value = 0.0
            if used:
                speedup_fn = info.speedup_fn.at_level(topology.level(used))
                value = float(speedup_fn(len(used), sum(cells)))
            if any(held) and cells != held:
                stays = any(a and b for a, b in zip(cells, held, strict=True))
                elastic = stays and info.rescale_seconds is not None
                value *= info.change_factor(elastic=elastic)
            share = min(
                max(-(-len(names) * SLOTS // len(jobs)), info.least_replicas), info.max_replicas
            )
            fewest = -(-share // SLOTS)
            rooms = topology.largest_rooms(np.full(len(names), SLOTS))
            fair_level = 1 + int((rooms[:-1] < share).sum())
            fair = float(info.speedup_fn.at_level(fair_level)(fewest, share))
            options.append((cells, float(power_terms(np.array(value / fair), -1.0))))
        per_job.append(options)

    def best(number, free, spread):
        if number == len(per_job):
            return 0.0
        found = -np.inf
        for cells, term in per_job[number]:
            if any(c > f for c, f in zip(cells, free, strict=True)):
                continue
            mine = [n for n, count in enumerate(cells) if count]
            if len(mine) > 1 and any(n in spread for n in mine):
                continue
            left = [f - c for f, c in zip(free, cells, strict=True)]
            total = term + best(number + 1, left, spread | set(mine if len(mine) > 1 else ()))
            found = max(found, total)
        return found

    return best(0, [SLOTS] * len(names), frozenset())


CLUSTERS = {
    "two racks": [("r1",), ("r1",), ("r2",), ("r2",)],
    "one label missing": [("r1",), ("r1",), ("r2",), ("",)],
    "zones": [("a", "r1"), ("a", "r1"), ("a", "r2"), ("b", "r1")],
    "flat": [(), (), (), ()],
}


@pytest.mark.parametrize("layout", CLUSTERS)
@pytest.mark.parametrize("seed", first(2, range(4)))
def test_no_allocation_is_better(layout, seed):
    """Against every allocation of three jobs, some of which run and some can be resized."""
    rng = random.Random(f"{layout} {seed}")  # noqa: S311  # as every seeded test
    nodes = cluster(*CLUSTERS[layout])
    jobs, base, free = {}, {}, Counter(dict.fromkeys(nodes, SLOTS))
    for number in range(2 if len(nodes) > 4 else 3):
        costs = sorted(rng.choice([0.0, 0.05, 0.3, 1.0]) for _ in range(3))
        name = f"job-{number}"
        jobs[name] = job(
            Levels(*costs),
            created=float(number),
            most=rng.choice([2, 4]),
            least=rng.choice([1, 2]),
            age=3600.0,
            rescale_seconds=rng.choice([None, 5.0]),
        )
        there = [node for node in nodes if free[node]]
        if rng.random() < 0.6 and there:
            node = rng.choice(there)
            base[name] = [node] * free[node]
            free[node] = 0
            if len(base[name]) < jobs[name].min_replicas:
                del base[name]
    policy = ExactPolicy(FairSpeedup())
    found, certificate = policy.solve(jobs, nodes, base, NodeInfo({"slots": SLOTS}))
    assert certificate.value == pytest.approx(brute_force(jobs, nodes, base), rel=1e-6)
    assert isinstance(certificate, Certificate)
    held = Counter(node for allocation in found.values() for node in allocation)
    assert all(count <= SLOTS for count in held.values())


SUFFERS = Levels(0.02, 5.0)
INDIFFERENT = Levels(0.02)


def solve(jobs, nodes, base=None, policy=None):
    template = NodeInfo({"slots": SLOTS})
    return (policy or ExactPolicy()).optimize(jobs, nodes, base or {}, template)[0]


def test_a_job_that_suffers_is_packed_and_an_indifferent_one_is_spread():
    """Two racks of three nodes: two jobs that suffer get two nodes of a rack each."""
    nodes = cluster(*[("r1",)] * 3, *[("r2",)] * 3)
    jobs = {
        "wide": job(INDIFFERENT, created=0.0, least=4, remaining_work=1e5),
        "tight-1": job(SUFFERS, created=1.0, least=4, remaining_work=1e5),
        "tight-2": job(SUFFERS, created=2.0, least=4, remaining_work=1e5),
    }
    found = solve(jobs, nodes)
    assert all(len(found[name]) == 4 for name in jobs)
    assert rack_of(nodes, found["tight-1"]) == rack_of(nodes, found["tight-2"]) == 1
    assert rack_of(nodes, found["wide"]) == 2


@pytest.mark.parametrize(
    "policy", [ExactPolicy(), PolluxPolicy(seed=1), SiaPolicy()], ids=["exact", "pollux", "sia"]
)
def test_a_job_that_suffers_stays_smaller_rather_than_span_racks(policy):
    nodes = cluster(("r1",), ("r2",))
    found = solve({"a": job(SUFFERS, remaining_work=1e5)}, nodes, policy=policy)
    assert len(found["a"]) == SLOTS
    found = solve({"a": job(INDIFFERENT, remaining_work=1e5)}, nodes, policy=policy)
    assert len(found["a"]) == 2 * SLOTS
    assert found["a"].level == 2
    assert found["a"].speedup == pytest.approx(float(INDIFFERENT(2, 4)))


@pytest.mark.parametrize(
    "policy",
    [
        pytest.param(PolluxPolicy(seed=1), id="pollux", marks=pytest.mark.exhaustive),
        pytest.param(SiaPolicy(), id="sia"),
    ],
)
def test_every_policy_with_goodput_tables_packs_racks(policy):
    """Nodes of two racks alternate, so a placement by names would span them."""
    nodes = cluster(*[("r1",), ("r2",)] * 2)
    jobs = {name: job(SUFFERS, created=float(n), least=4) for n, name in enumerate("ab")}
    found = solve(jobs, nodes, policy=policy)
    assert [rack_of(nodes, found[name]) for name in jobs] == [1, 1]
    assert all(len(found[name]) == 4 for name in jobs)


def test_an_elastic_resize_is_priced_at_the_level_of_the_new_nodes():
    nodes = cluster(("r1",), ("r1",), ("r2",))
    settings = {"age": 7200.0, "rescale_seconds": 1.0, "remaining_work": 1e6}
    found = solve({"a": job(SUFFERS, **settings)}, nodes, {"a": ["n0", "n0"]})
    assert set(found["a"]) == {"n0", "n1"}
    # With the neighbour in use by a pinned job, growing would span racks.
    pinned = job(INDIFFERENT, created=-1.0, least=2, most=2, preemptible=False)
    jobs = {"a": job(SUFFERS, **settings), "pinned": pinned}
    found = solve(jobs, nodes, {"a": ["n0", "n0"], "pinned": ["n1", "n1"]})
    assert found["a"] == ["n0", "n0"]


def test_without_labels_and_with_one_domain_decisions_are_the_same():
    rng = random.Random(7)  # noqa: S311  # as above
    for _ in range(10):
        jobs = {
            f"job-{n}": job(Levels(rng.random()), created=float(n), most=rng.choice([1, 4, 8]))
            for n in range(5)
        }
        answers = [
            solve(jobs, cluster(*[path] * 6, slots=rng_slots))
            for rng_slots in (2,)
            for path in ((), ("z", "r"), ("", ""))
        ]
        assert answers[0] == answers[1] == answers[2]


def random_topology(rng: random.Random, num_nodes: int) -> list[NodeInfo]:
    labels = [("a", "b", ""), ("r1", "r2", "r3", "")]
    return [
        NodeInfo({"slots": SLOTS}, topology=tuple(rng.choice(names) for names in labels))
        for _ in range(num_nodes)
    ]


@pytest.mark.parametrize("seed", range(10))
def test_nodes_meet_at_the_lowest_level_with_a_domain_that_has_them_all(seed):
    rng = random.Random(seed)  # noqa: S311  # as every seeded test
    topology = build_topology(random_topology(rng, 12))
    for _ in range(30):
        nodes = rng.sample(range(12), rng.randint(1, 4))
        level = 1
        while level < topology.num_levels and not any(
            {*nodes} <= {*topology.members(level, domain).tolist()}
            for domain in set(topology.domains[level - 1].tolist())
        ):
            level += 1
        assert topology.level(nodes) == (level if len(nodes) > 1 else 1)
    for level in range(1, topology.num_levels):
        for domain in {*topology.domains[level - 1].tolist()}:
            nodes = topology.members(level, domain).tolist()
            assert nodes == np.flatnonzero(topology.domains[level - 1] == domain).tolist()


@pytest.mark.parametrize("seed", range(10))
def test_nodes_of_a_domain_are_those_found_where_all_others_are_full(seed):
    """The search inside a domain looks at its nodes alone, which changes nothing."""
    rng = random.Random(seed)  # noqa: S311  # as above
    topology = build_topology(random_topology(rng, 12))
    for _ in range(30):
        counts, claims = (np.array([rng.randint(0, 3) for _ in range(12)]) for _ in range(2))
        closed = np.array([rng.random() < 0.2 for _ in range(12)])
        replicas = rng.randint(1, 10)
        found = find_nodes(counts, closed, replicas, claimed=claims, topology=topology)
        expected = find_nodes(counts, closed, replicas, claimed=claims)
        if expected is not None and len(expected) > 1:
            for level in range(1, topology.num_levels):
                room = topology.room(np.where(closed, 0, counts), level)
                enough = np.flatnonzero(room >= replicas)
                if enough.size:
                    tightest = enough[room[enough].argmin()]
                    inside = topology.domains[level - 1] == tightest
                    there = np.where(inside, counts, 0)
                    expected = find_nodes(there, closed, replicas, claimed=claims)
                    break
            else:  # no domain has room
                assert {node for node, _ in found} <= {*np.flatnonzero(~closed).tolist()}
                assert sum(count for _, count in found) == replicas
                continue
        assert found == expected
