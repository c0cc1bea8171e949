"""The folder of an attempt on this machine: its devices, and the files of its processes.

``attempt.json`` is written before the first process starts; beside it are, for replica R,
``replica-R.json`` (status of its supervisor), ``replica-R.result.json`` (result of its agent) and
``replica-R.cgroup`` (path of its control group).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipollux_sched.store import StateDir
from pipollux_utils.atomic_write import PRIVATE, write_aside

from . import cgroups


@dataclass(frozen=True, kw_only=True)
class LocalPlacement:
    """The devices and port of an attempt on this machine."""

    devices: Mapping[int, Mapping[str, str]]
    port: int


class AttemptFolder:
    """The folder of one attempt."""

    def __init__(self, state_dir: StateDir, job: str, attempt: int) -> None:
        self.path = state_dir.attempt(job, attempt)

    def status(self, replica: int) -> Path:
        """Return the status file of a replica's supervisor."""
        return self.path / f"replica-{replica}.json"

    def result(self, replica: int) -> Path:
        """Return the result file of a replica's agent."""
        return self.path / f"replica-{replica}.result.json"

    def agent(self, replica: int) -> Path:
        """Return the folder of a replica's agent."""
        return self.path / f"replica-{replica}.agent"

    def group(self, replica: int) -> Path:
        """Return the file with the path of a replica's control group."""
        return self.path / f"replica-{replica}.cgroup"

    def create(self) -> None:
        """Create it, or raise OSError; folders of earlier attempts of the job are removed."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        for other in self.path.parent.iterdir():
            if other != self.path:
                cgroups.remove_recorded(other)
                shutil.rmtree(other, ignore_errors=True)

    def write(self, placement: LocalPlacement) -> None:
        """Write the placement durably, or raise OSError."""
        data = json.dumps(asdict(placement)) + "\n"
        write_aside(self.path / "attempt.json", data.encode(), PRIVATE)

    def placement(self) -> LocalPlacement | None:
        """Read the placement; None if it does not exist, or is of another version."""
        try:
            text = (self.path / "attempt.json").read_text(encoding="utf-8")
            data: dict[str, Any] = json.loads(text)
            devices = {int(replica): dict(told) for replica, told in data["devices"].items()}
            return LocalPlacement(devices=devices, port=int(data["port"]))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
