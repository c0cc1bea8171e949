"""Views of forecasts: those of jobs, and how past ones turned out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any

from pipollux_sched.store import JobRecord, PastForecast, Store, StoredForecast

from .models import (
    EstimateView,
    ForecastAccuracyView,
    ForecastsView,
    ForecastView,
    JobForecastView,
    PastForecastView,
)

MOST_PAST = 2000
"""Number of last records that are compared with what happened."""
SHOWN_PAST = 50
"""Number of last records that are listed one by one."""


def forecast_view(found: StoredForecast | None, *, started: bool) -> ForecastView | None:
    """Return the view of a forecast; `started`: its job has started since."""
    if found is None:
        return None
    start = None if started or found.start is None else EstimateView(**found.start)
    end = EstimateView(**found.end)
    return ForecastView(made_at=found.made_at, start=start, end=end, note=found.note)


def current_forecast(
    latest: Mapping[str, StoredForecast],
    job: str,
    ended: bool,
    submitted_at: float,
    attempt: int,
) -> ForecastView | None:
    """Return the forecast of a job; None: it has ended, or none was made since its submission."""
    found = latest.get(job)
    if ended or found is None or found.made_at < submitted_at:
        return None
    return forecast_view(found, started=attempt > 0)


def job_forecast(latest: Mapping[str, StoredForecast], job: JobRecord) -> ForecastView | None:
    """Return the current forecast of a job; None: there is none, or its user has suspended it."""
    if job.state.suspended:
        return None
    return current_forecast(latest, job.name, job.phase.ended, job.submitted_at, job.state.attempt)


def list_forecasts(store: Store) -> ForecastsView:
    """Return the forecasts of all unfinished jobs, and how past ones turned out."""
    latest = store.forecasts.latest()
    jobs = []
    for job in store.jobs(unfinished=True):
        found = job_forecast(latest, job)
        if found is not None:
            jobs.append(JobForecastView(job=job.name, **dict(found)))
    past = store.forecasts.past(MOST_PAST)
    return ForecastsView(
        jobs=jobs,
        accuracy=accuracy(past),
        past=[_past(one) for one in past[-SHOWN_PAST:]],
    )


def accuracy(past: Iterable[PastForecast]) -> ForecastAccuracyView:
    """Return how many past intervals covered what happened, and the errors of their medians."""
    found = list(past)
    ends = _known(_covers(one.forecast.end, one.ended_at) for one in found)
    starts = _known(
        _covers(one.forecast.start, one.started_at)
        for one in found
        if one.forecast.start is not None and one.started_at > one.forecast.made_at
    )
    errors = [error for one in found if (error := _error(one)) is not None]
    return ForecastAccuracyView(
        num_ends=len(ends),
        ends_covered=sum(ends) / len(ends) if ends else None,
        num_starts=len(starts),
        starts_covered=sum(starts) / len(starts) if starts else None,
        median_error=median(errors) if errors else None,
    )


def _covers(estimate: Mapping[str, float | None], moment: float) -> bool | None:
    """Return whether an interval covers a moment; None: it has no known bound to compare."""
    low, high = estimate["low"], estimate["high"]
    if low is None and high is None:
        return None
    return (math.inf if low is None else low) <= moment <= (math.inf if high is None else high)


def _known(covered: Iterable[bool | None]) -> list[bool]:
    return [one for one in covered if one is not None]


def _error(one: PastForecast) -> float | None:
    """Return the error of the predicted end over the time that was left; None: there was none."""
    predicted, left = one.forecast.end["median"], one.ended_at - one.forecast.made_at
    return None if predicted is None or left <= 0 else abs(predicted - one.ended_at) / left


def _past(one: PastForecast) -> PastForecastView:
    shown: dict[str, Any] = dict(forecast_view(one.forecast, started=False) or {})
    return PastForecastView(
        job=one.job,
        **shown,
        started_at=one.started_at,
        ended_at=one.ended_at,
        covered=_covers(one.forecast.end, one.ended_at),
    )
