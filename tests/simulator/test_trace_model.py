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
