"""The record of a job's generation, written before its first process is started.

`jobs/NAME/generations/gen-G/generation.json` holds what the next scheduler needs to adopt the
generation; `replica-R.json` beside it is the status that the runner of replica R writes.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipollux_sched.utils.atomic_write import PRIVATE, write_aside


@dataclass(frozen=True, kw_only=True)
class GenerationFile:
    """What a scheduler needs to know about a generation to adopt it."""

    job: str
    generation: int
    nodes: tuple[str, ...]
    """Node of each replica."""
    slots: tuple[tuple[int, ...], ...]
    """Slots that each replica holds of its node."""
    devices: tuple[Mapping[str, str], ...]
    """The device variables of each replica."""
    port: int
    """The rendezvous port of the replicas."""
    supervisor_url: str
    """The URL that they report to."""
    checkpoints: Path
    """Where they save checkpoints."""

    def write(self, folder: Path) -> None:
        """Write it to the generation's folder; it is on disk when this returns.

        Raises:
            OSError: it cannot be written.
        """
        data = {**asdict(self), "checkpoints": str(self.checkpoints)}
        write_aside(folder / "generation.json", (json.dumps(data) + "\n").encode(), PRIVATE)

    @classmethod
    def read(cls, folder: Path) -> GenerationFile | None:
        """Read it; None if it was never written, or not by this version."""
        try:
            data: dict[str, Any] = json.loads(
                (folder / "generation.json").read_text(encoding="utf-8")
            )
            return cls(
                job=str(data["job"]),
                generation=int(data["generation"]),
                nodes=tuple(map(str, data["nodes"])),
                slots=tuple(tuple(map(int, held)) for held in data["slots"]),
                devices=tuple(dict(told) for told in data["devices"]),
                port=int(data["port"]),
                supervisor_url=str(data["supervisor_url"]),
                checkpoints=Path(data["checkpoints"]),
            )
        except (OSError, ValueError, KeyError, TypeError):
            return None


def status_files(folder: Path, num_replicas: int) -> list[Path]:
    """Return the status file of each replica's runner."""
    return [folder / f"replica-{replica}.json" for replica in range(num_replicas)]


def error_files(folder: Path, num_replicas: int) -> list[Path]:
    """Return the file in which each replica's agent records what ended the script."""
    return [folder / f"replica-{replica}.error.json" for replica in range(num_replicas)]


def drop_earlier(folder: Path, others: Sequence[Path]) -> None:
    """Remove the folders of earlier generations."""
    for other in others:
        if other != folder:
            with suppress(OSError):
                shutil.rmtree(other)
