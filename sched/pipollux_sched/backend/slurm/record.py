"""Files of a replica on disk, by which the next scheduler finds its step.

jobs/NAME/attempts/attempt-N/replica-R.json      its allocation, its node, the process of its srun
jobs/NAME/attempts/attempt-N/replica-R.srun      output of its srun: messages of Slurm

`StepFiles` has the others.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from pipollux_agent import supervisor
from pipollux_sched.backend.base import ReplicaKey
from pipollux_sched.backend.replica.replica_process import replicas_in
from pipollux_sched.backend.replica.step_files import StepFiles
from pipollux_sched.store import StateDir


class ReplicaFiles(StepFiles):
    """The files of one replica, with the output of its srun."""

    @property
    def srun(self) -> Path:
        """The output of its srun."""
        return self.base.with_name(f"{self.base.name}.srun")


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

    def write(self, files: ReplicaFiles) -> None:
        """Write it to disk, or raise OSError; a second time needs no space on a full disk."""
        if files.record.exists():
            supervisor.overwrite_status(files.record, asdict(self))
        else:
            supervisor.write_status(files.record, asdict(self))

    @classmethod
    def read(cls, files: ReplicaFiles) -> ReplicaRecord | None:
        """Read it; None if it does not exist or is invalid."""
        try:
            data = json.loads(files.record.read_text(encoding="utf-8"))
            birth = str(data["birth"]) if data["birth"] is not None else None
            return cls(int(data["pool"]), str(data["node"]), int(data["pid"]), birth)
        except (OSError, ValueError, KeyError, TypeError):
            return None


def find_records(state_dir: StateDir) -> Iterator[tuple[ReplicaKey, ReplicaRecord]]:
    """Yield the replicas that this scheduler or an earlier one has started and not forgotten."""
    for key in replicas_in(state_dir):
        record = ReplicaRecord.read(ReplicaFiles.of(state_dir, key))
        if record is not None:
            yield key, record
