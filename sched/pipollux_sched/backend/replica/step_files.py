"""Files of a replica that runs in `pipollux_agent.supervisor --step`, in a folder that nodes share.

jobs/NAME/attempts/attempt-N/replica-R.json      the record of its engine
jobs/NAME/attempts/attempt-N/replica-R.signal    the last request to the replica
jobs/NAME/attempts/attempt-N/replica-R.exit      exit status of its agent, written on its node
jobs/NAME/attempts/attempt-N/replica-R.result    the result of its agent
"""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self, TypeVar

from pipollux_agent import supervisor
from pipollux_sched.backend.base import ReplicaKey
from pipollux_sched.backend.result import ReplicaResult, out_of_memory
from pipollux_sched.store import StateDir
from pipollux_utils.atomic_write import PRIVATE, write_aside

T = TypeVar("T")
_SIGNAL_SIZE = 8
_STEP_NAME = re.compile(r"(?P<job>[^./\s]+)\.a(?P<attempt>\d+)\.r(?P<replica>\d+)")


def step_name(key: ReplicaKey) -> str:
    """Return the name of a replica in the cluster's own tools, such as `squeue -s`.

    Example:
        >>> step_name(ReplicaKey("char-lm", 2, 0))
        'char-lm.a2.r0'
    """
    return f"{key.job}.a{key.attempt}.r{key.replica}"


def read_step_name(name: str) -> ReplicaKey | None:
    """Return the replica with a name; None for names of others.

    Example:
        >>> read_step_name("char-lm.a2.r0"), read_step_name("bash")
        (ReplicaKey(job='char-lm', attempt=2, replica=0), None)
    """
    match = _STEP_NAME.fullmatch(name)
    if match is None:
        return None
    return ReplicaKey(match["job"], int(match["attempt"]), int(match["replica"]))


class StepFiles:
    """The files of one replica in the folder of its attempt; their paths begin with `base`."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.record, self.signal, self.exit, self.result = map(
            self.path, ("json", "signal", "exit", "result")
        )

    @classmethod
    def of(cls, state_dir: StateDir, key: ReplicaKey) -> Self:
        """Return the files of a replica."""
        return cls(state_dir.attempt(key.job, key.attempt) / f"replica-{key.replica}")

    def path(self, kind: str) -> Path:
        """Return one of the files by the end of its name."""
        return self.base.with_name(f"{self.base.name}.{kind}")

    def has(self, kind: str) -> bool:
        """Return whether there is a file that is written on the node."""
        self._refresh()
        return self.path(kind).exists()

    def remove(self) -> None:
        """Remove the files of an earlier start, or raise OSError."""
        for path in self.base.parent.glob(f"{self.base.name}.*"):
            if path.is_file():  # or a folder of the agent
                path.unlink(missing_ok=True)

    def write_record(self, record: Any) -> None:
        """Write a dataclass durably, or raise OSError; a second time needs no space on a disk."""
        write = supervisor.overwrite_status if self.record.exists() else supervisor.write_status
        write(self.record, asdict(record))

    def read_record(self, kind: type[T]) -> T | None:
        """Read the record; None if there is none, or it is of another version."""
        try:
            return kind(**json.loads(self.record.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None

    def prepare_signal(self) -> None:
        """Create the file of the signal, or raise OSError.

        A later signal needs no space on a full disk; and a node sees it at once over NFS, which
        checks an existing file when it is opened, and caches that a file is missing.
        """
        write_aside(self.signal, b"\n".rjust(_SIGNAL_SIZE), PRIVATE)

    def write_signal(self, what: str) -> None:
        """Write a signal to the step, "stop", "kill" or "gone", or raise OSError."""
        with self.signal.open("r+b", buffering=0) as file:
            file.write(f"{what}\n".rjust(_SIGNAL_SIZE).encode("ascii"))
            os.fsync(file.fileno())

    def read_signal(self) -> str:
        """Return the signal of this or an earlier scheduler to the step; empty: none."""
        return supervisor.read_signal(self.base)

    def read_exit(self) -> int | None:
        """Return the exit status of the agent; None if there is none."""
        self._refresh()
        try:
            return int(json.loads(self.exit.read_text(encoding="ascii"))["code"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def read_result(self) -> ReplicaResult:
        """Return the result of the agent; an agent that was stopped early has none."""
        result = ReplicaResult.read(self.result)
        with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
            limit, used = json.loads(self.exit.read_text(encoding="ascii"))["memory"]
            result = result._replace(error=out_of_memory(int(limit), int(used)))
        return result._replace(asked=result.asked or self._was_asked())

    def _refresh(self) -> None:
        with suppress(OSError):
            os.listdir(self.base.parent)  # over NFS, a new file becomes visible only after this

    def _was_asked(self) -> bool:
        try:
            return bool(json.loads(self.exit.read_text(encoding="ascii")).get("asked"))
        except (OSError, ValueError, AttributeError):
            return False
