"""Requests name the scheduler by one of its own names, or are refused in a sentence."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.sched.supervised import Service, detail


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    hosts = ("fe80::1", "*.example.com")
    with Service(tmp_path_factory.mktemp("state"), hosts=hosts) as service:
        yield service


@pytest.mark.parametrize(
    "host",
    ["localhost", "LOCALHOST:80", "127.0.0.1:1", "[::1]:8080", "[fe80::1]", "a.example.com:443"],
)
def test_names_of_its_own(service: Service, host: str) -> None:
    assert service.admin.get("/jobs", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "example.com.evil",
        "127.0.0.1.evil",
        "localhost:80:80",
        "[::2]",
        "",
        "a b",
        "*",
        "x" * 10_000,
    ],
)
@pytest.mark.parametrize("path", ["/jobs", "/healthz", "/"])
def test_names_of_others(service: Service, host: str, path: str) -> None:
    answer = service.admin.get(path, headers={"Host": host})
    assert answer.status_code == 400
    said = detail(answer)
    assert said.startswith(f"the header Host is {host[:100]!r}, which this scheduler does not")
    assert "serve --allow-host" in said
    assert len(said) < 400
