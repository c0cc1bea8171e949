"""Teams and priorities: `teams.yaml`, and the same as JSON (docs/howto/teams.md).

Example:
    ``teams: [{name: vision, quota: 8, users: [ana]}, {name: text, quota: 4, borrow: 4}]``
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    StrictFloat,
    StrictInt,
    field_serializer,
    model_validator,
)

from pipollux_policies.teams.membership import OwnedJob
from pipollux_policies.teams.team import DEFAULT_NOTICE, DEFAULT_TURN, Team, Teams
from pipollux_sched.utils.yaml_file import SpecError, read_yaml_file
from pipollux_utils.text import count
from pipollux_utils.units import parse_duration
from pipollux_utils.validation import problem_at

from .job import JobSpec
from .model import List, Spec, load_model, parse_model
from .names import Name, UserName
from .notify import NotifySpec, check_team_entries

DEFAULT_TEAM = "default"
"""Team of jobs without a team, if their user is in no team."""

_Amount = Annotated[int, Field(ge=0, le=10**9)]
_Number = Annotated[int, Field(ge=1, le=10**9)]


def _parse_pause(value: str | float | None) -> float:
    if value is None:
        raise ValueError("an empty value is not a duration; give one such as 60s, or 0")
    if value in (0, "0", "0s"):
        return 0.0
    if isinstance(value, int | float) and value < 0:
        raise ValueError(f"{value} is below 0; give a duration such as 60s, or 0")
    return float(parse_duration(value) or 0.0)


class TeamSpec(Spec):
    """One team."""

    name: Name = Field(description="a name, as in name: vision")
    """Unique among the teams."""
    quota: _Amount = Field(default=0, description="a whole number of slots from 0 to 1000000000")
    """Slots guaranteed to the team while its jobs can use them."""
    borrow: _Amount | None = Field(default=None, description="a whole number from 0 to 1000000000")
    """Slots beyond the quota that the team may borrow while they are idle; none: unlimited."""
    lend: _Amount | None = Field(default=None, description="a whole number from 0 to 1000000000")
    """Idle slots of the quota that other teams may borrow; none: all."""
    weight: Annotated[StrictFloat | StrictInt, Field(gt=0, le=1000)] = Field(
        default=1.0, description="a number above 0 and at most 1000"
    )
    """Share of borrowed slots relative to the other teams."""
    max_jobs: _Amount | None = Field(
        default=None, description="a whole number from 0 to 1000000000"
    )
    """Jobs that may hold slots at the same time; none: unlimited."""
    max_submit_jobs: _Amount | None = Field(
        default=None, description="a whole number from 0 to 1000000000"
    )
    """Unfinished jobs, as Slurm's GrpSubmitJobs. Further submissions are refused."""
    max_slots_per_job: _Number | None = Field(
        default=None, description="a whole number from 1 to 1000000000"
    )
    """Slots that one job may hold; none: unlimited."""
    users: List[UserName] = Field(default=(), description="a list of names")
    """Users that may submit jobs for the team; none: everyone."""
    notify: Annotated[List[NotifySpec], AfterValidator(check_team_entries)] = Field(
        default=(), description="a list of mappings with webhook or apprise", repr=False
    )
    """Where to send notifications about the team's jobs, and which."""

    @field_serializer("notify")
    def _notify_to_json(self, _notify: Sequence[NotifySpec]) -> List[NotifySpec]:
        # Destinations hold secrets: they are left out everywhere, except by `revealed`.
        return ()


class JobOwner(NamedTuple):
    """The fields of a job's spec about its owner, read without parsing the others."""

    name: str
    team: str | None
    user: str | None
    priority: str | None

    @classmethod
    def of(cls, spec: Mapping[str, Any]) -> JobOwner:
        """Return the owner of a job from its stored spec."""
        return cls(spec["name"], spec.get("team"), spec.get("user"), spec.get("priority"))


class PrioritySpec(Spec):
    """A priority class, like Kubernetes' PriorityClass and Kueue's WorkloadPriorityClass."""

    name: Name = Field(description="a name, as in name: urgent")
    """Unique among the priority classes."""
    value: Annotated[int, Field(ge=-(10**9), le=10**9)] = Field(
        description="a whole number from -1000000000 to 1000000000; the higher goes first"
    )
    """Priority of the jobs of this class."""
    preemption: bool = Field(default=True, description="true or false")
    """Whether jobs of this class preempt running jobs of lower priority."""
    users: List[UserName] = Field(default=(), description="a list of names")
    """Users whose jobs may name the class; none: everyone."""

    def admits(self, user: str | None) -> bool:
        """Return whether a user's jobs may have this class."""
        return not self.users or user in self.users


class TeamsSpec(Spec):
    """The teams of a cluster, and the priority classes of jobs."""

    teams: List[TeamSpec] = Field(description="a list of teams")
    """The teams."""
    default: Name = Field(default=DEFAULT_TEAM, description="the name of a team")
    """Team of jobs that name no team and whose user is in none."""
    notice: Annotated[float, BeforeValidator(_parse_pause)] = Field(
        default=DEFAULT_NOTICE, description="a duration such as 60s, or 0"
    )
    """Time between the notice that a team reclaims slots and the change of the allocation."""
    turn: Annotated[float, BeforeValidator(_parse_pause)] = Field(
        default=DEFAULT_TURN, description="a duration such as 1h, or 0"
    )
    """Time for which one team may borrow slots that cannot be divided among several."""
    priorities: List[PrioritySpec] = Field(default=(), description="a list of classes")
    """Priority classes. Jobs that name no class have priority 0."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = [team.name for team in self.teams]
        classes = [entry.name for entry in self.priorities]
        for where, given in (("teams", names), ("priorities", classes)):
            for index, name in enumerate(given):
                if name in given[:index]:
                    raise problem_at(
                        (where, index, "name"),
                        f"'{name}' is also the name of {where}[{given.index(name)}]; give each "
                        "its own",
                    )
        if self.default != DEFAULT_TEAM and self.default not in names:
            raise problem_at(
                ("default",),
                f"'{self.default}' is none of the teams; name one of "
                f"{', '.join(sorted(names)) or 'them'}, or leave it out",
            )
        return self

    def revealed(self) -> dict[str, Any]:
        """Return the teams as JSON with the secrets of notifications, to be stored or sent."""
        data = self.model_dump(mode="json")
        for team, plain in zip(self.teams, data["teams"], strict=True):
            plain["notify"] = [entry.revealed() for entry in team.notify]
        return data

    def for_policy(self) -> Teams:
        """Return the teams in the form that policies use."""
        own = set(Team.__dataclass_fields__)
        values = [{k: v for k, v in team.model_dump().items() if k in own} for team in self.teams]
        return Teams({entry["name"]: Team(**entry) for entry in values}, self.notice, self.turn)

    def team_of(self, job: OwnedJob) -> str:
        """Return a job's team: its own if that exists, else its user's first, else the default."""
        names = [team.name for team in self.teams]
        if job.team in names:
            return str(job.team)
        of_user = self.teams_of(job.user) if job.user else []
        return of_user[0] if of_user else self.default

    def teams_of(self, user: str) -> list[str]:
        """Return the teams that name a user, in the order of the file."""
        return [team.name for team in self.teams if user in team.users]

    def check_team_name(self, team: str) -> None:
        """Raise `SpecError` for the name of an unknown team."""
        _check_known("team", team, self.teams)

    def priority_of(self, job: OwnedJob) -> tuple[int, bool]:
        """Return a job's priority (0 if its class is invalid), and whether it preempts."""
        found = self._class_of(job)
        return (found.value, found.preemption) if found and found.admits(job.user) else (0, True)

    def _class_of(self, job: OwnedJob) -> PrioritySpec | None:
        return next((entry for entry in self.priorities if entry.name == job.priority), None)

    def check_names(self, job: OwnedJob) -> None:
        """Raise `SpecError` for a job with an unknown team or priority class."""
        _check_known(f"job '{job.name}': team", job.team, self.teams)
        _check_known(f"job '{job.name}': priority", job.priority, self.priorities)

    def check(self, job: JobSpec) -> None:
        """Refuse a job that can never run under these teams.

        Raises:
            SpecError: its team or priority is unknown or not allowed for its user, or its smallest
                allocation exceeds the team's limits.
        """
        self.check_names(job)
        where, asked = f"job '{job.name}'", self._class_of(job)
        who = job.user or "a job without a user"
        if asked is not None and not asked.admits(job.user):
            raise SpecError(
                f"{where}: priority: '{asked.name}' is not for {who}; its users "
                f"are {', '.join(asked.users)}"
            )
        team = next((t for t in self.teams if t.name == self.team_of(job)), None)
        if team is None:
            team = TeamSpec(name=self.team_of(job))
        if team.users and job.user not in team.users:
            raise SpecError(
                f"{where}: user: {who} is not in team '{team.name}'; its users "
                f"are {', '.join(team.users)}"
            )
        if team.max_jobs == 0:
            raise SpecError(
                f"{where}: max_jobs of team '{team.name}' is 0, so that none of its jobs runs; "
                "raise it, or name another team"
            )
        least = min(job.num_stages, *job.stage_choices, job.num_stages) * job.min_replicas
        limits = {
            "max_slots_per_job": team.max_slots_per_job,
            "quota and borrow": None if team.borrow is None else team.quota + team.borrow,
            "quota (it is not preemptible, so it may not borrow)": (
                None if job.preemptible else team.quota
            ),
        }
        for name, most in limits.items():
            if most is not None and least > most:
                raise SpecError(
                    f"{where}: it needs {count(least, 'slot')} at least, and {name} of team "
                    f"'{team.name}' allow {most}; ask for less, or raise the limit"
                )


def _check_known(
    place: str, name: str | None, entries: Sequence[TeamSpec] | Sequence[PrioritySpec]
) -> None:
    known = [entry.name for entry in entries]
    if name is not None and name not in known:
        fix = f"choose from {', '.join(known)}" if known else "the file has none"
        raise SpecError(f"{place}: '{name}' is not known; {fix}")


def load_teams(path: str | Path) -> TeamsSpec:
    """Return the teams in a `teams.yaml`; raise `SpecError` if it is invalid."""
    return load_model(read_yaml_file(path, "teams:"), TeamsSpec)


def parse_teams(data: Mapping[str, Any]) -> TeamsSpec:
    """Return teams from stored JSON; raise `SpecError` if it is invalid."""
    return parse_model(data, TeamsSpec, "teams")
