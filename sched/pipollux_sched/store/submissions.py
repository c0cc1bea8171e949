"""Submission of jobs: all jobs of a batch, or none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from pipollux_sched.lifecycle import JobState, Phase, Rerun, Submit
from pipollux_sched.spec.variables import hide_values

from . import deletion, journal
from .errors import JobEndedError, JobExistsError, JobUnfinishedError
from .journal import Change
from .records import write_job_state
from .tables import HintsRow, JobRow
from .teams import check_submit_limits

_MOST_NAMED = 5
"""Largest number of jobs named in a refusal."""


@dataclass(frozen=True)
class Submission:
    """One job to submit."""

    name: str
    spec: Mapping[str, Any]
    """The `JobSpec` as JSON."""
    token: str
    """The token that the job's processes send to the scheduler."""
    max_restarts: int
    """Number of failures that lead to a restart."""
    deadline: float | None = None
    """Seconds from now after which the job is ended, complete or not; None: never."""


def take_in(session: Session, submissions: Sequence[Submission], now: float) -> list[Change]:
    """Store new jobs, and restart failed or cancelled ones: see `Store.submit_all`."""
    rows = check_free(session, {entry.name: entry.spec for entry in submissions})
    for entry in submissions:
        row = rows.get(entry.name)
        if row is None:
            row = rows[entry.name] = JobRow(name=entry.name, submitted_at=now)
            write_job_state(row, JobState())
            session.add(row)
        row.spec, row.token, row.ended_at = dict(entry.spec), entry.token, None
        row.deadline_at = None if entry.deadline is None else now + entry.deadline
    session.flush()
    changes = []
    for entry in submissions:
        journal.log(session, now, "submitted", entry.name, None, {"spec": hide_values(entry.spec)})
        submit = Submit(entry.max_restarts)
        changes.append(journal.advance_job(session, rows[entry.name], submit, now))
    return changes


def check_free(session: Session, specs: Mapping[str, Mapping[str, Any]]) -> dict[str, JobRow]:
    """Return the failed jobs with the names of new ones; raise the errors of `take_in`."""
    names = list(specs)
    rows = {row.name: row for row in session.scalars(select(JobRow).where(JobRow.name.in_(names)))}
    deletion.check_free(session, names)
    _check_free([rows[name] for name in names if name in rows and rows[name].phase != "Failed"])
    check_submit_limits(session, list(specs.values()))
    return rows


def run_again(session: Session, name: str, now: float, *, from_scratch: bool) -> Change:
    """Run an ended job again, with its original spec: see `Store.rerun`."""
    row = journal.find_job(session, name)
    phase = Phase(row.phase)
    if not phase.ended:
        raise JobUnfinishedError(f"job {name!r} is {phase}; only a job that has ended is run again")
    if phase is Phase.COMPLETE and not from_scratch:
        raise JobEndedError(
            f"job {name!r} is complete and cannot continue; to train it again from the "
            f"start: pipollux rerun {name} --from-scratch"
        )
    check_submit_limits(session, [row.spec])
    if from_scratch:  # hints describe the end of the earlier training
        session.execute(delete(HintsRow).where(HintsRow.job == name))
    deadline = row.spec.get("deadline")
    row.ended_at = None
    row.deadline_at = None if deadline is None else now + deadline
    return journal.advance_job(session, row, Rerun(row.max_restarts, from_scratch), now)


def _check_free(taken: Sequence[JobRow]) -> None:
    if not taken:
        return
    if len(taken) == 1:
        raise JobExistsError(
            f"a job named {taken[0].name!r} already exists ({taken[0].phase}); "
            "give the new one another name"
        )
    named = ", ".join(f"{row.name!r} ({row.phase})" for row in taken[:_MOST_NAMED])
    more = f" and {len(taken) - _MOST_NAMED} more" if len(taken) > _MOST_NAMED else ""
    raise JobExistsError(
        f"{len(taken)} of the jobs already exist: {named}{more}; nothing was "
        "submitted, so leave these out or give them other names"
    )
