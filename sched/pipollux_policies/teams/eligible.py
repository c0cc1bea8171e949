"""Which jobs of a team may hold slots at all, and how many: limits on jobs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from pipollux_policies.job_info import JobInfo
from pipollux_policies.order import name_order
from pipollux_policies.rules import Allocations, Jobs, Nodes, is_pinned

from .restricted import within
from .team import Team, Teams


def eligible(
    teams: Teams, jobs: Jobs, nodes: Nodes, base: Allocations
) -> tuple[dict[Any, JobInfo], dict[Any, str]]:
    """Return the jobs that may hold slots, within their team's limits, and why the others may not.

    Pinned jobs may always, and count. Of the others those of higher priority go first, then those
    that run, then those that came first. One that may not preempt goes after all that run.
    """
    by_team: defaultdict[str, list[Any]] = defaultdict(list)
    for name, job in jobs.items():
        by_team[job.team].append(name)
    allowed: dict[Any, JobInfo] = {}
    refused: dict[Any, str] = {}
    for team_name, names in by_team.items():
        team = teams[team_name]
        pinned = {name for name in names if is_pinned(jobs[name], base.get(name, ()), nodes)}
        left = None if team.max_jobs is None else max(team.max_jobs - len(pinned), 0)
        ranks = {name: _rank(jobs, name, bool(base.get(name))) for name in names}
        taken = 0
        for name in sorted(names, key=lambda name: ranks[name]):
            if name in pinned:
                allowed[name] = jobs[name]
                continue
            limited = _limited(jobs[name], team)
            if limited is None:
                refused[name] = (
                    f"team {team_name} allows {team.max_slots_per_job} slots for each job, and its "
                    "least needs more"
                )
            elif left is not None and taken >= left:
                refused[name] = f"team {team_name} has the {team.max_jobs} running jobs it may have"
            else:
                allowed[name] = limited
                taken += 1
    return {name: allowed[name] for name in jobs if name in allowed}, refused


def runs_within_quota(teams: Teams, job: JobInfo) -> bool:
    """Tell whether a job can run on its team's quota alone."""
    team = teams[job.team]
    limits = (team.quota, team.max_slots_per_job)
    return within(job, min(limit for limit in limits if limit is not None)) is not None


def _rank(jobs: Mapping[Any, JobInfo], name: Any, runs: bool) -> tuple[Any, ...]:
    job = jobs[name]
    return not (runs or job.preempts), -job.priority, not runs, job.created, name_order(name)


def _limited(job: JobInfo, team: Team) -> JobInfo | None:
    most = team.max_slots_per_job
    if most is None or max(s.slots * job.most_replicas(s) for s in job.all_shapes) <= most:
        return job
    return within(job, most)
