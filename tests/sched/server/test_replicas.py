"""Heartbeats and addresses of replicas, over real HTTP."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import httpx
import pytest

from pipollux_sched.lifecycle import Allocate, Cancel, Exited, Outcome
from pipollux_sched.server import Limits
from pipollux_sched.store import Store
from pipollux_sched.views.jobs import job_details
from tests.sched.supervised import Service, detail


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    limits = Limits(waiting=6, waiting_per_job=3)
    with Service(tmp_path_factory.mktemp("state"), limits) as service:
        yield service


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def beat(
    client: httpx.Client, name: str, attempt: object, replica: object, **more: object
) -> httpx.Response:
    body = {"attempt": attempt, "replica": replica, **more}
    return client.post(f"/jobs/{name}/heartbeats", json=body)


def register(client: httpx.Client, name: str, attempt: int, replica: int) -> httpx.Response:
    body = {"attempt": attempt, "replica": replica, "address": f"10.0.0.{replica}:29500"}
    return client.post(f"/jobs/{name}/replicas", json=body)


def ask(client: httpx.Client, name: str, attempt: int, wait: float) -> httpx.Response:
    query = {"attempt": attempt, "wait": wait}
    return client.get(f"/jobs/{name}/replicas", params=query)


def eventually(true: Callable[[], object], seconds: float = 240.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.05)  # asked too often, everybody is told to wait


def test_heartbeats(service: Service) -> None:
    job = service.submit("beating", ["node-a", "node-b"])
    answer = beat(job, "beating", 1, 0, step=12)
    assert answer.status_code == 200
    assert set(answer.json().values()) == {None}, "it says nothing of elastic resizes"
    assert beat(service.admin, "beating", 1, 1).status_code == 200
    heard = service.control.heartbeats.heard("beating", 1)
    assert {replica: entry.step for replica, entry in heard.items()} == {0: 12, 1: None}
    shown = service.admin.get("/jobs/beating").json()["replicas"]
    assert [(row["replica"], row["node"], row["step"]) for row in shown] == [
        (0, "node-a", 12),
        (1, "node-b", None),
    ]
    assert all(0.0 <= row["heard_seconds"] < 60.0 for row in shown)


def test_heartbeats_of_attempts_that_are_gone(service: Service) -> None:
    job = service.submit("leaving", ["node-a"])
    assert beat(job, "leaving", 2, 0).status_code == 409
    service.store.transition("leaving", Exited(1, Outcome.FAILED, message="it fell over"))
    response = beat(job, "leaving", 1, 0)
    assert response.status_code == 409
    assert detail(response) == "attempt 1 of job 'leaving' has ended"
    assert service.control.heartbeats.heard("leaving", 1) == {}


@pytest.mark.parametrize(
    ("attempt", "replica", "more", "says"),
    [
        (1, 1, {}, "replica is 1, but attempt 1 of job 'odd' has 1, numbered from 0 to 0"),
        (1, -1, {}, "heartbeat: replica: -1 is not allowed"),
        (1, "0", {}, 'heartbeat: replica: "0" is not allowed'),
        (0, 0, {}, "heartbeat: attempt: 0 is not allowed"),
        (1.5, 0, {}, "heartbeat: attempt: 1.5 is not allowed"),
        (1, 0, {"step": -3}, "heartbeat: step: -3 is not allowed"),
        (1, 0, {"stpe": 3}, "heartbeat: stpe: unknown field; did you mean 'step'?"),
    ],
)
def test_heartbeats_that_make_no_sense(
    service: Service, attempt: object, replica: object, more: dict[str, int], says: str
) -> None:
    if "odd" not in {job.name for job in service.store.jobs()}:
        service.submit("odd", ["node-b"])
    response = beat(service.admin, "odd", attempt, replica, **more)
    assert response.status_code == 422
    assert says in detail(response)
    assert service.control.heartbeats.heard("odd", 1) == {}


def test_all_replicas_learn_where_the_others_are(
    service: Service, pool: ThreadPoolExecutor
) -> None:
    """Each registers and waits, as the replicas of a real attempt do, in whatever order."""
    job = service.submit("meeting", ["node-a", "node-b", "node-a"], max_replicas=3)
    together = threading.Barrier(3)

    def meet(replica: int) -> httpx.Response:
        together.wait(240)
        assert register(job, "meeting", 1, replica).status_code == 204
        return ask(job, "meeting", 1, 60)

    answers = [answer.json() for answer in pool.map(meet, (2, 0, 1))]
    assert answers == 3 * [
        {
            "attempt": 1,
            "num_replicas": 3,
            "complete": True,
            "replicas": [{"replica": r, "address": f"10.0.0.{r}:29500"} for r in range(3)],
        }
    ]
    shown = service.admin.get("/jobs/meeting").json()["replicas"]
    assert [row["address"] for row in shown] == [f"10.0.0.{r}:29500" for r in range(3)]


def test_who_waits_in_vain_is_told_who_is_there(service: Service) -> None:
    job = service.submit("lonely", ["node-a", "node-b"])
    assert ask(job, "lonely", 1, 0).json()["replicas"] == []
    assert register(job, "lonely", 1, 1).status_code == 204
    answer = ask(job, "lonely", 1, 0.3)
    assert answer.status_code == 200
    assert answer.json()["complete"] is False
    assert answer.json()["replicas"] == [{"replica": 1, "address": "10.0.0.1:29500"}]


def test_who_waits_learns_at_once_that_the_job_has_moved(
    service: Service, pool: ThreadPoolExecutor
) -> None:
    job = service.submit("moving", ["node-a", "node-b"])
    register(job, "moving", 1, 0)
    waiting = pool.submit(ask, job, "moving", 1, 60)
    service.store.transition("moving", Allocate(["node-b"], "it is better"))
    service.store.transition("moving", Exited(1, Outcome.STOPPED, step=1))
    response = waiting.result(240)
    assert response.status_code == 409
    assert detail(response) == "attempt 1 of job 'moving' is not the current one (2)"
    assert register(job, "moving", 1, 1).status_code == 409
    # Nothing of the old attempt is taken for the new one's.
    assert ask(job, "moving", 2, 0).json()["replicas"] == []
    assert register(job, "moving", 2, 0).status_code == 204
    assert ask(job, "moving", 2, 0).json()["complete"] is True


def test_addresses_and_heartbeats_survive_the_scheduler(service: Service) -> None:
    job = service.submit("lasting", ["node-a", "node-b"])
    register(job, "lasting", 1, 0)
    beat(job, "lasting", 1, 0, step=12)
    beat(job, "lasting", 1, 1, step=12, finished=True)
    with Store(service.state_dir.database) as reopened:
        assert reopened.replicas.find("lasting", 1).addresses == {0: "10.0.0.0:29500"}
        shown = job_details(reopened, reopened.job("lasting")).replicas
    assert [(replica.step, replica.finished) for replica in shown] == [(12, False), (12, True)]
    assert all(replica.heard_seconds is not None for replica in shown)


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("nowhere", "a text such as 10.0.0.7:29500"),
        ("a b:1", "a text such as 10.0.0.7:29500"),
        ("x" * 300 + ":1", "a text such as 10.0.0.7:29500"),
        (29500, "replica: address: 29500 is not allowed"),
    ],
)
def test_addresses_that_make_no_sense(service: Service, address: object, says: str) -> None:
    if "nameless" not in {job.name for job in service.store.jobs()}:
        service.submit("nameless", ["node-a"])
    body = {"attempt": 1, "replica": 0, "address": address}
    response = service.admin.post("/jobs/nameless/replicas", json=body)
    assert response.status_code == 422
    assert says in detail(response)
    assert service.store.replicas.find("nameless", 1).addresses == {}


@pytest.mark.parametrize("query", ["attempt=1&wait=61", "attempt=1&wait=nan", "wait=1"])
def test_queries_that_make_no_sense(service: Service, query: str) -> None:
    assert service.admin.get(f"/jobs/beating/replicas?{query}").status_code == 422


def test_no_more_wait_than_can(service: Service, pool: ThreadPoolExecutor) -> None:
    """Of one job three, of all six; those who wait are answered when the jobs are cancelled."""
    clients = {name: service.submit(name, ["node-a", "node-b"]) for name in ("one", "two", "three")}
    waiting: dict[tuple[str, int], Future[httpx.Response]] = {}

    def is_full(name: str) -> bool:
        """Let three of a job wait; whoever was refused, as this one here was just asking, again."""
        for key in [(name, number) for number in range(3)]:
            if key not in waiting or waiting[key].done():
                waiting[key] = pool.submit(ask, clients[name], name, 1, 60)
        return ask(clients[name], name, 1, 0).status_code == 503

    eventually(lambda: is_full("one"))
    refused = ask(clients["one"], "one", 1, 0)
    assert "3 requests of one already wait for replicas" in detail(refused)
    assert refused.headers["Retry-After"] == "1"
    assert ask(clients["two"], "two", 1, 0).status_code == 200
    eventually(lambda: is_full("two"))
    eventually(lambda: ask(clients["three"], "three", 1, 0).status_code == 503)
    assert "6 requests already wait" in detail(ask(clients["three"], "three", 1, 0))
    for name in clients:
        service.store.transition(name, Cancel())
        service.store.transition(name, Exited(1, Outcome.FAILED, message="it was cancelled"))
    assert {answer.result(240).status_code for answer in waiting.values()} == {409}
    assert ask(clients["three"], "three", 1, 0).status_code == 409
