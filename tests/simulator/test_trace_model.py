"""What a job of a traced application learns of itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipollux_perfmodel import GradParams, PerfParams, fit_perf_params
from pipollux_simulator import RunningJob, TrueStepTimes
from pipollux_simulator.applications.trace_model import Fit
from pipollux_simulator.applications.traces import TraceApplication
from tests.simulator.simulator_cases import write_traces


def speedups(folder: Path, fit: Fit) -> list[float]:
    """Return what 2, 3 and 4 GPUs of a node are worth after a step on each; on 3 it took long."""
    model = TraceApplication(folder / "cifar10", fit=fit).new_model()
    for replicas, seconds in ((1, 0.5), (2, 0.5), (3, 1.5), (4, 0.5)):
        running = RunningJob((replicas,), 1, 1, 256, 0, "")
        model.observe(running, TrueStepTimes(seconds, seconds), GradParams(1e-9, 1.0))
    (shape,) = model.shapes()
    return [float(shape.speedup_fn(1, replicas)) for replicas in (2, 3, 4)]


def test_our_jobs_correct_speedups_by_what_their_fit_leaves_over(tmp_path: Path) -> None:
    write_traces(tmp_path)
    two, three, four = speedups(tmp_path, fit_perf_params)
    assert three < 0.7 * two < four


def test_jobs_that_fit_as_adaptdl_does_correct_nothing(tmp_path: Path) -> None:
    """Theirs do not, so a simulation of them must not; the fit itself is the same here."""
    write_traces(tmp_path)

    def like_another(*arguments: Any, **options: Any) -> PerfParams:
        return fit_perf_params(*arguments, **options)

    two, three, four = speedups(tmp_path, like_another)
    assert two < three < four


def test_a_job_of_a_fixed_batch_inherits_initial_gradients(tmp_path: Path) -> None:
    """So its length is known in seconds before it starts; step times are known anyway."""
    write_traces(tmp_path)
    application, times = TraceApplication(tmp_path / "cifar10"), TrueStepTimes(0.5, 0.5)
    first, later = GradParams(1.0, 2.0), GradParams(1.0, 50.0)
    old, new, same = (application.new_model(512) for _ in range(3))
    running = old.configure(old.shapes()[0], (1,))
    same.observe(running, times, first)
    for gradients in (first, later):
        old.observe(running, times, gradients)
    assert new.base_goodput() == 0.0
    for relatives in ([old], []):
        new.inherit(relatives)
        assert new.base_goodput() == same.base_goodput() > 0
    assert new.base_goodput() < old.base_goodput()
