"""Views of sweeps: the list, and the table of a sweep's trials."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from pipollux_sched.lifecycle import SWEEPING, Phase
from pipollux_sched.report.sweep_text import TEAM_FULL, spell_progress
from pipollux_sched.spec.sweep import SweepSpec
from pipollux_sched.store import JobRecord, Store, TrialRecord, TrialState, UnknownJobError
from pipollux_sched.store.sweeps import best_of

from .models import JobView, SweepDetails, SweepView, TrialView


def list_sweeps(store: Store) -> list[SweepView]:
    """Return all sweeps, in the order of submission."""
    counts = store.sweeps.counts()
    return [
        _sweep(job, counts.get(job.name, {}), store.sweeps.best(job.name, _spec(job)))
        for job in store.sweeps.all()
    ]


def sweep_details(store: Store, name: str) -> SweepDetails:
    """Return a sweep and its trials; raise `UnknownJobError` if there is no such sweep."""
    job = store.job(name)
    if not job.is_sweep:
        raise UnknownJobError(f"job {name!r} is no sweep; see it with: pipollux describe {name}")
    spec = _spec(job)
    jobs, curves = store.sweeps.jobs(name), store.sweeps.curves(name, spec.metric)
    records, trials = store.sweeps.trials(name), []
    for trial in records:
        curve = curves.get(trial.number)
        latest = curve[max(curve)] if curve and not trial.state.ended else trial.value
        trials.append(_trial(trial, jobs.get(trial.number), latest))
    # From the same records, so that the sums fit the trials whatever ends meanwhile.
    counts = Counter(trial.state for trial in records)
    return SweepDetails(**dict(_sweep(job, counts, best_of(records, spec))), trials=trials)


def with_progress(store: Store, jobs: Sequence[JobRecord]) -> list[JobRecord]:
    """Return the jobs; the message of a sweep in progress says how far it has come by now.

    The stored message is that of the controller's last pass.
    """
    if not any(map(_in_progress, jobs)):
        return [*jobs]
    counts = store.sweeps.counts(jobs[0].name if len(jobs) == 1 else None)
    return [
        _told(job, counts.get(job.name, {}), store.sweeps.best(job.name, _spec(job)))
        if _in_progress(job)
        else job
        for job in jobs
    ]


def _told(job: JobRecord, counts: Mapping[TrialState, int], best: TrialRecord | None) -> JobRecord:
    """Return a sweep in progress with a message that fits these trials."""
    state, full = job.state, TEAM_FULL in job.state.message
    message = spell_progress(counts, best, _spec(job), team_full=full)
    conditions = tuple(
        replace(entry, message=message) if entry is state.condition else entry
        for entry in state.conditions
    )
    return replace(job, state=replace(state, conditions=conditions))


def _in_progress(job: JobRecord) -> bool:
    return job.phase is Phase.RUNNING and job.state.reason == SWEEPING


def _sweep(job: JobRecord, counts: Mapping[TrialState, int], best: TrialRecord | None) -> SweepView:
    spec, view = _spec(job), JobView.of(job)
    told = _told(job, counts, best) if _in_progress(job) else job
    known = {state: counts.get(state, 0) for state in TrialState}
    # The trials that a search has not proposed yet wait, too.
    known[TrialState.WAITING] += spec.num_trials - sum(counts.values())
    return SweepView(
        name=job.name,
        phase=view.listed_phase,
        message=told.state.message,
        submitted_at=job.submitted_at,
        ended_at=job.ended_at,
        user=job.spec.get("user"),
        metric=spec.metric,
        direction=spec.direction,
        num_trials=spec.num_trials,
        trial_states=known,
        best=None if best is None else _trial(best, None, best.value),
    )


def _trial(trial: TrialRecord, job: JobRecord | None, value: float | None) -> TrialView:
    return TrialView(
        number=trial.number,
        job=trial.job,
        parameters=dict(trial.parameters),
        state=trial.state,
        phase=None if job is None else JobView.of(job).listed_phase,
        value=value,
    )


def _spec(job: JobRecord) -> SweepSpec:
    return SweepSpec.model_validate(job.spec["sweep"])
