"""Ranks of jobs of which only a distribution of what they have left is known."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from pipollux_sched.policy import CompletionTime, ExactPolicy, JobInfo, NodeInfo
from pipollux_sched.policy.exact.completion_time import unit_costs
from pipollux_sched.policy.exact.configurations import Instance, build_instance
from pipollux_sched.policy.exact.objective import Held
from pipollux_sched.policy.exact.promise import Promises

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
                family=draw(st.sampled_from(["", "a", "b"])),
            )
        )
    return found


def instance_of(jobs: list[JobInfo]) -> Instance:
    return build_instance(dict(enumerate(jobs)), {"n": NODE}, {}, NODE)


def weight(jobs: list[JobInfo], number: int, power: float) -> float:
    """Return u_j · E[rank_j^a] by the definition, one job after the other."""
    instance = instance_of(jobs)
    units = unit_costs(instance)
    mine = jobs[number]

    def at_least(other: int, value: float) -> float:
        """Return with what probability another job has at least as much left."""
        his = jobs[other]
        if mine.work_left and his.work_left and mine.family == his.family != "":
            if his.work_done != mine.work_done:
                return float(his.work_done < mine.work_done)
            return float(other < number)
        left = units[other] * np.array(his.likely_work or (0.0,))
        return float(np.mean((left > value) | ((left == value) & (other < number))))

    others = [other for other in range(len(jobs)) if other != number]
    powers = [
        (1.0 + sum(at_least(other, units[number] * value) for other in others)) ** power
        for value in (mine.likely_work or (0.0,))
    ]
    return units[number] * float(np.mean(powers))


@example([member(0, 0.0), member(1, 0.0)], 0.5)  # ties, in the order of their ages
@given(infos(), st.sampled_from([0.5, 0.75, 1.0]))
def test_weights_are_the_mean_powers_of_ranks(jobs: list[JobInfo], power: float) -> None:
    instance = instance_of(jobs)
    objective = CompletionTime(rank_power=power)
    worth = objective.judge(instance, Promises())
    gains = instance.table.split(worth.gains())
    for number, configs in enumerate(instance.jobs):
        expected = weight(jobs, number, power) * configs.speedup
        assert np.allclose(gains[number][:1], expected[:1])
        moved = worth.moved(number, 1.0, Held(0, 1))
        kept = [1.0] if not jobs[number].likely_work else []
        for left in jobs[number].likely_work:
            used = min(left, 300.0)
            kept.append(used / (used + 30.0) if used else 1.0)
        if not jobs[number].likely_work:
            kept = [300.0 / 330.0]
        assert np.isclose(moved, weight(jobs, number, power) * np.mean(kept))


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

    def slots(first: float, second: float, family: str) -> tuple[int, ...]:
        jobs = {"first": job(first, family), "second": job(second, family)}
        given, _ = ExactPolicy().optimize(jobs, {"n": NODE}, {}, NODE)
        return tuple(len(nodes) for nodes in given.values())

    assert slots(5000.0, 10.0, "resnet") == (4, 0)
    assert slots(10.0, 5000.0, "resnet") == (0, 4)
    assert slots(5000.0, 10.0, "") == slots(10.0, 5000.0, ""), "nothing tells them apart"
