"""Roles of users' tokens: every route has one, and real requests are held to it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import pytest

from pipollux_sched.lifecycle import Allocate
from pipollux_sched.server import Limits
from pipollux_sched.server.roles import ACCESS, Access
from pipollux_sched.spec.job import JobSpec
from pipollux_sched.spec.teams import TeamsSpec
from pipollux_sched.spec.tokens import NewToken, Role
from pipollux_sched.store import StoreUnavailableError
from pipollux_sched.store.tokens import TokenRecords
from tests.sched.supervised import SCRIPT, Service


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with Service(tmp_path_factory.mktemp("state")) as service:
        yield service


@pytest.fixture(scope="module")
def users(service: Service) -> dict[str, httpx.Client]:
    roles = {"ada": Role.ADMIN, "ana": Role.USER, "bo": Role.USER, "eve": Role.VIEWER}
    made = {n: service.store.tokens.create(NewToken(name=n, role=r))[1] for n, r in roles.items()}
    return {name: service.client(secret) for name, secret in made.items()}


def test_every_route_has_a_role_and_a_check(service: Service) -> None:
    document = service.client(None).get("/openapi.json").json()
    found = {
        (method.upper(), path): operation.get("security", [])
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    }
    assert found.keys() == ACCESS.keys()
    job, admin = {"jobToken": []}, {"adminToken": []}
    for key, security in found.items():
        access = ACCESS[key]
        wanted = {Access.OPEN: [], Access.JOB: [job, admin]}.get(access, [admin])
        assert security == wanted, key
        answer = service.client(None).request(key[0], key[1].format(name="x", attempt=1, replica=0))
        assert (answer.status_code == 401) == (access is not Access.OPEN), key
    # What the document leaves out is the page and its files.
    plain = [route.path for route in service.app.routes if hasattr(route, "path")]
    assert {path for path in plain if not path.startswith(("/web/", "/docs"))} == {
        "/",
        "/openapi.json",
    }


def test_every_request_is_refused_to_all_roles_below_its_own(
    service: Service, users: dict[str, httpx.Client]
) -> None:
    service.store.transition(
        service.control.submit(JobSpec(name="theirs", script=SCRIPT)).name,
        Allocate(["node-a"], "it is free"),
    )
    last = service.store.last_event()
    refused = 0
    for (method, path), access in ACCESS.items():
        url = path.format(name="theirs", attempt=1, replica=0)
        for name, role in (("eve", Role.VIEWER), ("bo", Role.USER)):
            below = access in (Access.USER, Access.OWNER, Access.ADMIN) and not (
                role.allows(access.role) and access is not Access.OWNER
            )
            if not below:
                continue
            # A body that would be accepted from an admin is not even looked at.
            answer = users[name].request(method, url, json={})
            assert answer.status_code == 403, (method, path, name, answer.text)
            assert answer.json()["detail"].count(".") == 0
            refused += 1
    assert refused == 2 * 13 + 7
    assert service.store.last_event() == last
    seen = users["eve"].get("/jobs/theirs")
    assert seen.status_code == 200
    assert users["ada"].get("/tokens").status_code == 200
    assert users["bo"].get("/tokens").json()["detail"] == (
        "the token of 'bo' has the role user, and this needs admin; ask an admin for it"
    )


def test_a_user_manages_its_own_jobs_alone(
    service: Service, users: dict[str, httpx.Client]
) -> None:
    ana, bo = users["ana"], users["bo"]
    made = ana.post("/jobs", json={"name": "mine", "script": SCRIPT})
    assert made.status_code == 201
    assert made.json()["spec"]["user"] == "ana"
    forged = {"name": "forged", "script": SCRIPT, "user": "bo"}
    assert (
        "user: the token of 'ana' is for 'ana', not for 'bo'"
        in ana.post("/jobs", json=forged).json()["detail"]
    )
    for method, path in (("DELETE", "/jobs/mine"), ("POST", "/jobs/mine/suspend")):
        answer = bo.request(method, path)
        assert answer.status_code == 403
        assert "job 'mine' is not one of 'bo'" in answer.json()["detail"]
    assert ana.delete("/jobs/mine").status_code == 200
    # What has ended may be submitted again under its name, but not by others.
    again = {"jobs": [{"name": "mine", "script": SCRIPT}]}
    assert bo.post("/jobs/batch", json=again).status_code == 403
    assert bo.post("/jobs/mine/delete").status_code == 403
    assert ana.post("/jobs/batch", json=again).status_code == 201
    assert ana.delete("/jobs/nobody").status_code == 404
    assert users["ada"].delete("/jobs/mine").status_code == 200


def test_a_token_is_for_its_team_and_users_of_a_team(
    service: Service, users: dict[str, httpx.Client]
) -> None:
    spec = TeamsSpec.model_validate(
        {"teams": [{"name": "vision", "quota": 2, "users": ["ana", "cy"]}, {"name": "text"}]}
    )
    service.control.set_teams(spec)
    _, secret = service.store.tokens.create(NewToken(name="cy", role=Role.USER, team="vision"))
    cy = service.client(secret)
    made = cy.post("/jobs", json={"name": "cys", "script": SCRIPT})
    assert made.json()["spec"]["team"] == "vision"
    text = {"name": "cyt", "script": SCRIPT, "team": "text"}
    assert "team: the token of 'cy' is for 'vision'" in cy.post("/jobs", json=text).json()["detail"]
    vision = {"name": "bos", "script": SCRIPT, "team": "vision"}
    answer = users["bo"].post("/jobs", json=vision)
    assert answer.status_code == 422
    assert "user: bo is not in team 'vision'; its users are ana, cy" in answer.json()["detail"]
    (vision_view,) = [t for t in cy.get("/teams").json()["teams"] if t["name"] == "vision"]
    assert vision_view["waiting"] == ["cys"]
    service.control.set_teams(None)


def test_tokens_are_kept_as_digests_and_end_when_they_are_revoked(
    service: Service, users: dict[str, httpx.Client]
) -> None:
    admin = service.admin
    made = admin.post("/tokens", json={"name": "dan", "role": "viewer"}).json()
    secret = made["token"]
    dan = service.client(secret)
    assert dan.get("/jobs").status_code == 200
    kept = service.state_dir.database.read_bytes()
    log = service.state_dir.database.with_name("pipollux.db-wal")
    kept += log.read_bytes() if log.exists() else b""
    assert secret.encode() not in kept
    assert hashlib.sha256(secret.encode()).hexdigest().encode() in kept
    assert admin.post("/tokens", json={"name": "dan", "role": "user"}).status_code == 409
    assert admin.post("/tokens", json={"name": "admin", "role": "user"}).status_code == 422
    assert [one["name"] for one in users["ada"].get("/tokens").json()].count("dan") == 1
    assert admin.delete("/tokens/dan").json()["name"] == "dan"
    assert dan.get("/jobs").status_code == 401
    assert admin.delete("/tokens/dan").status_code == 404
    assert service.client("plx_wrong").get("/jobs").status_code == 401


def test_a_stream_ends_with_its_token(service: Service) -> None:
    _, secret = service.store.tokens.create(NewToken(name="fay", role=Role.VIEWER))
    with service.client(secret).stream("GET", "/events/stream?after=0") as response:
        lines = response.iter_lines()
        assert next(line for line in lines if line.startswith("data: "))
        service.store.tokens.revoke("fay")
        service.store.add_event("test", {"after": "it was revoked"})
        # The server ends it: the client would wait for four minutes.
        assert "it was revoked" not in "".join(lines)


def test_no_user_takes_all_places_of_those_who_listen(
    service: Service, users: dict[str, httpx.Client]
) -> None:
    most = Limits().listeners_per_user
    with ExitStack() as streams:
        for _ in range(most):
            streams.enter_context(users["eve"].stream("GET", "/events/stream")).raise_for_status()
        refused = users["eve"].get("/events/stream")
        assert refused.status_code == 503
        assert f"{most} requests of eve already listen to events" in refused.json()["detail"]
        for name in ("bo", "ada"):
            streams.enter_context(users[name].stream("GET", "/events/stream")).raise_for_status()


def test_users_together_leave_admins_places_to_listen(service: Service) -> None:
    limits = Limits()
    secrets = [
        service.store.tokens.create(NewToken(name=f"viewer-{n}", role=Role.VIEWER))[1]
        for n in range(limits.listeners // limits.listeners_per_user)
    ]
    with ExitStack() as streams:
        opened = 0
        for client in map(service.client, secrets):
            streams.enter_context(client)
            for _ in range(limits.listeners_per_user):
                stream = streams.enter_context(client.stream("GET", "/events/stream"))
                opened += stream.status_code == 200
        assert opened == limits.listeners - limits.listeners_per_user
        streams.enter_context(service.admin.stream("GET", "/events/stream")).raise_for_status()


def test_a_token_that_was_revoked_is_not_kept_when_the_store_fails(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, secret = service.store.tokens.create(NewToken(name="gus", role=Role.VIEWER))
    gus = service.client(secret)
    assert gus.get("/jobs").status_code == 200
    service.store.tokens.revoke("gus")

    def fails(_: TokenRecords) -> list[object]:
        raise StoreUnavailableError("the disk is full")

    with monkeypatch.context() as broken:
        broken.setattr(TokenRecords, "all", fails)
        assert gus.get("/jobs").status_code >= 500
    assert gus.get("/jobs").status_code == 401


def test_a_job_is_run_again_only_for_a_team_that_its_user_is_in(
    service: Service, users: dict[str, httpx.Client]
) -> None:
    teams = {"teams": [{"name": "vision", "users": ["hal"]}, {"name": "text"}]}
    service.control.set_teams(TeamsSpec.model_validate(teams))
    _, secret = service.store.tokens.create(NewToken(name="hal", role=Role.USER))
    hal = service.client(secret)
    hal.post("/jobs", json={"name": "old", "script": SCRIPT, "team": "vision"}).raise_for_status()
    assert hal.delete("/jobs/old").status_code == 200
    teams["teams"][0]["users"] = ["cy"]
    service.control.set_teams(TeamsSpec.model_validate(teams))
    answer = hal.post("/jobs/old/rerun")
    assert answer.status_code == 422
    assert "user: hal is not in team 'vision'" in answer.json()["detail"]
    teams["teams"][0]["users"] = ["hal"]
    service.control.set_teams(TeamsSpec.model_validate(teams))
    service.store.tokens.revoke("hal")
    _, secret = service.store.tokens.create(NewToken(name="hal", role=Role.USER, team="text"))
    hal = service.client(secret)
    answer = hal.post("/jobs/old/rerun")
    assert answer.status_code == 403
    assert "team: the token of 'hal' is for 'text', not for 'vision'" in answer.json()["detail"]
    assert users["ada"].post("/jobs/old/rerun").status_code == 200
    service.control.set_teams(None)


def test_a_priority_is_for_its_users(service: Service, users: dict[str, httpx.Client]) -> None:
    spec = {"teams": [], "priorities": [{"name": "urgent", "value": 9, "users": ["bo"]}]}
    service.control.set_teams(TeamsSpec.model_validate(spec))
    urgent = {"script": SCRIPT, "priority": "urgent"}
    answer = users["ana"].post("/jobs", json={"name": "pushes", **urgent})
    assert answer.status_code == 422
    assert "priority: 'urgent' is not for ana; its users are bo" in answer.json()["detail"]
    assert users["bo"].post("/jobs", json={"name": "hurries", **urgent}).status_code == 201
    kept = TeamsSpec.model_validate(spec)
    job = JobSpec(name="hurries", script=SCRIPT, user="bo", priority="urgent")
    assert kept.priority_of(job) == (9, True)
    assert kept.priority_of(job.model_copy(update={"user": "ana"})) == (0, True)
    service.control.set_teams(None)
