"""Views of teams: quotas, and slots used, borrowed and lent."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from pipollux_policies.teams.ledger import TeamUse, capacity_of, team_uses
from pipollux_sched.lifecycle import Phase
from pipollux_sched.spec.teams import JobOwner, TeamSpec, TeamsSpec, parse_teams
from pipollux_sched.store import JobRecord, NodeCondition, Store

from .models import View


class TeamView(View):
    """A team: its limits, the slots that its jobs hold, and its jobs.

    `submitted`: its unfinished jobs, including suspended ones; `borrowed`: slots beyond its quota;
    `lent`: slots of its quota that other teams hold; `notify`: the destinations of notifications,
    without what may be secret, as `spec` leaves them out; `until`: the time by which it must return
    borrowed slots, in seconds since the epoch.
    """

    name: str
    quota: int
    borrow: int | None
    lend: int | None
    weight: float
    max_jobs: int | None
    max_submit_jobs: int | None
    max_slots_per_job: int | None
    users: list[str]
    notify: list[str]
    used: int
    borrowed: int
    lent: int
    until: float | None
    submitted: int
    running: list[str]
    waiting: list[str]


class TeamsView(View):
    """The teams of a cluster: `configured`: whether there are teams; `spec`: their definition.

    `slots`: the slots of nodes in service, and those that jobs still hold on other nodes; quotas
    beyond that sum are scaled down.
    """

    configured: bool
    spec: TeamsSpec | None
    slots: int
    teams: list[TeamView]


def stored_teams(store: Store) -> TeamsSpec | None:
    """Return the teams that a store holds, or raise `SpecError`; None: there are none."""
    found = store.teams.spec()
    return None if found is None else parse_teams(found)


def list_teams(store: Store) -> TeamsView:
    """Return the teams and their usage, including teams that only jobs name."""
    spec, jobs = stored_teams(store), store.jobs(unfinished=True)
    on_nodes = Counter[str]()
    for job in jobs:
        nodes, stages = _held(job)
        for node in nodes:
            on_nodes[node] += stages
    slots = capacity_of(_slots_given(store), on_nodes)
    if spec is None:
        return TeamsView(configured=False, spec=None, slots=slots, teams=[])
    notices, of_jobs = store.teams.notices(), defaultdict[str, _TeamJobs](_TeamJobs)
    for job in jobs:
        of_jobs[spec.team_of(JobOwner.of(job.spec))].add(job, notices.get(job.name))
    held = {name: found.used for name, found in of_jobs.items()}
    until = {name: found.until for name, found in of_jobs.items() if found.until is not None}
    uses = team_uses(spec.for_policy(), held, slots, until)
    specs = {team.name: team for team in spec.teams}
    return TeamsView(
        configured=True,
        spec=spec,
        slots=slots,
        teams=[
            _view(use, specs.get(name, TeamSpec(name=name)), of_jobs[name])
            for name, use in uses.items()
        ],
    )


@dataclass
class _TeamJobs:
    used: int = 0
    submitted: int = 0
    until: float | None = None
    running: list[str] = field(default_factory=list)
    waiting: list[str] = field(default_factory=list)

    def add(self, job: JobRecord, due: float | None) -> None:
        """Count a job; `due`: the time by which it must return slots, or None."""
        nodes, stages = _held(job)
        self.used += len(nodes) * stages
        self.submitted += 1
        if nodes:
            self.running.append(job.name)
        elif job.state.phase is not Phase.SUSPENDED or not job.state.suspended:
            self.waiting.append(job.name)
        if due is not None:
            self.until = max(self.until or 0.0, due)


def _held(job: JobRecord) -> tuple[Sequence[str], int]:
    """Return the nodes of a job's replicas, and the slots that each takes."""
    state = job.state
    stages = state.num_stages if state.assigned else state.running_stages
    return state.assigned or state.running_on, stages or int(job.spec.get("num_stages", 1))


def _slots_given(store: Store) -> dict[str, int]:
    return {
        name: node.slots
        for name, node in store.nodes().items()
        if node.condition is NodeCondition.READY and not node.spec.get("draining")
    }


def _view(use: TeamUse, spec: TeamSpec, jobs: _TeamJobs) -> TeamView:
    return TeamView(
        **{
            **spec.model_dump(),
            "users": list(spec.users),
            "notify": [entry.label for entry in spec.notify],
            "weight": float(spec.weight),
        },
        used=use.used,
        borrowed=use.borrowed,
        lent=use.lent,
        until=use.until,
        submitted=jobs.submitted,
        running=jobs.running,
        waiting=jobs.waiting,
    )
