"""The present state of a cluster, as far as a forecast depends on it.

Work is in seconds of one replica, as in `JobInfo`. Times share one clock, such as seconds since the
epoch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pipollux_policies import Allocation, JobInfo, NodeInfo
from pipollux_policies.teams.team import Teams

from .errors import PastError


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
        if not self.arrival_seconds >= 0:
            raise ValueError(f"arrival_seconds: {self.arrival_seconds} must be at least 0")

    @property
    def jobs_and_sweeps(self) -> tuple[ForecastJob | ForecastSweep, ...]:
        """All that there are forecasts of."""
        return (*self.jobs, *self.sweeps)
