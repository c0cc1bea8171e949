"""Forecasts in the background, within a share of one core."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping

from pipollux_sched.store import Store, StoredForecast
from pipollux_sched.utils.failure_log import FailureLog

from .process import ForecastProcess

SHARE = 0.015
"""Largest share of one core that forecasts take on average."""
SHORTEST_PAUSE = 10.0
"""Fewest seconds between two forecasts."""
_RETRY = 60.0
_RECORDED_AFTER = 60.0
"""Fewest seconds between two records of a job."""

_LOG = logging.getLogger(__name__)


def record_due(made_at: float, last: float | None, submitted_at: float) -> bool:
    """Return whether a forecast is to be recorded: a job's first one, then one per doubled age.

    Args:
        made_at: when it was made.
        last: when the last record of its job was made; None: there is none.
        submitted_at: when its job was submitted.
    """
    return last is None or made_at - last >= max(last - submitted_at, _RECORDED_AFTER)


class ForecastLoop:
    """Makes the forecasts of all jobs again and again, and records some for comparison.

    Some are recorded (`record_due`).

    Args:
        store: of the scheduler.
        process: makes the forecasts.
        ending: set when the scheduler ends.
        share: largest share of one core.
    """

    def __init__(
        self,
        store: Store,
        process: ForecastProcess,
        *,
        ending: threading.Event,
        share: float = SHARE,
        shortest_pause: float = SHORTEST_PAUSE,
    ) -> None:
        self._store = store
        self._process = process
        self._ending = ending
        self._share = share
        self._shortest = shortest_pause
        self._recorded: dict[str, float] | None = None

    def run(self) -> None:
        """Make forecasts until the scheduler ends; log failures, and try again."""
        failures = FailureLog(_LOG, "the forecast of jobs")
        pause = self._shortest
        while not self._ending.wait(pause):
            began = time.monotonic()
            try:
                used = self.run_once()
            except Exception as error:  # a scheduler goes on without forecasts
                if self._ending.is_set():
                    return
                failures.failed(error)
                # What it took is not known, but no more than that.
                pause = max(_RETRY, (time.monotonic() - began) / self._share)
            else:
                failures.succeeded()
                passed = time.monotonic() - began
                pause = max(used / self._share - passed, self._shortest)

    def run_once(self) -> float:
        """Make, store and record the forecasts; return the CPU seconds that they took."""
        if not self._store.overview.has_unfinished():
            return 0.0
        found = self._process.ask()
        self._store.forecasts.keep(found.by_job, self._due(found.by_job))
        return found.cpu_seconds

    def _due(self, forecasts: Mapping[str, StoredForecast]) -> list[str]:
        """Return the jobs whose forecast is to be recorded."""
        if self._recorded is None:
            self._recorded = self._store.forecasts.last_records()
        due = []
        for job in self._store.jobs(unfinished=True):
            found = forecasts.get(job.name)
            if found is None or (found.note and found.end["low"] is None):
                continue
            made_at = found.made_at
            if record_due(made_at, self._recorded.get(job.name), job.submitted_at):
                due.append(job.name)
                self._recorded[job.name] = made_at
        self._recorded = {name: at for name, at in self._recorded.items() if name in forecasts}
        return due
