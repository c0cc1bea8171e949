"""Memberships: ordered lists of the replicas that train together.

An attempt of a job has memberships 1, 2, …, as replicas join and leave while the others train. A
replica has an id that is never reused; its rank is its index in the list. Numbers ascend with gaps,
as not every proposed membership is entered.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pipollux_perfmodel.timing.params import SCHEDULES, ScheduleKind

from .pipeline_spec import PipelineSchedule


class JobPlace(NamedTuple):
    """The position of a job in its script; replicas join at loops over loaders.

    Example:
        >>> JobPlace(epoch=2, loop=0) < JobPlace(epoch=2, loop=1)
        True
    """

    epoch: int
    loop: int
    """Number of loops over loaders completed in this epoch."""


@dataclass(frozen=True)
class Membership:
    """The replicas that train together.

    Example:
        >>> Membership(3, ("a", "b")).rank("b")
        1
    """

    number: int
    replicas: tuple[str, ...]
    """Their ids in the order of ranks."""
    num_nodes: int = 0
    """Number of nodes they run on, several of which may share a host; 0: the number of hosts."""
    network_level: int = 0
    """Level of the network at which these nodes meet; 0: as before."""

    def rank(self, replica: str) -> int | None:
        """Return the rank of a replica; None: it is not a member."""
        return self.replicas.index(replica) if replica in self.replicas else None

    def to_json_object(self) -> dict[str, Any]:
        """Return the membership as a JSON object."""
        replicas = list(self.replicas)
        nodes = {"num_nodes": self.num_nodes, "network_level": self.network_level}
        return {"number": self.number, "replicas": replicas, **nodes}

    @classmethod
    def from_json_object(cls, data: dict[str, Any]) -> Membership:
        """Return the membership of a JSON object; KeyError, TypeError or ValueError if invalid."""
        replicas = tuple(str(replica) for replica in data["replicas"])
        nodes = int(data["num_nodes"]), int(data.get("network_level", 0))
        return cls(int(data["number"]), replicas, *nodes)


@dataclass(frozen=True)
class Announcement:
    """The job announcement: information for replicas that want to join."""

    membership: Membership
    place: JobPlace
    balance: tuple[int, ...] = ()
    """Number of layers of each stage, equal on all replicas; empty before there is a model."""
    cannot: str | None = None
    """Why nobody can join; None: replicas can."""
    processes: int = 1
    schedule: str = ""
    """Pipeline schedule of its stages; empty: not given."""

    def order(self, num_stages: int) -> PipelineSchedule:
        """Return the schedule with its chunks; the balance has one entry per chunk."""
        chunks = max(len(self.balance) // num_stages, 1)
        usual: ScheduleKind = "interleaved" if chunks > 1 else "1f1b"
        known = next((kind for kind in SCHEDULES if kind == self.schedule), usual)
        return PipelineSchedule(known, chunks)

    def to_json_object(self) -> dict[str, Any]:
        """Return the announcement as a JSON object."""
        balance = list(self.balance)
        place = list(self.place)
        fields = {"place": place, "balance": balance, "processes": self.processes}
        fields["schedule"] = self.schedule
        return {**self.membership.to_json_object(), **fields}

    @classmethod
    def from_json_object(cls, data: dict[str, Any]) -> Announcement:
        """Return the announcement of a JSON object; errors as of :class:`Membership`."""
        epoch, loop = data["place"]
        return cls(
            Membership.from_json_object(data),
            JobPlace(int(epoch), int(loop)),
            tuple(int(count) for count in data["balance"]),
            processes=int(data.get("processes", 1)),
            schedule=str(data.get("schedule", "")),
        )


@dataclass(frozen=True)
class JoiningReplica:
    """A replica that wants to join."""

    replica: str
    host: str
    waiting_to_join: bool = False
    """Whether it waits at the beginning of a loop; else it has not reached it yet."""
    place: JobPlace = field(default=JobPlace(0, 0))
