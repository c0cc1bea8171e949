"""The present state of a cluster, as far as a forecast depends on it.

Work is in seconds of one replica, as in `JobInfo`. Times share one clock, such as seconds since the
epoch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from pipollux_policies import Allocation, JobInfo, NodeInfo
from pipollux_policies.teams.team import Teams

from .errors import PastError

ARRIVAL_SECONDS = 3600.0
"""The rate of arrivals is that of the last hour; an hour without any ends a spell of them."""


@dataclass(frozen=True)
class ForecastJob:
    """An unfinished job, as its scheduler sees it.

    >>> job = JobInfo({"slots": 1}, lambda nodes, replicas: replicas, 0.0, 1, 1, remaining_work=60)
    >>> ForecastJob("a", job).is_measured
    True
    """

    name: str
    info: JobInfo
    """Its `creation_timestamp` is by the clock of the forecast."""
    allocation: Allocation = field(default_factory=Allocation)
    starts_in: float = 0.0
    """Seconds until the replicas that it holds train; until then, its allocation is fixed."""
    is_new: bool = False
    """Whether it has never held slots."""
    is_measured: bool = True
    """Whether its speedups come from measurements, its own or inherited ones."""
    inherits: bool = False
    """Whether it has inherited measurements, so that only the policy starts it (`new_jobs`)."""
    family: str = ""
    """Its forecasts are wrong as those of its family were."""
    after: tuple[str, ...] = ()
    """Jobs and sweeps that it waits for: it arrives when the last of them has ended."""


@dataclass(frozen=True)
class ForecastSweep:
    """An unfinished sweep: some of its trials are jobs, and others are still to come."""

    name: str
    trial: ForecastJob
    """A trial to come, as if it were submitted now."""
    num_planned: int
    """Number of trials to come."""
    most_unfinished: int
    """Largest number of trials that are jobs at the same time."""
    trials: tuple[str, ...] = ()
    """Its unfinished trials, which are jobs of the state."""
    after: tuple[str, ...] = ()
    """Jobs and sweeps that it waits for."""
    is_new: bool = True
    """Whether no trial has held slots yet."""

    @property
    def family(self) -> str:
        """Its forecasts are wrong as those of its trials were."""
        return self.trial.family


@dataclass(frozen=True)
class JobKind:
    """A recent job as a model of future jobs, and of jobs about which nothing is known."""

    info: JobInfo
    """As at its submission, with the speedups that were measured since."""
    work: tuple[float, ...]
    """Equally likely values of its whole work; empty: unknown."""
    inherits: bool = False
    """Whether a new job of this kind inherits the measurements."""


@dataclass(frozen=True)
class ForecastState:
    """A cluster at one moment; `forecast` is a function of it."""

    now: float
    nodes: Mapping[str, NodeInfo]
    jobs: tuple[ForecastJob, ...]
    """All unfinished jobs that may run, or will, in the order of submission."""
    kinds: tuple[JobKind, ...] = ()
    """Recent jobs; future jobs resemble one of them."""
    num_arrivals: int = 0
    """Number of jobs that arrived in the last `arrival_seconds`."""
    arrival_seconds: float = 0.0
    """0: no further jobs are expected."""
    spell_seconds: float = math.inf
    """How long jobs have arrived without a long pause: see `spell`. It is not known when arrivals
    stop: they go on for about as long again. Infinite: they do not stop."""
    interval: float = 60.0
    """Seconds between two decisions without any change."""
    decides_in: float = 0.0
    """Seconds until the next decision, if nothing changes before."""
    teams: Teams | None = None
    notices: Mapping[str, float] = field(default_factory=dict)
    """Jobs with a notice to return slots, and when."""
    errors: tuple[PastError, ...] = ()
    """Errors of past forecasts."""
    sweeps: tuple[ForecastSweep, ...] = ()

    def __post_init__(self) -> None:
        if not self.interval > 0:
            raise ValueError(f"interval: {self.interval} must be above 0")
        for name in ("arrival_seconds", "spell_seconds"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}: {getattr(self, name)} must be at least 0")

    @cached_property
    def start_errors(self) -> tuple[PastError, ...]:
        """Scores of starts, in place of those of ends; families do not matter to them."""
        return tuple(PastError("", error.start) for error in self.errors)

    @cached_property
    def num_started(self) -> int:
        """Number of jobs that have started."""
        return sum(not job.is_new for job in self.jobs)

    @property
    def jobs_and_sweeps(self) -> tuple[ForecastJob | ForecastSweep, ...]:
        """All that there are forecasts of."""
        return (*self.jobs, *self.sweeps)


def spell(arrivals: Iterable[float], now: float) -> float:
    """Return the seconds for which jobs have arrived without a pause of an hour.

    At least an hour: the rate of arrivals is that of an hour.

    >>> spell([1000.0, 9000.0, 12000.0, 15000.0], now=17000.0)
    8000.0
    """
    begin = now
    for moment in sorted(arrivals, reverse=True):
        if begin - moment > ARRIVAL_SECONDS:
            break
        begin = moment
    return max(now - begin, ARRIVAL_SECONDS)
