"""Families of similar jobs, and their measurements.

A new job is planned with the hints of its predecessor: the last job of its family that completed
or, if none has, the running one with the latest report. It starts with the step times of its
relatives: its predecessor, and the jobs with the latest reports. Failed jobs pass nothing on.

Without a family name, it is that of the jobs of the same script and image whose names differ only
in a trailing number. Measurements depend on the GPU type and on the stages, so jobs that request
other ones are in other families, and so are those of other users or teams.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple, TypeAlias

from sqlalchemy import Select, or_, select

from pipollux_sched.lifecycle import PRUNED, Phase

from .attempts import has_reason
from .database import Database
from .tables import HintsRow, JobRow

MOST_LOOKED_AT = 10_000
"""Number of newest jobs that are searched; earlier jobs pass nothing on."""
MOST_ALIKE = 64
"""Number of newest jobs of a family whose hints are read."""

FamilyKey: TypeAlias = tuple[Any, ...]


class Predecessor(NamedTuple):
    """A job that passes on its measurements."""

    job: str
    hints: Mapping[str, Any]
    """Its latest ones."""
    first_gradients: Mapping[str, Any] | None = None
    """With which it began, as in `hints`; None: not known."""


class Families:
    """Finds predecessors; safe for use by many threads.

    Example:
        >>> with Store(Path("/var/lib/pipollux/pipollux.db")) as store:
        ...     found = store.families.predecessors({"toy-2": store.job("toy-2").spec})
        ...     found["toy-2"].job
        'toy-1'
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._lock = threading.Lock()
        self._seen = 0
        self._alike: dict[FamilyKey, deque[str]] = {}
        self._latest: dict[FamilyKey, tuple[tuple[str, float], Predecessor]] = {}

    def predecessors(self, jobs: Mapping[str, Mapping[str, Any]]) -> dict[str, Predecessor]:
        """Return the predecessors of jobs, given by their specs; jobs without one are left out."""
        keys = {name: key_of(name, spec) for name, spec in jobs.items()}
        wanted = {key for key in keys.values() if key is not None}
        if not wanted:
            return {}
        with self._lock:
            self._look_at_new_jobs()
            found = {key: self._find(key) for key in wanted}
        warm_starts = {name: found[key] for name, key in keys.items() if key is not None}
        return {
            name: before
            for name, before in warm_starts.items()
            if before is not None and before.job != name
        }

    def relatives(self, name: str, spec: Mapping[str, Any]) -> list[Predecessor]:
        """Return the jobs whose step times a job starts with: its predecessor, then the latest."""
        # Imports numpy, which lists of jobs do not need.
        from pipollux_perfmodel.hints.step_rows import MAX_RELATIVES

        key = key_of(name, spec)
        if key is None:
            return []
        with self._lock:
            self._look_at_new_jobs()
            first, names = self._find(key), [*self._alike.get(key, ())]
        with self._database.read() as session:
            latest = session.execute(
                _reported(names).order_by(HintsRow.time.desc()).limit(MAX_RELATIVES + 1)
            ).all()
            found = {} if first is None else {first.job: first}
            for row in latest:
                if row.name not in found and key_of(row.name, row.spec) == key:
                    found[row.name] = Predecessor(
                        row.name, session.get_one(HintsRow, row.name).hints
                    )
        found.pop(name, None)
        return [*found.values()][:MAX_RELATIVES]

    def forget(self) -> None:
        """Read all jobs again, because the family of a job has changed."""
        with self._lock:
            self._seen = 0
            self._alike.clear()
            self._latest.clear()

    def _look_at_new_jobs(self) -> None:
        query = select(JobRow.id, JobRow.name, JobRow.spec).where(JobRow.id > self._seen)
        with self._database.read() as session:
            rows = session.execute(query.order_by(JobRow.id.desc()).limit(MOST_LOOKED_AT)).all()
        for row in reversed(rows):
            self._seen = row.id
            key = key_of(row.name, row.spec)
            if key is not None:
                self._alike.setdefault(key, deque(maxlen=MOST_ALIKE)).append(row.name)

    def _find(self, key: FamilyKey) -> Predecessor | None:
        names = self._alike.get(key)
        if not names:
            return None
        with self._database.read() as session:
            completed = JobRow.phase == Phase.COMPLETE.value
            order = completed.desc(), JobRow.ended_at.desc(), HintsRow.time.desc(), JobRow.id.desc()
            last = session.execute(_reported(names).order_by(*order).limit(1)).first()
            if last is None:
                return None
            from pipollux_perfmodel.hints.step_rows import RENEWED

            works = last.phase != Phase.COMPLETE.value
            mark = (last.name, last.time // RENEWED if works else last.time)
            known = self._latest.get(key)
            if known is not None and known[0] == mark:
                return known[1]
            row = session.get(HintsRow, last.name)
            # A job submitted again with another spec may be in another family.
            if row is None or key_of(last.name, last.spec) != key:
                return None
            found = Predecessor(last.name, row.hints, row.first_gradients)
        self._latest[key] = (mark, found)
        return found


def key_of(name: str, spec: Mapping[str, Any]) -> FamilyKey | None:
    """Return the key that the jobs of a family share; None: the job has no family."""
    # Imports all policies, which takes longer than printing a list of jobs.
    from pipollux_policies import family_of

    family = spec.get("family")
    if family == "":
        return None
    fields = ("script", "module", "command", "image")
    program = tuple(map(spec.get, fields)) if family is None else ()
    stages = (
        spec.get("num_stages", 1),
        tuple(sorted(spec.get("stage_choices") or ())),
        bool(spec.get("process_per_stage")),
    )
    owner = (spec.get("team"), spec.get("user"), spec.get("gpu_type"), spec.get("device"))
    return (family is None, family or family_of(name), *program, *owner, *stages)


def _reported(names: Collection[str]) -> Select[tuple[str, str, float, dict[str, Any]]]:
    """Return the query for those of the jobs that have hints to pass on."""
    return (
        select(JobRow.name, JobRow.phase, HintsRow.time, JobRow.spec)
        .join(HintsRow, HintsRow.job == JobRow.name)
        # What a pruned trial measured is as good as that of any other one.
        .where(
            JobRow.name.in_(names),
            or_(JobRow.phase != Phase.FAILED.value, has_reason(JobRow.conditions, PRUNED)),
        )
    )
