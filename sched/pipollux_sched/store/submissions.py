"""Submission of jobs: all jobs of a batch, or none."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from pipollux_sched.lifecycle import JobState, Phase, Rerun, Submit
from pipollux_sched.spec.sweep import SweepSpec
from pipollux_sched.spec.variables import hide_values

from . import deletion, journal, sweeps
from .dependencies import waits_of
from .errors import JobEndedError, JobExistsError, JobUnfinishedError
from .journal import Change
from .notifications import keep_entries
from .records import write_job_state
from .sweeps import TrialRecord
from .tables import HintsRow, JobRow, MetricRow
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
    trial: TrialRecord | None = None
    """The trial of a sweep that the job is; None: it is none."""
    notify: Sequence[Mapping[str, Any]] = ()
    """Destinations of notifications, which hold secrets, so that `spec` leaves them out."""


def take_in(session: Session, submissions: Sequence[Submission], now: float) -> list[Change]:
    """Store new jobs, and restart failed or cancelled ones: see `Store.submit_all`."""
    names = [entry.name for entry in submissions]
    own = {entry.trial.sweep for entry in submissions if entry.trial is not None}
    rows = check_free(session, {entry.name: entry.spec for entry in submissions}, own)
    _check_kinds(session, submissions, rows)
    for entry in submissions:
        row = rows.get(entry.name)
        if row is None:
            row = rows[entry.name] = JobRow(name=entry.name, submitted_at=now)
            write_job_state(row, JobState())
            session.add(row)
        if entry.trial is not None:
            row.sweep, row.trial = entry.trial.sweep, entry.trial.number
            row.parameters = dict(entry.trial.parameters)
        elif entry.spec.get("sweep") is not None:
            row.sweep = entry.name
        row.spec, row.token, row.ended_at = dict(entry.spec), entry.token, None
        row.deadline_at = None if entry.deadline is None else now + entry.deadline
        if entry.trial is None:  # the sweep notifies for its trials
            keep_entries(session, entry.name, entry.notify, now)
    session.flush()
    for entry in submissions:
        if entry.trial is not None:
            sweeps.start_trial(session, entry.trial.sweep, entry.trial.number)
        elif entry.spec.get("sweep") is not None:
            sweeps.begin(session, entry.name, SweepSpec.model_validate(entry.spec["sweep"]))
    waits = [waits_of(session, entry.name, entry.spec, names) for entry in submissions]
    changes = []
    for entry, waits_for in zip(submissions, waits, strict=True):
        journal.log(session, now, "submitted", entry.name, None, {"spec": hide_values(entry.spec)})
        submit = Submit(entry.max_restarts, waits_for)
        changes.append(journal.advance_job(session, rows[entry.name], submit, now))
    return changes


def check_free(
    session: Session, specs: Mapping[str, Mapping[str, Any]], own: Collection[str] = ()
) -> dict[str, JobRow]:
    """Return the failed jobs with the names of new ones; raise the errors of `take_in`.

    ``own`` are sweeps of which the jobs are trials.
    """
    names = list(specs)
    rows = {row.name: row for row in session.scalars(select(JobRow).where(JobRow.name.in_(names)))}
    deletion.check_free(session, names)
    _check_free([rows[name] for name in names if name in rows and rows[name].phase != "Failed"])
    check_submit_limits(session, list(specs.values()), own)
    return rows


def run_again(session: Session, name: str, now: float, *, from_scratch: bool) -> Change:
    """Run an ended job again, with its original spec: see `Store.rerun`."""
    row = journal.find_job(session, name)
    phase = Phase(row.phase)
    if not phase.ended:
        raise JobUnfinishedError(f"job {name!r} is {phase}; only a job that has ended is run again")
    _check_rerun(row, from_scratch=from_scratch)
    more = row.sweep is not None and sweeps.try_again(session, name)
    if phase is Phase.COMPLETE and row.sweep is not None and not more:
        raise JobEndedError(f"sweep {name!r} is complete, and no trial has failed")
    if phase is Phase.COMPLETE and not (from_scratch or more):
        raise JobEndedError(
            f"job {name!r} is complete and cannot continue; to train it again from the "
            f"start: pipollux rerun {name} --from-scratch"
        )
    check_submit_limits(session, [row.spec])
    if from_scratch:  # hints and metrics describe the end of the earlier training
        session.execute(delete(HintsRow).where(HintsRow.job == name))
        session.execute(delete(MetricRow).where(MetricRow.job == name))
    deadline = row.spec.get("deadline")
    row.ended_at = None
    row.deadline_at = None if deadline is None else now + deadline
    # What a job has waited for once does not hold it back again.
    begun = row.attempt > 0 or sweeps.has_begun(session, name)
    waits = () if begun else waits_of(session, name, row.spec)
    rerun = Rerun(row.max_restarts, from_scratch, waits, more)
    return journal.advance_job(session, row, rerun, now)


def _check_kinds(
    session: Session, submissions: Sequence[Submission], rows: Mapping[str, JobRow]
) -> None:
    """Raise `JobExistsError` if the name of a job belongs to a sweep or one of its trials."""
    entries = [entry for entry in submissions if entry.trial is None]
    reserved = sweeps.reserved(session, [e.name for e in entries if e.name not in rows])
    for entry in entries:
        row = rows.get(entry.name)
        _check_kind(entry, row, reserved.get(entry.name) if row is None else row.sweep)


def _check_kind(entry: Submission, row: JobRow | None, sweep: str | None) -> None:
    if sweep is not None and sweep != entry.name:
        raise JobExistsError(
            f"the name {entry.name!r} is that of a trial of sweep {sweep!r}; give the job another "
            "name"
        )
    if row is not None and (sweep is not None or entry.spec.get("sweep") is not None):
        raise JobExistsError(
            f"a {'job' if sweep is None else 'sweep'} named {entry.name!r} already exists; give "
            "this one another name, or run that one again with: pipollux rerun "
            f"{entry.name}"
        )


def _check_rerun(row: JobRow, *, from_scratch: bool) -> None:
    if row.trial is not None:
        raise JobEndedError(
            f"job {row.name!r} is a trial of sweep {row.sweep!r}; run its failed trials again "
            f"with: pipollux rerun {row.sweep}"
        )
    if row.sweep is not None and from_scratch:
        raise JobEndedError(
            f"{row.name!r} is a sweep, which is not run from scratch; submit it under another name"
        )


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
