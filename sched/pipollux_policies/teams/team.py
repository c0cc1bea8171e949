"""Teams as policies see them: quotas, loans and limits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

DEFAULT_NOTICE = 60.0
"""Seconds from the notice to return borrowed slots until they are reclaimed."""

DEFAULT_TURN = 3600.0
"""Seconds of a turn at borrowed slots that cannot be divided among several teams."""


@dataclass(frozen=True)
class Team:
    """A team: Kueue's ClusterQueue in one cohort of all teams, Slurm's account.

    >>> Team("vision", quota=8, borrow=4).most
    12
    """

    name: str
    quota: int = 0
    """Slots that it has whenever its jobs can use them: Kueue's nominalQuota."""
    borrow: int | None = None
    """Slots beyond its quota that it may hold; None: no limit. Kueue's borrowingLimit."""
    lend: int | None = None
    """Slots of its quota that others may hold; None: all. Kueue's lendingLimit."""
    weight: float = 1.0
    """Its share of borrowed slots: Slurm's fairshare, Kueue's fair sharing weight."""
    max_jobs: int | None = None
    """Jobs that may hold slots at once: Slurm's GrpJobs."""
    max_slots_per_job: int | None = None
    """Slots that one job may hold: Slurm's MaxTRESPerJob."""

    @property
    def most(self) -> int | None:
        """The most slots that it may hold; None: no limit."""
        return None if self.borrow is None else self.quota + self.borrow

    @property
    def kept(self) -> int:
        """Slots of its quota that it does not lend, used or not."""
        return 0 if self.lend is None else max(self.quota - self.lend, 0)


@dataclass(frozen=True)
class Teams:
    """All teams of a cluster. A team without an entry has no quota, and may borrow."""

    by_name: Mapping[str, Team] = field(default_factory=dict)
    notice: float = DEFAULT_NOTICE
    turn: float = DEFAULT_TURN
    """Seconds for which one of several teams may borrow slots that cannot be divided; 0: no end."""

    def __getitem__(self, name: str) -> Team:
        return self.by_name.get(name) or Team(name)

    def without_loans(self, names: Iterable[str]) -> Teams:
        """Return the same teams, and further ones of these names, none of which borrows."""
        kept = self.by_name.keys() | set(names)
        return Teams({name: replace(self[name], borrow=0) for name in sorted(kept)}, 0.0)
