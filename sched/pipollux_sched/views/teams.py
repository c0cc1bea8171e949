"""Views of teams: quotas, and what is used, borrowed, lent and waited for."""

from __future__ import annotations

from collections import Counter, defaultdict

from pipollux_sched.lifecycle import Phase
from pipollux_sched.policy.teams.ledger import TeamUse, team_uses
from pipollux_sched.spec.teams import JobOwner, TeamSpec, TeamsSpec, parse_teams
from pipollux_sched.store import NodeCondition, Store

from .models import View


class TeamView(View):
    """A team: its limits, the slots that its jobs hold, and its jobs.

    `borrowed`: slots beyond its quota; `lent`: slots of its quota that others hold; `until`: when
    it gives back what it was told to, in seconds since the epoch.
    """

    name: str
    quota: int
    borrow: int | None
    lend: int | None
    weight: float
    max_jobs: int | None
    max_slots_per_job: int | None
    users: list[str]
    used: int
    borrowed: int
    lent: int
    until: float | None
    running: list[str]
    waiting: list[str]


class TeamsView(View):
    """The teams of a cluster: `configured` says whether there are any, `spec` what was given.

    `slots`: of all nodes that are not dead; quotas that are more than that are cut.
    """

    configured: bool
    spec: TeamsSpec | None
    slots: int
    teams: list[TeamView]


def stored_teams(store: Store) -> TeamsSpec | None:
    """Return the teams that a store holds; None: there are none.

    Raises:
        SpecError: this version cannot read them.
    """
    found = store.teams.spec()
    return None if found is None else parse_teams(found)


def list_teams(store: Store) -> TeamsView:
    """Return the teams, with what they hold; those that only jobs name are among them."""
    spec = stored_teams(store)
    alive = (n for n in store.nodes().values() if n.condition is not NodeCondition.DEAD)
    slots = sum(node.slots for node in alive)
    if spec is None:
        return TeamsView(configured=False, spec=None, slots=slots, teams=[])
    notices, held = store.teams.notices(), Counter[str]()
    until: dict[str, float] = {}
    running: defaultdict[str, list[str]] = defaultdict(list)
    waiting: defaultdict[str, list[str]] = defaultdict(list)
    for job in store.jobs(live=True):
        team, state = spec.team_of(JobOwner.of(job.spec)), job.state
        nodes = state.assigned or state.running_on
        stages = state.num_stages if state.assigned else state.running_stages
        held[team] += len(nodes) * (stages or int(job.spec.get("num_stages", 1)))
        if nodes:
            running[team].append(job.name)
        elif state.phase is not Phase.SUSPENDED or not state.suspended:
            waiting[team].append(job.name)
        if job.name in notices:
            until[team] = max(until.get(team, 0.0), notices[job.name])
    uses = team_uses(spec.for_policy(), held, slots, until)
    specs = {team.name: team for team in spec.teams}
    return TeamsView(
        configured=True,
        spec=spec,
        slots=slots,
        teams=[
            _view(use, specs.get(name, TeamSpec(name=name)), running[name], waiting[name])
            for name, use in uses.items()
        ],
    )


def _view(use: TeamUse, spec: TeamSpec, running: list[str], waiting: list[str]) -> TeamView:
    return TeamView(
        **{**spec.model_dump(), "users": list(spec.users), "weight": float(spec.weight)},
        used=use.used,
        borrowed=use.borrowed,
        lent=use.lent,
        until=use.until,
        running=running,
        waiting=waiting,
    )
