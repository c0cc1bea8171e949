"""The rules of teams for every decision (docs/howto/teams.md), in code independent of policies."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

from pipollux_policies.allocations.allocation import shape_of
from pipollux_policies.allocations.rules import Allocations, Jobs, Nodes, is_pinned

from .team import Team, Teams


def team_violations(
    teams: Teams, jobs: Jobs, nodes: Nodes, base_allocations: Allocations, allocations: Allocations
) -> list[str]:
    """Return a message for every rule of a team that a decision newly breaks. A team that holds
    more than it may, because its file has changed, may continue without more.
    """
    before, after = _slots(jobs, nodes, base_allocations), _slots(jobs, nodes, allocations)
    members: defaultdict[str, list[Any]] = defaultdict(list)
    for name, job in jobs.items():
        members[job.team].append(name)
    found: list[str] = []
    for of, names in members.items():
        kept = [n for n in names if is_pinned(jobs[n], base_allocations.get(n, ()), nodes)]
        found += _of_team(teams[of], jobs, names, kept, before, after)
    total: Counter[str] = Counter()
    for name, slots in after.items():
        total[jobs[name].team] += slots
    capacity = sum(node.resources.get("slots", 0) for node in nodes.values() if node.healthy)
    for name, team in teams.by_name.items():
        others = sum(slots for other, slots in total.items() if other != name)
        quotas = sum(min(teams[o].quota, slots) for o, slots in total.items() if o != name)
        unlent = team.quota - team.lend if team.lend is not None else 0
        lent = others - quotas
        fixed = any(is_pinned(jobs[n], base_allocations.get(n, ()), nodes) for n in after)
        if unlent > total[name] and lent > max(capacity - quotas - unlent, 0) and not fixed:
            found.append(f"team {name!r} does not lend {unlent} slots, but others hold {lent} more")
    return found


def _of_team(
    team: Team,
    jobs: Jobs,
    names: list[Any],
    pinned: list[Any],
    before: Counter[Any],
    after: Counter[Any],
) -> Iterator[str]:
    held, had = sum(after[n] for n in names), sum(before[n] for n in names)
    if team.borrow is not None and held > max(team.quota + team.borrow, had):
        yield (
            f"team {team.name!r} holds {held} slots, and may hold {team.quota + team.borrow}: "
            f"quota {team.quota}, borrow {team.borrow}"
        )
    running = [n for n in names if after[n]]
    if team.max_jobs is not None and len(running) > max(team.max_jobs, len(pinned)):
        yield f"team {team.name!r} has {len(running)} running jobs, allowed are {team.max_jobs}"
    if team.max_slots_per_job is not None:
        for name in set(running) - set(pinned):
            if after[name] > team.max_slots_per_job:
                yield (
                    f"job {name!r} holds {after[name]} slots, its team {team.name!r} allows "
                    f"{team.max_slots_per_job}"
                )
    fixed = sum(after[n] for n in names if not jobs[n].preemptible)
    was_fixed = sum(after[n] for n in pinned)
    if fixed > max(team.quota, was_fixed):
        yield (
            f"team {team.name!r} has {fixed} slots held by jobs that are not preemptible, beyond "
            f"its quota of {team.quota}"
        )


def _slots(jobs: Jobs, nodes: Nodes, allocations: Allocations) -> Counter[Any]:
    return Counter(
        {
            name: len(held) * shape_of(jobs[name], held, nodes).slots
            for name, held in allocations.items()
            if held and name in jobs
        }
    )
