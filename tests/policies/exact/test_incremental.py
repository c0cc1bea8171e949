"""A decision that goes on from earlier ones is the one that is made from scratch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from pipollux_perfmodel import GoodputFunction, PerfParams, SpeedupFunction
from pipollux_policies import (
    CompletionTime,
    ExactPolicy,
    FairSpeedup,
    JobInfo,
    NodeInfo,
    ReplicaShape,
)

NODES = {f"n{n:02}": NodeInfo({"slots": 4}) for n in range(20)}


def make_job(number: int, interval: int, stages: Sequence[int]) -> JobInfo:
    """A job at a decision; nothing of its models has been asked for yet."""
    rng = np.random.default_rng(number)
    seconds, work = rng.uniform(0.02, 0.4), rng.uniform(1e3, 1e5)
    shapes = []
    for count in stages:
        params = PerfParams(seconds, seconds / 40, seconds / 3, 0.01, seconds / 5, 0.01, 1.3)
        speedup_fn = SpeedupFunction(
            GoodputFunction(params, (1.0, float(rng.uniform(1, 50))), 128),
            4096,
            (16, 256),
            accumulation=True,
            base_goodput=float(rng.uniform(500, 600)) / count,
        )
        shapes.append(ReplicaShape(count, {"slots": count}, speedup_fn))
    own, *further = shapes
    return JobInfo(
        own.resources,
        own.speedup_fn,
        float(number),
        min_replicas=0,
        max_replicas=16,
        num_stages=own.num_stages,
        age=60.0 * (interval + 1) + number,
        remaining_work=max(work - 60.0 * interval, 1.0),
        shapes=tuple(further),
        rescale_seconds=1.0 if number % 3 else None,
    )


@pytest.mark.parametrize("stages", [(1,), (1, 2, 4)])
@pytest.mark.parametrize("fair", [False, True])
def test_a_decision_that_goes_on_is_the_one_from_scratch(
    fair: bool, stages: tuple[int, ...]
) -> None:
    def policy() -> ExactPolicy:
        return ExactPolicy(FairSpeedup() if fair else CompletionTime())

    kept, known = policy(), {}
    base: dict[str, Sequence[str]] = {}
    for interval in range(4):
        numbers = range(2 * interval, 40 + 2 * interval)  # a twentieth comes, and as many are done
        fresh = {f"j{n:03}": make_job(n, interval, stages) for n in numbers}
        # The same jobs with the models of the decision before, where there was one.
        same = {
            name: replace(job, speedup_fn=known[name].speedup_fn, shapes=known[name].shapes)
            if name in known
            else make_job(int(name[1:]), interval, stages)
            for name, job in fresh.items()
        }
        held = {name: nodes for name, nodes in base.items() if name in fresh}
        scratch, proof = policy().solve(fresh, NODES, held, NODES["n00"])
        answer, certificate = kept.solve(same, NODES, held, NODES["n00"])
        assert answer == scratch
        assert {name: found.num_stages for name, found in answer.items()} == {
            name: found.num_stages for name, found in scratch.items()
        }
        assert certificate == proof
        known, base = same, {name: nodes for name, nodes in answer.items() if nodes}
