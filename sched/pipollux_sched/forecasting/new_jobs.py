"""Forecasts of jobs before they are submitted."""

from __future__ import annotations

from collections.abc import Sequence

from pipollux_sched.spec.job import JobSpec
from pipollux_sched.store import StateDir, Store
from pipollux_sched.views.forecasts import forecast_view
from pipollux_sched.views.models import JobForecastView

from .process import ForecastError, ForecastProcess


def forecast_new(
    store: Store, state_dir: StateDir, specs: Sequence[JobSpec]
) -> list[JobForecastView]:
    """Return when jobs would start and end if they were submitted now; store nothing.

    Raises:
        ForecastError: there is no forecast, with the reason.
        StoreError: one would be refused: its name is taken, or its team is full.
    """
    store.check_free({spec.name: spec.model_dump(mode="json") for spec in specs})
    with ForecastProcess(state_dir.store) as process:
        found = process.ask(specs).by_job
    views = []
    for spec in specs:
        view = forecast_view(found.get(spec.name), started=False)
        if view is None:
            raise ForecastError(f"there is no forecast of job {spec.name!r}")
        views.append(JobForecastView(job=spec.name, **dict(view)))
    return views
