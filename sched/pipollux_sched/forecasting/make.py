"""Forecasts of a store: of its jobs, or of new ones as if they were submitted now."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from pipollux_policies import DEFAULT_RESTART_SECONDS, Policy
from pipollux_sched.spec.job import JobSpec
from pipollux_sched.store import Store, StoredForecast
from pipollux_simulator import Effort, Estimate, ForecastState, JobForecast, forecast
from pipollux_simulator.forecasting.forecast import sample_times, summarize
from pipollux_simulator.forecasting.sample import Times

from .policy import serving_policy_maker
from .state import StateReader

_FEW = 40
"""Number of jobs up to which a forecast is made with full effort."""
_LONGEST_STRETCH = 0.25
_SEVERAL = 10
"""Number of jobs above which a pass makes one sample only, so that a new job waits less long."""


class Forecaster:
    """Makes the forecasts of a store; keeps what it has parsed for the next one."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._reader: StateReader | None = None
        self._known: tuple[float, float] | None = None
        self._samples: list[dict[str, Times]] = []
        self._number = 0

    def make(self, new: Sequence[JobSpec] = (), seed: int = 0) -> dict[str, StoredForecast]:
        """Return the forecasts of all jobs and sweeps, as if `new` ones were submitted now.

        Raises:
            NoForecastError: the policy of the scheduler cannot be simulated.
            SimulationError: the policy broke a rule in the simulation.
        """
        make_policy = serving_policy_maker(self._store)
        reader = self._present_reader()
        state = reader.read(new)
        effort = effort_for(len(state.jobs))
        num_jobs = len(state.jobs) + sum(sweep.num_planned for sweep in state.sweeps)
        if new or num_jobs <= _SEVERAL:
            found = forecast(state, make_policy, seed=seed, effort=effort)
        else:
            found = self._next_sample(state, make_policy, seed, effort)
        made = {name: stored(state.now, one) for name, one in found.items()}
        for name, note in reader.notes.items():
            # With an unknown end, a note would be taken for its reason.
            if name not in made or made[name].end["low"] is not None:
                made[name] = made.get(name, _unknown(state.now))._replace(note=note)
        return made

    def _next_sample(
        self, state: ForecastState, make_policy: Callable[[], Policy], seed: int, effort: Effort
    ) -> dict[str, JobForecast]:
        """Return forecasts from one new sample and the last ones, which were of earlier states."""
        which, self._number = [self._number % effort.samples], self._number + 1
        self._samples += sample_times(state, make_policy, seed=seed, effort=effort, which=which)
        del self._samples[: -effort.samples]
        return {
            job.name: summarize(
                job, [one[job.name] for one in self._samples if job.name in one], state
            )
            for job in state.jobs_and_sweeps
        }

    def _present_reader(self) -> StateReader:
        served = next(iter(self._store.latest_events(1, types=["cluster"])), {})
        known = (
            float(served.get("restart_seconds") or DEFAULT_RESTART_SECONDS),
            float(served.get("interval") or 60.0),
        )
        if self._reader is None or known != self._known:
            self._known = known
            self._reader = StateReader(self._store, restart_seconds=known[0], interval=known[1])
        return self._reader


def effort_for(num_jobs: int) -> Effort:
    """Return the effort of a forecast: with many jobs, a sample makes fewer decisions.

    >>> effort_for(1000).exact_changes < effort_for(10).exact_changes
    True
    """
    crowd = max(num_jobs / _FEW, 1.0)
    full = Effort()
    stretch = min(full.stretch * math.sqrt(crowd), _LONGEST_STRETCH)
    return Effort(exact_changes=round(full.exact_changes / crowd), stretch=stretch)


def stored(made_at: float, found: JobForecast) -> StoredForecast:
    """Return a forecast in the form of the store, which has no infinite moments."""
    start, uncorrected = (
        None if one is None else _moments(one) for one in (found.start, found.uncorrected_start)
    )
    running = found.running_seconds
    return StoredForecast(
        *(made_at, start, _moments(found.end), _moments(found.uncorrected_end)),
        uncorrected_start=uncorrected,
        running_seconds=None if running is None else round(running, 1),
    )


def _unknown(made_at: float) -> StoredForecast:
    never: dict[str, float | None] = dict.fromkeys(Estimate._fields)
    return StoredForecast(made_at, never, never, never)


def _moments(estimate: Estimate) -> dict[str, float | None]:
    return {
        name: round(moment, 1) if math.isfinite(moment) else None
        for name, moment in estimate._asdict().items()
    }
