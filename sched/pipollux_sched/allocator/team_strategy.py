"""Teams in the allocator: a policy within quotas, and reasons why jobs of teams wait."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from pipollux_policies import Policy, shape_of
from pipollux_policies.allocations.rules import usable_nodes
from pipollux_policies.teams.eligible import eligible
from pipollux_policies.teams.ledger import TeamUse, capacity_of, team_uses, why_team_waits
from pipollux_policies.teams.team import Teams
from pipollux_policies.teams.team_policy import TeamAnswer, TeamPolicy

from .job_infos import node_template
from .snapshot import Snapshot
from .strategy import EvenStrategy, Nodes, PolicyStrategy, SchedulableJob, Strategy, jobs_of


class TeamStrategy:
    """Calls a policy within the quotas of teams; used for one decision."""

    def __init__(
        self, policy: Policy, teams: Teams, now: float, notices: Mapping[str, float]
    ) -> None:
        self._policy = TeamPolicy(policy, teams, now, notices)
        self.answer: TeamAnswer | None = None

    def place(
        self,
        candidate: SchedulableJob,  # noqa: ARG002  # required by the protocol
        free: Nodes,  # noqa: ARG002  # required by the protocol
    ) -> Sequence[str]:
        """Place nothing: the owners of free slots follow only from all jobs together."""
        return ()

    def optimize(
        self, candidates: Sequence[SchedulableJob], nodes: Nodes
    ) -> Mapping[str, Sequence[str]]:
        """Call the policy for all jobs."""
        base = {job.name: job.held for job in candidates if job.allocation}
        template = node_template(nodes)
        self.answer = self._policy.solve(jobs_of(candidates), nodes, base, template)
        return self.answer.allocations


def within_teams(strategy: Strategy, snapshot: Snapshot) -> tuple[Strategy, TeamStrategy | None]:
    """Return a strategy within a snapshot's quotas, if any, and its part that calls the policy."""
    inner = strategy.strategy if isinstance(strategy, EvenStrategy) else strategy
    if snapshot.teams is None or not isinstance(inner, PolicyStrategy):
        return strategy, None
    asks = TeamStrategy(inner.policy, snapshot.teams, snapshot.time, snapshot.notices)
    return (EvenStrategy(asks) if isinstance(strategy, EvenStrategy) else asks), asks


def uses_of(snapshot: Snapshot) -> dict[str, TeamUse]:
    """Return the slots of the teams of a snapshot, by name; empty without teams."""
    if snapshot.teams is None:
        return {}
    held, on_nodes = Counter[str](), Counter[str]()
    until: dict[str, float] = {}
    for job in snapshot.candidates:
        team = job.info.team
        for node in job.held:
            slots = shape_of(job.info, job.held, snapshot.nodes).slots
            held[team] += slots
            on_nodes[node] += slots
        if job.name in snapshot.notices:
            until[team] = max(until.get(team, 0.0), snapshot.notices[job.name])
    usable = usable_nodes(snapshot.nodes)
    slots_of = {name: node.resources.get("slots", 0) for name, node in usable.items()}
    return team_uses(snapshot.teams, held, capacity_of(slots_of, on_nodes), until)


def team_reasons(snapshot: Snapshot) -> dict[str, str]:
    """Return by job, for jobs without slots, how teams keep them from running."""
    if snapshot.teams is None:
        return {}
    base = {job.name: job.held for job in snapshot.candidates if job.allocation}
    jobs = jobs_of(snapshot.candidates)
    _, refused = eligible(snapshot.teams, jobs, snapshot.nodes, base)
    uses, found = uses_of(snapshot), {}
    for job in snapshot.candidates:
        if job.allocation:
            continue
        team = job.info.team
        reason = refused.get(job.name) or why_team_waits(
            uses, team, preemptible=job.info.preemptible
        )
        if reason is not None:
            found[job.name] = reason
    return found
