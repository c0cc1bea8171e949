"""Forecasts over REST."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipollux_sched.lifecycle import Allocate, Exited, Outcome
from pipollux_sched.spec.tokens import NewToken, Role
from pipollux_sched.store import StoredForecast
from tests.cli.kept import HINTS
from tests.sched.supervised import NODES, SCRIPT, Service

NEW = {
    "name": "new",
    "script": SCRIPT,
    "min_replicas": 2,
    "max_replicas": 2,
    "hints": {**HINTS, "remainingSamples": 1e6},
}


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    with Service(tmp_path / "state") as service:
        nodes = {node.name: {"slots": node.slots, "kind": "cpu"} for node in NODES}
        service.store.add_event("cluster", {"nodes": nodes, "policy": "FifoPolicy"})
        yield service


def estimate(low: float, median: float | None, high: float | None) -> dict[str, float | None]:
    return {"low": low, "median": median, "high": high}


@pytest.mark.exhaustive
def test_a_new_job_is_forecast_and_not_stored(service: Service) -> None:
    before = service.store.last_event()
    answer = service.admin.post("/jobs/forecast", json={"jobs": [NEW]})
    assert answer.status_code == 200, answer.text
    [found] = answer.json()
    assert found["job"] == "new"
    assert found["start"]["low"] == found["start"]["high"]
    assert found["start"]["low"] < found["end"]["low"] < found["end"]["high"]
    assert service.store.jobs() == []
    assert service.store.last_event() == before
    assert service.num_reconsidered == 0


def test_what_would_not_be_submitted_is_not_forecast(service: Service) -> None:
    service.submit("old")
    viewer = service.client(service.store.tokens.create(NewToken(name="eve", role=Role.VIEWER))[1])
    for client, changes, status, text in (
        (service.admin, {"num_stages": 9}, 422, "9 slots"),
        (service.admin, {"script": "/nowhere.py"}, 422, "/nowhere.py"),
        (service.admin, {"name": "old"}, 409, "already exists"),
        (service.admin, {"team": "blue"}, 422, "no teams are set"),
        (viewer, {}, 403, "role"),
    ):
        answer = client.post("/jobs/forecast", json={"jobs": [{**NEW, **changes}]})
        assert answer.status_code == status, answer.text
        assert text in answer.json()["detail"]


@pytest.mark.exhaustive
def test_a_policy_that_cannot_be_simulated(service: Service) -> None:
    service.store.add_event("cluster", {"nodes": {}, "policy": "Mine"})
    answer = service.admin.post("/jobs/forecast", json={"jobs": [NEW]})
    assert answer.status_code == 409
    assert "under the policy 'mine'" in answer.json()["detail"]


def test_every_answer_about_a_job_has_its_forecast(service: Service) -> None:
    service.submit("runs", ["node-a"])
    service.submit("waits")
    service.submit("done", ["node-b"])
    now = time.time()
    end = estimate(now + 10, now + 20, None)
    for name in ("runs", "waits", "done"):
        service.store.forecasts.keep(
            {
                other: StoredForecast(now, estimate(now, now + 1, now + 2), end, end)
                for other in ("runs", "waits", "done")
            },
            [name],
        )
    service.store.transition("done", Exited(1, Outcome.COMPLETE, step=9, epoch=0))
    shown = {"made_at": now, "end": end, "note": None}
    waits = {**shown, "start": estimate(now, now + 1, now + 2)}
    runs = {**shown, "start": None}  # it has started since
    get = lambda path: service.admin.get(path).json()  # noqa: E731  # short
    for listed in (get("/jobs"), get("/overview")["jobs"]):
        found = {job["name"]: job["forecast"] for job in listed}
        assert found == {"runs": runs, "waits": waits, "done": None}
    for path in ("/jobs/waits", "/jobs/waits/explanation"):
        assert get(path)["forecast"] == waits
    assert get("/jobs/done")["forecast"] is None
    assert {one["job"]: one["forecast"] for one in get("/plan")["jobs"]} == {
        "runs": runs,
        "waits": waits,
    }
    assert [one["forecast"] for one in get("/plan?policy=exact")["jobs"]] == [None, None]
    found = get("/forecasts")
    assert found["jobs"] == [{**runs, "job": "runs"}, {**waits, "job": "waits"}]
    # It ended before the interval began.
    assert [(one["job"], one["covered"]) for one in found["past"]] == [("done", False)]
    assert found["accuracy"]["num_ends"] == 1


def test_a_forecast_of_an_earlier_job_of_the_name_is_not_shown(service: Service) -> None:
    now = time.time()
    end = estimate(now + 10, now + 20, now + 30)
    service.store.forecasts.keep({"again": StoredForecast(now - 100, None, end, end)}, ["again"])
    service.submit("again")
    assert service.admin.get("/jobs/again").json()["forecast"] is None


def test_a_suspended_job_has_no_forecast(service: Service) -> None:
    service.submit("held")
    now = time.time()
    end = estimate(now + 10, now + 20, now + 30)
    service.store.forecasts.keep({"held": StoredForecast(now + 1, None, end, end)})
    service.store.transition("held", Allocate(["node-a"], "it is free"))
    service.admin.post("/jobs/held/suspend").raise_for_status()
    assert service.admin.get("/jobs/held").json()["forecast"] is None
