"""The files of the web page: open to all as they hold no data, and strict in what they may do."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipollux_sched.lifecycle import Exited, Outcome
from pipollux_sched.report.charts.specs import LIBRARY, SCRIPTS
from tests.programs import LIMIT, Forked
from tests.sched.supervised import ADMIN, Service, detail, report

PIPOLLUX = str(Path(sys.executable).with_name("pipollux"))
CLUSTER = "nodes:\n  - {name: node-a, slots: 1, kind: cpu}\n"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with Service(tmp_path_factory.mktemp("state")) as service:
        service.submit("toy")
        yield service


def test_every_file_is_served_without_a_token_and_with_its_policy(
    service: Service, repository: Path
) -> None:
    files = {path.name for path in (repository / "sched/pipollux_sched/server/web").iterdir()}
    assert len(files) > 12
    shared = {"base.css", LIBRARY, *SCRIPTS}
    paths = ["/", *(f"/web/{name}" for name in (files | shared) - {"index.html"})]
    for path in paths:
        response = service.client(None).get(path)
        assert response.status_code == 200, path
        policy = response.headers["content-security-policy"].split("; ")
        assert policy[:5] == [
            *("default-src 'none'", "script-src 'self'", "style-src 'self'"),
            *("connect-src 'self'", "img-src 'self' data:"),
        ]
        assert "unsafe" not in response.headers["content-security-policy"]
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["referrer-policy"] == "no-referrer"
        assert response.headers["cache-control"] == "no-store"
        assert "toy" not in response.text
        assert ADMIN not in response.text
    kinds = {path: service.client(None).get(path).headers["content-type"] for path in paths}
    assert kinds["/"] == "text/html; charset=utf-8"
    assert kinds["/web/main.js"] == "text/javascript; charset=utf-8"


def test_what_the_files_name_is_there_and_nowhere_else(repository: Path) -> None:
    folder = repository / "sched/pipollux_sched/server/web"
    charts = repository / "sched/pipollux_sched/report/charts"
    served = {path.name for path in folder.iterdir()} | {"base.css", LIBRARY, *SCRIPTS}
    for path in (*folder.iterdir(), *(charts / name for name in SCRIPTS)):
        text = path.read_text()
        outside = re.findall(r"(?:https?:)?//[a-z][\w.-]*\.[a-z]{2,}[^\s\"']*", text)
        assert set(outside) <= {"http://www.w3.org/2000/svg"}, path
        for name in re.findall(r'from "\./([\w.]+)"|"/web/([\w.]+)"', text):
            wanted = next(filter(None, name))
            assert wanted in served, (path, wanted)
        for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
            assert way not in text, f"{path.name} uses {way}"


@pytest.mark.parametrize("path", ["/web/", "/web/none.js", "/web/../app.py", "/web/%2e%2e/app.py"])
def test_no_other_file_is_served(service: Service, path: str) -> None:
    assert service.client(None).get(path).status_code == 404


@pytest.mark.parametrize(
    "path",
    [
        *("/overview", "/attempts", "/usage"),
        *("/jobs/toy/explanation", "/events/stream?summary=true"),
    ],
)
def test_what_the_page_asks_needs_the_token(service: Service, path: str) -> None:
    assert service.client(None).get(path).status_code == 401


def test_what_the_page_shows(service: Service) -> None:
    store = service.store
    service.submit("past", ["node-a"])
    store.transition("past", Exited(1, Outcome.COMPLETE, step=7, epoch=0))
    service.submit("present", ["node-b"], num_stages=2)
    found = service.admin.get("/overview?events=2").json()
    assert [event["text"] for event in found["events"]] == ["submitted", "it is free"]
    assert found["events"][-1]["id"] <= found["last_event"] == store.last_event()
    lines = {job["name"]: job for job in found["jobs"]}
    assert (lines["present"]["nodes"], lines["present"]["num_stages"]) == (["node-b"], 2)
    assert (lines["past"]["phase"], lines["past"]["nodes"]) == ("Complete", [])
    used = {name: (node["used"], len(node["jobs"])) for name, node in found["nodes"].items()}
    assert used == {"node-a": (0, 0), "node-b": (2, 1)}
    page = "/overview?phase=Complete&phase=Running&order=name&descending=true&limit=1"
    found = service.admin.get(f"{page}&name=P").json()
    assert ([job["name"] for job in found["jobs"]], found["num_found"]) == (["present"], 2)
    assert found["phases"] == {"Created": 1, "Running": 1, "Complete": 1}, "of all jobs"
    assert found["events"] == []
    attempts = service.admin.get("/attempts?since=0").json()
    assert [entry["job"] for entry in attempts] == ["past", "present"]
    assert attempts[0]["number"] == lines["past"]["number"] == 2
    later = service.admin.get(f"/attempts?since={found['time'] + 1}").json()
    assert [entry["job"] for entry in later] == ["present"]
    there = service.admin.get("/attempts?node=node-a&node=elsewhere").json()
    assert [entry["job"] for entry in there] == ["past"]
    usage = service.admin.get(f"/usage?since={found['time'] - 100}&parts=4").json()
    assert [len(parts) for parts in usage["nodes"].values()] == [4, 4]
    assert usage["until"] - usage["since"] >= 100


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ("/overview?phase=Tired", "phase.0: \"Tired\" is not allowed; it must be 'Running'"),
        ("/overview?order=colour", "order: \"colour\" is not allowed; it must be 'usual'"),
        ("/overview?limit=501", 'limit: "501" is not allowed; it must be at most 500'),
        ("/usage?since=1e300", 'since: "1e300" is not allowed; it must be at most 1000000000000'),
        ("/usage?parts=0", 'parts: "0" is not allowed; it must be at least 1'),
    ],
)
def test_what_cannot_be_shown_is_refused_in_a_sentence(
    service: Service, asked: str, named: str
) -> None:
    response = service.admin.get(asked)
    assert response.status_code == 422
    assert named in detail(response)


def test_what_people_are_told_as_it_happens(service: Service) -> None:
    after = service.store.last_event()
    told = service.submit("told", ["node-a"])
    told.post("/jobs/told/reports", json=report()).raise_for_status()
    asked = f"/events/stream?summary=true&job=told&after={after}"
    with service.admin.stream("GET", asked) as stream:
        lines = (line[6:] for line in stream.iter_lines() if line.startswith("data: "))
        heard = [json.loads(next(lines)) for _ in range(3)]
    assert [event["text"] for event in heard] == [
        *("submitted", "it is free", "training since step 7")
    ]
    keys = {"id", "time", "type", "job", "attempt", "text"}
    assert all(event.keys() == keys for event in heard)


def test_a_page_of_jobs(service: Service) -> None:
    for name in ("paged-1", "paged-2", "other-3", "paged-4"):
        service.store.submit(name, {"name": name, "script": "/a.py"}, name, 0)
    page = service.admin.get("/jobs?name=PAGED&offset=1&limit=1")
    assert [job["name"] for job in page.json()] == ["paged-2"]
    assert page.headers["X-Total-Count"] == "3"
    assert len(service.admin.get("/jobs").json()) > 3
    assert service.admin.get("/jobs?limit=501").status_code == 422


def test_logs_of_one_attempt(service: Service) -> None:
    for attempt in (1, 2):
        log = service.state_dir.log("toy", attempt, 0)
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(f"of {attempt}\n")
    found = service.admin.get("/jobs/toy/logs?attempt=2").json()
    assert found == [{"attempt": 2, "replica": 0, "lines": ["of 2"]}]
    assert len(service.admin.get("/jobs/toy/logs").json()) == 2


@pytest.mark.exhaustive
def test_the_link_is_for_terminals_alone(tmp_path: Path) -> None:
    """What is written into a log must not open everything."""
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    command = [PIPOLLUX, "serve", "--cluster", "cluster.yaml", "--state-dir", "state"]
    ours, theirs = pty.openpty()
    with subprocess.Popen(command, cwd=tmp_path, stdout=theirs) as server:
        os.close(theirs)
        said = ""
        while "#token=" not in said or not said.endswith("\n"):
            said += os.read(ours, 4096).decode().replace("\r", "")
        token = re.search(r'"token": *"([^"]+)"', (tmp_path / "state/server.json").read_text())
        assert token is not None
        url = re.search(r"^Watch it at (http://127\.0\.0\.1:\d+/)#token=([\w-]+)$", said, re.M)
        assert url is not None
        assert url[2] == token[1]
        server.send_signal(signal.SIGTERM)
        while True:  # until it has closed its end
            try:
                if not os.read(ours, 4096):
                    break
            except OSError:
                break
    os.close(ours)
    with Forked(Path(PIPOLLUX), command[1:], folder=tmp_path) as server:
        deadline = time.monotonic() + LIMIT
        while (url := re.search(r"^Watch it at (.*)\n", server.output, re.M)) is None:
            assert time.monotonic() < deadline, server.errors
            time.sleep(0.05)
        file = tmp_path / "state/admin.token"
        assert re.fullmatch(rf"http://127\.0\.0\.1:\d+/ with the token in {file}", url[1])
        server.send_signal(signal.SIGTERM)
        assert server.wait() == 0, server.errors
        assert file.read_text().strip() not in server.output
