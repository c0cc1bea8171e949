"""Step times are measured, fitted and reported by the level of the network."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from pipollux_hybrid.job import context as contexts
from pipollux_hybrid.job.context import context
from pipollux_hybrid.job.env import JobEnvironment
from pipollux_hybrid.job.heartbeat import Heartbeat
from pipollux_hybrid.job.membership import Membership
from pipollux_hybrid.job.pipeline_spec import PipelineSchedule
from pipollux_hybrid.telemetry.inheritance import fit, rows_to_pass_on
from pipollux_hybrid.telemetry.step_profile import STEADY, StepProfile
from pipollux_hybrid.telemetry.step_summary import StepConfiguration, fit_data
from pipollux_perfmodel import PerfParams
from pipollux_perfmodel.timing.step_time import step_time

from .test_autotuner import Job
from .test_inheritance import TRAITS

TRUE = PerfParams(
    *(0.05, 0.01, 0.1, 0.01, 0.02, 0.002, 1.4), alpha_levels=(0.5,), beta_levels=(0.05,)
)


@pytest.fixture(autouse=True)
def fresh_context() -> Iterator[None]:
    contexts.reset()
    yield
    contexts.reset()


def profile() -> StepProfile:
    found = StepProfile()
    allocations = [(1, 1, 1), (1, 2, 1), (2, 2, 1), (2, 4, 1), (2, 2, 2), (4, 4, 2), (4, 8, 2)]
    for nodes, replicas, level in allocations:
        for size in (8, 16, 32):
            one = StepConfiguration(1, nodes, replicas, size, 1, level=level)
            times = step_time(TRUE, nodes, replicas, size, 0, 1, level)
            for _ in range(2 + STEADY):
                found.add_step(
                    one, float(times.optim_time), float(times.network_time), optimizer=True
                )
    return found


def test_the_fit_has_a_cost_per_level_and_rows_keep_theirs() -> None:
    measured = profile()
    data = fit_data(measured.summaries(), 1, "never")
    assert set(data.level) == {1, 2}
    params = fit(data, PipelineSchedule("gpipe"))
    assert len(params.alpha_levels) == 1
    assert params.alpha_levels[0] > 2 * params.alpha_n
    rows = rows_to_pass_on(measured, TRAITS)
    assert rows is not None
    levels = {(row.num_nodes, row.num_replicas, row.level) for row in rows.rows}
    assert {(2, 2, 1), (2, 2, 2)} <= levels
    assert StepConfiguration.from_json({**next(iter(measured.own()))._asdict()}).level == 1


def test_a_job_prices_the_level_at_which_it_runs() -> None:
    job = Job()
    metrics: Any = job.metrics
    metrics.perf_params = metrics.perf_params._replace(alpha_levels=(0.7,), beta_levels=(0.2,))
    ctx = context()
    ctx.env = replace(ctx.env, num_nodes=2, num_replicas=2, network_level=2)
    assert metrics.configuration(8).level == 2
    assert metrics.goodput_function().perf_params.alpha_n == 0.7
    assert metrics.hints().perf_params.alpha_levels == (0.7,)
    ctx.env = replace(ctx.env, num_nodes=1)
    assert metrics.configuration(8).level == 1


def test_the_scheduler_may_change_the_level_of_a_running_job() -> None:
    env = JobEnvironment.read({"PIPOLLUX_NETWORK_LEVEL": "1"})
    heartbeat = Heartbeat(env, lambda: None)
    ctx = context()
    ctx.heartbeat = heartbeat
    assert ctx.network_level == 1
    heartbeat._hand_on(SimpleNamespace(content=b'{"network_level": 2}'))  # type: ignore[arg-type]  # only its content is read
    assert ctx.network_level == 2
    heartbeat._hand_on(SimpleNamespace(content=b"{}"))  # type: ignore[arg-type]  # as above
    assert ctx.network_level == 1
    ctx.heartbeat = None


def test_a_membership_has_the_level_of_its_nodes() -> None:
    old = {"number": 1, "replicas": ["0", "1"], "num_nodes": 2}
    assert Membership.from_json_object(old).network_level == 0
    new = Membership(2, ("0", "1"), 2, 3)
    assert Membership.from_json_object(new.to_json_object()) == new
