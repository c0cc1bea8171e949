"""Views of sweeps: the list, and the table of a sweep's trials."""

from __future__ import annotations

from collections.abc import Mapping

from pipollux_sched.spec.sweep import SweepSpec
from pipollux_sched.store import JobRecord, Store, TrialRecord, TrialState, UnknownJobError

from .models import JobView, SweepDetails, SweepView, TrialView


def list_sweeps(store: Store) -> list[SweepView]:
    """Return all sweeps, in the order of submission."""
    counts = store.sweeps.counts()
    return [_sweep(store, job, counts.get(job.name, {})) for job in store.sweeps.all()]


def sweep_details(store: Store, name: str) -> SweepDetails:
    """Return a sweep and its trials; raise `UnknownJobError` if there is no such sweep."""
    job = store.job(name)
    if not job.is_sweep:
        raise UnknownJobError(f"job {name!r} is no sweep; see it with: pipollux describe {name}")
    spec = _spec(job)
    counts = store.sweeps.counts(name).get(name, {})
    jobs, curves = store.sweeps.jobs(name), store.sweeps.curves(name, spec.metric)
    trials = []
    for trial in store.sweeps.trials(name):
        curve = curves.get(trial.number)
        latest = curve[max(curve)] if curve and not trial.state.ended else trial.value
        trials.append(_trial(trial, jobs.get(trial.number), latest))
    return SweepDetails(**dict(_sweep(store, job, counts)), trials=trials)


def _sweep(store: Store, job: JobRecord, counts: Mapping[TrialState, int]) -> SweepView:
    spec, view = _spec(job), JobView.of(job)
    best = store.sweeps.best(job.name, spec)
    known = {state: counts.get(state, 0) for state in TrialState}
    # The trials that a search has not proposed yet wait, too.
    known[TrialState.WAITING] += spec.num_trials - sum(counts.values())
    return SweepView(
        name=job.name,
        phase=view.listed_phase,
        message=job.state.message,
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
