"""What jobs send all the time is answered on the short way as on the usual one, to the letter."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from pipollux_sched.lifecycle import (
    Allocate,
    ChangeStage,
    ElasticReady,
    FirstStep,
    Started,
    WaitingToJoin,
)
from pipollux_sched.server import Limits
from pipollux_sched.server.fast_path import FastPath
from pipollux_sched.store import UnknownJobError
from tests.cli.kept import HINTS
from tests.sched.supervised import ADMIN, Service, report

BEAT = {"attempt": 1, "replica": 0, "step": 5}
ELASTIC = {"membership": 1, "epoch": 3, "loop": 1, "balance": [1], "cannot": None}
DEEP = "[" * 40 + "]" * 40
BODIES: dict[str, list[Any]] = {
    "heartbeats": [
        BEAT,
        {**BEAT, "elastic": {**ELASTIC, "schedule": "gpipe"}},
        {**BEAT, "elastic": {**ELASTIC, "step": 4, "seconds": 0.5, "store": None}},
        {**BEAT, "elastic": {"membership": 1, "store": {"number": 1, "host": "a", "port": 70000}}},
        {**BEAT, "finished": "yes"},
        {**BEAT, "attempt": 2},
        {**BEAT, "attempt": 1.0},
        {**BEAT, "attempt": True},
        {**BEAT, "replica": 3},
        {**BEAT, "step": -1},
        {**BEAT, "step": 2**63},
        {**BEAT, "more": 1},
        {**BEAT, "elastic": {"why": "\0"}},
        {**BEAT, "elastic": {"why": "\ud800"}},
        {},
        [],
        b"",
        b"\xff",
        b'{"attempt": 1, "replica": 0, "replica": 1}',
        b'{"attempt": 1, "replica": 0, "step": NaN}',
        b'{"attempt": 1, "replica": 0, "elastic": ' + DEEP.encode() + b"}",
    ],
    "reports": [
        report(),
        report(loss=None),
        report(step="7"),
        report(step=7.0),
        report(loss="nan"),
        {**report(), "timeline": None},
        {**report(), "timeline": {"step": 1}},
        {"attempt": 1},
        report(attempt=2),
        report(step=-1),
        report(more=1),
        b'{"attempt": 1, "points": [' + DEEP.encode() + b"]}",
        b'{"attempt": 1e400}',
    ],
    "hints": [
        HINTS,
        {},
        {**HINTS, "initBatchSize": 2**40},
        {**HINTS, "perfParams": {**HINTS["perfParams"], "growth_n": 17}},
        {**HINTS, "perfParams": {**HINTS["perfParams"], "alpha_c": 1e19}},
        {**HINTS, "gradParams": {"norm": 1e59, "var": 1.0}},
        {**HINTS, "gradParams": {"norm": 1e61, "var": 1.0}},
        {**HINTS, "more": 1},
        [],
        b"",
    ],
}
QUERIES = ["attempt=1", "attempt=01", "attempt=2", "attempt=0", "", "attempt=a"]
QUERIES += ["attempt=1&more=2", "attempt=1&attempt=2", "attempt=%31"]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    limits = Limits(job_rate=1e6, job_burst=10_000, wrong_rate=1e6, wrong_burst=10_000)
    with Service(tmp_path_factory.mktemp("state"), limits) as service:
        service.job = service.submit("a", ["node-a"])
        yield service


def told(answer: httpx.Response) -> tuple[object, ...]:
    body = answer.json() if answer.content else None
    if isinstance(body, dict):
        body.pop("again", None)  # which depends on the jobs that have reported
    return answer.status_code, answer.headers.get("content-type"), body


def both_ways(service: Service, client: httpx.Client, **request: Any) -> tuple[object, ...]:
    """Send a request on both ways; return the one answer."""
    routes = service.app.router.routes
    short = next(route for route in routes if isinstance(route, FastPath))
    answered = told(client.request(**request))
    place = routes.index(short)
    routes.remove(short)
    try:
        assert told(client.request(**request)) == answered
    finally:
        routes.insert(place, short)
    return answered


@pytest.mark.parametrize("path", BODIES)
def test_both_ways_answer_the_same(service: Service, path: str) -> None:
    method = "PUT" if path == "hints" else "POST"
    statuses = []
    for body in BODIES[path]:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        url = f"/jobs/a/{path}" + ("?attempt=1" if path == "hints" else "")
        request = {"method": method, "url": url, "content": content}
        statuses.append(both_ways(service, service.job, **request)[0])
    assert {200, 204} & set(statuses)
    assert {409, 422} & set(statuses)


def test_queries_tokens_and_paths(service: Service) -> None:
    def hints(client: httpx.Client, url: str) -> Any:
        return both_ways(service, client, method="PUT", url=url, json=HINTS)[0]

    found = [hints(service.job, f"/jobs/a/hints?{query}") for query in QUERIES]
    assert found == [204, 204, 409, 422, 422, 422, 204, 409, 204]
    url = "/jobs/a/hints?attempt=1"
    clients = {token: service.client(token) for token in (ADMIN, "a guess", "", None)}
    assert [hints(client, url) for client in clients.values()] == [204, 401, 401, 401]
    assert hints(service.job, "/jobs/b/hints?attempt=1") == 401
    assert hints(service.job, "/jobs/a/b/hints?attempt=1") == 404
    beat = {"method": "GET", "url": "/jobs/a/heartbeats", "json": BEAT}
    assert both_ways(service, service.job, **beat)[0] == 405


def test_what_comes_on_the_short_way_is_kept(service: Service) -> None:
    before = len(service.store.events(job="a", types=["progress"]))
    counted = service.metrics.registry.get_sample_value("pipollux_heartbeats_received_total")
    assert service.job.post("/jobs/a/reports", json=report(loss=0.25)).status_code == 200
    beat = {**BEAT, "step": 99}
    assert service.job.post("/jobs/a/heartbeats", json=beat).status_code == 200
    assert service.job.put("/jobs/a/hints?attempt=1", json=HINTS).status_code == 204
    *_, last = service.store.events(job="a", types=["progress"])
    assert len(service.store.events(job="a", types=["progress"])) == before + 1
    assert last["loss"] == 0.25
    assert service.control.heartbeats.heard("a", 1)[0].step == 99
    assert service.store.hints()["a"]["initBatchSize"] == HINTS["initBatchSize"]
    now = service.metrics.registry.get_sample_value("pipollux_heartbeats_received_total")
    assert now == (counted or 0.0) + 1


def test_a_job_that_is_not_in_memory_goes_the_short_way(service: Service) -> None:
    routes = service.app.router.routes
    before = list(routes)
    routes[:] = [route for route in routes if isinstance(route, FastPath)]
    try:
        service.store.present.keep({"a": None})
        assert service.job.post("/jobs/a/heartbeats", json=BEAT).status_code == 200
        assert service.job.post("/jobs/nobody/heartbeats", json=BEAT).status_code == 404
    finally:
        routes[:] = before


def test_jobs_that_can_be_resized_are_noted_together(service: Service) -> None:
    jobs = {name: service.submit(name, ["node-a"]) for name in ("c", "d")}
    for name, cannot in (("c", None), ("d", "its loop says so")):
        beat = {**BEAT, "elastic": {**ELASTIC, "cannot": cannot}}
        assert jobs[name].post(f"/jobs/{name}/heartbeats", json=beat).status_code == 200
        assert service.store.job(name).state.membership.why_not == cannot
    told = [("c", ElasticReady(1, "no more")), ("gone", ElasticReady(1)), ("d", ElasticReady(1))]
    one, none, other = service.control.note_words(told)
    assert isinstance(none, UnknownJobError)
    assert one == service.store.job("c")
    assert other == service.store.job("d")
    assert [service.store.job(n).state.membership.why_not for n in "cd"] == ["no more", None]


def test_joining_that_wait_are_noted_together(service: Service) -> None:
    """One change of a job's state for all that come in a moment, a record for each."""
    service.submit("grows", ["node-a"])
    grow = Allocate(["node-a"] * 4, "it grows")
    for event in (Started(1, ("4711",)), FirstStep(1, 1), ElasticReady(1), grow):
        service.store.transition("grows", event)
    told = [
        ("grows", WaitingToJoin(1, (2,))),
        ("grows", WaitingToJoin(1, (1,))),
        ("grows", WaitingToJoin(1, (2,))),
    ]
    noted = service.control.note_words(told)
    assert noted == [service.store.job("grows")] * 3
    change = service.store.job("grows").state.membership.change
    assert change is not None
    assert (change.waiting_to_join, change.stage) == ((2, 1), ChangeStage.STARTING)
    service.control.note_words([("grows", WaitingToJoin(1, (3, 1)))])
    change = service.store.job("grows").state.membership.change
    assert change is not None
    assert (change.waiting_to_join, change.stage) == ((2, 1, 3), ChangeStage.FORMING)
    events = service.store.events(job="grows", types=["waiting_to_join"])
    assert [event["replica"] for event in events] == [2, 1, 3]


def test_a_job_beyond_its_rate_is_refused_on_both_ways(service: Service) -> None:
    auth = service.app.state.services.auth
    rate, auth._jobs.rate, auth._jobs._burst = auth._jobs.rate, 0.001, 3.0
    auth._jobs._buckets.clear()
    try:
        answers = [service.job.post("/jobs/a/heartbeats", json=BEAT) for _ in range(5)]
        assert [answer.status_code for answer in answers] == [200] * 3 + [429] * 2
        assert int(answers[-1].headers["Retry-After"]) > 900
    finally:
        auth._jobs.rate, auth._jobs._burst = rate, 10_000.0
        auth._jobs._buckets.clear()
