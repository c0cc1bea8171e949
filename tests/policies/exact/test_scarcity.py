"""Jobs that run on several types of GPU leave a scarce one to those that run on no other."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from pipollux_policies import (
    CompletionTime,
    ExactPolicy,
    JobInfo,
    NodeInfo,
    ReplicaShape,
)
from pipollux_policies.exact.completion_time import SCARCE_TAIL
from pipollux_policies.exact.configurations import build_instance
from pipollux_policies.exact.objective import Held
from pipollux_policies.exact.reservation import Reservations
from pipollux_policies.exact.scarcity import LEAST_KEPT, waiting_charges

NODES = {
    "fast": NodeInfo({"slots": 4}, gpu_type="fast"),
    "slow": NodeInfo({"slots": 8}, gpu_type="slow"),
}


def job(number: int, left: float, slow: float) -> JobInfo:
    """Return a job whose replicas run on the fast type at 1 and on the slow one at `slow`."""
    shapes = (ReplicaShape(1, {"slots": 1}, lambda n, r: slow * r, "slow"),) if slow else ()  # noqa: ARG005  # as every speedup function
    return JobInfo(
        {"slots": 1},
        lambda nodes, replicas: replicas,  # noqa: ARG005  # as every speedup function
        float(number),
        0,
        8,
        remaining_work=left,
        gpu_type="fast",
        shapes=shapes,
    )


def types(
    jobs: dict[str, JobInfo], scarcity: float, rank_power: float = 0.5
) -> dict[str, set[str]]:
    policy = ExactPolicy(CompletionTime(scarcity=scarcity, tail=0.0, rank_power=rank_power))
    given, _ = policy.optimize(jobs, NODES, {}, NODES["fast"])
    return {name: set(nodes) for name, nodes in given.items()}


def test_a_job_with_a_choice_leaves_scarce_slots_to_captive_jobs() -> None:
    captives = {f"captive-{n}": job(n, 50_000.0, 0.0) for n in range(3)}
    jobs = {**captives, "free": job(3, 5000.0, 0.05)}
    assert types(jobs, 0.0)["free"] == {"fast"}
    for rank_power in (0.5, CompletionTime.rank_power):
        given = types(jobs, 1.0, rank_power)
        assert given["free"] == {"slow"}
        assert any(given[name] == {"fast"} for name in captives)


def test_a_slot_that_no_captive_job_wants_is_used() -> None:
    captive = JobInfo(
        {"slots": 1},
        lambda nodes, replicas: replicas,  # noqa: ARG005  # as every speedup function
        0.0,
        0,
        1,
        remaining_work=50_000.0,
        gpu_type="fast",
    )
    free = job(1, 5000.0, 0.001)
    assert types({"captive": captive, "free": free}, 1e6) == {"captive": {"fast"}, "free": {"fast"}}


def test_charges_are_the_waiting_of_captive_jobs() -> None:
    jobs = {f"captive-{n}": job(n, 50_000.0, 0.0) for n in range(3)}
    jobs |= {"free": job(3, 5000.0, 0.3), "narrow": job(4, 100.0, 0.2)}
    instance = build_instance(jobs, NODES, {}, NODES["fast"])
    by_job = np.split(waiting_charges(instance), instance.table.first_shape[1:-1])
    charges = dict(zip([c.name for c in instance.jobs], by_job, strict=True))
    assert all(not charges[f"captive-{n}"].any() for n in range(3))
    assert np.allclose(charges["free"], [3 / 4, 0.0]), "of the fast type, and of the slow one"
    plain, paying = (
        CompletionTime(scarcity=scarcity, tail=0.0).judge(instance, Reservations())
        for scarcity in (0.0, 0.5)
    )
    ranks = {"free": 4, "narrow": 5}
    for number, configs in enumerate(instance.jobs):
        power = ranks.get(configs.name, 1) ** CompletionTime().rank_power
        free, paid = (instance.table.split(worth.gains())[number] for worth in (plain, paying))
        slots = np.where(configs.shape == 0, configs.replicas, 0)
        due = 0.5 * power * charges[configs.name][0] * slots
        assert np.allclose(paid, np.maximum(free - due, LEAST_KEPT * free))
        for shape, replicas in itertools.product(range(len(configs.shapes)), (1, 3)):
            held, speedup = Held(shape, replicas), 2.0
            without = plain.moved(number, speedup, held)
            cost = 0.5 * power * float(charges[configs.name][shape]) * replicas
            assert np.isclose(
                paying.moved(number, speedup, held), max(without - cost, LEAST_KEPT * without)
            )


@pytest.mark.parametrize(
    ("slow", "tail"),
    [((0.0, 0.0, 0.3), SCARCE_TAIL), ((0.0, 0.0, 0.0), 0.0), ((0.3, 0.2, 0.3), 0.0)],
    ids=["some have a choice", "none has", "all have"],
)
def test_late_jobs_count_more_where_a_type_is_scarce(slow: Sequence[float], tail: float) -> None:
    jobs = {
        f"job-{n}": replace(job(n, 3000.0 * (n + 1), speed), age=1000.0 * (3 - n))
        for n, speed in enumerate(slow)
    }
    instance = build_instance(jobs, NODES, {}, NODES["fast"])
    usual, same, other = (
        CompletionTime(tail=q).judge(instance, Reservations()).gains()
        for q in (None, tail, SCARCE_TAIL - tail)
    )
    assert (usual == same).all()
    assert (usual != other).any()


@pytest.mark.parametrize("scarcity", [-0.1, float("nan")])
def test_a_charge_is_a_share_of_at_least_0(scarcity: float) -> None:
    with pytest.raises(ValueError, match=r"scarcity: .* must be a finite number at least 0"):
        CompletionTime(scarcity=scarcity)
