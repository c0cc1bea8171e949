"""Sweeps over REST: one job to users, with a table of its trials."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipollux_sched.lifecycle import Allocate
from pipollux_sched.spec.tokens import NewToken, Role
from pipollux_sched.store import TrialState
from tests.sched.supervised import SCRIPT, Service, detail

GRID = {"grid": {"lr": [0.1, 0.01]}, "metric": "error"}


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    with Service(tmp_path / "state") as service:
        yield service


def submit(service: Service, name: str = "rates", **fields: Any) -> None:
    body = {"name": name, "script": SCRIPT, "sweep": GRID, **fields}
    service.admin.post("/jobs", json=body).raise_for_status()


def start(service: Service, name: str, number: int) -> None:
    trial = service.store.sweeps.trials(name)[number]
    service.control.submit_trials(service.store.job(name), [trial])
    service.store.transition(trial.job, Allocate(["node-a"], "free"))


def test_a_sweep_and_its_trials(service: Service) -> None:
    submit(service)
    start(service, "rates", 1)
    job = service.client(service.store.job("rates-1").token)
    metrics = [
        {"name": "error", "step": step, "value": value} for step, value in ((1, 2.0), (2, 1.5))
    ]
    body = {"attempt": 1, "metrics": metrics}
    assert job.post("/jobs/rates-1/reports", json=body).status_code == 200
    bad = {"attempt": 1, "metrics": [{"name": "a b", "step": 1, "value": 1.0}]}
    assert "metrics[0].name" in detail(job.post("/jobs/rates-1/reports", json=bad))

    found = service.admin.get("/sweeps/rates").json()
    assert [(trial["job"], trial["state"], trial["value"]) for trial in found["trials"]] == [
        ("rates-0", "waiting", None),
        ("rates-1", "unfinished", 1.5),
    ]
    assert found["trials"][1]["phase"] == "Running"
    assert found["trial_states"]["waiting"] == found["trial_states"]["unfinished"] == 1
    assert [sweep["name"] for sweep in service.admin.get("/sweeps").json()] == ["rates"]
    shown = service.admin.get("/jobs/rates-1").json()
    assert (shown["sweep"], shown["trial"], shown["parameters"]) == ("rates", 1, {"lr": 0.01})
    assert service.admin.get("/sweeps/rates-1").status_code == 404
    assert service.admin.get("/sweeps/nobody").status_code == 404


def test_lists_show_a_sweep_as_one_job(service: Service) -> None:
    submit(service)
    start(service, "rates", 0)
    service.submit("other")

    def names(path: str, **params: Any) -> list[str]:
        found = service.admin.get(path, params=params).json()
        return [job["name"] for job in (found if isinstance(found, list) else found["jobs"])]

    assert sorted(names("/overview")) == ["other", "rates", "rates-0"]
    assert sorted(names("/overview", trials=False)) == ["other", "rates"]
    assert names("/jobs", trials=False) == ["rates", "other"]
    compact = service.admin.get("/overview", params={"trials": False}).json()
    assert (sum(compact["phases"].values()), compact["num_found"]) == (2, 2)


def test_commands_on_a_sweep_are_commands_on_its_trials(service: Service) -> None:
    submit(service)
    start(service, "rates", 0)
    assert service.admin.post("/jobs/rates/suspend").json()["phase"] == "Suspended"
    assert service.store.job("rates-0").state.suspended
    service.admin.post("/jobs/rates/resume").raise_for_status()
    assert not service.store.job("rates-0").state.suspended
    assert service.admin.delete("/jobs/rates").json()["reason"] == "Cancelled"
    assert service.store.job("rates-0").state.intent is not None
    assert "is Running" in detail(service.admin.post("/jobs/rates-0/delete"))


def test_trials_are_their_users(service: Service) -> None:
    _, token = service.store.tokens.create(NewToken(name="ana", role=Role.USER))
    ana = service.client(token)
    ana.post("/jobs", json={"name": "mine", "script": SCRIPT, "sweep": GRID}).raise_for_status()
    start(service, "mine", 0)
    assert service.store.job("mine-0").spec["user"] == "ana"
    assert ana.delete("/jobs/mine").status_code == 200
    submit(service)
    assert ana.delete("/jobs/rates").status_code == 403
    assert [trial.state for trial in service.store.sweeps.trials("rates")] == (
        [TrialState.WAITING] * 2
    )


@pytest.mark.parametrize(
    ("sweep", "sentence"),
    [
        ({"grid": {"lr": []}}, "job: sweep.grid.lr: has no values; give at least one"),
        ({"grid": {"lr": [[1]]}}, "sweep.grid.lr[0]"),
        ({"search": {"lr": {"low": 0, "high": 1}}}, "sweep.trials: is missing"),
    ],
)
def test_what_is_refused(service: Service, sweep: dict[str, Any], sentence: str) -> None:
    body = {"name": "rates", "script": SCRIPT, "sweep": sweep}
    assert sentence in detail(service.admin.post("/jobs", json=body))
