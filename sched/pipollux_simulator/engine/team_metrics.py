"""Metrics of a simulation by team: completion times and allocated slots."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from .outcome import JobOutcome, SimulationOutcome


@dataclass(frozen=True)
class TeamMetrics:
    """Metrics of one team."""

    team: str
    jobs: int
    avg_jct_s: float
    """Seconds from a job's arrival to its completion, on average."""
    slot_hours: float

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name."""
        return asdict(self)


def measure_teams(outcome: SimulationOutcome) -> list[TeamMetrics]:
    """Return the metrics of the teams that had jobs, by name; empty without teams."""
    jobs: defaultdict[str, list[JobOutcome]] = defaultdict(list)
    for job in outcome.jobs:
        if job.team:
            jobs[job.team].append(job)
    return [
        TeamMetrics(
            team,
            len(found),
            fmean(job.jct for job in found),
            sum(job.slot_seconds for job in found) / 3600,
        )
        for team, found in sorted(jobs.items())
    ]
