"""Dependencies between jobs: what a new job waits for, and what happens when a job ends."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from pipollux_sched.lifecycle import (
    CANCELLED,
    Dependency,
    DependencyEnded,
    JobState,
    Phase,
    When,
)

from .errors import DependencyError
from .records import job_state
from .tables import JobRow


def waits_of(
    session: Session, job: str, spec: Mapping[str, Any], submitted: Collection[str] = ()
) -> tuple[Dependency, ...]:
    """Return what a job has to wait for; jobs that are `submitted` with it have not ended.

    `DependencyError`: one is not known, or has ended otherwise than the job needs.
    """
    wanted = [Dependency(entry["job"], When(entry["when"])) for entry in spec.get("after") or ()]
    if not wanted:
        return ()
    named = [entry.job for entry in wanted]
    found = {row.name: row for row in session.scalars(select(JobRow).where(JobRow.name.in_(named)))}
    waits = []
    for entry in wanted:
        row = found.get(entry.job)
        if entry.job in submitted:
            waits.append(entry)
            continue
        if row is None:
            raise DependencyError(
                f"job '{job}' waits for '{entry.job}', and there is no job of this name; submit "
                "that one first, or both together"
            )
        state = job_state(row)
        if not state.phase.ended:
            waits.append(entry)
        elif not entry.met_by(state.phase):
            ended = CANCELLED if state.cancelled else state.phase.value
            raise DependencyError(
                f"job '{job}' can never start: it waits for {entry}, which has ended "
                f"({ended}); run that one again first, or wait for something else"
            )
    return tuple(waits)


def waiting_for(session: Session, name: str) -> list[JobRow]:
    """Return the jobs that wait for a job."""
    # The index has the jobs that wait for anything.
    held = session.scalars(select(JobRow).where(JobRow.waits_for.is_not(None)).order_by(JobRow.id))
    return [row for row in held if any(entry["job"] == name for entry in row.waits_for or ())]


def end_of(name: str, state: JobState) -> DependencyEnded:
    """Return the event for the jobs that wait for a job which has ended."""
    return DependencyEnded(name, state.phase, _how(state))


def _how(state: JobState) -> str:
    if state.phase is Phase.COMPLETE:
        return "is complete"
    if state.cancelled:
        return "was cancelled"
    return "can never start itself" if state.reason == "DependencyNotMet" else "failed"
