"""The teams that a scheduler was given, and the notices that it has given to jobs.

Both are single documents in the table of facts about the store, and so of any version of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from sqlalchemy.orm import Session

from . import journal
from .database import Database
from .tables import MetaRow

_TEAMS, _NOTICES = "teams", "notices"


class TeamRecords:
    """What a store knows of teams.

    Args:
        database: database of the store.
        clock: returns the time, in seconds since the epoch.
    """

    def __init__(self, database: Database, clock: Callable[[], float]) -> None:
        self._database = database
        self._clock = clock

    def spec(self) -> dict[str, Any] | None:
        """Return the teams as JSON; None: there are none."""
        with self._database.read() as session:
            found = _get(session, _TEAMS)
            return None if found is None else dict(found)

    def set_spec(self, spec: Mapping[str, Any] | None) -> None:
        """Store other teams, or None for none; an event records a change."""
        with self._database.write() as session:
            if _get(session, _TEAMS) == spec:
                return
            _put(session, _TEAMS, spec)
            names = [] if spec is None else [str(team["name"]) for team in spec["teams"]]
            journal.log(session, self._clock(), "teams", None, None, {"teams": names})
            if spec is None:
                _put(session, _NOTICES, None)

    def notices(self) -> dict[str, float]:
        """Return the jobs that were told to give slots back, and when they have to."""
        with self._database.read() as session:
            return {str(job): float(due) for job, due in (_get(session, _NOTICES) or {}).items()}

    def set_notices(self, notices: Mapping[str, float]) -> None:
        """Store the present notices; an event records each new one."""
        with self._database.write() as session:
            before = _get(session, _NOTICES) or {}
            if before == notices:
                return
            _put(session, _NOTICES, dict(notices))
            for job in sorted(notices.keys() - before.keys()):
                data = {"due": notices[job]}
                journal.log(session, self._clock(), "notice", job, None, data)


def _get(session: Session, key: str) -> Any:
    row = session.get(MetaRow, key)
    return None if row is None else json.loads(row.value)


def _put(session: Session, key: str, value: Any) -> None:
    session.merge(MetaRow(key=key, value=json.dumps(value)))
