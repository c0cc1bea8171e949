"""As whom the jobs of a token's user run, and who may read their logs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipollux_sched.backend import run_as
from pipollux_sched.spec.teams import TeamsSpec
from tests.sched.supervised import SCRIPT, Service, detail


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    with Service(tmp_path / "state") as service:
        yield service


@pytest.fixture
def _as_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the user can run this machine's Python is tried with real users, elsewhere."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(run_as, "_look", lambda *_: 0)


@pytest.mark.usefixtures("_as_root")
def test_jobs_of_a_user_run_as_the_tokens_user_of_the_machine(service: Service) -> None:
    made = service.admin.post(
        "/tokens", json={"name": "ana", "role": "user", "run_as": "nobody"}
    ).json()
    assert (made["run_as"], made["note"]) == ("nobody", "")
    assert [token["run_as"] for token in service.admin.get("/tokens").json()] == ["nobody"]
    ana = service.client(made["token"])
    job = {"name": "mine", "script": SCRIPT, "checkpoint_dir": "/srv/mine"}
    spec = ana.post("/jobs", json=job).json()["spec"]
    assert (spec["user"], spec["run_as"]) == ("ana", "nobody")
    for other in ("root", "daemon"):
        refused = ana.post("/jobs", json={**job, "name": "other", "run_as": other})
        assert refused.status_code == 403
        assert f"jobs of 'ana' run as 'nobody', not as '{other}'" in detail(refused)
    # Whoever submits it.
    job = {"name": "hers", "script": SCRIPT, "user": "ana", "checkpoint_dir": "/srv/hers"}
    assert service.admin.post("/jobs", json=job).json()["spec"]["run_as"] == "nobody"
    job = {"name": "admins", "script": SCRIPT}
    assert service.admin.post("/jobs", json=job).json()["spec"]["run_as"] is None


@pytest.mark.usefixtures("_as_root")
def test_such_a_job_saves_where_its_user_can(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its home directory, each job in a folder of its own, unless the job names one."""
    job = {"name": "mine", "script": SCRIPT, "run_as": "nobody"}
    account = run_as.pwd.getpwnam("nobody")
    where = [account.pw_dir]
    monkeypatch.setattr(
        run_as.pwd,
        "getpwnam",
        lambda _name: run_as.pwd.struct_passwd((*account[:5], where[0], *account[6:])),
    )
    where[0] = str(tmp_path / "gone")
    refused = service.admin.post("/jobs", json=job)
    assert refused.status_code == 422
    assert "home directory" in detail(refused)
    where[0] = str(tmp_path)
    spec = service.admin.post("/jobs", json=job).json()["spec"]
    assert spec["checkpoint_dir"].startswith(f"{tmp_path}/.local/state/pipollux/mine-")
    service.admin.delete("/jobs/mine").raise_for_status()
    again = service.admin.post("/jobs", json=job).json()["spec"]
    assert again["checkpoint_dir"] == spec["checkpoint_dir"], "it goes on"
    service.admin.delete("/jobs/mine").raise_for_status()
    service.admin.post("/jobs/mine/delete").raise_for_status()
    other = service.admin.post("/jobs", json=job).json()["spec"]
    assert other["checkpoint_dir"] != spec["checkpoint_dir"], "it begins"


def test_a_job_of_a_user_that_the_machine_lacks(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused by the backend, in one sentence."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    job = {"name": "mine", "script": SCRIPT, "working_dir": "/", "run_as": "no-such-user"}
    refused = service.admin.post("/jobs", json=job)
    assert refused.status_code == 422
    assert "job 'mine': run_as: this machine has no user 'no-such-user'; give" in detail(refused)


def test_tokens_that_cannot_be_made(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusal(**fields: str) -> str:
        answer = service.admin.post("/tokens", json={"name": "ana", "role": "user", **fields})
        assert answer.status_code == 422
        return detail(answer)

    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert "this machine has no user 'no-such-user'" in refusal(run_as="no-such-user")
    assert "is for tokens of the role 'user'" in refusal(run_as="nobody", role="admin")
    assert "no teams are set" in refusal(team="vision")
    service.control.set_teams(TeamsSpec.model_validate({"teams": [{"name": "text"}]}))
    assert "team: 'vision' is not known; choose from text" in refusal(team="vision")
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert "only a scheduler that runs as root can start jobs as 'nobody'" in refusal(
        run_as="nobody"
    )
    assert service.admin.get("/tokens").json() == []


@pytest.mark.parametrize(("uid", "remedy"), [(0, "pass --run-as"), (12345, "runs as root")])
def test_whom_a_token_trusts_is_said(
    service: Service, monkeypatch: pytest.MonkeyPatch, uid: int, remedy: str
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    note = service.admin.post("/tokens", json={"name": "ana", "role": "user"}).json()["note"]
    assert "'ana' must be trusted as an admin is" in note
    assert remedy in note
    viewer = service.admin.post("/tokens", json={"name": "eve", "role": "viewer"}).json()
    assert viewer["note"] == ""


def test_logs_are_for_the_team_of_a_job(service: Service) -> None:
    """And for its user, and admins; without teams for everybody who may look."""

    def client(name: str, **fields: str) -> str:
        made = service.admin.post("/tokens", json={"name": name, **fields})
        return str(made.raise_for_status().json()["token"])

    teams = [{"name": "vision", "users": ["ana", "cy"]}, {"name": "text", "users": ["bo"]}]
    service.control.set_teams(TeamsSpec.model_validate({"teams": teams}))
    tokens = {
        "ana": client("ana", role="user"),
        "bo": client("bo", role="user"),
        "cy": client("cy", role="viewer"),
        "dan": client("dan", role="viewer", team="vision"),
        "eve": client("eve", role="viewer"),
        "ada": client("ada", role="admin"),
    }
    people = {name: service.client(token) for name, token in tokens.items()}
    job = {"name": "anas", "script": SCRIPT}
    people["ana"].post("/jobs", json=job).raise_for_status()
    log = service.state_dir.log("anas", 1, 0)
    log.parent.mkdir(parents=True)
    log.write_text("a secret\n")

    def readers() -> set[str]:
        found = set()
        for path in ("/jobs/anas/logs", "/jobs/anas/logs/1/0"):
            answers = {name: person.get(path) for name, person in people.items()}
            assert {answer.status_code for answer in answers.values()} <= {200, 403}
            found.add(frozenset(name for name, got in answers.items() if got.is_success))
        (same,) = found
        return set(same)

    assert readers() == {"ana", "cy", "dan", "ada"}
    refused = people["eve"].get("/jobs/anas/logs")
    assert "the logs of job 'anas' are for its team 'vision'" in detail(refused)
    assert service.admin.get("/jobs/anas/logs/1/0").text == "a secret\n"
    assert people["eve"].get("/jobs/anas").is_success
    assert people["eve"].get("/jobs/none/logs").status_code == 404
    service.control.set_teams(None)
    assert readers() == set(people)


def test_a_wrong_token_learns_nothing_of_the_machine(service: Service) -> None:
    answer = service.client("wrong").get("/jobs")
    assert answer.status_code == 401
    assert str(service.state_dir.path) not in answer.text
    assert "/" not in detail(answer)
