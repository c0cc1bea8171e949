"""What attempts tell, what waits to become one, and what they must have kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from pipollux_sched.lifecycle import Exited, JoiningReplicaLost, Started

from .base import ReplicaProgram

__all__ = ["Joiners", "LaunchStore", "Report", "Running", "Waiting"]


class Report(NamedTuple):
    """The outcome of an earlier `apply` or `stop`, or something that happened by itself."""

    job: str
    event: Started | Exited | JoiningReplicaLost
    unsent: Mapping[str, Any] | None = None
    """Body of the training report that an attempt which has ended could not send, unchecked."""


class Running(NamedTuple):
    """An attempt whose processes run, or are about to start."""

    attempt: int
    nodes: tuple[str, ...]


class Waiting(NamedTuple):
    """An attempt that waits for the previous one to end, or for its slots."""

    program: ReplicaProgram
    attempt: int
    nodes: tuple[str, ...]


class Joiners(NamedTuple):
    """Replicas that wait for their slots, to join others that train."""

    program: ReplicaProgram
    replicas: Mapping[int, str]


class LaunchStore(Protocol):
    """Keeps launches for the next scheduler, and what the jobs told: the store's `launches`."""

    def note_launch(self, job: str, attempt: int, data: dict[str, Any]) -> None:
        """Keep a launch; it is on the disk when this returns."""

    def launch(self, job: str, attempt: int) -> dict[str, Any] | None:
        """Return a launch, None if there is none."""

    def stopped_step(self, job: str, attempt: int) -> int | None:
        """Return the step at which an attempt told that it has saved and stops, if it did."""
