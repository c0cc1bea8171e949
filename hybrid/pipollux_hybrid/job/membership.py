"""Who takes part in a job: memberships, each an ordered list of replicas.

Inside one run of a job there are memberships 1, 2, …: replicas join and leave while the others
train. A replica has an id that is never used twice; its rank is its place in the list. Numbers
grow, and some are left out, as not every membership that is proposed comes about.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pipollux_perfmodel.timing.params import SCHEDULES, ScheduleKind

from .pipeline_spec import PipelineSchedule

__all__ = ["Announcement", "JobPlace", "JoiningReplica", "Membership"]


class JobPlace(NamedTuple):
    """Where a job is in its script: loops over loaders are where replicas can join.

    Example:
        >>> JobPlace(epoch=2, loop=0) < JobPlace(epoch=2, loop=1)
        True
    """

    epoch: int
    loop: int
    """Loops over loaders that were done in this epoch."""


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
    """Nodes that they are on, of which a host may have several; 0: as many as hosts."""

    def rank(self, replica: str) -> int | None:
        """Return the rank of a replica; None: it does not take part."""
        return self.replicas.index(replica) if replica in self.replicas else None

    def to_json_object(self) -> dict[str, Any]:
        """Return it as what JSON can hold."""
        replicas = list(self.replicas)
        return {"number": self.number, "replicas": replicas, "num_nodes": self.num_nodes}

    @classmethod
    def from_json_object(cls, data: dict[str, Any]) -> Membership:
        """Return what :meth:`to_json_object` gave.

        Raises:
            KeyError, TypeError, ValueError: It is none.
        """
        replicas = tuple(str(replica) for replica in data["replicas"])
        return cls(int(data["number"]), replicas, int(data["num_nodes"]))


@dataclass(frozen=True)
class Announcement:
    """What a running job tells those who want to join it."""

    membership: Membership
    place: JobPlace
    balance: tuple[int, ...] = ()
    """Layers of each stage, which all replicas have in common; empty before there is a model."""
    cannot: str | None = None
    """Why nobody can join; None: replicas can."""
    processes: int = 1
    """Of each replica."""
    schedule: str = ""
    """In which order their stages work on micro-batches; empty: they do not say."""

    def order(self, num_stages: int) -> PipelineSchedule:
        """Return the same with its chunks, of which the balance has an entry each.

        Args:
            num_stages: Number K of stages.
        """
        chunks = max(len(self.balance) // num_stages, 1)
        usual: ScheduleKind = "interleaved" if chunks > 1 else "1f1b"
        known = next((kind for kind in SCHEDULES if kind == self.schedule), usual)
        return PipelineSchedule(known, chunks)

    def to_json_object(self) -> dict[str, Any]:
        """Return it as what JSON can hold."""
        balance = list(self.balance)
        place = list(self.place)
        told = {"place": place, "balance": balance, "processes": self.processes}
        told["schedule"] = self.schedule
        return {**self.membership.to_json_object(), **told}

    @classmethod
    def from_json_object(cls, data: dict[str, Any]) -> Announcement:
        """Return what :meth:`to_json_object` gave.

        Raises:
            KeyError, TypeError, ValueError: It is none.
        """
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
    """Whether it waits at the beginning of a loop; else it is on its way there."""
    place: JobPlace = field(default=JobPlace(0, 0))
