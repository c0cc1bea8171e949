"""What a cluster has learnt from its jobs, as a scheduler's store has it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from pipollux_perfmodel.hints.step_rows import MAX_RELATIVES
from pipollux_sched.policy import CompletedJob, LengthHistory
from pipollux_sched.simulator.applications.base import JobModel
from pipollux_sched.simulator.workload.arrivals import JobArrival

from .job import SimulatedJob


@dataclass
class _Family:
    """Models of jobs that are alike: each begins with what the others have measured."""

    completed: list[JobModel] = field(default_factory=list)
    active: dict[str, JobModel] = field(default_factory=dict)
    """By name of the job, the latest to arrive last."""

    def relatives(self) -> list[JobModel]:
        """Return those that hand down what they measured: the last that completed goes first."""
        measured = [x for x in self.active.values() if x.max_profiled_replicas > 0]
        before = self.completed[-1:]
        return [*before, *reversed([*self.completed[:-1], *measured])][:MAX_RELATIVES]


@dataclass
class Experience:
    """Lengths of completed jobs, and models of all, by family (`policy.family_of`)."""

    lengths: LengthHistory = field(default_factory=LengthHistory)
    _families: dict[Any, _Family] = field(default_factory=lambda: defaultdict(_Family))

    def add(self, job: SimulatedJob) -> None:
        """Take in a completed job."""
        goodput = job.model.base_goodput()
        trained = job.progress * job.app.init_batch_size
        if goodput > 0 and trained > 0:
            self.lengths.add(CompletedJob(job.arrival.family, trained, trained / goodput))
        family = self._families[job.arrival.lineage]
        family.active.pop(job.name, None)
        family.completed.append(job.model)

    def bequeath(self, job: JobArrival, model: JobModel) -> bool:
        """Let a job that arrives inherit from its family; tell whether there was anything."""
        family = self._families[job.lineage]
        relatives = family.relatives()
        if relatives:
            model.inherit(relatives)
        family.active[job.name] = model
        return bool(relatives)
