"""One moment of a scheduler, as `pipollux top` shows it: read from the store, no server needed."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipollux_sched.event_line import TELLING_TYPES
from pipollux_sched.lifecycle import Phase
from pipollux_sched.occupancy import NodeOccupancy, holding, occupancy
from pipollux_sched.store import GenerationRecord, JobRecord, Point, StateDir, Store

from .sparkline import Span

MOST_JOBS = 200
"""Jobs that are looked at closely: more than any terminal has lines for."""
MOST_EVENTS = 60

_ORDER = (Phase.RUNNING, Phase.RESTARTING, Phase.QUEUED, Phase.SUSPENDED, Phase.CREATED)


@dataclass(frozen=True)
class JobView:
    """One job."""

    number: int
    """Its place in the order in which jobs came, from 1; its colour and its badge."""
    record: JobRecord
    point: Point | None
    spans: tuple[Span, ...]
    """When it held how many slots."""

    @property
    def name(self) -> str:
        """Short for ``record.name``."""
        return self.record.name

    @property
    def num_replicas(self) -> int:
        """Replicas that hold slots."""
        return len(holding(self.record)[0])

    @property
    def num_stages(self) -> int:
        """K of these replicas, or of those that it would have."""
        return holding(self.record)[1]


@dataclass(frozen=True)
class ClusterView:
    """One moment of a scheduler."""

    time: float
    served: bool
    """Whether a scheduler runs."""
    policy: str
    nodes: tuple[NodeOccupancy, ...]
    jobs: tuple[JobView, ...]
    """Those that hold something first, those that have ended last, the latest before the others."""
    phases: Mapping[Phase, int]
    """How many jobs are in each phase, also of those that are not in `jobs`."""
    events: Sequence[Mapping[str, Any]]
    """The last ones, oldest first."""
    numbers: Mapping[str, int]
    """The number of every job, by name."""

    @property
    def goodput(self) -> float | None:
        """Samples per second of all jobs that run, as far as they told; None: none did."""
        told = [
            job.point.goodput
            for job in self.jobs
            if job.point is not None and job.point.goodput and job.record.state.launched
        ]
        return sum(told) if told else None


def look(store: Store, directory: StateDir) -> ClusterView:
    """Look at what a scheduler keeps."""
    records = store.jobs()
    numbers = {record.name: number for number, record in enumerate(records, 1)}
    points = store.last_points()
    chosen = sorted(records, key=_place)[:MOST_JOBS]
    now = time.time()
    served_by = store.latest_events(1, types=["cluster"])
    return ClusterView(
        time=now,
        served=directory.is_served(),
        policy=_policy_name(served_by[-1]["policy"]) if served_by else "",
        nodes=tuple(occupancy(store.nodes(), records).values()),
        jobs=tuple(
            JobView(
                numbers[record.name],
                record,
                points.get(record.name),
                tuple(_span(launch, now) for launch in store.generations(record.name)),
            )
            for record in chosen
        ),
        phases={phase: sum(record.phase is phase for record in records) for phase in Phase},
        events=store.latest_events(MOST_EVENTS, types=TELLING_TYPES),
        numbers=numbers,
    )


def _place(record: JobRecord) -> tuple[int, float]:
    if record.phase.ended:
        return len(_ORDER), -(record.ended_at or 0.0)
    return _ORDER.index(record.phase), record.submitted_at


def _span(launch: GenerationRecord, now: float) -> Span:
    end = now if launch.ended_at is None else launch.ended_at
    return Span(launch.launched_at, end, len(launch.nodes) * launch.num_stages)


def _policy_name(class_name: str) -> str:
    return class_name.removesuffix("Policy").lower()
