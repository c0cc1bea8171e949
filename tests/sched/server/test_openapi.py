"""The OpenAPI document and its page: whole, true of real answers, and needing no network."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any

import pytest
from pydantic import TypeAdapter

from pipollux_sched.server.openapi import BODIES, REPLIES, TEXTS
from pipollux_sched.spec.job import JobSpec
from tests.sched.supervised import SCRIPT, Service, report


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


def test_every_path_is_described(document: dict[str, Any]) -> None:
    operations = {
        (method, path): operation
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    }
    assert len(operations) == 27
    assert BODIES.keys() <= operations.keys()
    for key, operation in operations.items():
        assert operation["summary"], key
        assert operation["tags"], key
        assert operation["description"], key
        fine, *refusals = operation["responses"]
        answered = key in REPLIES or key in TEXTS
        assert ("content" in operation["responses"][fine]) == answered == (fine != "204"), key
        assert ("requestBody" in operation) == (key in BODIES), key
        assert bool(refusals) == bool(operation.get("security")), key
    assert document["paths"]["/jobs/{name}/hints"]["put"]["security"] == [
        {"jobToken": []},
        {"adminToken": []},
    ]
    assert document["paths"]["/jobs"]["get"]["security"] == [{"adminToken": []}]
    assert document["components"]["securitySchemes"].keys() == {"jobToken", "adminToken"}


def test_every_reference_leads_somewhere(document: dict[str, Any]) -> None:
    known = {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}
    found = set(references(document))
    assert found
    assert found <= known


def test_what_is_answered_is_what_is_described(service: Service) -> None:
    """Each model refuses fields that it does not know, and wants those that it does."""
    service.job.post("/jobs/toy/reports", json=report(goodput=2.0)).raise_for_status()
    hints = {"initBatchSize": 8, "gradParams": {"norm": 1.0, "var": 2.0}}
    service.job.put("/jobs/toy/hints?generation=1", json=hints).raise_for_status()
    place = {"generation": 1, "replica": 0, "address": "10.0.0.1:1"}
    service.job.post("/jobs/toy/replicas", json=place).raise_for_status()
    beat = {"generation": 1, "replica": 0}
    service.job.post("/jobs/toy/heartbeats", json=beat).raise_for_status()
    log = service.state_dir.log("toy", 1, 0)
    log.parent.mkdir(parents=True)
    log.write_text("one\n")
    bodies = {
        ("post", "/jobs"): {"name": "new", "script": SCRIPT},
        ("post", "/jobs/batch"): {"jobs": [{"name": "newer", "script": SCRIPT}]},
        ("put", "/nodes/{name}"): {"condition": "draining"},
    }
    names = {
        "/nodes/{name}": "node-a",
        "/jobs/{name}/rerun": "ended",
        "/jobs/{name}/delete": "gone",
    }
    for name in ("ended", "gone"):
        service.control.submit(JobSpec(name=name, script=SCRIPT))
        service.control.cancel(name)
    for (method, path), model in REPLIES.items():
        full = path.replace("{name}", names.get(path, "toy"))
        query = {"generation": 1} if path.endswith("/replicas") else None
        body = bodies.get((method, path))
        response = service.admin.request(method.upper(), full, params=query, json=body)
        assert response.is_success, (method, path)
        TypeAdapter(model).validate_json(response.content)
        assert response.json(), "an empty list proves nothing"


class Page(HTMLParser):
    """Collects what a page refers to, and where it can be jumped to."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attributes:
            if name in ("href", "src") and value:
                self.links.append(value)
            if name == "id" and value:
                self.anchors.append(value)


def test_the_page_holds_everything_and_needs_nothing(
    service: Service, document: dict[str, Any]
) -> None:
    response = service.client(None).get("/docs")
    assert response.status_code == 200
    assert response.headers["Content-Security-Policy"].startswith("default-src 'none'")
    page = Page()
    page.feed(response.text)
    assert not page.tags & {"script", "link", "img", "iframe"}
    assert len(set(page.anchors)) == len(page.anchors)
    for link in page.links:
        assert link == "/openapi.json" or link.removeprefix("#") in page.anchors, link
    assert "http" not in re.sub(r"<style>.*</style>", "", response.text, flags=re.DOTALL)
    for path in document["paths"]:
        assert path in response.text
    for name in document["components"]["schemas"]:
        assert name in page.anchors
