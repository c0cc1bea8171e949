"""What users ask over real HTTP, with the client that the command line has: jobs, nodes, curves."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator

import pytest

from pipollux_sched.client.client import Client
from pipollux_sched.client.connection import ClientError
from pipollux_sched.lifecycle import (
    Allocate,
    ElasticReady,
    Exited,
    Outcome,
    Switched,
    WaitingToJoin,
)
from pipollux_sched.metrics import SchedulerMetrics
from pipollux_sched.spec.job import JobSpec
from pipollux_sched.store import NodeCondition, ServerInfo
from tests.sched.supervised import ADMIN, POINT, SCRIPT, Service, detail, report


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with Service(tmp_path_factory.mktemp("state")) as service:
        info = ServerInfo(service.server.url, os.getpid(), ADMIN)
        service.state_dir.write_server(info)
        yield service


@pytest.fixture
def client(service: Service) -> Iterator[Client]:
    with Client.of(service.state_dir) as client:
        yield client


def test_a_job_is_suspended_and_resumed(service: Service, client: Client) -> None:
    client.submit(JobSpec(name="resting", script=SCRIPT))
    service.store.transition("resting", Allocate(["node-a"], "it is free"))
    assert client.suspend("resting").suspended is True
    service.store.transition("resting", Exited(1, Outcome.STOPPED, step=3))
    assert client.job("resting").phase == "Suspended"
    assert client.jobs()[-1].phase == "Suspended"
    before = service.num_reconsidered
    assert client.resume("resting").suspended is False
    assert service.num_reconsidered == before + 1
    client.cancel("resting")
    for ask, done in (
        (client.cancel, "cancelled"),
        (client.suspend, "suspended"),
        (client.resume, "resumed"),
    ):
        ended = rf"job 'resting' has ended \(Failed, Cancelled\) and cannot be {done}; to resume it"
        with pytest.raises(ClientError, match=ended):
            ask("resting")
        with pytest.raises(ClientError, match="no job is named 'restign'"):
            ask("restign")


def test_a_job_that_ends_while_it_is_being_suspended_is_not_resumed(
    service: Service, client: Client
) -> None:
    service.submit("nearly-done", ["node-a"])
    client.suspend("nearly-done")
    service.store.transition("nearly-done", Exited(1, Outcome.COMPLETE, step=3))
    job = client.job("nearly-done")
    assert (job.phase, job.suspended, job.assigned) == ("Complete", False, [])
    with pytest.raises(
        ClientError, match=r"has ended \(Complete, Finished\) and cannot be resumed$"
    ):
        client.resume("nearly-done")
    assert client.job("nearly-done").phase == "Complete"


def test_a_node_drains_dies_and_is_back(service: Service, client: Client) -> None:
    service.submit("living", ["node-b", "node-b"])
    changed = client.set_node("node-b", NodeCondition.DRAINING, "a new disk")
    assert changed == client.nodes()[1]
    node = changed.to_dict()
    assert node.pop("since") > 0
    assert node.pop("spec")["name"] == "node-b"
    assert node == {
        "name": "node-b",
        "slots": 2,
        "kind": "cpu",
        "used": 2,
        "free": 0,
        "jobs": {"living": 2},
        "condition": "draining",
        "reason": "a new disk",
        "devices": [],
    }
    assert client.set_node("node-b", NodeCondition.DEAD).condition == "dead"
    assert service.store.job("living").state.reason == "NodeLost"
    assert client.set_node("node-b", NodeCondition.READY).condition == "ready"
    assert [e["condition"] for e in client.events() if e["type"] == "node"] == [
        "draining",
        "dead",
        "ready",
    ]
    with pytest.raises(ClientError, match="no node is named 'node-c'; there are node-a, node-b"):
        client.set_node("node-c", NodeCondition.DEAD)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"condition": "gone"}, "node: condition: \"gone\" is not allowed; it must be 'ready'"),
        ({}, "node: condition: is missing"),
        ({"condition": "dead", "reason": "x" * 501}, "one line and at most 500 characters"),
        ({"condition": "dead", "reason": "two\nlines"}, "one line and at most 500 characters"),
        ({"condition": "dead", "why": "fire"}, "node: why: unknown field"),
    ],
)
def test_changes_of_nodes_that_make_no_sense(
    service: Service, body: dict[str, str], says: str
) -> None:
    response = service.admin.put("/nodes/node-a", json=body)
    assert response.status_code == 422
    assert says in detail(response)
    assert service.store.nodes()["node-a"].condition is NodeCondition.READY


def test_curves_are_thinned(service: Service, client: Client) -> None:
    job = service.submit("long", ["node-a"])
    steps = [{**POINT, "step": step, "goodput": float(step)} for step in range(1, 901)]
    body = {"attempt": 1, "points": steps}
    assert job.post("/jobs/long/reports", json=body).status_code == 200
    for most in (0, 1, 2, 7, 499, 500):
        found = [point.step for point in client.curves("long", most).points]
        assert len(found) == most
        assert found == sorted(set(found))
        assert found[-1:] == [900][:most]
        gaps = {after - before for before, after in itertools.pairwise(found)}
        assert not gaps or max(gaps) - min(gaps) <= 1, "they are evenly spread"
    assert service.admin.get("/jobs/long?points=501").status_code == 422
    assert len(service.admin.get("/jobs/long").json()["points"]) == 500
    assert client.curves("long", 3).points[-1].goodput == 900.0


def test_curves_that_are_short_are_whole(service: Service, client: Client) -> None:
    job = service.submit("short", ["node-a"])
    assert client.curves("short", 500).points == []
    for num_points in (1, 2, 3):
        job.post("/jobs/short/reports", json=report(step=num_points)).raise_for_status()
        found = client.curves("short", 3).points
        assert [point.step for point in found] == list(range(1, num_points + 1))


def test_the_noise_of_the_gradient(service: Service, client: Client) -> None:
    job = service.submit("noisy", ["node-a"])
    for hints in (
        {"initBatchSize": 8},
        {"initBatchSize": 8, "gradParams": {"norm": 2.0, "var": 6.0}},
        {"gradParams": {"norm": 0.0, "var": 6.0}},
    ):
        job.put("/jobs/noisy/hints?attempt=1", json=hints).raise_for_status()
    found = client.curves("noisy", 500).noise
    assert [(entry.norm, entry.var, entry.noise_scale) for entry in found] == [
        (2.0, 6.0, 24.0),
        (0.0, 6.0, None),
    ]


def test_events_of_one_job(service: Service, client: Client) -> None:
    service.submit("told", ["node-a"])
    service.submit("untold", ["node-a"])
    events = client.events(job="told")
    assert {event["job"] for event in events} == {"told"}
    assert [event["type"] for event in events] == ["submitted", "allocated"]
    assert client.events(events[0]["id"], job="told") == events[1:]


def figures(text: str) -> dict[str, float]:
    """Read Prometheus' text format."""
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def test_figures_for_prometheus(service: Service, client: Client) -> None:
    job = service.submit("counted", ["node-a"])
    before = figures(client.metrics())
    job.post("/jobs/counted/reports", json=report(goodput=321.5)).raise_for_status()
    job.put("/jobs/counted/hints?attempt=1", json={}).raise_for_status()
    beat = {"attempt": 1, "replica": 0}
    job.post("/jobs/counted/heartbeats", json=beat).raise_for_status()
    job.put("/jobs/counted/hints?attempt=9", json={})
    job.put("/jobs/counted/hints?attempt=1", content="[")
    with service.client("wrong") as stranger:
        stranger.get("/jobs")
    for event in (
        *(ElasticReady(1), Allocate(["node-a", "node-b"], "it grows"), WaitingToJoin(1, (1,))),
        *(Switched(1, 2, step=1, seconds=0.1), ElasticReady(1, "it says so")),
    ):
        service.store.transition("counted", event)
    service.store.transition("counted", Allocate(["node-b"], "it is better"))
    service.store.transition("counted", Exited(1, Outcome.STOPPED, step=1))
    service.store.transition("counted", Exited(2, Outcome.FAILED, message="it fell over"))
    with service.metrics.deciding():
        pass
    after = figures(client.metrics())
    grown = {name: after[name] - before.get(name, 0.0) for name in after}
    for name, by in {
        "pipollux_reports_received_total": 1,
        "pipollux_hints_received_total": 1,
        "pipollux_heartbeats_received_total": 1,
        'pipollux_requests_refused_total{reason="conflict"}': 1,
        'pipollux_requests_refused_total{reason="invalid"}': 1,
        'pipollux_requests_refused_total{reason="token"}': 1,
        "pipollux_restarts_total": 1,
        "pipollux_reallocations_total": 1,
        "pipollux_failures_total": 1,
        "pipollux_resizes_total": 1,
        "pipollux_policy_seconds_count": 1,
        'pipollux_jobs{phase="Restarting"}': 1,
        'pipollux_jobs{phase="Running"}': -1,
    }.items():
        assert grown[name] == by, name
    node = client.nodes()[0]
    assert after['pipollux_slots{node="node-a",state="free"}'] == node.free
    assert after['pipollux_slots{node="node-a",state="used"}'] == node.used
    assert after['pipollux_nodes{condition="ready"}'] == 2
    assert after["pipollux_events_total"] == service.store.last_event()
    assert after["pipollux_store_bytes"] >= service.state_dir.database.stat().st_size
    assert after["pipollux_last_decision_timestamp_seconds"] > 1e9


def test_the_goodput_of_what_runs(service: Service, client: Client) -> None:
    job = service.submit("fast", ["node-a"])
    name = 'pipollux_job_goodput{job="fast"}'
    assert name not in figures(client.metrics())
    for goodput in (123.0, 321.5):
        job.post("/jobs/fast/reports", json=report(goodput=goodput)).raise_for_status()
    assert figures(client.metrics())[name] == 321.5
    service.store.transition("fast", Exited(1, Outcome.COMPLETE, step=1))
    assert name not in figures(client.metrics())


def test_figures_may_be_open(tmp_path_factory: pytest.TempPathFactory) -> None:
    with Service(tmp_path_factory.mktemp("open"), open_metrics=True) as service:
        response = service.client(None).get("/metrics")
        assert response.status_code == 200
        assert response.headers["Content-Type"].startswith("text/plain")
        assert "pipollux_jobs" in response.text
        assert service.client(None).get("/jobs").status_code == 401


def test_a_decision_that_fails_is_timed_as_well() -> None:
    metrics = SchedulerMetrics()
    with pytest.raises(ValueError, match="no"), metrics.deciding():
        raise ValueError("no")
    assert metrics.registry.get_sample_value("pipollux_policy_seconds_count") == 1.0
