"""What a cluster has learnt from the jobs that completed on it, as a scheduler's store has it."""

from __future__ import annotations

from dataclasses import dataclass, field

from pipollux_sched.policy import CompletedJob, LengthHistory, family_of
from pipollux_sched.simulator.applications.base import JobModel

from .job import SimulatedJob


@dataclass
class Experience:
    """Lengths and models of completed jobs, by family (`policy.family_of`)."""

    lengths: LengthHistory = field(default_factory=LengthHistory)
    _models: dict[str, JobModel] = field(default_factory=dict)

    def add(self, job: SimulatedJob) -> None:
        """Take in a completed job."""
        family, goodput = family_of(job.name), job.model.base_goodput()
        trained = job.progress * job.app.init_batch_size
        if goodput > 0 and trained > 0:
            self.lengths.add(CompletedJob(family, trained, trained / goodput))
        self._models[family] = job.model

    def bequeath(self, job: str, model: JobModel) -> None:
        """Let a new job inherit from the last one of its family that completed."""
        before = self._models.get(family_of(job))
        if before is not None:
            model.inherit(before)
