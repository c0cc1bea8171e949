"""The OpenAPI document and its page: whole, true of real answers, and needing no network."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import expect

from pipollux_sched.spec.job import JobSpec
from pipollux_sched.spec.tokens import NewToken, Role
from tests.sched.server.browser import chromium, find_chromium, visit
from tests.sched.supervised import ADMIN, SCRIPT, Service, report
from tests.services import service_missing

BODIES = {
    ("put", "/jobs/{name}/hints"),
    ("post", "/jobs/{name}/reports"),
    ("post", "/jobs/{name}/heartbeats"),
    ("post", "/jobs/{name}/stops"),
    ("post", "/jobs/{name}/replicas"),
    ("post", "/jobs"),
    ("post", "/jobs/batch"),
    ("post", "/jobs/forecast"),
    ("put", "/nodes/{name}"),
    ("put", "/teams"),
    ("put", "/jobs/{name}/team"),
    ("post", "/tokens"),
    ("post", "/notifications/channels"),
}
"""What is sent with a body."""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with Service(tmp_path_factory.mktemp("state")) as service:
        service.job = service.submit("toy", ["node-a"])
        yield service


@pytest.fixture(scope="module")
def document(service: Service) -> dict[str, Any]:
    found: dict[str, Any] = service.client(None).get("/openapi.json").json()
    return found


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if "$ref" in value:
            yield value["$ref"]
        for inner in value.values():
            yield from references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from references(inner)


def operations_of(document: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    return {
        (method, path): operation
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    }


def test_every_path_is_described(document: dict[str, Any]) -> None:
    operations = operations_of(document)
    assert len(operations) == 46
    assert {key for key, operation in operations.items() if "requestBody" in operation} == BODIES
    for key, operation in operations.items():
        assert operation["summary"], key
        assert operation["tags"], key
        assert operation["description"], key
        fine, *refusals = operation["responses"]
        assert ("content" in operation["responses"][fine]) == (fine != "204"), key
        assert bool(refusals) == bool(operation.get("security")), key
        for status in refusals:
            answer = operation["responses"][status]["content"]["application/json"]
            assert answer["schema"] == {"$ref": "#/components/schemas/Refusal"}, key
    assert document["paths"]["/jobs/{name}/hints"]["put"]["security"] == [
        {"jobToken": []},
        {"adminToken": []},
    ]
    assert document["paths"]["/jobs"]["get"]["security"] == [{"adminToken": []}]
    assert document["components"]["securitySchemes"].keys() == {"jobToken", "adminToken"}
    names = [operation["operationId"] for operation in operations.values()]
    assert len(set(names)) == len(names)


def test_every_reference_leads_somewhere(document: dict[str, Any]) -> None:
    known = {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}
    found = set(references(document))
    assert found
    assert found <= known


def test_what_is_answered_is_what_is_described(service: Service, document: dict[str, Any]) -> None:
    """An answer that lacks a field of its model, or has another, is a failure of the server."""
    service.job.post("/jobs/toy/reports", json=report(goodput=2.0)).raise_for_status()
    hints = {"initBatchSize": 8, "gradParams": {"norm": 1.0, "var": 2.0}}
    service.job.put("/jobs/toy/hints?attempt=1", json=hints).raise_for_status()
    place = {"attempt": 1, "replica": 0, "address": "10.0.0.1:1"}
    service.job.post("/jobs/toy/replicas", json=place).raise_for_status()
    beat = {"attempt": 1, "replica": 0}
    service.job.post("/jobs/toy/heartbeats", json=beat).raise_for_status()
    log = service.state_dir.log("toy", 1, 0)
    log.parent.mkdir(parents=True)
    log.write_text("one\n")
    teams = {"teams": [{"name": "vision", "quota": 2}]}
    service.admin.put("/teams", json=teams).raise_for_status()
    bodies = {
        ("post", "/jobs"): {"name": "new", "script": SCRIPT},
        ("post", "/jobs/batch"): {"jobs": [{"name": "newer", "script": SCRIPT}]},
        ("post", "/jobs/forecast"): {"jobs": [{"name": "newest", "script": SCRIPT}]},
        ("put", "/nodes/{name}"): {"condition": "draining"},
        ("post", "/jobs/{name}/heartbeats"): beat,
        ("post", "/jobs/{name}/reports"): report(),
        ("post", "/tokens"): {"name": "ana", "role": "viewer"},
        ("put", "/teams"): teams,
        ("post", "/notifications/channels"): {"name": "ops", "webhook": "https://example.org/"},
        ("put", "/jobs/{name}/team"): {"team": "vision"},
    }
    names = {
        "/nodes/{name}": "node-a",
        "/jobs/{name}/rerun": "ended",
        "/jobs/{name}/delete": "gone",
        "/tokens/{name}": "ana",
        "/sweeps/{name}": "rates",
        "/notifications/channels/{name}": "old",
        "/notifications/channels/{name}/test": "ops",
    }
    sweep = {"grid": {"lr": [0.1, 0.01]}}
    service.control.submit(
        JobSpec.model_validate({"name": "rates", "script": SCRIPT, "sweep": sweep})
    )
    service.store.add_event("cluster", {"nodes": {}, "policy": "FifoPolicy"})
    for name in ("ended", "gone"):
        service.control.submit(JobSpec(name=name, script=SCRIPT))
        service.control.cancel(name)
    service.store.tokens.create(NewToken(name="bo", role=Role.USER))
    hook = {"webhook": "https://example.org/", "events": ["failed"]}
    service.store.notifications.add_channel("user:", "old", hook)
    models = {}
    for (method, path), operation in operations_of(document).items():
        schema = next(iter(operation["responses"].values())).get("content", {})
        if "application/json" not in schema:
            continue
        models[method, path] = schema["application/json"]["schema"]
        full = path.replace("{name}", names.get(path, "toy"))
        query = {"attempt": 1} if path.endswith(("/replicas", "/inheritance")) else None
        body = bodies.get((method, path))
        response = service.admin.request(method.upper(), full, params=query, json=body)
        assert response.is_success, (method, path)
        assert response.json(), "an empty list proves nothing"
    assert len(models) == 39
    assert {} not in models.values(), "each has a model"
    for name in {reference.rpartition("/")[2] for reference in references(models)}:
        model = document["components"]["schemas"][name]
        assert model.get("additionalProperties", True) is (name == "EventView"), name


@pytest.mark.exhaustive
def test_the_page_is_swagger_ui_and_needs_no_network(
    service: Service, document: dict[str, Any]
) -> None:
    response = service.client(None).get("/docs")
    policy = response.headers["Content-Security-Policy"].split("; ")
    assert policy[0] == "default-src 'none'"
    assert "style-src 'self'" in policy
    assert "unsafe" not in response.headers["Content-Security-Policy"]
    path = find_chromium()
    if path is None:
        service_missing("there is no Chromium on this machine")
    with chromium(path) as browser, visit(browser, service.server.url) as tab:
        page = tab.page
        page.goto(f"{service.server.url}/docs")
        expect(page.locator(".opblock")).to_have_count(len(operations_of(document)))
        page.get_by_role("button", name="Authorize").first.click()
        page.locator(".modal-ux input").last.fill(ADMIN)
        page.locator(".modal-ux button.authorize").last.click()
        page.locator(".modal-ux .close-modal").click()
        asked = page.locator("#operations-nodes-nodes")
        asked.locator(".opblock-summary-control").click()
        asked.get_by_role("button", name="Try it out").click()
        asked.get_by_role("button", name="Execute").click()
        expect(asked.locator(".live-responses-table")).to_contain_text('"node-a"')
        tab.check()
