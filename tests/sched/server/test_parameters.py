"""What a query or a path may say is bounded: anything else is refused in one short sentence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from tests.sched.supervised import Service, detail, report

HUGE = "9999999999999999999999"
WRONG = {
    "integer": ("-1", HUGE, "1e300", "nan", "1.5", "", "x" * 20_000),
    "number": ("-1", "nan", "inf", "1e999", "", "x" * 20_000),
    "boolean": ("2", "nan", "x" * 20_000),
    "string": ("x" * 20_000,),
    "array": ("x" * 20_000,),
}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with Service(tmp_path_factory.mktemp("state")) as service:
        service.job = service.submit("toy", ["node-a"])
        yield service


def types_of(schema: Mapping[str, Any]) -> set[str]:
    choices = schema.get("anyOf", [schema])
    # A reference is to an enumeration of texts.
    return {choice.get("type", "string") for choice in choices} - {"null"}


def test_every_parameter_of_every_query(service: Service) -> None:
    paths = service.admin.get("/openapi.json").json()["paths"]
    tried = 0
    for path, methods in paths.items():
        operation = methods.get("get", {})
        parameters = [one for one in operation.get("parameters", ()) if one["in"] == "query"]
        needed = {one["name"]: "1" for one in parameters if one.get("required")}
        for parameter in parameters:
            (kind,) = types_of(parameter["schema"])
            for value in WRONG[kind]:
                query = {**needed, parameter["name"]: value}
                answer = service.admin.get(path.replace("{name}", "toy"), params=query)
                assert answer.status_code == 422, (path, query)
                assert len(detail(answer)) < 300, (path, query)
                tried += 1
    assert tried > 50


@pytest.mark.parametrize("name", ["x" * 5_000, "%00", "..%2f..%2fetc", "ä", "%F0%9F%98%80"])
@pytest.mark.parametrize("path", ["/jobs/{}", "/jobs/{}/logs", "/jobs/{}/explanation"])
def test_names_that_no_job_has(service: Service, path: str, name: str) -> None:
    answer = service.admin.get(path.format(name))
    assert answer.status_code == 404
    assert len(detail(answer)) <= 1000


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("time", 1e300, "seconds since 1970, before the year 3000"),
        ("time", -1.0, "seconds since 1970, before the year 3000"),
        ("stepTime", 1e300, "a number of seconds from 0 to 1e9"),
    ],
)
def test_times_that_no_clock_tells(
    service: Service, field: str, value: float, allowed: str
) -> None:
    answer = service.job.post("/jobs/toy/reports", json=report(**{field: value}))
    assert answer.status_code == 422
    assert detail(answer) == (
        f"report: points[0].{field}: {value} is not allowed; it must be {allowed}"
    )


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"deadline": 1e300}, "job: deadline: '1e+300' is more than 100 years"),
        ({"hang_timeout": "99999999d"}, "job: hang_timeout: '99999999d' is more than 100 years"),
        ({"args": ["a", "x" * 200_000]}, "job: args: entry 1 has 200000 bytes; a process is given"),
        ({"args": ["a\0"]}, "the body holds the text 'a\\x00', which cannot be kept"),
        (
            {"environment": {"A": "x" * 200_000}},
            "job: environment: 'A' has a value of 200000 characters;",
        ),
        ({"working_dir": "x" * 200_000}, "job: working_dir: 'xxxxxxxxxxxxxxxxxxxx'... is not a"),
        ({"name": "x" * 200_000}, "job: name: 'xxxxxxxxxxxxxxxxxxxx...' has 200000 characters"),
    ],
)
def test_jobs_that_no_process_can_be_started_for(
    service: Service, fields: Mapping[str, Any], sentence: str
) -> None:
    answer = service.admin.post("/jobs", json={"name": "big", "script": "train.py", **fields})
    assert answer.status_code == 422
    assert detail(answer).startswith(sentence)
    assert len(detail(answer)) < 300
