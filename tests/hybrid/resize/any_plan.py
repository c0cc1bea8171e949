"""What a run of any shape does, and when its replicas come, go and die."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

__all__ = ["MOST_REPLICAS", "Happening", "LoopPlace", "RunEvent", "RunOperation", "RunPlan"]

MOST_REPLICAS = 4
"""Of a run; whoever would be one more does not come."""


class LoopPlace(NamedTuple):
    """The beginning of an iteration."""

    epoch: int
    loop: int
    """Which of the epoch's loops."""
    index: int
    """Samples that were taken in it before."""


@dataclass(frozen=True)
class RunOperation:
    """One replica that comes, leaves or dies, or a batch that gets another shape."""

    kind: str
    """joins, leaves, dies, or reshapes."""
    rank: int = 0
    """Of the replica, counted round among those that are neither about to leave nor to die."""
    point: str = ""
    """Where it dies; a joining replica only where this is not empty."""
    late: bool = False
    """Whether it dies in the last pass of the iteration, not in the first."""
    stage: int = 0
    """Of its process that dies, where each stage has one."""
    shape: tuple[int, int, int] = (0, 0, 0)
    """What the goodput model proposes: samples, accumulation steps, micro-batches."""


@dataclass(frozen=True)
class RunEvent:
    """What happens at one place."""

    place: LoopPlace
    """At this one or the next one after it."""
    operations: tuple[RunOperation, ...]
    waits: bool
    """Whether the replicas wait there until the next membership has met."""
    settles: bool
    """Whether it happens only when all that was before it has come about."""


@dataclass(frozen=True)
class Happening:
    """An event as it came about; written by the first replica that is there, and read by all."""

    place: LoopPlace
    member: int
    """Number of the membership."""
    joins: tuple[str, ...]
    """Names of those that come."""
    leaves: tuple[str, ...]
    """Ids of those that are to leave."""
    dies: tuple[str, ...]
    """Ids of those that are to die."""
    points: tuple[tuple[str, bool, int], ...]
    """Where each of them does, whether late, and of which stage the process is."""
    doomed: tuple[str, ...]
    """Names of those joining replicas that die before they take part."""
    shape: tuple[int, int, int]

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Happening:
        data = json.loads(text)
        return cls(
            place=LoopPlace(*data["place"]),
            member=data["member"],
            joins=tuple(data["joins"]),
            leaves=tuple(data["leaves"]),
            dies=tuple(data["dies"]),
            points=tuple((point, late, stage) for point, late, stage in data["points"]),
            doomed=tuple(data["doomed"]),
            shape=tuple(data["shape"]),
        )


@dataclass(frozen=True)
class RunPlan:
    """A run of any shape. A last epoch, in which nothing happens, comes after its epochs."""

    replicas: int
    kind: str
    """indices, stream or text."""
    size: int
    batch_size: int
    shuffle: bool
    largest: int
    """Samples that a replica takes at once, where the batch size is adaptive; 0: it is fixed."""
    loops: tuple[str, ...]
    """Of an epoch: train, again (over the same loader), other (over another one), evaluate, partly
    (over the same loader, and left by `break`)."""
    epochs: int
    stages: int
    microbatches: int
    """0: the library chooses."""
    schedule: str
    """Of the engine that has a process for each stage; empty: one process has all stages."""
    saves: str
    """Whether checkpoints are written all the time: no, yes, or background."""
    events: tuple[RunEvent, ...]
    over: str
    """What sends gradients: gloo, or the stand-in for NCCL."""

    @property
    def processes(self) -> int:
        """Of each replica."""
        return self.stages if self.schedule else 1

    @property
    def max_batch_size(self) -> int:
        """Largest batch size, where it is adaptive: any number of replicas has a share of it."""
        return max(2 * self.batch_size, 2 * MOST_REPLICAS)

    @property
    def accumulates(self) -> bool:
        """Whether amounts are added up: where replicas die these are lost."""
        return not any(x.kind == "dies" for event in self.events for x in event.operations)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RunPlan:
        data: dict[str, Any] = json.loads(text)
        events = [
            RunEvent(
                place=LoopPlace(*event["place"]),
                operations=tuple(
                    RunOperation(**{**x, "shape": tuple(x["shape"])}) for x in event["operations"]
                ),
                waits=event["waits"],
                settles=event["settles"],
            )
            for event in data["events"]
        ]
        return cls(**{**data, "loops": tuple(data["loops"]), "events": tuple(events)})
