"""The stored teams, and the notices given to jobs: two documents in the table of facts."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from pipollux_sched.lifecycle import Phase
from pipollux_utils.text import count

from . import journal
from .attempts import ENDED
from .database import Database
from .errors import TeamFullError
from .records import JobRecord, job_record
from .tables import JobRow, MetaRow

if TYPE_CHECKING:
    from pipollux_sched.spec.teams import TeamsSpec

_TEAMS, _NOTICES = "teams", "notices"


class TeamRecords:
    """The teams and notices of a store; `moved` is called when a job moves to another team."""

    def __init__(
        self, database: Database, clock: Callable[[], float], moved: Callable[[], None]
    ) -> None:
        self._database = database
        self._clock = clock
        self._moved = moved

    def spec(self) -> dict[str, Any] | None:
        """Return the teams as JSON; None: there are none."""
        with self._database.read() as session:
            found = _get(session, _TEAMS)
            return None if found is None else dict(found)

    def set_spec(self, spec: Mapping[str, Any] | None) -> None:
        """Replace the teams; None: remove them. An event records a change."""
        with self._database.write() as session:
            if _get(session, _TEAMS) == spec:
                return
            _put(session, _TEAMS, spec)
            names = [] if spec is None else [str(team["name"]) for team in spec["teams"]]
            journal.log(session, self._clock(), "teams", None, None, {"teams": names})
            if spec is None:
                _put(session, _NOTICES, None)

    def move(self, job: str, team: str) -> JobRecord:
        """Move a job to another team; an event records a change.

        `TeamFullError`: it has not ended, and the team has reached its limit of unfinished jobs.
        """
        with self._database.write() as session:
            row = journal.find_job(session, job)
            before, spec = row.spec.get("team"), {**row.spec, "team": team}
            if before != team:
                if not Phase(row.phase).ended:
                    check_submit_limits(session, [spec])
                row.spec = spec
                data = {"team": team, "before": before}
                journal.log(session, self._clock(), "updated", job, None, data)
            record = job_record(row)
        if before != team:
            self._moved()
        return record

    def notices(self) -> dict[str, float]:
        """Return the jobs that must return slots, and the time by which they must."""
        with self._database.read() as session:
            return {str(job): float(due) for job, due in (_get(session, _NOTICES) or {}).items()}

    def set_notices(self, notices: Mapping[str, float]) -> None:
        """Store the current notices; an event records each new one."""
        with self._database.write() as session:
            before = _get(session, _NOTICES) or {}
            if before == notices:
                return
            _put(session, _NOTICES, dict(notices))
            for job in sorted(notices.keys() - before.keys()):
                data = {"due": notices[job]}
                journal.log(session, self._clock(), "notice", job, None, data)


def check_submit_limits(
    session: Session, specs: Iterable[Mapping[str, Any]], sweeps: Iterable[str] = ()
) -> None:
    """Raise `TeamFullError` for jobs with which a team would exceed its `max_submit_jobs`.

    The jobs of trials of ``sweeps`` take the places of these, so that a sweep that was accepted
    can always run one trial.
    """
    found = _get(session, _TEAMS)
    if found is None or all(team.get("max_submit_jobs") is None for team in found["teams"]):
        return
    # Imports all policies, which takes longer than printing a list of jobs.
    from pipollux_sched.spec.teams import JobOwner, parse_teams

    teams, owners = parse_teams(found), [JobOwner.of(spec) for spec in specs]
    more = Counter(map(teams.team_of, owners))
    limits = {t.name: t.max_submit_jobs for t in teams.teams if t.name in more}
    if all(limit is None for limit in limits.values()):
        return
    has = _unfinished(session, teams, [*(owner.name for owner in owners), *sweeps])
    for team, limit in limits.items():
        if limit is not None and has[team] + more[team] > limit:
            these = "this one is" if more[team] == 1 else f"these are {more[team]}"
            raise TeamFullError(
                f"team {team!r} may have {count(limit, 'unfinished job')} (max_submit_jobs), has "
                f"{has[team]}, and {these} more: wait until jobs of it have ended, cancel some, "
                "or ask an admin to raise the limit"
            )


def _unfinished(session: Session, teams: TeamsSpec, but: Collection[str]) -> Counter[str]:
    """Return the number of unfinished jobs of each team, without the jobs with some names."""
    from pipollux_sched.spec.teams import JobOwner

    # Thousands of jobs have few owners, and their specs are long.
    owner = (JobRow.spec[name].as_string().label(name) for name in ("team", "user"))
    unfinished = (
        select(*owner).where(JobRow.phase.not_in(ENDED), JobRow.name.not_in(but)).subquery()
    )
    query = select(unfinished.c.team, unfinished.c.user, func.count()).group_by(
        unfinished.c.team, unfinished.c.user
    )
    found = Counter[str]()
    for team, user, number in session.execute(query):
        found[teams.team_of(JobOwner("", team, user, None))] += number
    return found


def _get(session: Session, key: str) -> Any:
    row = session.get(MetaRow, key)
    return None if row is None else json.loads(row.value)


def _put(session: Session, key: str, value: Any) -> None:
    session.merge(MetaRow(key=key, value=json.dumps(value)))
