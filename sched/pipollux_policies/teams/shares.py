"""How many slots each team may hold: its quota first, then loans, by priority and weight.

Whole slots are shared by weighted max-min fairness (progressive filling, Bertsekas & Gallager,
*Data Networks*, §6.5.2): the next slot goes to the team with the least per weight that wants it.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from .team import Teams


class Tier(NamedTuple):
    """Jobs of one rank, of all teams; tiers are served in ascending order."""

    rank: int
    preemptible: bool
    """Non-preemptible jobs get quota only, because their slots cannot be reclaimed."""
    waits: bool


class TeamGroup(NamedTuple):
    """The jobs of a team in one tier, among which the policy decides."""

    tier: Tier
    team: str


@dataclass(frozen=True)
class Claim:
    """The slots that a group asks for, and holds."""

    wants: int
    """Slots that the policy would give it if it were alone."""
    holds: int = 0


@dataclass(frozen=True)
class SlotBudget:
    """The slots that a group may hold."""

    quota: int = 0
    borrowed: int = 0

    @property
    def slots(self) -> int:
        """The total."""
        return self.quota + self.borrowed


def fill(amount: int, wants: Mapping[str, int], weights: Mapping[str, float]) -> dict[str, int]:
    """Share an amount in whole units by weighted max-min fairness.

    >>> fill(10, {"a": 2, "b": 9, "c": 9}, {"a": 1.0, "b": 1.0, "c": 3.0})
    {'a': 2, 'b': 2, 'c': 6}
    """
    given = dict.fromkeys(wants, 0)
    # A unit goes to the name that then has the least per weight.
    queue = [(1 / weights[name], name) for name, want in wants.items() if want > 0]
    heapq.heapify(queue)
    while amount > 0 and queue:
        _, name = heapq.heappop(queue)
        given[name] += 1
        amount -= 1
        if given[name] < wants[name]:
            heapq.heappush(queue, ((given[name] + 1) / weights[name], name))
    return given


def whose_turn(turns: float, weights: Mapping[str, float]) -> str:
    """Return the name whose turn it is, if the length of each turn is the weight. `turns` is the
    time so far, in turns of the least weight.

    >>> [whose_turn(turns, {"a": 1.0, "b": 2.0}) for turns in range(6)]
    ['a', 'b', 'b', 'a', 'b', 'b']
    """
    least, name = min(weights.values()), ""
    left = turns % sum(weight / least for weight in weights.values())
    for name in sorted(weights):
        left -= weights[name] / least
        if left < 0:
            break
    return name


def budgets(
    teams: Teams,
    capacity: int,
    claims: Mapping[TeamGroup, Claim],
    fixed: Mapping[str, int],
    loaned: Mapping[str, int] | None = None,
) -> dict[TeamGroup, SlotBudget]:
    """Return the budget of every group within a capacity.

    `fixed` are further slots of each team that cannot be reclaimed, `loaned` those of them that it
    borrows until a notice is over; their lenders wait.
    """
    loaned = loaned or {}
    quota = _quotas(teams, capacity, claims, fixed, lent=bool(loaned))
    total: Counter[str] = Counter()
    for group, slots in quota.items():
        total[group.team] += slots
    pinned = Counter(fixed) + Counter(loaned)
    names = {group.team for group in claims} | pinned.keys() | teams.by_name.keys()
    unlent = sum(max(teams[n].kept - total[n] - pinned[n], 0) for n in names)
    borrowed = _loans(
        teams, max(capacity - total.total() - unlent, 0), claims, quota, fixed, loaned
    )
    return {group: SlotBudget(quota[group], borrowed[group]) for group in claims}


def _quotas(
    teams: Teams,
    capacity: int,
    claims: Mapping[TeamGroup, Claim],
    fixed: Mapping[str, int],
    *,
    lent: bool,
) -> dict[TeamGroup, int]:
    """Return each group's part of its team's quota, the first tier first."""
    wants, holds = Counter[str](), Counter[str]()
    for group, claim in claims.items():
        wants[group.team] += claim.wants
        holds[group.team] += min(claim.holds, claim.wants)
    due = {n: min(max(teams[n].quota - fixed.get(n, 0), 0), wants[n]) for n in sorted(wants)}
    if sum(due.values()) > capacity:
        # The quotas exceed the capacity: nodes were lost, or slots are lent until a notice is over.
        # In the latter case the lenders wait, not teams that hold only their own quota.
        weights = {name: float(max(teams[name].quota, 1)) for name in due}
        first = {name: min(n, holds[name]) if lent else 0 for name, n in due.items()}
        first = fill(capacity, first, weights)
        rest = {name: n - first[name] for name, n in due.items()}
        more = fill(capacity - sum(first.values()), rest, weights)
        due = {name: first[name] + more[name] for name in due}
    given: dict[TeamGroup, int] = {}
    for group in sorted(claims):
        left = due[group.team] - _kept_below(
            group, (g for g in claims if g.team == group.team), claims
        )
        given[group] = max(min(claims[group].wants, left), 0)
        due[group.team] -= given[group]
    return given


def _loans(
    teams: Teams,
    pool: int,
    claims: Mapping[TeamGroup, Claim],
    quota: Mapping[TeamGroup, int],
    fixed: Mapping[str, int],
    loaned: Mapping[str, int],
) -> Counter[TeamGroup]:
    """Return the loans of each group: the first tier of all teams first, by weight."""
    borrowed: Counter[TeamGroup] = Counter()
    by_team = Counter({name: max(slots - teams[name].quota, 0) for name, slots in fixed.items()})
    by_team.update(loaned)
    unmet = {g: Claim(c.wants - quota[g], max(c.holds - quota[g], 0)) for g, c in claims.items()}
    for tier in sorted({group.tier for group in claims if group.tier.preemptible}):
        groups = {group.team: group for group in sorted(claims) if group.tier == tier}
        wants = {}
        for name, group in groups.items():
            limit = teams[name].borrow
            left = unmet[group].wants if limit is None else limit - by_team[name]
            wants[name] = max(min(unmet[group].wants, left), 0)
        first = next(iter(groups.values()))
        open_pool = pool - _kept_below(first, claims, unmet)
        weights = {name: teams[name].weight for name in groups}
        for name, slots in fill(max(open_pool, 0), wants, weights).items():
            borrowed[groups[name]] = slots
            by_team[name] += slots
            pool -= slots
    return borrowed


def _kept_below(
    group: TeamGroup, others: Iterable[TeamGroup], claims: Mapping[TeamGroup, Claim]
) -> int:
    """Return the slots that lower tiers keep because this tier does not preempt them."""
    if not group.tier.waits:
        return 0
    lower = (claims[other] for other in others if other.tier.rank > group.tier.rank)
    return sum(min(claim.holds, claim.wants) for claim in lower)
