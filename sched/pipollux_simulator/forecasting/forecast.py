"""Forecasts of starts and ends: a handful of samples, and quantiles over them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pipollux_policies import Policy

from .draws import Draws, quantile
from .errors import ERROR, HIGH, LOW, START_ERROR, Estimate, corrected, spread_of_starts
from .sample import NEVER, Effort, Times, run_sample
from .state import ForecastJob, ForecastState, ForecastSweep

_ARRIVALS_FOR = 86400.0
"""Seconds ahead for which the recent rate of arrivals is assumed."""


@dataclass(frozen=True)
class JobForecast:
    """When a job or a sweep starts and ends, by the clock of its state."""

    start: Estimate | None
    """None: it has started."""
    end: Estimate
    uncorrected_end: Estimate
    """The same without the correction by past errors, to learn from its own."""
    uncorrected_start: Estimate | None = None
    running_seconds: float | None = None
    """Median of the running time without its correction; None: it has started, or is a sweep."""


def forecast(
    state: ForecastState,
    make_policy: Callable[[], Policy],
    *,
    seed: int = 0,
    effort: Effort | None = None,
    error: float = ERROR,
    start_error: float = START_ERROR,
) -> dict[str, JobForecast]:
    """Return the forecasts of all jobs and sweeps of a state; deterministic.

    A sweep starts with its first trial, and ends with its last one. Jobs end as those that wait for
    them need: complete, for instance.

    Args:
        state: of the cluster.
        make_policy: returns a new instance of the cluster's policy.
        seed: of the random draws.
        effort: number of samples, and how exact each is; None: the default.
        error: spread of the logarithm of the time to an end that samples lack: see `errors`.
        start_error: the least of the time to a start: see `errors.spread_of_starts`.

    Raises:
        SimulationError: the policy broke a rule.

    Example:
        >>> from pipollux_policies import JobInfo, NodeInfo, make_policy
        >>> from pipollux_simulator import ForecastJob
        >>> job = JobInfo({"slots": 1}, lambda n, r: r, 0.0, 1, 1, remaining_work=100.0)
        >>> state = ForecastState(0.0, {"n": NodeInfo({"slots": 1})}, (ForecastJob("a", job),))
        >>> forecast(state, lambda: make_policy("fifo"), error=0.0)["a"].end.median
        130.0
    """
    samples = sample_times(state, make_policy, seed=seed, effort=effort or Effort())
    return {
        job.name: summarize(
            job, [sample[job.name] for sample in samples], state, error, start_error
        )
        for job in state.jobs_and_sweeps
    }


def sample_times(
    state: ForecastState,
    make_policy: Callable[[], Policy],
    *,
    seed: int,
    effort: Effort,
    which: Sequence[int] | None = None,
) -> list[dict[str, Times]]:
    """Return the start and end of all jobs and sweeps in each sample: see `forecast`.

    `which`: numbers of the samples, from 0; None: all.
    """
    numbers = range(effort.samples) if which is None else which
    wanted = state.jobs_and_sweeps
    if not wanted or not state.nodes:
        return [{job.name: NEVER for job in wanted} for _ in numbers]
    draws = Draws(state, seed, effort.samples)
    until = state.now + min(effort.horizon, _ARRIVALS_FOR)
    return [
        run_sample(
            state, make_policy(), draws.jobs(i), draws.arrivals(i, until), effort, draws.planned(i)
        )
        for i in numbers
    ]


def summarize(
    job: ForecastJob | ForecastSweep,
    times: Sequence[Times],
    state: ForecastState,
    error: float = ERROR,
    start_error: float = START_ERROR,
) -> JobForecast:
    """Return the forecast of a job or sweep from its times in the samples."""
    now = state.now
    start = uncorrected = None
    if job.is_new:
        uncorrected = estimate([max(time.start, now) for time in times])
        spread = spread_of_starts(state.num_started, error, start_error)
        start = corrected(uncorrected, now, past=state.start_errors, error=spread)
    end = estimate([max(time.end, now) for time in times])
    found = corrected(end, now, job.family, state.errors, error)
    if start is not None:  # each is corrected by its own errors
        found = Estimate(*map(max, start, found))
    return JobForecast(start, found, end, uncorrected, _running_seconds(job, times))


def _running_seconds(job: ForecastJob | ForecastSweep, times: Sequence[Times]) -> float | None:
    if not job.is_new or isinstance(job, ForecastSweep):
        return None
    found = [(one.end - one.start) / one.factor for one in times if one.end < math.inf]
    return quantile(found, 0.5) if found else None


def estimate(values: Sequence[float]) -> Estimate:
    """Return the quantiles of equally likely values.

    >>> estimate([3.0, 1.0, 2.0, math.inf])
    Estimate(low=1.0, median=2.5, high=inf)
    """
    low, median, high = (quantile(values, place) for place in (LOW, 0.5, HIGH))
    return Estimate(low, median, high)
