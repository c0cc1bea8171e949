"""`fit_like_adaptdl` gives AdaptDL's own numbers, whatever was measured."""

from __future__ import annotations

from itertools import cycle

import numpy as np
import pytest

from pipollux_perfmodel import PerfParams, fit_like_adaptdl
from tests.extent import first, first_points
from tests.perfmodel.measured import Job, measure, random_jobs, their_fit

SAME = 1e-6

# Regimes that were never seen, and what little can be seen of the others.
PARTS = [
    (((1, 1),), (32,)),
    (((1, 1),), (8, 32)),
    (((1, 2),), (8, 32)),
    (((1, 1), (1, 4)), (8, 32)),
    (((1, 1), (2, 2)), (8, 32)),
    (((2, 4), (4, 8)), (8, 32)),
    (((1, 2), (2, 2)), (32,)),
]
TRUTH = PerfParams(0.05, 0.004, 0.12, 0.004, 0.04, 0.002, 1.3)


def same(job: Job, noise: float) -> None:
    found = fit_like_adaptdl(*measure(job.truth, *job[1:], noise=noise)[:5])
    np.testing.assert_allclose(found[:7], their_fit(job, noise), rtol=SAME)
    assert found == PerfParams(*found[:7])  # one stage, nothing but the seven


@pytest.mark.parametrize(
    ("part", "noise"),
    first_points(len(PARTS), [*zip(PARTS, cycle([0.05, 0.0])), *zip(PARTS, cycle([0.0, 0.05]))]),
    ids=str,
)
def test_the_same_where_little_was_seen(
    part: tuple[tuple[tuple[int, int], ...], tuple[int, ...]], noise: float
) -> None:
    same(Job(TRUTH, *part), noise)


@pytest.mark.parametrize("count", first(1, [3, 15]))
@pytest.mark.exhaustive
def test_the_same_on_random_profiles(count: int) -> None:
    for index, job in enumerate(random_jobs(count)):
        same(job, noise=0.05 if index % 3 == 2 else 0.0)


def test_wrong_measurements_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="accum_step_time has -1; give a finite time above 0 s"):
        fit_like_adaptdl([1, 1], [1, 1], [8, 16], [0.1, -1.0], [0.1, 0.2])
