"""The outcome of a simulation as plain data, for metrics, plots and other processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pipollux_policies import Contention
from pipollux_policies.teams.membership import TeamMembership
from pipollux_simulator.applications.base import Application
from pipollux_simulator.known_length import EXACT_LENGTHS, KnownLength

from .cluster import Result
from .isolated import IsolatedTimes
from .job import Interval, SimulatedJob


@dataclass(frozen=True)
class JobOutcome:
    """The outcome of one job; times in seconds since the workload's start."""

    name: str
    application: str
    """For a job of a scheduler's history, its family."""
    arrived: float
    started: float
    completed: float
    num_restarts: int
    """Starts after the first, also after lost nodes."""
    num_rescales: int
    slot_seconds: float
    lost_progress: float
    """Progress lost with nodes and repeated, in iterations at the initial batch size."""
    isolated: float
    """Seconds of the job alone on its equal share (`isolated`)."""
    history: tuple[Interval, ...]
    team: str = ""

    @property
    def jct(self) -> float:
        """Job completion time: seconds from arrival to completion."""
        return self.completed - self.arrived

    @property
    def finish_time_fairness(self) -> float:
        """The rho of Themis (NSDI'20): JCT over `isolated`; above 1 an equal split was better."""
        return self.jct / self.isolated


@dataclass(frozen=True)
class SimulationOutcome:
    """The outcome of one workload under one policy."""

    workload: str
    policy: str
    seed: int
    jobs: tuple[JobOutcome, ...]
    slots: Mapping[str, int]
    policy_seconds: tuple[float, ...]
    known_length: KnownLength = EXACT_LENGTHS

    @property
    def begin(self) -> float:
        """First arrival."""
        return min(job.arrived for job in self.jobs)

    @property
    def end(self) -> float:
        """Last completion."""
        return max(job.completed for job in self.jobs)


def outcome(
    result: Result,
    applications: Mapping[str, Application],
    isolated: IsolatedTimes,
    *,
    workload: str,
    policy: str,
    seed: int,
    known_length: KnownLength = EXACT_LENGTHS,
    teams: TeamMembership | None = None,
) -> SimulationOutcome:
    """Convert a result to an outcome, including the time of each job alone. `isolated` is for the
    same nodes and restarts, and caches its results.
    """
    contention = Contention([(job.arrival.time, _completed(job)) for job in result.jobs])

    def alone(job: SimulatedJob) -> float:
        number = contention.mean(job.arrival.time, _completed(job))
        return isolated.seconds(applications[job.arrival.application], isolated.num_slots / number)

    return SimulationOutcome(
        workload=workload,
        policy=policy,
        seed=seed,
        jobs=tuple(_job_outcome(job, alone(job), teams) for job in result.jobs),
        slots={name: node.resources.get("slots", 0) for name, node in result.nodes.items()},
        policy_seconds=result.policy_seconds,
        known_length=known_length,
    )


def _completed(job: SimulatedJob) -> float:
    if job.completed is None:
        raise ValueError(f"job {job.name!r} is not done; run the simulation to its end")
    return job.completed


def _job_outcome(job: SimulatedJob, isolated: float, teams: TeamMembership | None) -> JobOutcome:
    completed = _completed(job)
    return JobOutcome(
        name=job.name,
        application=job.arrival.terms.family or job.arrival.application,
        arrived=job.arrival.time,
        started=completed if job.started is None else job.started,
        completed=completed,
        num_restarts=job.num_restarts,
        num_rescales=job.num_rescales,
        slot_seconds=job.attained_service,
        lost_progress=job.lost_progress,
        isolated=isolated,
        history=tuple(job.history),
        team="" if teams is None else teams.team_of(job.arrival),
    )
