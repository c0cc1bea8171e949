"""The state of a simulated cluster, as its scheduler would see it, for evaluating forecasts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from pipollux_policies import Allocation, JobInfo
from pipollux_simulator.applications.base import JobModel
from pipollux_simulator.engine.cluster import Cluster
from pipollux_simulator.engine.job import SimulatedJob

from .state import ARRIVAL_SECONDS, ForecastJob, ForecastState, JobKind, spell

MOST_KINDS = 100
"""Number of last jobs that future jobs may resemble."""


@dataclass
class ObservedCluster(Cluster):
    """A cluster that calls `observe` after every decision, for instance to take its `state`."""

    observe: Callable[[ObservedCluster], object] = lambda _: None
    _models: dict[Any, JobModel] = field(default_factory=dict)
    """Models of new jobs, by family and batch size, as forecasts see them now."""

    def _round(self) -> None:
        super()._round()
        self.observe(self)

    @property
    def now(self) -> float:
        """The time in the simulation."""
        return self._now

    def state(self) -> ForecastState:
        """Return the state at this time, without anything that a scheduler could not know."""
        self._models.clear()
        mean_jobs = self._mean_jobs()
        jobs = [self._forecast_job(job, mean_jobs.get(name)) for name, job in self._active.items()]
        since = max(self._now - ARRIVAL_SECONDS, 0.0)
        arrived = [job.arrival.time for job in self.known_jobs()]
        return ForecastState(
            now=self._now,
            nodes=dict(self.nodes),
            jobs=tuple(sorted(jobs, key=lambda job: job.info.created)),
            kinds=self._kinds(),
            num_arrivals=sum(time > since for time in arrived),
            arrival_seconds=self._now - since,
            spell_seconds=spell(arrived, self._now),
            interval=self.options.interval,
            decides_in=self.options.interval,
            teams=self._teams,
            notices=dict(self._notices),
        )

    def _foreseen(self, job: SimulatedJob) -> SimulatedJob:
        """Return a job as forecasts see it: a new one with the gradients that its family reached.

        The scheduler plans it with those with which its family began.
        """
        if job.started is not None or job.name not in self._warm_starts:
            return job
        key = job.arrival.lineage, job.arrival.batch_size
        if key not in self._models:
            self._models[key] = self._new_model(job.arrival, job.app)
            self.experience.foresee(job, self._models[key])
        seen = copy.copy(job)
        seen.model = self._models[key]
        return seen

    def _forecast_job(self, job: SimulatedJob, mean_jobs: float | None) -> ForecastJob:
        job = self._foreseen(job)
        return ForecastJob(
            name=job.name,
            # Only a decision that is being made pins a job that starts.
            info=replace(self._info(job, mean_jobs), preemptible=job.arrival.terms.preemptible),
            allocation=Allocation(job.nodes, job.shape),
            starts_in=job.starts_in,
            is_new=job.started is None,
            is_measured=job.model.base_goodput() > 0,
            inherits=job.name in self._warm_starts,
            family=job.arrival.family,
        )

    def _kinds(self) -> tuple[JobKind, ...]:
        # Of a long queue, nothing is known: it must not push out the jobs that have trained.
        measured = [job for job in self.known_jobs() if job.model.base_goodput() > 0]
        measured.sort(key=lambda job: job.arrival.time)
        return tuple(self._kind(job) for job in measured[-MOST_KINDS:])

    def _kind(self, job: SimulatedJob) -> JobKind:
        job = self._foreseen(job)
        present = self._info(job, None)
        if job.completed is not None:
            work: tuple[float, ...] = (present.work_done,)
        else:
            work = tuple(present.work_done + left for left in present.likely_work)
        return JobKind(self._at_submission(job), work, self.options.inherit_models)

    def _at_submission(self, job: SimulatedJob) -> JobInfo:
        new = copy.copy(job)
        new.arrival = replace(job.arrival, time=self._now)
        new.progress, new.epoch, new.attained_service = 0.0, 0, 0.0
        new.num_starts = new.num_moves = new.num_rescales = 0
        new.nodes = new.members = ()
        return self._info(new, None)
