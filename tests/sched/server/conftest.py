"""The page in a real browser, over a scheduler with two jobs that have seen something."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from pipollux_sched.lifecycle import Allocate, Exited, Outcome
from tests.cli.kept import HINTS, point
from tests.sched.server.browser import HOSTILE, Visit, chromium, find_chromium, visit
from tests.sched.supervised import Service
from tests.services import service_missing


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = find_chromium()
    if path is None:
        service_missing("there is no Chromium on this machine")
    with chromium(path) as browser:
        yield browser


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    with Service(tmp_path / "state") as service:
        fill(service)
        yield service


@pytest.fixture
def tab(browser: Browser, service: Service) -> Iterator[Visit]:
    with visit(browser, service.server.url) as tab:
        yield tab


def fill(service: Service) -> None:
    """A job that was moved once and trains, and one that failed with hostile words."""
    store, now = service.store, time.time()
    service.submit("grown", ["node-a"], max_replicas=4)
    store.add_report("grown", 1, [point(step, now - 100 + step) for step in range(1, 21)])
    store.put_hints("grown", 1, HINTS)
    store.transition("grown", Allocate(["node-a"] * 2, "grows from 1 to 2 replicas"))
    store.transition("grown", Exited(1, Outcome.STOPPED, step=20))
    again = time.time()
    points = [point(step, again + step - 20, replicas=2, loss=1.25) for step in range(21, 41)]
    store.add_report("grown", 2, points)
    store.put_hints("grown", 2, HINTS)
    service.submit("hostile", ["node-b"], max_restarts=0)
    store.transition("hostile", Exited(1, Outcome.FAILED, message=HOSTILE))
    log = service.state_dir.log("hostile", 1, 0)
    log.parent.mkdir(parents=True)
    log.write_text(f"first line\n{HOSTILE}\n")
