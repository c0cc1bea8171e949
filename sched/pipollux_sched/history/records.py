"""The history of a scheduler's store: replayable jobs, nodes, and settings.

A job can be replayed if it has trained and reported a model, however it ended. A job that is not
complete is replayed up to its progress at its last hints, and counts as done then.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from pipollux_perfmodel import HintsError, SchedHints, SpeedupFunction
from pipollux_policies import (
    DEFAULT_RESTART_SECONDS,
    POLICIES,
    NodeInfo,
    make_policy,
    policy_text,
)
from pipollux_sched.allocator.inherited_hints import without_rows
from pipollux_sched.allocator.job_infos import hints_worth, node_info
from pipollux_sched.allocator.learned_lengths import whole_samples
from pipollux_sched.lifecycle import Phase
from pipollux_sched.spec.cluster import NodeSpec
from pipollux_sched.spec.job import JobSpec, SpecError, parse_job
from pipollux_sched.spec.teams import TeamsSpec
from pipollux_sched.store import AttemptRecord, JobRecord, Store
from pipollux_sched.store.families import key_of
from pipollux_sched.views.teams import stored_teams

_ALL = 2**31


class LeftOut(NamedTuple):
    """A job that cannot be replayed."""

    job: str
    reason: str
    """The predicate of a sentence with the job as subject."""


@dataclass(frozen=True)
class PastJob:
    """A replayable job of a history. Times are seconds since the epoch."""

    spec: JobSpec
    hints: SchedHints
    samples: float
    """Samples trained at `until`, in units of the initial batch size's samples."""
    submitted: float
    until: float
    """When it completed or, if it did not, when it sent its last hints."""
    phase: Phase
    attempts: tuple[AttemptRecord, ...]
    """From its first start on, one entry per membership."""
    lineage: Any
    """Equal for jobs that inherit from each other."""

    @property
    def name(self) -> str:
        """Short for ``spec.name``."""
        return self.spec.name

    @property
    def complete(self) -> bool:
        """Whether it completed its training."""
        return self.phase is Phase.COMPLETE


@dataclass(frozen=True)
class SchedulerHistory:
    """The history of a scheduler."""

    jobs: tuple[PastJob, ...]
    """In the order of submission."""
    left_out: tuple[LeftOut, ...]
    nodes: Mapping[str, NodeInfo]
    teams: TeamsSpec | None
    policy: str | None
    """Its last policy with its options; None: not one of `POLICIES`."""
    interval: float
    """Seconds between two of its decisions."""
    restart_seconds: float
    """Assumed cost of a restart if none was measured."""


def read_history(store: Store) -> SchedulerHistory:
    """Return the history of a store; raise `SpecError` for nodes or teams of another version."""
    attempts: defaultdict[str, list[AttemptRecord]] = defaultdict(list)
    for record, _ in store.overview.attempts_since(0.0, _ALL):
        attempts[record.job].append(record)
    reader = _JobReader(store, attempts)
    found = [reader.read(job) for job in store.jobs()]
    settings = next(iter(store.latest_events(1, types=["cluster"])), {})
    nodes = {
        name: node_info(NodeSpec.model_validate({**record.spec, "draining": False}))
        for name, record in store.nodes().items()
    }
    return SchedulerHistory(
        jobs=tuple(
            sorted(
                (job for job in found if isinstance(job, PastJob)), key=lambda job: job.submitted
            )
        ),
        left_out=tuple(job for job in found if isinstance(job, LeftOut)),
        nodes=nodes,
        teams=stored_teams(store),
        policy=_policy(settings),
        interval=float(settings.get("interval") or 60.0),
        restart_seconds=float(settings.get("restart_seconds") or DEFAULT_RESTART_SECONDS),
    )


def _policy(settings: Mapping[str, Any]) -> str | None:
    logged = settings.get("policy")
    name = next((name for name in POLICIES if type(make_policy(name)).__name__ == logged), None)
    return name and policy_text(name, settings.get("policy_options") or {})


class _JobReader:
    """Reads jobs of a store; queries for all jobs are made once."""

    def __init__(self, store: Store, attempts: Mapping[str, list[AttemptRecord]]) -> None:
        self._store = store
        self._attempts = attempts
        self._hints, self._times = store.hints(), store.overview.hint_times()
        self._points = store.last_points()

    def read(self, job: JobRecord) -> PastJob | LeftOut:
        began = [
            record
            for record in self._attempts.get(job.name, ())
            if record.attempt >= job.state.first_attempt
        ]
        if not began:
            return LeftOut(job.name, "never started")
        if job.name not in self._hints:
            return LeftOut(job.name, "sent no hints, so how fast it trains is not known")
        try:
            spec = parse_job(job.spec)
            hints = without_rows(SchedHints.from_json_object(self._hints[job.name]))
        except (SpecError, HintsError) as error:
            return LeftOut(job.name, f"is of another version of Pipollux: {error}")
        said = hints_worth(spec, hints)
        if said.doubt is not None:
            return LeftOut(job.name, f"sent hints that {said.doubt}")
        if spec.num_stages not in said.speedups:
            return LeftOut(job.name, "sent no model of its step times yet")
        samples, until = self._trained(job, hints, said.speedups[spec.num_stages])
        submitted = self._submitted(job)
        if not samples > 0 or until <= submitted:
            return LeftOut(job.name, "did not report how much it trained")
        lineage = key_of(job.name, job.spec) or ("", job.name)
        return PastJob(spec, hints, samples, submitted, until, job.phase, tuple(began), lineage)

    def _trained(
        self, job: JobRecord, hints: SchedHints, own: SpeedupFunction
    ) -> tuple[float, float]:
        """Return how many samples a job trained, and until when."""
        told = self._times[job.name]
        ended = job.ended_at if job.phase is Phase.COMPLETE else None
        if hints.trained_samples is not None:
            since = 0.0 if ended is None else ended - told
            return whole_samples(hints, own, since), told if ended is None else ended
        point = self._points.get(job.name)
        if point is None:
            return 0.0, told
        worth = 1.0 if point.efficiency is None else point.efficiency
        return point.samples * worth, point.time if ended is None else ended

    def _submitted(self, job: JobRecord) -> float:
        """Return when it was submitted, or last started from scratch."""
        if job.state.first_attempt > 1:
            again = self._store.latest_events(1, job=job.name, types=["rerun"])
            return float(again[0]["time"]) if again else job.submitted_at
        return job.submitted_at
