"""Ranks of jobs of which only a distribution of what they have left is known."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pipollux_policies import (
    MOST_TAIL,
    CompletionTime,
    ExactPolicy,
    JobInfo,
    NodeInfo,
)
from pipollux_policies.exact.configurations import Instance, build_instance
from pipollux_policies.exact.objective import Held
from pipollux_policies.exact.ranks import LONG, unit_costs
from pipollux_policies.exact.reservation import Reservations

NODE = NodeInfo({"slots": 4})
work = st.integers(0, 6).map(lambda n: 100.0 * n)


def member(number: int, left: float) -> JobInfo:
    """Return a job of a family whose members have all done nothing."""
    return JobInfo(
        {"slots": 1},
        lambda nodes, replicas: replicas,  # noqa: ARG005  # as every speedup function
        float(number),
        0,
        1,
        work_left=(left,),
        family="a",
    )


@st.composite
def infos(draw: st.DrawFn) -> list[JobInfo]:
    """Draw jobs, the oldest first, of which nothing, a number or a distribution is known."""
    found = []
    for number in range(draw(st.integers(1, 6))):
        kind = draw(st.sampled_from(["unknown", "told", "learned"]))
        values = tuple(sorted(draw(st.lists(work, min_size=1, max_size=4))))
        found.append(
            JobInfo(
                {"slots": 1},
                lambda nodes, replicas: replicas,  # noqa: ARG005  # as every speedup function
                float(number),
                0,
                draw(st.integers(1, 4)),
                remaining_work=values[0] if kind == "told" else None,
                work_left=values if kind == "learned" else (),
                work_done=draw(work),
                age=draw(work),
                attained_service=draw(work),
                family=draw(st.sampled_from(["", "a", "b"])),
            )
        )
    return found


def instance_of(jobs: list[JobInfo]) -> Instance:
    return build_instance(dict(enumerate(jobs)), {"n": NODE}, {}, NODE)


def weight(jobs: list[JobInfo], number: int, power: float, tail: float) -> float:
    """Return u_j · E[rank_j^a] by the definition, one job after the other; long ones are level."""
    units = unit_costs(instance_of(jobs))
    work = [np.array(job.likely_work or (0.0,)) for job in jobs]
    # Only ratios of costs matter, except to a charge: their mean is 1.
    ends = [np.maximum(job.age + units.own[n] * work[n], 1.0) for n, job in enumerate(jobs)]
    longest = max(end.max() for end in ends)
    costs = [(end / longest) ** tail for end in ends]
    scale = np.mean([cost.mean() for cost in costs])
    costs = [cost / scale for cost in costs]
    left = [units.total[n] * work[n] / costs[n] for n in range(len(jobs))]

    def behind(mine: int, other: int, value: float) -> float:
        """Return the costs of another job, if it has at least as much left, times how likely."""
        me, him = jobs[mine], jobs[other]
        if me.work_left and him.work_left and me.family == him.family != "":
            if him.work_done != me.work_done:
                return float(him.work_done < me.work_done) * float(costs[other].mean())
            later = (him.attained_service, other) > (me.attained_service, mine)
            return float(later) * float(costs[other].mean())
        order = [(-job.work_done, -job.attained_service) for job in (him, me)]
        later = (*order[0], -other) < (*order[1], -mine)
        more = (left[other] > value) | ((left[other] == value) & later)
        return float(np.mean(more * costs[other]))

    def powers(mine: int) -> list[float]:
        others = [other for other in range(len(jobs)) if other != mine]
        return [
            (own + sum(behind(mine, other, value) for other in others)) ** power
            for value, own in zip(left[mine].tolist(), costs[mine].tolist(), strict=True)
        ]

    most = LONG * np.mean([values.mean() for values in left])
    long_ones = [
        (found, len(values))
        for other, values in enumerate(left)
        for value, found in zip(values, powers(other), strict=True)
        if value > most
    ]
    if long_ones:
        level = sum(f / n for f, n in long_ones) / sum(1 / n for _, n in long_ones)
    mine = [
        level if value > most else found
        for value, found in zip(left[number], powers(number), strict=True)
    ]
    return float(units.total[number]) * float(np.mean(mine))


@example([member(0, 0.0), member(1, 0.0)], 0.5, 0.0)  # ties, the oldest first
@given(infos(), st.sampled_from([0.5, 0.75, 1.0]), st.sampled_from([0.0, 0.5, 1.0, 2.0]))
def test_weights_are_the_mean_powers_of_ranks(
    jobs: list[JobInfo], power: float, tail: float
) -> None:
    instance = instance_of(jobs)
    objective = CompletionTime(rank_power=power, tail=tail, part=0.0)
    worth = objective.judge(instance, Reservations())
    gains = instance.table.split(worth.gains())
    for number, configs in enumerate(instance.jobs):
        expected = weight(jobs, number, power, tail) * configs.speedup
        assert np.allclose(gains[number][:1], expected[:1])
        moved = worth.moved(number, 1.0, Held(0, 1))
        kept = []
        lasts = max(300.0, jobs[number].age)
        for left in jobs[number].likely_work:
            used = min(left, lasts)
            kept.append(used / (used + 30.0) if used else 1.0)
        if not jobs[number].likely_work:
            kept = [lasts / (lasts + 30.0)]
        assert np.isclose(moved, weight(jobs, number, power, tail) * np.mean(kept))


def one_replica(number: int, age: float, left: float) -> JobInfo:
    """Return a job that runs on one slot, and whose start costs nothing."""
    return JobInfo(
        {"slots": 1},
        lambda nodes, replicas: replicas,  # noqa: ARG005  # as every speedup function
        float(number),
        0,
        1,
        age=age,
        remaining_work=left,
        restart_seconds=0.0,
    )


times = st.integers(1, 10_000).map(float)


@given(
    st.lists(st.tuples(times, times), min_size=2, max_size=5, unique=True),
    st.sampled_from([0.0, 0.5, 1.0, 2.0]),
)
def test_the_first_job_begins_the_best_of_all_orders(
    drawn: list[tuple[float, float]], tail: float
) -> None:
    """What a second of waiting adds to the sum of JCT^(1 + q) is least, by brute force."""
    jobs = {n: one_replica(n, age, left) for n, (age, left) in enumerate(drawn)}

    def cost(order: Iterable[int]) -> float:
        total = now = 0.0
        for number in order:
            age, left = drawn[number]
            now += left
            total += (age + left) ** tail * now
        return total

    orders = [*itertools.permutations(jobs)]
    best = min(map(cost, orders))
    node = NodeInfo({"slots": 1})
    policy = ExactPolicy(CompletionTime(rank_power=1.0, tail=tail, part=0.0))
    given, _ = policy.optimize(jobs, {"n": node}, {}, node)
    chosen = [number for number, nodes in given.items() if nodes]
    assert len(chosen) == 1
    assert min(cost(o) for o in orders if o[0] == chosen[0]) <= best * (1 + 1e-9)


def test_late_jobs_go_first_where_they_count_more() -> None:
    jobs = {"new": one_replica(1, 0.0, 1000.0), "old": one_replica(0, 50_000.0, 3000.0)}
    node = NodeInfo({"slots": 1})

    def first(tail: float) -> list[str]:
        policy = ExactPolicy(CompletionTime(tail=tail, part=0.0))
        given, _ = policy.optimize(jobs, {"n": node}, {}, node)
        return [name for name, nodes in given.items() if nodes]

    assert first(0.0) == ["new"]
    assert first(1.0) == ["old"]


@pytest.mark.parametrize("tail", [-0.1, MOST_TAIL + 0.1, float("nan")])
def test_a_tail_is_a_power_in_bounds(tail: float) -> None:
    with pytest.raises(ValueError, match=r"tail: .* must be a number between 0 and 10"):
        CompletionTime(tail=tail)


def test_jobs_of_a_family_are_trained_one_after_the_other() -> None:
    """However long they may be: side by side, all of them would end late."""
    spread = tuple(float(10**n) for n in range(1, 7))

    def job(done: float, family: str) -> JobInfo:
        return JobInfo(
            {"slots": 1},
            lambda nodes, replicas: replicas**0.9,  # noqa: ARG005  # as every speedup function
            0.0,
            1,
            4,
            work_left=spread,
            work_done=done,
            family=family,
            restart_seconds=0.0,
        )

    def slots(first: float, second: float, family: str, rank_power: float = 0.5) -> tuple[int, ...]:
        policy = ExactPolicy(CompletionTime(rank_power=rank_power))
        jobs = {"first": job(first, family), "second": job(second, family)}
        given, _ = policy.optimize(jobs, {"n": NODE}, {}, NODE)
        return tuple(len(nodes) for nodes in given.values())

    assert slots(5000.0, 10.0, "resnet") == (4, 0)
    assert slots(10.0, 5000.0, "resnet") == (0, 4)
    assert slots(10.0, 5000.0, "resnet", CompletionTime.rank_power) == (1, 3), "by default, most"
    assert slots(5000.0, 10.0, "") == slots(10.0, 5000.0, ""), "nothing tells them apart"


def test_long_jobs_are_trained_side_by_side_beside_short_ones() -> None:
    """Two that have about as much left as each other are none; of two long ones each has half."""

    def job(number: int, left: float, most: int) -> JobInfo:
        return JobInfo(
            {"slots": 1},
            lambda nodes, replicas: replicas**0.5,  # noqa: ARG005  # as every speedup function
            float(number),
            0,
            most,
            remaining_work=left,
            restart_seconds=0.0,
        )

    def replicas_of_two(num_short: int) -> tuple[int, int]:
        jobs = {n: job(n, 100.0, 1) for n in range(num_short)}
        jobs |= {num_short: job(num_short, 60_000.0, 8), num_short + 1: job(99, 70_000.0, 8)}
        nodes = dict.fromkeys(range(8 + num_short), NodeInfo({"slots": 1}))
        policy = ExactPolicy(CompletionTime(part=0.0))
        given, _ = policy.optimize(jobs, nodes, {}, NodeInfo({"slots": 1}))
        assert all(len(given[n]) == 1 for n in range(num_short))
        return len(given[num_short]), len(given[num_short + 1])

    shorter, longer = replicas_of_two(0)
    assert shorter > longer
    assert replicas_of_two(6) == (4, 4)


@pytest.mark.parametrize("known", ["unknown", "exact", "family"])
def test_equal_jobs_start_in_the_order_of_arrival(known: str) -> None:
    """Twelve jobs of 1, 2, 3 and 4 stages in turn on four slots, which end in any order."""
    node = NodeInfo({"slots": 4})
    chance = random.Random(1)  # noqa: S311  # to be repeated
    trained = dict.fromkeys(range(12), 0.0)
    held: dict[int, list[str]] = {}
    started: list[int] = []
    for minute in range(12):
        jobs = {n: equal_job(n, known, 60.0 * minute, trained[n]) for n in trained}
        found, _ = ExactPolicy().optimize(jobs, {"n": node}, held, node)
        started += [n for n in sorted(jobs) if found[n] and n not in started]
        held = {n: list(allocation) for n, allocation in found.items() if allocation}
        for number in held:
            trained[number] += 60.0
        ended = chance.choice(sorted(held))
        del held[ended], trained[ended]
    for stages in range(4):
        of_one_kind = [n for n in started if n % 4 == stages]
        assert of_one_kind == sorted(of_one_kind)


def equal_job(number: int, known: str, now: float, done: float) -> JobInfo:
    stages = 1 + number % 4
    length: dict[str, Any] = {
        "unknown": {},
        "exact": {"remaining_work": 1000.0 - done},
        "family": {"family": "f", "work_left": tuple(100.0 * n for n in range(1, 17))},
    }[known]
    return JobInfo(
        {"slots": stages},
        lambda _nodes, replicas: replicas,
        float(number),
        *(1, 1),
        num_stages=stages,
        age=now + 12.0 - number,
        attained_service=done * stages,
        work_done=done,
        **length,
    )
