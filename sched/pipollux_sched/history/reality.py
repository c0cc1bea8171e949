"""The actual outcome of a history, in the form of a simulation's outcome, for comparison.

Slots count as held from an attempt's creation to its end, as in the scheduler. Everything after the
moment up to which a job is replayed is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from pipollux_policies import Contention
from pipollux_sched.allocator.learned_lengths import family_name
from pipollux_sched.lifecycle import Phase
from pipollux_sched.spec.teams import TeamsSpec
from pipollux_sched.store import AttemptRecord
from pipollux_simulator.engine.isolated import IsolatedTimes
from pipollux_simulator.engine.job import Interval
from pipollux_simulator.engine.outcome import JobOutcome, SimulationOutcome
from pipollux_simulator.known_length import KnownLength

from .records import PastJob, SchedulerHistory
from .workload import Replay

ACTUAL = "actual"
"""Takes the place of a policy's name for the actual outcome."""


def what_happened(
    history: SchedulerHistory, replay: Replay, teams: TeamsSpec | None = None
) -> SimulationOutcome:
    """Return the actual outcome of the replayed jobs, with fairness as simulations estimate it."""
    begin, jobs = replay.begin, replay.jobs
    slots = _slots(history, jobs.values())
    isolated = IsolatedTimes(history.nodes, history.restart_seconds)
    lifetimes = {name: (job.submitted - begin, job.until - begin) for name, job in jobs.items()}
    contention = Contention(list(lifetimes.values()))

    def alone(name: str) -> float:
        share = isolated.num_slots / contention.mean(*lifetimes[name])
        return isolated.seconds(replay.workload.applications[name], share)

    return SimulationOutcome(
        workload=replay.workload.name,
        policy=ACTUAL,
        seed=0,
        jobs=tuple(_outcome(job, begin, alone(name), teams) for name, job in jobs.items()),
        slots=slots,
        policy_seconds=(),
        known_length=KnownLength.parse("declared"),
    )


def _outcome(job: PastJob, begin: float, isolated: float, teams: TeamsSpec | None) -> JobOutcome:
    held = tuple(_intervals(job, begin))
    starts = sum(one.membership == 1 for one in _before_end(job))
    return JobOutcome(
        name=job.name,
        application=family_name(job.spec),
        arrived=job.submitted - begin,
        started=held[0].start if held else job.until - begin,
        completed=job.until - begin,
        num_restarts=max(starts - 1, 0),
        num_rescales=sum(one.membership > 1 for one in _before_end(job)),
        slot_seconds=sum((i.end - i.start) * len(i.nodes) * i.num_stages for i in held),
        lost_progress=0.0,
        isolated=isolated,
        history=held,
        team="" if teams is None else teams.team_of(job.spec),
    )


def _before_end(job: PastJob) -> list[AttemptRecord]:
    return [one for one in job.attempts if one.created_at < job.until]


def _intervals(job: PastJob, begin: float) -> Iterator[Interval]:
    for one in _before_end(job):
        end = job.until if one.ended_at is None else min(one.ended_at, job.until)
        if end > one.created_at:
            start, elastic = one.created_at - begin, one.membership > 1
            yield Interval(start, end - begin, one.nodes, one.num_stages, elastic)


def _slots(history: SchedulerHistory, jobs: Iterable[PastJob]) -> dict[str, int]:
    """Return the slots of nodes; for nodes that are gone, the most that a job held there."""
    slots = {name: node.resources.get("slots", 0) for name, node in history.nodes.items()}
    gone: Counter[str] = Counter()
    for job in jobs:
        for one in job.attempts:
            for node, replicas in Counter(one.nodes).items():
                gone[node] = max(gone[node], replicas * one.num_stages)
    return {**{name: held for name, held in sorted(gone.items()) if name not in slots}, **slots}


@dataclass(frozen=True)
class Agreement:
    """How close the replay with the scheduler's own policy came to the actual outcome."""

    policy: str
    avg_jct_ratio: float
    """Average JCT of the replay over the actual one."""
    makespan_ratio: float
    jct_error_median: float
    """Median of |JCT of the replay / actual JCT - 1| over the jobs."""
    jct_error_p90: float

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name."""
        return asdict(self)


def agreement(actual: SimulationOutcome, replayed: SimulationOutcome) -> Agreement:
    """Compare the replay with the scheduler's own policy and nodes with the actual outcome."""
    real = {job.name: job.jct for job in actual.jobs}
    simulated = {job.name: job.jct for job in replayed.jobs}
    errors = np.abs([simulated[name] / real[name] - 1 for name in real])
    return Agreement(
        policy=replayed.policy,
        avg_jct_ratio=sum(simulated.values()) / sum(real.values()),
        makespan_ratio=(replayed.end - replayed.begin) / (actual.end - actual.begin),
        jct_error_median=float(np.median(errors)),
        jct_error_p90=float(np.percentile(errors, 90)),
    )


def cut_short(replay: Replay) -> dict[str, str]:
    """Return the jobs that are replayed only up to their last hints, and their state then."""
    ended = {Phase.FAILED: "failed or cancelled"}
    return {
        name: ended.get(job.phase, "not done")
        for name, job in replay.jobs.items()
        if not job.complete
    }
