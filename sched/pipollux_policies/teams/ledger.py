"""Slots that teams hold, borrow and lend, as numbers and as explanations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from pipollux_utils.text import count

from .shares import fill
from .team import Team, Teams


@dataclass(frozen=True)
class TeamUse:
    """The slots of a team."""

    team: Team
    used: int
    lent: int = 0
    until: float | None = None
    """When it returns slots after a notice, in seconds since the epoch; None: no notice."""

    @property
    def borrowed(self) -> int:
        """Slots that it holds beyond its quota."""
        return max(self.used - self.team.quota, 0)


def capacity_of(slots: Mapping[str, int], held: Mapping[str, int]) -> int:
    """Return the slots that can be lent: all of nodes that accept jobs, and those held on others.

    >>> capacity_of({"a": 4}, {"a": 1, "drains": 2})
    6
    """
    return sum(slots.values()) + sum(n for node, n in held.items() if node not in slots)


def team_uses(
    teams: Teams, held: Mapping[str, int], capacity: int, until: Mapping[str, float]
) -> dict[str, TeamUse]:
    """Return the slots of every team, by name; `until` as in `TeamUse`. Slots in no quota are lent
    before those of teams; teams lend evenly.
    """
    names = sorted(teams.by_name.keys() | held.keys())
    borrowed = sum(max(held.get(name, 0) - teams[name].quota, 0) for name in names)
    unowned = max(capacity - sum(teams[name].quota for name in names), 0)
    idle = {name: max(teams[name].quota - held.get(name, 0), 0) for name in names}
    lent = fill(max(borrowed - unowned, 0), idle, dict.fromkeys(names, 1.0))
    return {
        name: TeamUse(teams[name], held.get(name, 0), lent[name], until.get(name)) for name in names
    }


def why_team_waits(uses: Mapping[str, TeamUse], name: str, *, preemptible: bool) -> str | None:
    """Explain how a team keeps its job from running; None: it does not.

    >>> uses = {"a": TeamUse(Team("a", quota=2), 2), "b": TeamUse(Team("b", quota=2), 2)}
    >>> why_team_waits(uses, "a", preemptible=True)
    'team a holds its quota of 2 slots'
    """
    own = uses.get(name, TeamUse(Team(name), 0))
    team = own.team
    rest = [use for other, use in uses.items() if other != name]
    others = [use for use in rest if use.borrowed]
    if own.used < team.quota and not others:
        return None
    if not team.quota:
        text = f"team {name} has no quota of its own"
    elif own.used < team.quota:
        text = f"team {name} holds {own.used} of its quota of {count(team.quota, 'slot')}"
    else:
        text = f"team {name} holds its quota of {count(team.quota, 'slot')}"
    if own.borrowed:
        text += f" and borrows {own.borrowed}"
    if own.used >= team.quota and team.borrow is not None and own.borrowed >= team.borrow:
        return f"{text}, the most that it may borrow"
    if own.used >= team.quota and not preemptible:
        return f"{text}, and a job that is not preemptible may not borrow"
    if not any(use.used or use.team.quota for use in rest):
        return None  # only jobs of its own team can be in its way
    return "; ".join([text, *(_loan(use) for use in others)])


def why_no_more(use: TeamUse, held: int, more: int) -> str | None:
    """Explain how limits keep a job that holds `held` slots from `more`; None: they do not.

    >>> why_no_more(TeamUse(Team("a", max_slots_per_job=2), 2), 2, 1)
    'Team a allows 2 slots for each job.'
    """
    team = use.team
    if team.max_slots_per_job is not None and held + more > team.max_slots_per_job:
        return f"Team {team.name} allows {count(team.max_slots_per_job, 'slot')} for each job."
    if team.most is not None and use.used + more > team.most:
        borrowed = f", and it may borrow {team.borrow}" if team.borrow else ""
        quota = count(team.quota, "slot")
        return f"Team {team.name} holds {use.used}: its quota is {quota}{borrowed}."
    return None


def _loan(use: TeamUse) -> str:
    verb = "is" if use.borrowed == 1 else "are"
    text = f"{use.borrowed} more {verb} borrowed by team {use.team.name}"
    if use.until is None:
        return text
    return f"{text} until {datetime.fromtimestamp(use.until).strftime('%H:%M:%S')}"
