"""Hints that are well-formed and absurd: a plan comes out, and other jobs keep what they have."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pipollux_perfmodel import HintsError, SchedHints
from pipollux_policies import POLICIES, NodeInfo, make_policy
from pipollux_sched.allocator.decide import place_new, reallocate
from pipollux_sched.allocator.job_infos import hints_worth, job_info, linear_speedup
from pipollux_sched.allocator.strategy import PolicyStrategy, SchedulableJob
from pipollux_sched.spec.hints import read_hints
from pipollux_sched.spec.job import JobSpec
from tests.sched.sane_hints import PERF, SANE

NODES = {name: NodeInfo({"slots": 4}) for name in ("a", "b")}


def absurd(perf: dict[str, Any] | None = None, **others: Any) -> SchedHints:
    """Hints that the supervisor takes."""
    return read_hints({**SANE, **others, "perfParams": {**PERF, **(perf or {})}})


TWO_STAGES = {"numStages": 2, "gradientAccumulation": True, "localBszBounds": [1, 64]}
NO_TIME = absurd(
    {"alpha_c": 0.0, "beta_c": 1e-310, "alpha_n": 1e-300, "alpha_r": 5e-324, "beta_r": 1e-300},
    **TWO_STAGES,
    gradParams={"norm": 1e60, "var": 1e60},
)
A_LEAP = absurd(
    {"alpha_c": 1e-155, "beta_c": 1e-155, "alpha_n": 1e-30, "beta_n": 0.0, "alpha_r": 1.0},
    **TWO_STAGES,
    initBatchSize=2,
    maxBatchSize=2,
    gradParams={"norm": 1, "var": 1e60},
)
NOTHING_FITS = absurd(initBatchSize=1000, localBszBounds=[1, 2])
DOUBTED = {
    "no time": (NO_TIME, "say that 2 replicas of 2 stages on one node have a speedup of inf; "),
    "a leap": (A_LEAP, "say that 2 replicas of 2 stages on 2 nodes have a speedup of 1e+22; "),
    "nothing fits": (NOTHING_FITS, "say that up to 8 replicas are all worth nothing"),
}
BELIEVED = {
    "for ever": absurd({"alpha_c": 1e18, "beta_c": 1e18, "contention": 1e18}),
    "a slow network": absurd({"alpha_n": 1e18, "beta_n": 1e18, "alpha_r": 1e18, "growth_n": 16}),
    "nothing left": absurd({"alpha_c": 1e18, "contention": 1}, remainingSamples=0),
    "much left": absurd({"alpha_c": 1e18}, remainingSamples=1e18),
    "no gradient": absurd(gradParams={"norm": 0, "var": 0}),
    "an exploded gradient": absurd(gradParams={"norm": 5e-324, "var": 1e60}),
}
EVERY = {**{name: hints for name, (hints, _) in DOUBTED.items()}, **BELIEVED}


@pytest.mark.parametrize("case", DOUBTED)
def test_what_no_machine_could_reach_is_not_believed(case: str) -> None:
    """The job is planned for as if it had sent none: it scales, and starts small."""
    hints, doubt = DOUBTED[case]
    spec = JobSpec(name="x", script="x.py", num_stages=hints.num_stages)
    found = hints_worth(spec, hints)
    assert found.speedups == {}
    assert (found.doubt or "").startswith(doubt)
    info, unknown = (job_info(spec, told, age=5.0) for told in (hints, None))
    assert info == unknown
    assert info.speedup_fn is linear_speedup
    assert info.max_replicas == 1


@pytest.mark.parametrize("case", BELIEVED)
def test_what_is_only_bad_is_believed(case: str) -> None:
    spec = JobSpec(name="x", script="x.py")
    assert hints_worth(spec, BELIEVED[case]).doubt is None
    info = job_info(spec, BELIEVED[case], age=5.0)
    found = info.speedup_fn(np.array([1, 1, 2, 2]), np.array([1, 4, 2, 4]))
    assert np.isfinite(found).all()
    assert (found >= 0).all()


def test_sizes_of_powers_are_bounded() -> None:
    for power in (-17, 17, 1e18):
        with pytest.raises(HintsError, match=r"perfParams.growth_n is .*; at most 16 is allowed"):
            absurd({"growth_n": power})


def test_the_hints_of_a_job_file_have_the_same_bounds() -> None:
    with pytest.raises(ValueError, match="maxBatchSize is 4194305; at most 4194304 is allowed"):
        JobSpec.model_validate({"name": "x", "script": "x", "hints": {"maxBatchSize": 2**22 + 1}})


# Pollux searches for a second or two where it may let the job grow.
LONG = [(case, "pollux") for case in list(BELIEVED)[1:]]


@pytest.mark.parametrize(
    ("case", "policy"),
    [
        pytest.param(*point, marks=pytest.mark.exhaustive if point in LONG else ())
        for point in itertools.product(EVERY, POLICIES)
    ],
)
def test_every_policy_comes_to_a_plan(policy: str, case: str) -> None:
    """Warnings are errors here, so nothing that is not a number is even computed with."""
    strategy = PolicyStrategy(make_policy(policy))
    hints = EVERY[case]
    spec = JobSpec(name="absurd", script="x", num_stages=hints.num_stages)
    absurd_job = job_info(spec, hints, age=100.0, num_stages=hints.num_stages)
    sane = JobSpec(name="sane", script="x", preemptible=False)
    sane_job = job_info(sane, read_hints(SANE), age=100.0, num_stages=1, attained_service=50.0)
    new_job = job_info(JobSpec(name="new", script="x"), None, age=0.0)
    candidates = [
        SchedulableJob("sane", sane_job, ("a", "a")),
        SchedulableJob("absurd", absurd_job, ("b",), num_stages=hints.num_stages),
        SchedulableJob("new", new_job),
    ]
    started = place_new(candidates, NODES, strategy)
    assert [decision.job for decision in started] == (["new"] if policy != "fifo" else [])
    given = {decision.job: decision for decision in started}
    candidates = [
        replace(job, allocation=given[job.name].nodes, num_stages=1, pinned=True)
        if job.name in given
        else job
        for job in candidates
    ]
    decided = {decision.job: decision for decision in reallocate(candidates, NODES, strategy)}
    assert "sane" not in decided, "it holds what it held"
    for decision in decided.values():
        speedup = decision.details["speedup"]
        assert speedup is None or np.isfinite(speedup)
