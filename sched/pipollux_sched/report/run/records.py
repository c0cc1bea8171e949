"""The records of a run, built from its events: nodes, jobs, attempts, measurements.

An attempt (one start of a job) passes through these times; each is None until it is seen:

    allocated --> started --> first_step --> stopping --> ended
                  |  starting  |  training   | stopping |
                  '------------- holds its slots -------'

In an elastic resize, the record of the current membership ends, and the next one begins, with its
first step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from pipollux_perfmodel import StageEvent
from pipollux_perfmodel.timing.params import ScheduleKind

FINISHED = ("Complete", "Failed", "Cancelled")


class NodeRun(NamedTuple):
    """A node of the cluster: its name, its number of slots and their kind (cpu, gpu)."""

    name: str
    slots: int
    kind: str = ""


class RunPoint(NamedTuple):
    """A job's report at one optimizer step. Times in seconds, goodput in samples/s."""

    time: float
    attempt: int
    step: int
    epoch: int | None
    samples: int | None
    loss: float | None
    batch_size: int | None
    atomic_bsz: int | None
    accum_steps: int | None
    num_replicas: int | None
    membership: int
    step_time: float | None
    predicted_step_time: float | None
    goodput: float | None
    efficiency: float | None


class StepTimeline(NamedTuple):
    """One optimizer step of one replica: the times at which each stage worked on a micro-batch."""

    attempt: int
    step: int | None
    num_stages: int
    num_microbatches: int
    events: tuple[StageEvent, ...]
    schedule: ScheduleKind = "gpipe"

    @property
    def makespan(self) -> float:
        """Seconds from the start of the first stage to the end of the last one."""
        return max(e.end for e in self.events) - min(e.start for e in self.events)


class AllocationRecord(NamedTuple):
    """One decision of the scheduler about one job."""

    time: float
    job: str
    nodes: tuple[str, ...]
    previous: tuple[str, ...]
    num_stages: int
    num_replicas: int
    batch_size: int | None
    speedup: float | None
    why: str
    elastic: bool
    why_restart: str
    """The reason of a restart; empty: it is not a restart, or nothing ran."""


@dataclass
class Attempt:
    """One membership of a start of a job. All times are unix times; None if not seen."""

    number: int
    nodes: tuple[str, ...]
    num_stages: int
    membership: int = 1
    elastic: bool = False
    pause_seconds: float | None = None
    """The pause of that resize, in seconds."""
    replicas: tuple[int, ...] = ()
    """Id of the replica on each of `nodes`; empty: unknown."""
    arrivals: Mapping[int, float] = field(default_factory=dict)
    """Start times of the replicas that joined with this membership, by id."""
    arriving: Mapping[int, float] = field(default_factory=dict)
    """Start times of the replicas that join with the next membership, by id."""
    allocated: float | None = None
    started: float | None = None
    first_step: float | None = None
    first_step_number: int | None = None
    stopping: float | None = None
    ended: float | None = None
    stopped_step: int | None = None
    outcome: str = ""
    restart_seconds: float | None = None

    @property
    def num_replicas(self) -> int:
        """Number of pipeline replicas, one per entry of `nodes`."""
        return len(self.nodes)

    @property
    def title(self) -> str:
        """The title of the membership: `attempt 2, membership 3`."""
        more = f", membership {self.membership}" if self.membership > 1 else ""
        return f"attempt {self.number}{more}"

    @property
    def active(self) -> bool:
        """Whether it has been started and has not ended."""
        return self.started is not None and self.ended is None


@dataclass
class JobRun:
    """A job from submission to its end, according to the events."""

    name: str
    num_stages: int = 1
    num_microbatches: int | None = None
    synchronization: str = ""
    """What pushes and pulls cost by its last hints; empty: unknown, or all-reduces."""
    owner: str = ""
    """Its user and team, as far as known."""
    program: str = ""
    """Its script or image, with shell-quoted arguments."""
    phase: str = "Queued"
    message: str = ""
    submitted: float | None = None
    ended: float | None = None
    num_epochs: int | None = None
    final_step: int | None = None
    final_epoch: int | None = None
    num_failures: int = 0
    attempts: list[Attempt] = field(default_factory=list)
    allocations: list[AllocationRecord] = field(default_factory=list)
    points: list[RunPoint] = field(default_factory=list)
    timelines: list[StepTimeline] = field(default_factory=list)

    @property
    def started(self) -> list[Attempt]:
        """Attempts whose processes were started, with one entry per membership."""
        return [g for g in self.attempts if g.started is not None]

    @property
    def num_restarts(self) -> int:
        """Number of attempts after the first."""
        return max(0, len(self.started) - self.num_resizes - 1)

    @property
    def num_resizes(self) -> int:
        """Number of elastic resizes, including losses of replicas that the others survived."""
        return sum(g.elastic for g in self.started)

    @property
    def current(self) -> Attempt | None:
        """The attempt that runs now, if any."""
        return next((g for g in reversed(self.attempts) if g.active), None)

    @property
    def last_point(self) -> RunPoint | None:
        """The latest report, if any."""
        return self.points[-1] if self.points else None


@dataclass
class Run:
    """All records of a run. `start` and `end` are the unix times of the first and last event."""

    nodes: dict[str, NodeRun] = field(default_factory=dict)
    policy: str = ""
    start: float | None = None
    end: float | None = None
    jobs: dict[str, JobRun] = field(default_factory=dict)
    nodes_declared: bool = False

    @property
    def seconds(self) -> float:
        """Length of the run."""
        return 0.0 if self.start is None or self.end is None else self.end - self.start

    @property
    def allocations(self) -> list[AllocationRecord]:
        """Every decision about every job, in chronological order."""
        return sorted((a for j in self.jobs.values() for a in j.allocations), key=lambda a: a.time)
