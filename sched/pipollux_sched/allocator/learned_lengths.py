"""Estimates of job lengths from the completed jobs of a store."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from pipollux_perfmodel import HintsError, SchedHints, SpeedupFunction
from pipollux_policies import CompletedJob, LengthHistory, SpeedupCallable, family_of
from pipollux_sched.spec.job import JobSpec, parse_job
from pipollux_sched.store import CompletedRecord, Store

from .hints import worth

MOST_ASSUMED = 0.99
"""Share of a job's remaining samples that it is assumed to have trained since its hints, and it has
a sample left: it has not ended, and may evaluate its model for a while. Policies take a job without
work left for one that only has to be started to end."""


class LearnedLengths:
    """The history of a store's completed jobs; reads only new ones."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._history = LengthHistory()
        self._since = 0.0
        self._last: frozenset[str] = frozenset()

    def read(self) -> LengthHistory:
        """Return the history, including the jobs that have completed since the last call."""
        found = self._store.overview.completed(self._since)
        new = [record for record in found if record.name not in self._last]
        if found:
            newest = found[-1].ended_at
            known = self._last if newest == self._since else frozenset()
            self._since = newest
            self._last = known | {record.name for record in found if record.ended_at == newest}
        self._history.extend(job for job in map(completed_job, new) if job is not None)
        return self._history


def completed_job(record: CompletedRecord) -> CompletedJob | None:
    """Return the length of a completed job; None: unknown, or of another version."""
    try:
        spec, hints = parse_job(record.spec), SchedHints.from_json_object(record.hints)
    except (HintsError, ValueError):
        return None  # of another version
    trained, left = hints.trained_samples, hints.remaining_samples
    most = max(hints.max_profiled_replicas, 1)
    own = worth(hints, spec.num_stages, (), most).speedups.get(spec.num_stages)
    if not trained or own is None or not own.base_goodput > 0:
        return None
    whole = whole_samples(hints, own, record.ended_at - record.time)
    declared = None if left is None else trained + left
    return CompletedJob(family_name(spec), whole, whole / own.base_goodput, declared)


def whole_samples(hints: SchedHints, own: SpeedupFunction, since: float) -> float:
    """Return how many samples a completed job has trained, by its last hints.

    These are `since` seconds older than the end of the job: the samples that it could have trained
    since then are added, up to the remaining ones.
    """
    most = max(hints.max_profiled_replicas, 1)
    could = own.base_goodput * most * max(since, 0.0)
    return (hints.trained_samples or 0.0) + min(hints.remaining_samples or 0.0, could)


def family_name(spec: JobSpec) -> str:
    """Return the family of a job, by which lengths are estimated; its own name if it has none."""
    return family_of(spec.name) if spec.family is None else spec.family or spec.name


def declared_lengths(
    jobs: Iterable[tuple[JobSpec, SchedHints | None]],
) -> dict[str, tuple[float, ...]]:
    """Return the declared numbers of samples of unfinished jobs by family, by their hints."""
    found: dict[str, list[float]] = {}
    for spec, hints in jobs:
        if hints is not None and None not in (hints.trained_samples, hints.remaining_samples):
            whole = (hints.trained_samples or 0.0) + (hints.remaining_samples or 0.0)
            if 0 < whole < math.inf:
                found.setdefault(family_name(spec), []).append(whole)
    return {family: tuple(samples) for family, samples in found.items()}


def length_of(
    spec: JobSpec,
    hints: SchedHints | None,
    own: SpeedupCallable,
    history: LengthHistory | None,
    *,
    has_trained: bool = True,
    relatives: Sequence[float] = (),
    work_since: float = 0.0,
) -> dict[str, Any]:
    """Return the estimate of a job's remaining training, as fields of `JobInfo`.

    Implausible `hints` are left out; without `has_trained` they are inherited. `own` is the speedup
    of its own shape, `relatives` are declared numbers of samples of other jobs of its family.

    `work_since` is what the job has trained since the hints, in seconds of one replica. Without it
    a job that was just stopped, whose hints are new, would seem to be ahead of those that run.
    """
    if hints is None or not isinstance(own, SpeedupFunction) or not own.base_goodput > 0:
        return {}
    trained = hints.trained_samples if has_trained else 0.0
    left, goodput = hints.remaining_samples, own.base_goodput
    since = work_since * goodput
    if left is not None and since > 0:
        since = min(since, MOST_ASSUMED * left)
        left = max(left - since, 1.0)
    trained = None if trained is None else trained + since
    told = {} if left is None else {"remaining_work": left / goodput}
    if trained is not None:
        told["work_done"] = trained / goodput
    if not all(map(math.isfinite, told.values())):
        return {}
    if trained is None or history is None:
        return told
    if not history.knows(declared=left is not None) and (left is not None or not relatives):
        return told
    family = family_name(spec)
    declared = None if left is None else trained + left
    return {
        # A declared length is more precise than the family.
        "family": family if left is None else "",
        "work_left": history.work_left(family, trained, goodput, declared, relatives),
        "work_done": told["work_done"],
    }
