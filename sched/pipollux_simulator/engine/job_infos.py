"""`JobInfo` of simulated jobs, as a scheduler would provide it to a policy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from pipollux_policies import MEASURED_REACH, JobInfo, LengthHistory
from pipollux_policies.teams.membership import TeamMembership
from pipollux_simulator.known_length import KnownLength

from .job import SimulatedJob


def simulated_info(
    job: SimulatedJob,
    now: float,
    known_length: KnownLength,
    history: LengthHistory,
    *,
    fixed: bool,
    teams: TeamMembership | None = None,
    mean_jobs: float | None = None,
    relatives: Sequence[float] = (),
) -> JobInfo:
    """Return the policy's information about a simulated job.

    `fixed`: the policy keeps the user's batch size. `relatives` are total samples that related jobs
    declare (`declared_lengths`). Without `mean_jobs`, the job has just arrived.
    """
    own, *others = job.model.shapes()
    terms, most = job.arrival.terms, _most_replicas(job, fixed=fixed)
    priority, preempts = (0, True) if teams is None else teams.priority_of(job.arrival)
    return JobInfo(
        resources=own.resources,
        speedup_fn=own.speedup_fn,
        creation_timestamp=job.arrival.time,
        min_replicas=min(terms.min_replicas, most),
        max_replicas=most,
        preemptible=terms.preemptible,
        num_stages=own.num_stages,
        age=now - job.arrival.time,
        num_restarts=job.num_restarts,
        restart_seconds=_told(job.restart_seconds, job.num_moves, terms.assumed_restart_seconds),
        num_rescales=job.num_rescales,
        rescale_seconds=None
        if job.rescale_seconds is None
        else _told(job.rescale_seconds, job.num_rescales, terms.assumed_rescale_seconds),
        gpu_type=own.gpu_type,
        shapes=tuple(others),
        attained_service=job.attained_service,
        mean_jobs=mean_jobs,
        allowed_replicas=_allowed_replicas(job, fixed=fixed),
        **{"work_done": _work_done(job), **_length(job, known_length, history, relatives)},
        requested_replicas=min(job.arrival.num_replicas, most) if fixed else None,
        team="" if teams is None else teams.team_of(job.arrival),
        priority=priority,
        preempts=preempts,
    )


def _told(seconds: float, times: int, assumed: float | None) -> float:
    """Return the cost known to a policy: the assumed one until the first occurrence."""
    return seconds if times or assumed is None else assumed


def _most_replicas(job: SimulatedJob, *, fixed: bool) -> int:
    """Return the maximum replicas: `MEASURED_REACH` times the measured ones, unless fixed."""
    terms = job.arrival.terms
    if fixed and terms.max_replicas is None:
        most = job.app.max_replicas(job.arrival.batch_size)
    else:
        measured = MEASURED_REACH * job.model.max_profiled_replicas
        most = min(max(measured, terms.unmeasured_replicas), job.app.max_replicas())
    return most if terms.max_replicas is None else min(most, terms.max_replicas)


def _allowed_replicas(job: SimulatedJob, *, fixed: bool) -> int:
    most = job.app.max_replicas(job.arrival.batch_size) if fixed else job.app.max_replicas()
    own = job.arrival.terms.max_replicas
    return max(most if own is None else min(most, own), 1)


def declared_lengths(jobs: Iterable[SimulatedJob]) -> dict[str, tuple[float, ...]]:
    """Return the total samples declared by jobs that have trained, by family."""
    found: dict[str, list[float]] = {}
    for job in jobs:
        if _declares(job):
            whole = job.app.progress(job.last_epoch) * job.app.init_batch_size
            found.setdefault(job.arrival.family, []).append(whole)
    return {family: tuple(samples) for family, samples in found.items()}


def _declares(job: SimulatedJob) -> bool:
    """Return whether it declares its length; inherited measurements do not contain it."""
    return job.arrival.terms.declares_length and job.progress > 0


def _length(
    job: SimulatedJob, known: KnownLength, history: LengthHistory, relatives: Sequence[float]
) -> dict[str, Any]:
    left = _remaining_work(job)
    if known.declared and _declares(job):
        return {"remaining_work": left}
    relatives = relatives if known.declared else ()
    if known.declared and not (history.knows(declared=False) or relatives):
        return {}
    learned = _learned_length(job, history, relatives) if known.learned else {}
    return {"remaining_work": known.estimate(job.name, left), **learned}


def _learned_length(
    job: SimulatedJob, history: LengthHistory, relatives: Sequence[float]
) -> dict[str, Any]:
    family, goodput = job.arrival.family, job.model.base_goodput()
    trained = job.progress * job.app.init_batch_size
    left = history.work_left(family, trained, goodput, relatives=relatives)
    return {"family": family, "work_left": left}


def _work_done(job: SimulatedJob) -> float:
    base = job.model.base_goodput()
    return job.progress * job.app.init_batch_size / base if base > 0 else 0.0


def _remaining_work(job: SimulatedJob) -> float | None:
    base = job.model.base_goodput()
    if base <= 0:
        return None
    left = job.app.progress(job.last_epoch) - job.progress
    return max(left, 0.0) * job.app.init_batch_size / base
