"""The team and the priority of a job: the interface that `teams.yaml` implements."""

from __future__ import annotations

from typing import Protocol

from .team import Teams


class OwnedJob(Protocol):
    """The fields of a job that determine its team and priority."""

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
    """The teams of a cluster, and the rules that assign jobs to them."""

    def for_policy(self) -> Teams:
        """Return the quotas in the form for policies."""

    def team_of(self, job: OwnedJob, /) -> str:
        """Return the team of a job."""

    def priority_of(self, job: OwnedJob, /) -> tuple[int, bool]:
        """Return a job's priority, and whether it preempts jobs of lower priority."""
