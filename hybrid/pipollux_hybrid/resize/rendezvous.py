"""The interface of a rendezvous for replicas that join and leave."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

from pipollux_hybrid.job.membership import Announcement, JoiningReplica, Membership

from .arbiter import Arbiter


class Rendezvous(Protocol):
    """A folder that all hosts share, or the scheduler.

    Methods return at once, except those of replicas that wait to join; undelivered information is
    sent again later. Methods that write raise an OSError if they cannot. Both the main thread and
    that of the :class:`~pipollux_hybrid.resize.watch.MembershipWatch` use it.
    """

    @property
    def self_governed(self) -> bool:
        """Whether replica 0 proposes memberships; else somebody else does."""

    @property
    def arbiter(self) -> Arbiter | None:
        """Arbiter of the surviving replicas after a loss; None: they cannot continue."""

    @property
    def folder(self) -> Path | None:
        """A folder that all replicas share; None: there is none."""

    def post(self, announcement: Announcement) -> None:
        """Publish the job announcement; replica 0 does so all the time."""

    def follow(self) -> None:
        """Note which attempt of the job this replica trains in; all members do so all the time."""

    def is_over(self) -> bool:
        """Return whether that attempt is known to have ended, or to have been replaced."""

    def retract(self) -> None:
        """Publish the end of the job."""

    def announcement(self) -> Announcement | None:
        """Return the last job announcement; None: there is none."""

    def job_is_silent(self) -> bool:
        """Return whether there is no job to join any more."""

    def apply(self, joining_replica: JoiningReplica) -> None:
        """Apply to join; a joining replica does so all the time."""

    def withdraw(self, replica: str) -> None:
        """Withdraw all requests of a replica."""

    def withdraw_application(self, replica: str) -> None:
        """Withdraw a replica's application to join, and nothing else."""

    def wanted(self, current: Membership, *, joining: bool) -> tuple[str, ...]:
        """Return the next members, by the requests to leave and, if ``joining``, to join."""

    def leave_sign(self, process: str) -> None:
        """Leave a sign of life of this process."""

    def signs(self, processes: Iterable[str]) -> Mapping[str, object]:
        """Return the last sign of life of each process, None if there is none."""

    def propose(self, membership: Membership) -> None:
        """Propose a membership; replica 0 does so if the job governs itself."""

    def proposal(self) -> Membership | None:
        """Return the proposed membership; None: there is none."""

    def refresh(self) -> None:
        """Fetch the proposal soon, as another replica knows a newer one."""

    def refuse(self, number: int, why: str, *, for_good: bool) -> None:
        """Report that this replica gives up a membership; ``for_good``: others would fail, too."""

    def entered(self, membership: Membership, step: int, seconds: float) -> None:
        """Report that this replica has entered a membership, the step, and the pause in seconds."""

    def host(self) -> tuple[str, bool]:
        """Return this host's name or address for the others, and whether to listen on it alone."""

    def announce_store(self, number: int, host: str, port: int) -> None:
        """Publish the address of a membership's store."""

    def find_store(self, number: int) -> tuple[str, int] | None:
        """Return the address of a membership's store; None: not yet known."""

    def remove_store(self, number: int) -> None:
        """Remove the address of a membership's store."""
