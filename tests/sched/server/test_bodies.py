"""Whatever bytes are sent: one clear sentence or a proper answer, never a failure, and what is
refused changes nothing."""

from __future__ import annotations

import json
import string
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipollux_sched.lifecycle import Cancel
from pipollux_sched.server import Limits
from tests.extent import examples
from tests.sched.supervised import SCRIPT, Service, detail, report

HINTS = {
    "initBatchSize": 8,
    "localBszBounds": [4, 32],
    "globalBatchSize": 16,
    "maxBatchSize": 64,
    "maxProfiledReplicas": 2,
    "gradientAccumulation": True,
    "gradParams": {"norm": 1.0, "var": 2.0},
    "perfParams": {
        "alpha_c": 0.1, "beta_c": 0.01, "alpha_n": 0.1, "beta_n": 0.1, "alpha_r": 0.1,
        "beta_r": 0.1, "gamma": 2.0,
    },
    "numStages": 2,
    "numMicrobatches": 4,
    "balance": [1, 1],
    "memoryLimit": 1e9,
    "remainingSamples": 1e6,
    "version": 1,
}  # fmt: skip
PLACES: dict[str, tuple[str, dict[str, Any]]] = {
    "/jobs/toy/hints?attempt=1": ("PUT", HINTS),
    "/jobs/toy/reports": ("POST", report()),
    "/jobs/toy/heartbeats": ("POST", {"attempt": 1, "replica": 0, "step": 3}),
    "/jobs/toy/stops": ("POST", {"attempt": 1, "step": 3}),
    "/jobs/toy/replicas": ("POST", {"attempt": 1, "replica": 0, "address": "10.0.0.1:1"}),
    "/jobs": ("POST", {"name": "other", "script": SCRIPT, "stage_choices": [1, 2]}),
    "/nodes/node-b": ("PUT", {"condition": "ready", "reason": "why not"}),
}
NUMBERS = st.one_of(
    st.integers(-3, 3),
    st.sampled_from([2**31, 2**63, -(2**63), 10**30, 10**400]),
    st.floats(),
    st.sampled_from([1e308, -1e308, 5e-324, 1e18]),
)
TEXTS = st.one_of(
    st.text(string.ascii_lowercase, max_size=4),
    st.sampled_from(["", "\0", "\ud800", "a\nb", "x" * 300, "..", "/etc/passwd", "1", "😀"]),
)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    fast = Limits(job_rate=1e9, job_burst=10**9, admin_rate=1e9, admin_burst=10**9)
    with Service(tmp_path_factory.mktemp("state"), fast) as service:
        service.submit("toy", ["node-a"])
        yield service


@st.composite
def spoilt(draw: st.DrawFn, body: dict[str, Any]) -> Any:
    """A proper body of which one part is something else, is missing, or is there twice."""
    body = json.loads(json.dumps(body))
    where: Any = body
    while True:
        key = draw(st.sampled_from(sorted(where) if isinstance(where, dict) else range(len(where))))
        inside = where[key]
        if isinstance(inside, dict | list) and inside and draw(st.booleans()):
            where = inside
            continue
        break
    match draw(st.sampled_from(["another", "missing", "more"])):
        case "another":
            where[key] = draw(VALUES)
        case "missing":
            del where[key]
        case "more" if isinstance(where, dict):
            where[draw(TEXTS)] = draw(VALUES)
    return body


def send(service: Service, path: str, content: bytes | str) -> int:
    """Send a body; check the answer, and that what is refused has changed nothing."""
    method, _ = PLACES[path]
    version, beats = service.store.version, service.control.heartbeats.heard("toy", 1)
    response = service.admin.request(method, path, content=content)
    assert response.status_code < 500, response.text
    if response.status_code >= 400:
        assert 10 < len(detail(response)) <= 1000
        assert service.store.version == version
        assert service.control.heartbeats.heard("toy", 1).keys() == beats.keys()
    else:
        # What was taken can be shown.
        assert service.admin.get("/jobs/toy").status_code == 200
        assert service.admin.get("/nodes").status_code == 200
        assert service.admin.get("/metrics").status_code == 200
    return response.status_code


@pytest.mark.parametrize("path", PLACES)
def test_what_is_spoilt_by_something(service: Service, path: str) -> None:
    @examples(24, 120)
    @given(spoilt(PLACES[path][1]))
    def check(body: Any) -> None:
        send(service, path, json.dumps(body))

    check()


@examples(60)
@given(st.sampled_from(sorted(PLACES)), st.one_of(st.binary(max_size=60), VALUES.map(json.dumps)))
def test_anything_at_all(service: Service, path: str, body: bytes | str) -> None:
    if send(service, path, body) < 400:
        assert path in ("/jobs/toy/hints?attempt=1",), "only hints have no field that is needed"


@pytest.mark.parametrize("path", PLACES)
@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("[" * 100_000, "levels of objects and arrays"),
        ('{"a":' * 40 + "1" + "}" * 40, "more than 32 levels"),
        ('{"a":' * 5000 + "1" + "}" * 5000, "levels of objects and arrays"),
        ("1" * 10_000, "not valid JSON"),
        ('"text"', "the body is a JSON string; send a JSON object"),
        ("null", "the body is null; send a JSON object"),
        (b"\xff\xfe{}", "not valid JSON"),
        ('{"a": "\\ud800"}', "which cannot be kept"),
        (b'{"a": "\xed\xa0\x80"}', "not valid JSON"),
        ('{"a\\u0000": 1}', "which cannot be kept"),
    ],
    ids=range(10),
)
def test_bodies_from_hell(service: Service, path: str, content: bytes | str, says: str) -> None:
    version = service.store.version
    response = service.admin.request(PLACES[path][0], path, content=content)
    assert response.status_code == 422
    assert says in detail(response)
    assert service.store.version == version


@pytest.mark.parametrize(
    ("hints", "says"),
    [
        ({"numStages": 10**9}, "numStages is 1000000000; at most 1024 is allowed"),
        ({"maxBatchSize": 10**400}, "maxBatchSize is far too large; at most"),
        ({"gradParams": {"norm": 1e200, "var": 1.0}}, "gradParams.norm is 1e+200; at most 1e+60"),
        ({"localBszBounds": [1, 2**62]}, "localBszBounds.1 is 4611686018427387904; at most"),
    ],
)
def test_hints_that_are_absurd(service: Service, hints: dict[str, Any], says: str) -> None:
    response = service.admin.put("/jobs/toy/hints?attempt=1", json=hints)
    assert response.status_code == 422
    assert says in detail(response)


def test_paths_and_methods_that_are_not_there(service: Service) -> None:
    response = service.admin.get("/jbos")
    assert response.status_code == 404
    assert detail(response) == "there is no path '/jbos'; /docs lists the paths"
    response = service.admin.patch("/jobs")
    assert response.status_code == 405
    assert detail(response) == "PATCH is not allowed on '/jobs'; use GET or POST"
    assert response.headers["Allow"] == "GET, POST"
    response = service.admin.put("/jobs/toy")
    assert detail(response) == "PUT is not allowed on '/jobs/toy'; use GET or DELETE"
    response = service.admin.post("/docs/files/page.js")
    assert detail(response) == "POST is not allowed on '/docs/files/page.js'; use GET"


def test_paths_of_users_that_there_are_not(service: Service) -> None:
    """Each is refused in a sentence that names it."""
    job = {"name": "mine", "script": SCRIPT}
    for field, says in (
        ("script", "script: there is no file "),
        ("python", "python: there is no interpreter "),
        ("checkpoint_dir", "checkpoint_dir: there is no user 'no-such-user' for "),
    ):
        path = "~no-such-user/here"
        refused = service.admin.post("/jobs", json={**job, field: path})
        assert refused.status_code == 422
        assert f"job 'mine': {says}" in detail(refused)
        assert path in detail(refused)


def test_a_name_whose_checkpoints_are_of_a_job_that_the_store_has_lost(service: Service) -> None:
    """As where an older copy of the store was brought back: nothing continues from them unasked."""
    checkpoints = service.state_dir.checkpoints("lost-1")
    checkpoints.mkdir(parents=True)
    new = {"name": "lost-1", "script": SCRIPT}
    sweep = {**new, "name": "lost", "args": ["{x}"], "sweep": {"list": [{"x": 1}, {"x": 2}]}}
    (checkpoints / "checkpoint-52").touch()
    for job in (new, sweep):
        refused = service.admin.post("/jobs", json=job)
        assert refused.status_code == 422
        assert f"job '{job['name']}': name: {checkpoints.parent} holds checkpoints" in detail(
            refused
        )
    (checkpoints / "checkpoint-52").unlink()
    assert service.admin.post("/jobs", json=new).status_code == 201
    (checkpoints / "checkpoint-1").touch()
    service.store.transition("lost-1", Cancel())
    assert service.admin.post("/jobs", json=new).status_code == 201, "it goes on from its own"
