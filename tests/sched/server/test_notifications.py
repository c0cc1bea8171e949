"""Channels over REST: each user's own, and no secret in any answer."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.sched.supervised import Service, detail

HOOK = "https://hooks.example.org/T0KEN"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with Service(tmp_path_factory.mktemp("state")) as service:
        yield service


def user(service: Service, name: str, role: str = "user") -> httpx.Client:
    made = service.admin.post("/tokens", json={"name": name, "role": role}).json()
    return service.client(made["token"])


def test_channels_of_users(service: Service) -> None:
    ana, bo = user(service, "ana"), user(service, "bo")
    made = ana.post("/notifications/channels", json={"name": "ops", "webhook": HOOK})
    assert made.status_code == 201
    assert made.json()["secret"].startswith("whsec_")
    assert made.json()["channel"]["to"] == "webhook hooks.example.org"
    assert "T0KEN" not in made.text
    again = ana.post("/notifications/channels", json={"name": "ops", "webhook": HOOK})
    assert (again.status_code, "remove it first" in detail(again)) == (409, True)
    assert bo.delete("/notifications/channels/ops").status_code == 404
    assert bo.delete("/notifications/channels/ops?user=ana").status_code == 403
    body = {"name": "ops", "webhook": HOOK, "user": "ana"}
    assert bo.post("/notifications/channels", json=body).status_code == 403
    assert bo.get("/notifications").json() == {"channels": [], "notifications": []}
    assert [one["user"] for one in service.admin.get("/notifications").json()["channels"]] == [
        "ana"
    ]
    assert ana.post("/notifications/channels/ops/test").status_code == 200
    (sent,) = ana.get("/notifications").json()["notifications"]
    assert (sent["kind"], sent["state"], sent["to"]) == (
        "test",
        "pending",
        "channel ops (webhook hooks.example.org)",
    )
    assert bo.get("/notifications").json()["notifications"] == []
    assert user(service, "eva", "viewer").get("/notifications").status_code == 403
    assert service.admin.delete("/notifications/channels/ops?user=ana").status_code == 200
    assert ana.get("/notifications").json() == {"channels": [], "notifications": []}


def test_entries_of_jobs_and_teams(service: Service) -> None:
    key = "whsec_" + "A" * 32
    entry = {"webhook": HOOK, "secret": key}
    body = {"name": "toy", "script": __file__, "notify": [entry]}
    answers = [service.admin.post("/jobs", json=body), service.admin.get("/jobs/toy")]
    answers.append(
        service.admin.put("/teams", json={"teams": [{"name": "vision", "notify": [entry]}]})
    )
    answers += [service.admin.get(path) for path in ("/teams", "/jobs", "/events?limit=999")]
    for answer in answers:
        assert answer.is_success, answer.text
        assert "T0KEN" not in answer.text
        assert key not in answer.text
    vision = {team["name"]: team for team in answers[3].json()["teams"]}["vision"]
    assert vision["notify"] == ["webhook hooks.example.org"]
    assert [rule.owner for rule in service.store.notifications.rules()] == ["job:toy"]
    for wrong, words in (
        ({"channel": "ops"}, "there is no channel 'ops'"),
        ({"webhook": "http://10.0.0.1/T0KEN", "secret": key}, "not a host that an admin allows"),
        ({"webhook": "nothing/T0KEN", "secret": key}, "notify[0].webhook: is not a URL"),
    ):
        refused = service.admin.post("/jobs", json={**body, "name": "two", "notify": [wrong]})
        assert refused.status_code == 422
        assert words in detail(refused)
        assert "T0KEN" not in refused.text
