"""The role that each request needs. A route without an entry is for admins only."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum

from fastapi import HTTPException

from pipollux_sched.spec.job import JobSpec
from pipollux_sched.spec.teams import JobOwner, TeamsSpec
from pipollux_sched.spec.tokens import Role

from .limits import ConcurrencyLimit


class Access(StrEnum):
    """The senders that a request is open to."""

    OPEN = "open"
    """Everyone, without a token."""
    JOB = "job"
    """The job of the path with its own token, and the admin."""
    VIEWER = "viewer"
    USER = "user"
    OWNER = "owner"
    """The user who owns the job, and admins."""
    LOGS = "logs"
    """Viewers; with teams, members of the job's team, and admins."""
    ADMIN = "admin"

    @property
    def role(self) -> Role:
        """The lowest sufficient role."""
        least = {Access.OWNER: Role.USER, Access.LOGS: Role.VIEWER}
        return least.get(self) or Role(self.value)


ACCESS: Mapping[tuple[str, str], Access] = {
    ("GET", "/healthz"): Access.OPEN,
    ("PUT", "/jobs/{name}/hints"): Access.JOB,
    ("POST", "/jobs/{name}/reports"): Access.JOB,
    ("GET", "/jobs/{name}/inheritance"): Access.JOB,
    ("POST", "/jobs/{name}/heartbeats"): Access.JOB,
    ("POST", "/jobs/{name}/stops"): Access.JOB,
    ("POST", "/jobs/{name}/replicas"): Access.JOB,
    ("GET", "/jobs/{name}/replicas"): Access.JOB,
    ("POST", "/jobs"): Access.USER,
    ("POST", "/jobs/batch"): Access.USER,
    ("POST", "/jobs/forecast"): Access.USER,
    ("GET", "/jobs"): Access.VIEWER,
    ("GET", "/jobs/{name}"): Access.VIEWER,
    ("DELETE", "/jobs/{name}"): Access.OWNER,
    ("POST", "/jobs/{name}/suspend"): Access.OWNER,
    ("POST", "/jobs/{name}/resume"): Access.OWNER,
    ("POST", "/jobs/{name}/rerun"): Access.OWNER,
    ("POST", "/jobs/{name}/delete"): Access.OWNER,
    ("PUT", "/jobs/{name}/team"): Access.OWNER,
    ("GET", "/jobs/{name}/explanation"): Access.VIEWER,
    ("GET", "/jobs/{name}/logs"): Access.LOGS,
    ("GET", "/jobs/{name}/logs/{attempt}/{replica}"): Access.LOGS,
    ("GET", "/sweeps"): Access.VIEWER,
    ("GET", "/sweeps/{name}"): Access.VIEWER,
    ("GET", "/nodes"): Access.VIEWER,
    ("PUT", "/nodes/{name}"): Access.ADMIN,
    ("POST", "/decisions"): Access.ADMIN,
    ("GET", "/teams"): Access.VIEWER,
    ("PUT", "/teams"): Access.ADMIN,
    ("DELETE", "/teams"): Access.ADMIN,
    ("GET", "/tokens"): Access.ADMIN,
    ("POST", "/tokens"): Access.ADMIN,
    ("DELETE", "/tokens/{name}"): Access.ADMIN,
    ("GET", "/notifications"): Access.USER,
    ("POST", "/notifications/channels"): Access.USER,
    ("DELETE", "/notifications/channels/{name}"): Access.USER,
    ("POST", "/notifications/channels/{name}/test"): Access.USER,
    ("GET", "/events"): Access.VIEWER,
    ("GET", "/events/stream"): Access.VIEWER,
    ("GET", "/overview"): Access.VIEWER,
    ("GET", "/attempts"): Access.VIEWER,
    ("GET", "/usage"): Access.VIEWER,
    ("GET", "/plan"): Access.VIEWER,
    ("GET", "/forecasts"): Access.VIEWER,
    ("GET", "/report"): Access.VIEWER,
    ("GET", "/metrics"): Access.VIEWER,
}


@dataclass(frozen=True)
class Caller:
    """The sender of a request."""

    name: str
    role: Role
    team: str | None = None
    """The only team that the sender may submit jobs for; None: any."""
    run_as: str | None = None
    """The system user that the sender's jobs run as; None: the scheduler's."""

    def why_not(self, access: Access) -> str | None:
        """Explain why the role does not allow a request; None: allowed."""
        if self.role.allows(access.role):
            return None
        return (
            f"the token of {self.name!r} has the role {self.role}, and this needs {access.role}; "
            "ask an admin for it"
        )

    def place(self, places: ConcurrencyLimit) -> AbstractContextManager[None]:
        """Return a place to hold: users have a share of the places, admins may have all."""
        return places.take(self.name, all_of_them=self.role is Role.ADMIN)

    def owns(self, user: str | None) -> bool:
        """Return whether the sender may manage the jobs of a user."""
        return self.role is Role.ADMIN or user == self.name

    def reads_logs_of(self, job: JobOwner, teams: TeamsSpec) -> bool:
        """Return whether the sender may read a job's logs: as its user, or a member of its team."""
        if self.owns(job.user):
            return True
        own = [self.team] if self.team else teams.teams_of(self.name) or [teams.default]
        return teams.team_of(job) in own

    def signed(self, job: JobSpec) -> JobSpec:
        """Return a job with this sender as user, and the token's team, or raise HTTPException."""
        if self.role is Role.ADMIN:
            return job
        for field, allowed in (("user", self.name), ("team", self.team)):
            asked = getattr(job, field)
            if allowed is not None and asked not in (None, allowed):
                raise HTTPException(
                    403,
                    f"job {job.name!r}: {field}: the token of {self.name!r} is for {allowed!r}, "
                    f"not for {asked!r}; leave {field} out",
                )
        if job.run_as not in (None, self.run_as):
            raise HTTPException(
                403,
                f"job {job.name!r}: run_as: jobs of {self.name!r} run as "
                f"{self.run_as or 'the scheduler'!r}, not as {job.run_as!r}; leave run_as out",
            )
        own = {"user": self.name, "team": self.team or job.team, "run_as": self.run_as}
        return job.model_copy(update=own)

    def check_team(self, job: str, team: str | None, remedy: str) -> None:
        """Refuse a job of another team than that of the sender's token, with 403 and a remedy."""
        if self.role is not Role.ADMIN and self.team not in (None, team):
            raise HTTPException(
                403,
                f"job {job!r}: team: the token of {self.name!r} is for {self.team!r}, not for "
                f"{team or 'none'!r}; {remedy}",
            )
