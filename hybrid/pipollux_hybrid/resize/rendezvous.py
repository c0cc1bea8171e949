"""What replicas that join and leave need from the place where they find each other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

from pipollux_hybrid.job.membership import Announcement, JoiningReplica, Membership

from .arbiter import Arbiter

__all__ = ["Rendezvous"]


class Rendezvous(Protocol):
    """A folder that all hosts share, or the scheduler.

    Every method but those of replicas that wait to join returns at once; what cannot be told now is
    told later. It is used by the thread that watches the membership, and by the main thread.
    """

    @property
    def self_governed(self) -> bool:
        """Whether replica 0 proposes memberships; else somebody else does."""

    @property
    def arbiter(self) -> Arbiter | None:
        """Where those that are left find out who goes on when replicas were lost; None: nobody."""

    @property
    def folder(self) -> Path | None:
        """A folder that all replicas see; None: there is none."""

    def post(self, announcement: Announcement) -> None:
        """Tell joining replicas where the job is; replica 0 does so all the time.

        Raises:
            OSError: It cannot be told.
        """

    def retract(self) -> None:
        """Say that the job has ended."""

    def announcement(self) -> Announcement | None:
        """Return what the job told last; None: nothing."""

    def job_is_silent(self) -> bool:
        """Return whether a joining replica has nobody to join any more."""

    def apply(self, joining_replica: JoiningReplica) -> None:
        """Ask to join; a joining replica does so all the time.

        Raises:
            OSError: It cannot be told.
        """

    def withdraw(self, replica: str) -> None:
        """Take back what a replica has asked for."""

    def withdraw_application(self, replica: str) -> None:
        """Take back that a replica wants to join, and nothing else."""

    def wanted(self, current: Membership, *, joining: bool) -> tuple[str, ...]:
        """Return who is to take part, judging by who has asked to join or leave.

        Args:
            current: Who does now.
            joining: Whether anybody may join.
        """

    def leave_sign(self, process: str) -> None:
        """Leave a sign that this process is alive.

        Raises:
            OSError: It cannot be left.
        """

    def signs(self, processes: Iterable[str]) -> Mapping[str, object]:
        """Return the last sign of each of these processes, None where there is none."""

    def propose(self, membership: Membership) -> None:
        """Have a membership formed; replica 0 does so where the job governs itself.

        Raises:
            OSError: It cannot be told.
        """

    def proposal(self) -> Membership | None:
        """Return the membership that is to be formed; None: none."""

    def refresh(self) -> None:
        """Ask for the proposal soon, as another replica has heard of a newer one."""

    def refuse(self, number: int, why: str, *, for_good: bool) -> None:
        """Say that a membership does not come about, as this replica has given it up.

        Args:
            number: Of the membership.
            why: A sentence.
            for_good: Whether no other would come about either.
        """

    def entered(self, membership: Membership, step: int, seconds: float) -> None:
        """Say that this replica takes part in a membership now.

        Args:
            membership: The one.
            step: Optimizer step after which it has changed.
            seconds: How long nobody trained.
        """

    def host(self) -> tuple[str, bool]:
        """Return this host's name or address for the others, and whether to listen there alone."""

    def announce_store(self, number: int, host: str, port: int) -> None:
        """Tell where the replicas of a membership find each other.

        Raises:
            OSError: It cannot be told.
        """

    def find_store(self, number: int) -> tuple[str, int] | None:
        """Return where the replicas of a membership find each other; None: not yet known."""

    def remove_store(self, number: int) -> None:
        """Take back what was announced for a membership."""
