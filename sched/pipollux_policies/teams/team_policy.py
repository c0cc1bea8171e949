"""A policy within quotas: loans with notice, weights, priorities and limits of teams.

The wrapped policy knows nothing of teams. `TeamPolicy` calls it for these steps:

1. Demand: the slots that each group (the jobs of a team with one priority) would get alone.
2. `budgets`: the slots that each group may hold.
3. If a budget is below the demand, its division among the group's jobs, in a part of the cluster.
4. Placement: one call with all jobs, each limited to its part. Remaining slots are offered
(`offers`).

If a team then has less of its quota than it would without any loans, the result without loans is
used. Slots are reclaimed only after a notice, which is binding: the same jobs keep it whatever the
policy would reclaim meanwhile, and once it is over the team returns the announced number of slots,
if need be from other jobs.
"""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from pipollux_policies.allocations.allocation import Allocation, as_allocation, shape_of
from pipollux_policies.allocations.rules import Allocations, Jobs, Nodes, is_pinned, usable_nodes
from pipollux_policies.base import Policy
from pipollux_policies.jobs.job_info import JobInfo, NodeInfo

from .eligible import eligible
from .offers import Offers, held_by_team
from .restricted import cut, slots_of, within
from .shares import Claim, SlotBudget, TeamGroup, Tier, budgets
from .subcluster import fitting_base, part_of, restricted_base, without
from .team import Teams


@dataclass(frozen=True)
class TeamAnswer:
    """Allocations of all jobs, with the decisions about teams."""

    allocations: dict[Any, Allocation]
    notices: dict[Any, float] = field(default_factory=dict)
    """Jobs that have to return slots, and when, in seconds since the epoch."""
    refused: dict[Any, str] = field(default_factory=dict)
    """Jobs that a limit of their team keeps from running, and the limit."""
    wants: dict[Any, int] = field(default_factory=dict)
    """Slots that the policy would give each job if its team were alone."""


@dataclass(frozen=True)
class TeamPolicy:
    """Wraps a policy to enforce the quotas and limits of teams. `now` is in seconds since the
    epoch, as are the times when notices end.

    >>> from pipollux_policies import ExactPolicy
    >>> from .team import Team
    >>> job = JobInfo({"slots": 1}, lambda nodes, replicas: replicas, 0.0, 1, 8, team="a")
    >>> teams = Teams({"a": Team("a", quota=2, borrow=1)})
    >>> node = NodeInfo({"slots": 4})
    >>> TeamPolicy(ExactPolicy(), teams).optimize({"j": job}, {"n": node}, {}, node)[0]
    {'j': ['n', 'n', 'n']}
    """

    policy: Policy
    teams: Teams
    now: float = 0.0
    notices: Mapping[Any, float] = field(default_factory=dict)

    def __copy__(self) -> Self:
        """Return an independent copy: the wrapped policy may have state."""
        return replace(self, policy=copy.copy(self.policy))

    def allocate_job(
        self,
        job_info: JobInfo,  # noqa: ARG002  # required by the protocol
        nodes: Mapping[Any, NodeInfo],  # noqa: ARG002  # required by the protocol
    ) -> Allocation:
        """Place nothing: the owners of the free slots are known only in `optimize`."""
        return Allocation()

    def optimize(
        self, jobs: Jobs, nodes: Nodes, base_allocations: Allocations, node_template: NodeInfo
    ) -> tuple[dict[Any, Allocation], int]:
        """Allocate all jobs, as policies do."""
        answer = self.solve(jobs, nodes, base_allocations, node_template)
        return answer.allocations, len(nodes)

    def solve(
        self, jobs: Jobs, nodes: Nodes, base_allocations: Allocations, node_template: NodeInfo
    ) -> TeamAnswer:
        """Allocate all jobs, and return the necessary notices."""
        base = {n: as_allocation(jobs[n], a, nodes) for n, a in base_allocations.items() if a}
        told: dict[Any, float] = {}
        while True:
            # Jobs with a notice stay until it is over, as if they were pinned.
            kept = {
                name: replace(job, preemptible=False) if name in told else job
                for name, job in jobs.items()
            }
            allowed, refused = eligible(self.teams, kept, nodes, base)
            overdue = {n for n in self.notices if self._due(n) <= self.now and n not in told}
            round_ = _Round(
                self.policy,
                self.teams,
                allowed,
                nodes,
                base,
                node_template,
                told,
                overdue,
                self.now,
            )
            given = round_.answer()
            news = self._earlier(round_, self._notices(round_, given, told), told)
            if not news:
                break
            told |= news
        told = self._binding(round_, given, told)
        found = {name: given.get(name, Allocation()) for name in jobs}
        result = {
            name: _as_told(jobs[name], held, base_allocations.get(name, ()), nodes)
            for name, held in found.items()
        }
        return TeamAnswer(result, told, refused, round_.wants)

    def _notices(
        self, round_: _Round, given: Mapping[Any, Allocation], told: Mapping[Any, float]
    ) -> dict[Any, float]:
        """Return the jobs that would lose slots to other teams before they have had notice."""
        jobs, nodes = round_.jobs, round_.nodes
        before = held_by_team(jobs, nodes, {n: a for n, a in round_.base.items() if n in jobs})
        after = held_by_team(jobs, nodes, given)
        wanted: defaultdict[str, int] = defaultdict(int)
        for name, slots in round_.wants.items():
            wanted[jobs[name].team] += slots
        for name in round_.pinned:
            wanted[jobs[name].team] += slots_of(jobs[name], round_.base[name], nodes)
        stays = fitting_base(jobs, usable_nodes(nodes), round_.base)
        found = {}
        for name, held in round_.base.items():
            if name in told or name not in jobs or is_pinned(jobs[name], held, nodes):
                continue
            team = jobs[name].team
            loses = after[team] < min(before[team], wanted[team])
            less = slots_of(jobs[name], given[name], nodes) < slots_of(jobs[name], held, nodes)
            # Replicas that cannot stay, because their node is gone or has shrunk, do not count as
            # held.
            there = len(stays.get(name, ())) == len(held)
            due = self._due(name)
            if loses and less and there and due > self.now:
                found[name] = due
        return found

    def _due(self, name: Any) -> float:
        """Return when a job has to return slots, by an earlier notice or by one given now."""
        # A shorter notice period also shortens the notices given before.
        latest = self.now + self.teams.notice
        return min(self.notices.get(name, latest), latest)

    def _earlier(
        self, round_: _Round, found: dict[Any, float], told: Collection[Any]
    ) -> dict[Any, float]:
        """Return jobs with an earlier notice, in place of others of their teams. Otherwise a policy
        that reclaims from another job each time would postpone the end forever.
        """
        jobs, nodes = round_.jobs, round_.nodes
        teams = {jobs[name].team for name in found}
        stays = fitting_base(jobs, usable_nodes(nodes), round_.base)
        before = {
            name: due
            for name in self.notices
            if (due := self._due(name)) > self.now
            and name not in told
            and name in round_.base
            and name not in round_.pinned
            and len(stays.get(name, ())) == len(round_.base[name])
            and jobs[name].team in teams
        }
        again = {jobs[name].team for name in before}
        return before | {n: due for n, due in found.items() if jobs[n].team not in again}

    def _binding(
        self, round_: _Round, given: Mapping[Any, Allocation], told: Mapping[Any, float]
    ) -> dict[Any, float]:
        """Return the notices that are valid after this decision.

        Jobs that were kept only until others of their team had returned all slots get no notice.
        Slots of a starting job, which cannot be reclaimed now, keep theirs.
        """
        jobs, nodes = round_.jobs, round_.nodes
        after = held_by_team(jobs, nodes, given)
        done = {
            team
            for team in held_by_team(jobs, nodes, round_.overdue)
            if after[team] <= self.teams[team].quota
        }
        fixed = {n: due for n, due in self.notices.items() if n in round_.pinned}
        new = {n: due for n, due in told.items() if n in self.notices or jobs[n].team not in done}
        return {**fixed, **new}


class _Round:
    def __init__(
        self,
        policy: Policy,
        teams: Teams,
        jobs: Jobs,
        nodes: Nodes,
        base: Mapping[Any, Allocation],
        template: NodeInfo,
        told: Collection[Any],
        overdue: Collection[Any],
        now: float,
    ) -> None:
        self._turns = now / teams.turn if teams.turn else None
        self._policy, self._teams, self._template, self._told = policy, teams, template, told
        self.jobs, self.nodes, self.base = jobs, nodes, {n: base[n] for n in jobs if n in base}
        self.pinned = {n: a for n, a in self.base.items() if is_pinned(jobs[n], a, nodes)}
        self.overdue = {n: a for n, a in self.base.items() if n in overdue and n not in self.pinned}
        self._free = without(jobs, nodes, self.pinned)
        self._groups: defaultdict[TeamGroup, dict[Any, JobInfo]] = defaultdict(dict)
        for name, job in jobs.items():
            if name not in self.pinned:
                tier = Tier(-job.priority, job.preemptible, not job.preempts)
                self._groups[TeamGroup(tier, job.team)][name] = job
        self._alone = {group: self._ask(self._free, group) for group in sorted(self._groups)}
        self.wants = {
            name: slots_of(jobs[name], allocation, nodes)
            for answer in self._alone.values()
            for name, allocation in answer.items()
        }

    def answer(self) -> dict[Any, Allocation]:
        if len(self._groups) == 1 and not self.pinned:
            (group,) = self._groups
            if self._budgets()[group].slots >= self._wanted(group):
                return self._alone[group]  # the only group, without any limit
        given = self._placed(self._budgets())
        if not self._owed(given):
            return given
        alone = {group: SlotBudget(budget.quota) for group, budget in self._budgets().items()}
        return min((given, self._placed(alone)), key=self._owed)

    def _budgets(self) -> dict[TeamGroup, SlotBudget]:
        usable = usable_nodes(self._free)
        capacity = sum(node.resources.get("slots", 0) for node in usable.values())
        claims = {
            group: Claim(self._wanted(group), self._held(group)) for group in sorted(self._groups)
        }
        fixed = held_by_team(self.jobs, self.nodes, self.pinned)
        told = {name: held for name, held in self.pinned.items() if name in self._told}
        before, loaned = held_by_team(self.jobs, self.nodes, self.base), Counter[str]()
        # Slots of the team with an expired notice are returned first.
        overdue = held_by_team(self.jobs, self.nodes, self.overdue)
        for team, slots in held_by_team(self.jobs, self.nodes, told).items():
            over = before[team] - overdue[team] - self._teams[team].quota
            loaned[team] = min(slots, max(over, 0))
            fixed[team] -= loaned[team]
        return budgets(self._teams, capacity, claims, fixed, loaned)

    def _owed(self, given: Mapping[Any, Allocation]) -> int:
        held = held_by_team(self.jobs, self.nodes, given)
        due = held_by_team(self.jobs, self.nodes, self.pinned)
        for group, budget in self._budgets().items():
            due[group.team] += budget.quota
        return sum(max(min(slots, self._teams[t].quota) - held[t], 0) for t, slots in due.items())

    def _placed(self, budget: Mapping[TeamGroup, SlotBudget]) -> dict[Any, Allocation]:
        asked = {name: self.jobs[name] for name in self.pinned}
        for group in self._groups:
            for name, part in self._divided(group, budget[group].slots).items():
                # Keep the current shape if possible: the policy knows how the job runs in it.
                slots = slots_of(self.jobs[name], part, self.nodes)
                limited = within(self.jobs[name], slots, part.shape) if part else None
                if limited is not None:
                    asked[name] = limited
        asked = {name: asked[name] for name in self.jobs if name in asked}
        base = {
            name: self.base[name]
            for name in asked
            if name in self.base and _has_shape(asked[name], self.base[name])
        }
        answer: Mapping[Any, Any] = {}
        if asked:
            answer, _ = self._policy.optimize(asked, self.nodes, base, self._template)
        given = dict.fromkeys(self.jobs, Allocation())
        for name, job in asked.items():
            found = as_allocation(job, answer.get(name, ()), self.nodes)
            if name not in self.pinned:
                most = max(job.most_replicas(shape) * shape.slots for shape in job.all_shapes)
                found = cut(job, found, most, self.nodes)
            given[name] = found
        self._uncrowd(given)
        made = (self.jobs, self.nodes, self.base, self.wants, given, self._told, self._turns)
        Offers(self._teams, *made).make()
        return given

    def _uncrowd(self, given: dict[Any, Allocation]) -> None:
        """Merge jobs onto one node if they share one with a job that has a notice.

        Policies treat the latter as pinned, which may share its nodes with another distributed job.
        """
        crowded = {n for name in self._told if len(set(given[name])) > 1 for n in given[name]}
        for name, held in given.items():
            if name in self.pinned or len(set(held)) < 2 or not crowded & set(held):
                continue
            fullest = max(sorted(set(held), key=str), key=held.count)
            count = held.count(fullest)
            enough = count >= self.jobs[name].least_replicas
            given[name] = Allocation([fullest] * count if enough else [], held.shape)

    def _divided(self, group: TeamGroup, slots: int) -> Mapping[Any, Allocation]:
        if slots >= self._wanted(group):
            return self._alone[group]
        jobs = self._groups[group]
        part = part_of(self._free, slots, jobs, restricted_base(jobs, self.base))
        return self._ask(part, group)

    def _ask(self, nodes: Nodes, group: TeamGroup) -> dict[Any, Allocation]:
        jobs = self._groups[group]
        base = restricted_base(jobs, self.base)
        held = fitting_base(jobs, nodes, base)
        answer, _ = self._policy.optimize(jobs, nodes, held, self._template)
        return {name: as_allocation(jobs[name], answer.get(name, ()), nodes) for name in jobs}

    def _wanted(self, group: TeamGroup) -> int:
        return sum(self.wants[name] for name in self._groups[group])

    def _held(self, group: TeamGroup) -> int:
        held = restricted_base(self._groups[group], self.base)
        return sum(slots_of(self.jobs[name], a, self.nodes) for name, a in held.items())


def _has_shape(job: JobInfo, held: Allocation) -> bool:
    shape = held.shape
    return shape is not None and any(
        (s.num_stages, s.gpu_type) == (shape.num_stages, shape.gpu_type) for s in job.all_shapes
    )


def _as_told(job: JobInfo, given: Allocation, base: Any, nodes: Nodes) -> Allocation:
    """Return an allocation in the job's own shapes; if unchanged, in the order of its list."""
    if not given:
        return Allocation()
    shape = shape_of(job, given, nodes)
    same = sorted(map(str, base)) == sorted(map(str, given))
    return Allocation(base if same else given, shape)
