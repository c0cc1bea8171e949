"""Files of a replica on disk, by which the next scheduler finds its step.

jobs/NAME/attempts/attempt-N/replica-R.json      its allocation, its node, the process of its srun
jobs/NAME/attempts/attempt-N/replica-R.srun      output of its srun: messages of Slurm

`StepFiles` has the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pipollux_sched.backend.replica.step_files import StepFiles


class ReplicaFiles(StepFiles):
    """The files of one replica, with the output of its srun."""

    @property
    def srun(self) -> Path:
        """The output of its srun."""
        return self.path("srun")


@dataclass(frozen=True)
class ReplicaRecord:
    """Where a replica was started."""

    pool: int
    """The allocation, a job of Slurm's."""
    node: str
    pid: int = 0
    """Process id of its srun; 0: its scheduler was killed at its start."""
    birth: str | None = None
    """Identity of this process: see `supervisor.birth`."""
