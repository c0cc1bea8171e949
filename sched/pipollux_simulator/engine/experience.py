"""Measurements and lengths that a cluster accumulates from its jobs, as in a scheduler's store."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import Any

from pipollux_perfmodel.hints.step_rows import MAX_RELATIVES, RENEWED
from pipollux_policies import CompletedJob, LengthHistory
from pipollux_simulator.applications.base import JobModel

from .job import SimulatedJob


@dataclass
class _Family:
    completed: deque[JobModel] = field(default_factory=lambda: deque(maxlen=MAX_RELATIVES))
    active: dict[str, SimulatedJob] = field(default_factory=dict)

    def relatives(self) -> list[JobModel]:
        """Return the jobs that pass on measurements, the last completed one first."""
        started = [job.model for job in self.active.values() if job.started is not None]
        measured = [model for model in started if model.max_profiled_replicas > 0]
        latest = [*self.completed]
        return [*latest[-1:], *reversed([*latest[:-1], *measured])][:MAX_RELATIVES]


@dataclass
class Experience:
    """Lengths of completed jobs and models of all jobs, by family (`policy.family_of`)."""

    lengths: LengthHistory = field(default_factory=LengthHistory)
    _families: dict[Any, _Family] = field(default_factory=lambda: defaultdict(_Family))
    _looked: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    """State of the relatives at the last inheritance of each waiting job."""

    def add(self, job: SimulatedJob) -> None:
        """Add a completed job."""
        goodput = job.model.base_goodput()
        trained = job.progress * job.app.init_batch_size
        if goodput > 0 and trained > 0:
            self.lengths.add(CompletedJob(job.arrival.family, trained, trained / goodput))
        family = self._families[job.arrival.lineage]
        family.active.pop(job.name, None)
        self._looked.pop(job.name, None)
        family.completed.append(job.model)

    def bequeath(self, job: SimulatedJob) -> bool:
        """Pass its family's measurements to a job before its start; return whether any exist."""
        family = self._families[job.arrival.lineage]
        family.active[job.name] = job
        relatives = family.relatives()
        looked = (job.clock // RENEWED, *map(id, relatives))
        if relatives and self._looked.get(job.name) != looked:
            self._looked[job.name] = looked
            job.model.inherit(relatives)
        return bool(relatives)

    def foresee(self, job: SimulatedJob, model: JobModel) -> None:
        """Pass its family's measurements to a model of a job, with the latest gradients."""
        model.inherit(self._families[job.arrival.lineage].relatives(), latest=True)
