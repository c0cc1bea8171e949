"""What generations tell, what waits to become one, and what they must have kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from pipollux_sched.lifecycle import Exited, NewcomerLost, Started

from .base import ReplicaProgram

__all__ = ["Joiners", "LaunchStore", "Report", "Running", "Waiting"]


class Report(NamedTuple):
    """The outcome of an earlier `apply` or `stop`, or something that happened by itself."""

    job: str
    event: Started | Exited | NewcomerLost
    unsent: Mapping[str, Any] | None = None
    """Body of the training report that a generation which has ended could not send, unchecked."""


class Running(NamedTuple):
    """A generation whose processes run, or are about to start."""

    generation: int
    nodes: tuple[str, ...]


class Waiting(NamedTuple):
    """A generation that waits for the previous one to end, or for its slots."""

    program: ReplicaProgram
    generation: int
    nodes: tuple[str, ...]


class Joiners(NamedTuple):
    """Replicas that wait for their slots, to join others that train."""

    program: ReplicaProgram
    replicas: Mapping[int, str]


class LaunchStore(Protocol):
    """Keeps launches for the next scheduler, and what the jobs told: the store's `launches`."""

    def note_launch(self, job: str, generation: int, data: dict[str, Any]) -> None:
        """Keep a launch; it is on the disk when this returns."""

    def launch(self, job: str, generation: int) -> dict[str, Any] | None:
        """Return a launch, None if there is none."""

    def stopped_step(self, job: str, generation: int) -> int | None:
        """Return the step at which a generation told that it has saved and stops, if it did."""
