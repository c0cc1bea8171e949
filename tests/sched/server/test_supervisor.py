"""The supervisor over real HTTP: who may ask what, and what is refused how."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.metadata import version

import pytest

from pipollux_sched.lifecycle import Allocate, Exited, Outcome
from pipollux_sched.server import BODY_LIMIT
from pipollux_sched.server.http_server import HttpServer, HttpServerError
from tests.sched.supervised import SCRIPT, TIMELINE, Service, detail, report


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with Service(tmp_path_factory.mktemp("state")) as service:
        service.job = service.submit("toy", ["node-a"])
        yield service


def test_health_needs_no_token(service: Service) -> None:
    with service.client(None) as nobody:
        assert nobody.get("/healthz").json() == {"status": "ok", "version": version("pipollux")}


def test_a_job_reports_and_hints(service: Service) -> None:
    before = service.store.last_event()
    hints = {"initBatchSize": 8, "maxBatchSize": 64, "maxProfiledReplicas": 1}
    assert service.job.put("/jobs/toy/hints?attempt=1", json=hints).status_code == 204
    answer = service.job.post("/jobs/toy/reports", json=report())
    assert (answer.status_code, answer.json()) == (200, {"again": 1.0})
    assert service.store.hints()["toy"]["maxBatchSize"] == 64
    assert service.store.last_points()["toy"].loss == 0.5
    assert service.store.job("toy").state.reason == "Training"
    events = service.admin.get(f"/events?after={before}").json()
    assert [event["type"] for event in events] == ["hints", "first_step", "progress", "timeline"]
    assert events[2]["num_epochs"] == 3
    assert events[3]["events"] == TIMELINE["events"]
    assert events[3]["schedule"] == TIMELINE["schedule"]
    shown = service.admin.get("/jobs/toy").json()
    assert shown["hints"]["initBatchSize"] == 8
    assert shown["attempts"][0]["nodes"] == ["node-a"]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("PUT", "/jobs/toy/hints?attempt=1"),
        ("POST", "/jobs/toy/reports"),
        ("PUT", "/jobs/no-such-job/hints?attempt=1"),
        ("POST", "/jobs"),
        ("GET", "/jobs"),
        ("GET", "/jobs/toy"),
        ("DELETE", "/jobs/toy"),
        ("GET", "/jobs/toy/logs"),
        ("GET", "/events"),
        ("GET", "/plan"),
        ("POST", "/jobs/toy/heartbeats"),
        ("POST", "/jobs/toy/replicas"),
        ("GET", "/jobs/toy/replicas?attempt=1"),
        ("POST", "/jobs/toy/suspend"),
        ("POST", "/jobs/toy/resume"),
        ("GET", "/nodes"),
        ("PUT", "/nodes/node-a"),
        ("GET", "/events/stream"),
        ("GET", "/metrics"),
    ],
)
@pytest.mark.parametrize("token", [None, "wrong token", "tökén"])
def test_wrong_tokens_open_nothing(
    service: Service, method: str, path: str, token: str | None
) -> None:
    headers = {} if token is None else {"Authorization": f"Bearer {token}".encode()}
    with service.client(None) as client:
        response = client.request(method, path, json={}, headers=headers)
    assert response.status_code == 401
    assert "token" in detail(response)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"a": "\\u0000"}', "[" * 100_000, '{"a": 1}'])
@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/jobs"), ("PUT", "/jobs/toy/hints?attempt=1"), ("PUT", "/nodes/node-a")],
)
def test_who_has_no_token_is_told_so_whatever_is_sent(
    service: Service, method: str, path: str, content: str
) -> None:
    with service.client(None) as client:
        assert client.request(method, path, content=content).status_code == 401
    assert service.admin.request(method, path, content=content).status_code == 422


def test_a_job_s_token_opens_its_own_two_rows_alone(service: Service) -> None:
    with service.submit("other") as other:
        assert other.put("/jobs/toy/hints?attempt=1", json={}).status_code == 401
        assert other.post("/jobs/toy/reports", json=report()).status_code == 401
        for path in ("/jobs", "/jobs/other", "/events", "/plan", "/report", "/nodes", "/metrics"):
            assert other.get(path).status_code == 401
        assert other.delete("/jobs/other").status_code == 401


def test_the_token_of_a_job_that_was_taken_up_again_is_another(service: Service) -> None:
    """At once, although the old one was seen before and need not be looked up any more."""
    before = service.submit("again")
    assert before.put("/jobs/again/hints?attempt=7", json={}).status_code == 409
    service.admin.delete("/jobs/again").raise_for_status()
    after = service.submit("again")
    assert before.put("/jobs/again/hints?attempt=7", json={}).status_code == 401
    assert after.put("/jobs/again/hints?attempt=7", json={}).status_code == 409


def test_a_first_step_lets_the_jobs_that_wait_be_weighed(service: Service) -> None:
    job = service.submit("settling", ["node-a"])
    service.submit("waiting")
    service.store.transition("waiting", Allocate((), "there is no room"))
    before = service.num_reconsidered
    for _ in range(2):
        assert job.post("/jobs/settling/reports", json=report()).status_code == 200
    assert service.num_reconsidered == before + 1


def test_attempts_that_are_gone_are_refused(service: Service) -> None:
    moved = service.submit("moved", ["node-a"])
    service.store.transition("moved", Allocate(["node-b"], "it is better"))
    service.store.transition("moved", Exited(1, Outcome.STOPPED, step=1))
    response = moved.put("/jobs/moved/hints?attempt=1", json={})
    assert response.status_code == 409
    assert "attempt 1 of job 'moved' is not the current one (2)" in detail(response)
    assert moved.post("/jobs/moved/reports", json=report(1)).status_code == 409
    assert moved.post("/jobs/moved/reports", json=report(2)).status_code == 200


HUGE = "x" * 10_000_000


def test_large_bodies_are_refused_and_the_next_is_served(service: Service) -> None:
    """With a length and without one, and with far more than the limit."""

    def chunks() -> Iterator[bytes]:
        for _ in range(100):
            yield b"x" * 100_000

    for content in (HUGE, chunks(), "y" * (BODY_LIMIT + 1)):
        response = service.job.put("/jobs/toy/hints?attempt=1", content=content)
        assert response.status_code == 413
        assert "larger than 1048576 bytes" in detail(response)
    padded = json.dumps({"initBatchSize": 8}).ljust(BODY_LIMIT)
    assert service.job.put("/jobs/toy/hints?attempt=1", content=padded).status_code == 204


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ('{"initBatchSize": NaN}', "initBatchSize"),
        ('{"perfParams": {"alpha_c": NaN}}', "perfParams.alpha_c"),
        ('{"gradParams": {"norm": 1, "var": Infinity}}', "gradParams.var"),
        ('{"initBatchsize": 8}', "did you mean initBatchSize?"),
        ('{"numStages": -1}', "numStages is -1"),
        ("[]", "send a JSON object"),
        ("{", "not valid JSON"),
        ("", "not valid JSON"),
    ],
)
def test_hints_that_make_no_sense(service: Service, body: str, says: str) -> None:
    response = service.job.put("/jobs/toy/hints?attempt=1", content=body)
    assert response.status_code == 422
    assert says in detail(response)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"loss": float("nan")}, "points[0].loss"),
        ({"stepTime": -1.0}, "points[0].stepTime: -1.0 is not allowed"),
        ({"step": "seven"}, 'points[0].step: "seven" is not allowed'),
        ({"samples": 2**70}, "points[0].samples"),
        ({"los": 1.0}, "did you mean 'loss'?"),
    ],
)
def test_reports_that_make_no_sense(
    service: Service, changes: dict[str, object], says: str
) -> None:
    body = json.dumps(report(**changes))  # httpx itself would refuse to send NaN
    response = service.job.post("/jobs/toy/reports", content=body)
    assert response.status_code == 422
    assert says in detail(response)


def test_jobs_that_make_no_sense(service: Service) -> None:
    response = service.admin.post("/jobs", json={"name": "Toy", "script": "toy.py"})
    assert response.status_code == 422
    assert "'Toy' is not a name" in detail(response)
    response = service.admin.post("/jobs", json={"name": "toy", "script": SCRIPT})
    assert response.status_code == 409
    assert "'toy' already exists" in detail(response)
    before = service.store.last_event()
    image = {"name": "boxed", "image": "registry.example/train:2.1"}
    response = service.admin.post("/jobs", json=image)
    assert response.status_code == 422
    assert detail(response) == (
        "job 'boxed': image: 'registry.example/train:2.1' cannot be run by the local backend, "
        "which starts processes of this machine and no containers; remove it, and give as script "
        "the path of a Python script"
    )
    assert service.admin.get("/jobs/boxed").status_code == 404
    assert service.store.last_event() == before
    for response in (service.admin.get("/jobs/tyo"), service.admin.delete("/jobs/tyo")):
        assert response.status_code == 404
        assert "no job is named 'tyo'" in detail(response)


def test_logs_and_cluster(service: Service) -> None:
    log = service.state_dir.log("toy", 1, 0)
    log.parent.mkdir(parents=True)
    log.write_text("one\ntwo\nthree\n")
    assert service.admin.get("/jobs/toy/logs?tail=2").json() == [
        {"attempt": 1, "replica": 0, "lines": ["two", "three"]}
    ]
    assert service.admin.get("/jobs/toy/logs?tail=0").json()[0]["lines"] == []
    for none in ("999999999/0", "1/1", "2/0"):
        refused = service.admin.get(f"/jobs/toy/logs/{none}")
        assert refused.status_code == 404
        assert "there is no log of attempt" in refused.json()["detail"]
    part = service.admin.get("/jobs/toy/logs/1/0?offset=4")
    assert (part.text, part.headers["Pipollux-Log-Offset"]) == ("two\nthree\n", "14")
    assert service.admin.get("/nodes").json()[0]["slots"] == 2
    assert service.admin.get("/jobs/toy/logs?tail=-1").status_code == 422


def test_a_port_that_is_taken(service: Service) -> None:
    port = int(service.server.url.rpartition(":")[2])
    with pytest.raises(
        HttpServerError, match=rf"cannot listen on 127.0.0.1:{port}.*another --port"
    ):
        HttpServer(service.app, "127.0.0.1", port)
