"""Which team a job counts to, and its priority: the interface that `teams.yaml` implements."""

from __future__ import annotations

from typing import Protocol

from .team import Teams


class OwnedJob(Protocol):
    """A job's name, and what decides its team and priority."""

    @property
    def name(self) -> str:
        """Name of the job."""

    @property
    def team(self) -> str | None:
        """Team that the job names."""

    @property
    def user(self) -> str | None:
        """User who submitted the job."""

    @property
    def priority(self) -> str | None:
        """Priority class that the job names."""


class TeamMembership(Protocol):
    """Teams of a cluster, with the rules that assign jobs to them."""

    def for_policy(self) -> Teams:
        """Return the quotas as policies use them."""

    def team_of(self, job: OwnedJob, /) -> str:
        """Return the team that a job counts to."""

    def priority_of(self, job: OwnedJob, /) -> tuple[int, bool]:
        """Return a job's priority, and whether it preempts jobs of a lower one."""
