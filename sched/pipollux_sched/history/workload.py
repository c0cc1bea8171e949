"""A history as a workload: original arrivals, and measured costs of changes.

The cost of a start, a restart or an elastic resize is the average of the job's own. A job without
any has the median of all jobs, and for elastic resizes the median of its family, as other jobs may
not be resizable. The policy gets the assumed cost until the job has measured one.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from pipollux_policies import DEFAULT_RESCALE_SECONDS, NodeInfo
from pipollux_sched.allocator.job_infos import replica_cap
from pipollux_sched.allocator.learned_lengths import family_name
from pipollux_sched.store import AttemptRecord
from pipollux_sched.store.attempts import moving_average
from pipollux_simulator.applications.registry import fits
from pipollux_simulator.experiment import Workload
from pipollux_simulator.workload.arrivals import JobArrival
from pipollux_simulator.workload.terms import JobTerms
from pipollux_utils.text import count

from .application import HistoryApplication
from .records import LeftOut, PastJob, SchedulerHistory


@dataclass(frozen=True)
class Replay:
    """A history in the form for simulation."""

    workload: Workload
    jobs: Mapping[str, PastJob]
    left_out: tuple[LeftOut, ...]
    paces: Mapping[str, float]
    """Actual speeds of the jobs, relative to their own models."""
    begin: float
    """Start of the workload, in seconds since the epoch."""


def replay(
    history: SchedulerHistory,
    nodes: Mapping[str, NodeInfo],
    *,
    name: str,
    first: int | None = None,
    restart_seconds: float | None = None,
    rescale_seconds: float | None = None,
) -> Replay:
    """Return the workload of a history; ValueError: no job is left.

    Args:
        history: of a scheduler.
        nodes: of the simulated cluster; jobs that could never run there are left out.
        name: of the workload.
        first: only this number of jobs, in order of submission; None: all.
        restart_seconds: the cost of every start and restart; None: measured costs.
        rescale_seconds: the cost of every elastic resize; None: measured costs.
    """
    applications: dict[str, HistoryApplication] = {}
    left_out, jobs = list(history.left_out), []
    for job in history.jobs[:first]:
        app = HistoryApplication(job.spec, job.hints, job.samples)
        app.pace = pace_of(job, app)
        problem = _problem(app, nodes)
        if problem is None:
            jobs.append(job)
            applications[job.name] = app
        else:
            left_out.append(LeftOut(job.name, problem))
    if not jobs:
        told = "; ".join(f"{one.job} {one.reason}" for one in left_out[:3])
        raise ValueError(
            f"{name}: none of its {len(left_out)} jobs can be replayed"
            + (f" ({told})" if told else "")
            + "; give the state directory of a scheduler whose jobs have trained, and nodes on "
            "which they fit"
        )
    begin, prices = jobs[0].submitted, _Prices(jobs, history.restart_seconds)
    rows = []
    for job in jobs:
        terms = _terms(job, prices.of(job, restart_seconds, rescale_seconds))
        rows.append(_arrival(job, begin, terms))
    workload = Workload(name, tuple(rows), applications)
    paces = {name: app.pace for name, app in applications.items()}
    return Replay(workload, {job.name: job for job in jobs}, tuple(left_out), paces, begin)


def _problem(app: HistoryApplication, nodes: Mapping[str, NodeInfo]) -> str | None:
    (own,) = app.new_model().shapes()
    if not fits(app, nodes):
        needs = ", ".join(f"{amount} {kind}" for kind, amount in own.resources.items())
        where = f"one node with GPUs of type {own.gpu_type}" if own.gpu_type else "one node"
        return f"fits on no node: a replica takes {needs} of {where}"
    room = sum(node.num_fitting(own) for node in nodes.values())
    least = app.spec.min_replicas
    if room < least:
        return f"runs on {count(least, 'replica')} at least, and the nodes hold {room}"
    return None


def _arrival(job: PastJob, begin: float, terms: JobTerms) -> JobArrival:
    spec = job.spec
    return JobArrival(
        name=job.name,
        time=job.submitted - begin,
        application=job.name,
        num_replicas=spec.requested_replicas or spec.min_replicas,
        batch_size=job.hints.init_batch_size or 1,
        team=spec.team,
        user=spec.user,
        priority=spec.priority,
        terms=terms,
    )


def _terms(job: PastJob, prices: Mapping[str, float | None]) -> JobTerms:
    spec = job.spec
    return JobTerms(
        min_replicas=spec.min_replicas,
        max_replicas=spec.max_replicas,
        unmeasured_replicas=replica_cap(spec, None),
        preemptible=spec.preemptible,
        family=family_name(spec),
        lineage=job.lineage,
        declares_length=job.hints.remaining_samples is not None,
        start_seconds=prices["start"],
        restart_seconds=prices["restart"],
        rescale_seconds=prices["rescale"],
        assumed_restart_seconds=prices["assumed_restart"],
        assumed_rescale_seconds=prices["assumed_rescale"],
    )


class _Prices:
    """The costs of changes, in seconds without training."""

    def __init__(self, jobs: Sequence[PastJob], assumed: float) -> None:
        starts = [cost for job in jobs for cost in _start_costs(job.attempts)]
        restarts = [cost for job in jobs for cost in _restarts(job)]
        self._assumed = assumed
        self._start = median(starts) if starts else assumed
        # A restart is a stop and a start.
        self._restart = median(restarts) if restarts else self._start
        pauses: defaultdict[str, list[float]] = defaultdict(list)
        for job in jobs:
            pauses[family_name(job.spec)] += _pauses(job)
        self._pause = {family: median(found) for family, found in pauses.items() if found}

    def of(
        self, job: PastJob, restart_seconds: float | None, rescale_seconds: float | None
    ) -> dict[str, Any]:
        pauses = self._pause.get(family_name(job.spec))
        rescale = moving_average(_pauses(job), -1.0 if pauses is None else pauses)
        start = moving_average(_start_costs(job.attempts), self._start)
        restart = moving_average(_restarts(job), self._restart)
        if restart_seconds is not None:
            start = restart = restart_seconds
        if rescale_seconds is not None:
            rescale = rescale_seconds
        return {
            "start": start,
            "restart": restart,
            "rescale": None if rescale < 0 else min(rescale, restart),
            "assumed_restart": self._assumed if restart_seconds is None else None,
            "assumed_rescale": DEFAULT_RESCALE_SECONDS if rescale_seconds is None else None,
        }


def _start_costs(attempts: Iterable[AttemptRecord]) -> list[float]:
    return [
        max(one.first_step_at - one.created_at, 0.0)
        for one in attempts
        if one.membership == 1 and one.restart_seconds is None and one.first_step_at is not None
    ]


def _restarts(job: PastJob) -> list[float]:
    return [one.restart_seconds for one in job.attempts if one.restart_seconds is not None]


def _pauses(job: PastJob) -> list[float]:
    return [one.pause_seconds for one in job.attempts if one.pause_seconds is not None]


def pace_of(job: PastJob, app: HistoryApplication) -> float:
    """Return the pace of a job; 1 if it ran in configurations that its model does not cover."""
    predicted = 0.0
    for one in job.attempts:
        if one.first_step_at is None or not one.nodes:
            continue
        ends = (one.stopping_at, one.ended_at, job.until)
        seconds = min(end for end in ends if end is not None) - one.first_step_at
        if one.num_stages not in app.speedups:
            return 1.0
        placement = tuple(Counter(one.nodes).values())
        predicted += app.goodput(app.configure(one.num_stages, placement)) * max(seconds, 0.0)
    return job.samples / predicted if predicted > 0 else 1.0
