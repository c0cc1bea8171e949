"""Reports about attempts, pending attempts, and their store."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from pipollux_sched.lifecycle import Exited, JoiningReplicaLost, Started

from .base import ReplicaProgram


class Report(NamedTuple):
    """The result of an earlier `apply` or `stop`, or a spontaneous event."""

    job: str
    event: Started | Exited | JoiningReplicaLost
    unsent: Mapping[str, Any] | None = None
    """Body of the training report that an ended attempt could not send, unvalidated."""


class Running(NamedTuple):
    """An attempt whose processes run, or are starting."""

    attempt: int
    nodes: tuple[str, ...]


class Waiting(NamedTuple):
    """An attempt that waits for the end of the previous one, or for its slots."""

    program: ReplicaProgram
    attempt: int
    nodes: tuple[str, ...]


class Joiners(NamedTuple):
    """Joining replicas that wait for their slots."""

    program: ReplicaProgram
    replicas: Mapping[int, str]


class LaunchStore(Protocol):
    """Stores launches and stopped steps for the next scheduler: the store's `launches`."""

    def note_launch(self, job: str, attempt: int, data: dict[str, Any]) -> None:
        """Store a launch durably."""

    def launch(self, job: str, attempt: int) -> dict[str, Any] | None:
        """Return a launch, None if there is none."""

    def stopped_step(self, job: str, attempt: int) -> int | None:
        """Return the step at which an attempt reported that it has saved and stops, if it did."""
