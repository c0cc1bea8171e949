"""Which jobs of a team may hold slots: limits on the number and size of jobs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from pipollux_policies.allocations.order import name_order
from pipollux_policies.allocations.rules import Allocations, Jobs, Nodes, is_pinned
from pipollux_policies.jobs.job_info import JobInfo
from pipollux_utils.text import count

from .restricted import within
from .team import Team, Teams


def eligible(
    teams: Teams, jobs: Jobs, nodes: Nodes, base: Allocations
) -> tuple[dict[Any, JobInfo], dict[Any, str]]:
    """Return the jobs that may hold slots within their team's limits, and why the others may not.

    Pinned jobs always may, and count. The others go by priority, then running jobs, then by
    submission. A job that may not preempt goes after all running ones.
    """
    by_team: defaultdict[str, list[Any]] = defaultdict(list)
    for name, job in jobs.items():
        by_team[job.team].append(name)
    allowed: dict[Any, JobInfo] = {}
    refused: dict[Any, str] = {}
    for team_name, names in by_team.items():
        team = teams[team_name]
        pinned = {name for name in names if is_pinned(jobs[name], base.get(name, ()), nodes)}
        limit = team.max_jobs
        ranks = {name: _rank(jobs, name, bool(base.get(name))) for name in names}
        taken = 0
        for name in sorted(names, key=lambda name: ranks[name]):
            if name in pinned:
                allowed[name] = jobs[name]
                continue
            limited = _limited(jobs[name], team)
            if limited is None:
                refused[name] = (
                    f"team {team_name} allows {team.max_slots_per_job} slots for each job, and "
                    "this one needs more"
                )
            elif limit is not None and taken >= max(limit - len(pinned), 0):
                refused[name] = f"team {team_name} runs {count(limit, 'job')} already, its max_jobs"
            else:
                allowed[name] = limited
                taken += 1
    return {name: allowed[name] for name in jobs if name in allowed}, refused


def runs_within_quota(teams: Teams, job: JobInfo) -> bool:
    """Return whether a job can run within its team's quota."""
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
