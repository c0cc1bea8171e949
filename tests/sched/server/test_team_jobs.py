"""How many jobs a team may have submitted, and jobs that move from team to team."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from pipollux_sched.lifecycle import Allocate
from pipollux_sched.report.event_text import event_text
from pipollux_sched.spec.teams import TeamsSpec
from pipollux_sched.spec.tokens import NewToken, Role
from tests.sched.supervised import SCRIPT, Service, detail


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    with Service(tmp_path / "state") as service:
        yield service


def set_teams(service: Service, *teams: dict[str, Any], **more: Any) -> None:
    service.control.set_teams(TeamsSpec.model_validate({"teams": list(teams), **more}))


def ask(service: Service, *names: str, **fields: Any) -> httpx.Response:
    jobs = [{"name": name, "script": SCRIPT, **fields} for name in names]
    return service.admin.post("/jobs/batch", json={"jobs": jobs})


def submitted(service: Service) -> dict[str, int]:
    teams = service.admin.get("/teams").json()["teams"]
    return {team["name"]: team["submitted"] for team in teams}


def test_a_team_with_all_the_jobs_it_may_have_is_refused_more(service: Service) -> None:
    set_teams(service, {"name": "vision", "max_submit_jobs": 3})
    assert ask(service, "a", "b", team="vision").is_success
    refused = ask(service, "c", "d", team="vision")
    assert (refused.status_code, len(service.store.jobs())) == (409, 2)
    assert detail(refused) == (
        "team 'vision' may have 3 unfinished jobs (max_submit_jobs), has 2, and these are 2 more: "
        "wait until jobs of it have ended, cancel some, or ask an admin to raise the limit"
    )
    assert ask(service, "other").is_success  # of no team with a limit
    service.store.transition("a", Allocate(["node-a"], "free"))
    assert service.admin.post("/jobs/b/suspend").is_success
    assert ask(service, "c", team="vision").is_success
    assert "has 3, and this one is more" in detail(ask(service, "d", team="vision"))
    # What has ended counts no more, until it is run again.
    assert service.admin.delete("/jobs/b").is_success
    assert ask(service, "d", team="vision").is_success
    assert service.admin.post("/jobs/b/rerun").status_code == 409
    assert ask(service, "b", team="vision").status_code == 409
    assert submitted(service) == {"default": 1, "vision": 3}
    set_teams(service, {"name": "vision", "max_submit_jobs": 4})
    assert service.admin.post("/jobs/b/rerun").is_success
    # A limit that is lowered ends nobody's job.
    set_teams(service, {"name": "vision", "max_submit_jobs": 0})
    assert submitted(service) == {"default": 1, "vision": 4}
    assert "may have 0 unfinished jobs" in detail(ask(service, "e", team="vision"))


def move(client: httpx.Client, job: str, team: str) -> httpx.Response:
    return client.put(f"/jobs/{job}/team", json={"team": team})


def test_a_job_of_a_team_that_is_renamed_moves(service: Service) -> None:
    set_teams(service, {"name": "vision"}, priorities=[{"name": "urgent", "value": 9}])
    ask(service, "a", "b", "old", team="vision", priority="urgent").raise_for_status()
    service.admin.delete("/jobs/old").raise_for_status()
    set_teams(service, {"name": "sight", "max_submit_jobs": 1}, {"name": "web"})
    assert "vision' is not known" in detail(service.admin.post("/jobs/old/rerun"))
    assert submitted(service) == {"default": 2, "sight": 0, "web": 0}

    decided = service.num_reconsidered
    moved = move(service.admin, "a", "sight")
    assert (moved.status_code, moved.json()["spec"]["team"]) == (200, "sight")
    assert service.num_reconsidered == decided + 1
    assert submitted(service) == {"default": 1, "sight": 1, "web": 0}
    assert move(service.admin, "a", "sight").is_success  # it is there already
    (told,) = service.store.events(types=["updated"])
    assert event_text(told) == "moved to team sight from team vision"

    # Into a team that is full only what has ended moves, until it is run again.
    assert "has 1, and this one is more" in detail(move(service.admin, "b", "sight"))
    assert move(service.admin, "old", "sight").is_success
    assert service.admin.post("/jobs/old/rerun").status_code in (409, 422)
    assert move(service.admin, "b", "web").is_success
    assert submitted(service) == {"sight": 1, "web": 1}


def test_a_job_moves_only_where_it_could_be_submitted(service: Service) -> None:
    set_teams(
        service,
        {"name": "vision", "users": ["ana"]},
        {"name": "text", "users": ["ana", "bo"], "max_slots_per_job": 1},
        {"name": "web", "users": ["bo"]},
    )
    tokens = [NewToken(name=name, role=Role.USER) for name in ("ana", "bo")]
    ana, bo = (service.client(service.store.tokens.create(new)[1]) for new in tokens)
    bound = NewToken(name="ana-laptop", role=Role.USER, team="vision")
    laptop = service.client(service.store.tokens.create(bound)[1])
    for client, name in ((ana, "mine"), (laptop, "bound")):
        body = {"name": name, "script": SCRIPT, "team": "vision", "min_replicas": 2}
        client.post("/jobs", json={**body, "max_replicas": 2})
    one = {"name": "narrow", "script": SCRIPT, "team": "vision"}
    ana.post("/jobs", json=one).raise_for_status()

    assert "is not one of 'bo'" in detail(move(bo, "narrow", "text"))
    assert "user: ana is not in team 'web'" in detail(move(ana, "narrow", "web"))
    assert "max_slots_per_job of team 'text' allow 1" in detail(move(ana, "mine", "text"))
    assert "team: 'sight' is not known" in detail(move(ana, "narrow", "sight"))
    assert "'A B' is not a name" in detail(move(ana, "narrow", "A B"))
    assert move(ana, "nobody", "text").status_code == 404
    assert service.store.job("narrow").spec["team"] == "vision"
    assert move(ana, "narrow", "text").is_success
    set_teams(service, {"name": "vision"}, {"name": "text"})
    service.submit("bounds", user="ana-laptop", team="vision")
    said = detail(move(laptop, "bounds", "text"))
    assert said == (
        "job 'bounds': team: the token of 'ana-laptop' is for 'vision', not for 'text'; ask an "
        "admin to move it"
    )
    service.control.set_teams(None)
    assert "no teams are set" in detail(move(ana, "narrow", "vision"))
