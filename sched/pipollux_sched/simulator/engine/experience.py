"""What a cluster has learnt from the jobs that completed on it, as a scheduler's store has it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pipollux_sched.policy import CompletedJob, LengthHistory
from pipollux_sched.simulator.applications.base import JobModel
from pipollux_sched.simulator.workload.arrivals import JobArrival

from .job import SimulatedJob


@dataclass
class Experience:
    """Lengths and models of completed jobs, by family (`policy.family_of`)."""

    lengths: LengthHistory = field(default_factory=LengthHistory)
    _models: dict[Any, JobModel] = field(default_factory=dict)

    def add(self, job: SimulatedJob) -> None:
        """Take in a completed job."""
        family, goodput = job.arrival.family, job.model.base_goodput()
        trained = job.progress * job.app.init_batch_size
        if goodput > 0 and trained > 0:
            self.lengths.add(CompletedJob(family, trained, trained / goodput))
        self._models[job.arrival.lineage] = job.model

    def bequeath(self, job: JobArrival, model: JobModel) -> bool:
        """Let a new job inherit from the last one of its family that completed, if there is one."""
        before = self._models.get(job.lineage)
        if before is not None:
            model.inherit(before)
        return before is not None
