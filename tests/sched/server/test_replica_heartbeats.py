"""Replicas that tell a real supervisor that they are alive: real processes, real HTTP."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from pipollux_hybrid import init_process_group
from pipollux_hybrid.errors import ConfigurationError
from pipollux_hybrid.job import heartbeat
from pipollux_hybrid.job.context import context, reset
from pipollux_hybrid.job.env import JobEnvironment
from pipollux_hybrid.job.heartbeat import Heartbeat
from pipollux_hybrid.telemetry.metrics import Metrics
from pipollux_sched.controller.heartbeats import Heartbeats
from pipollux_sched.lifecycle import Allocate, Exited, Outcome
from pipollux_sched.server.http_server import HttpServer
from tests.hybrid.replicas import run_replicas
from tests.sched.supervised import Service, detail

PATIENCE = 240.0


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    with Service(tmp_path / "state") as service:
        yield service


def environment(service: Service, job: str, **changes: str) -> dict[str, str]:
    return {
        "PIPOLLUX_SCHEDULER_URL": service.server.url,
        "PIPOLLUX_JOB_ID": job,
        "PIPOLLUX_ATTEMPT": "1",
        "PIPOLLUX_TOKEN": service.store.job(job).token,
        "PIPOLLUX_HEARTBEAT_INTERVAL": "0.05",
        **changes,
    }


def eventually(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.01)


def work_until(end: Path) -> int:
    """Be a replica that trains until a file is there; return the step it came to."""
    init_process_group("gloo")
    metrics = context().component(Metrics)
    deadline = time.monotonic() + PATIENCE
    while not end.exists():
        assert time.monotonic() < deadline
        metrics.step += 1
        time.sleep(0.001)
    reset()
    return metrics.step


def test_every_replica_is_heard_of_also_after_the_scheduler_was_away(
    service: Service, tmp_path: Path
) -> None:
    service.submit("alive", ["node-a", "node-b"])
    beats = service.control.heartbeats
    end = tmp_path / "end"
    with ThreadPoolExecutor(1) as pool:
        replicas = pool.submit(
            run_replicas, work_until, 2, end, environment=environment(service, "alive")
        )
        try:
            eventually(lambda: beats.heard("alive", 1).keys() == {0, 1})
            assert beats.lost(PATIENCE) == []
            first = beats.heard("alive", 1)[0].step or 0
            eventually(lambda: (beats.heard("alive", 1)[0].step or 0) > first)
            port = int(service.server.url.rpartition(":")[2])
            service.server.stop()
            beats.forget("alive", 1)
            service.server = HttpServer(service.app, "127.0.0.1", port)
            service.server.start()
            eventually(lambda: beats.heard("alive", 1).keys() == {0, 1})
        finally:
            end.touch()
        steps = replicas.result(PATIENCE)
    assert all(step > first for step in steps)


class _Noted(logging.Handler):
    """Touches a file when a last heartbeat has failed."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self._file = file

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage().startswith("the last heartbeat"):
            self._file.touch()


def leave_one_by_one(folder: Path) -> None:
    """Be a replica that has nothing to do until it is told to leave."""
    init_process_group("gloo")
    heartbeat.GOODBYE_PATIENCE = PATIENCE
    heartbeat.LOG.setLevel(logging.DEBUG)
    heartbeat.LOG.addHandler(_Noted(folder / "missed"))
    deadline = time.monotonic() + PATIENCE
    while not (folder / f"end-{context().env.rank}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    reset()


def test_a_replica_that_leaves_while_the_scheduler_is_away(
    service: Service, tmp_path: Path
) -> None:
    """It says so to the next scheduler, which expects it, as its heartbeats were heard."""
    service.submit("early", ["node-a", "node-b"])
    with ThreadPoolExecutor(1) as pool:
        replicas = pool.submit(
            run_replicas, leave_one_by_one, 2, tmp_path, environment=environment(service, "early")
        )
        try:
            eventually(lambda: service.store.heartbeats.of("early", 1).keys() == {0, 1})
            port = int(service.server.url.rpartition(":")[2])
            service.server.stop()
            (tmp_path / "end-1").touch()
            eventually((tmp_path / "missed").exists)
            beats = service.control.heartbeats = Heartbeats()
            service.control.expect_replicas()
            assert [entry.replica for entry in beats.lost(-1.0)] == [0, 1]
            service.server = HttpServer(service.app, "127.0.0.1", port)
            service.server.start()
            eventually(lambda: service.store.heartbeats.of("early", 1)[1].finished)
            assert [entry.replica for entry in beats.lost(-1.0)] == [0]
            service.control.heartbeats = Heartbeats()
            service.control.expect_replicas()
            assert [entry.replica for entry in service.control.heartbeats.lost(-1.0)] == [0]
            shown = service.admin.get("/jobs/early").json()["replicas"]
            assert [row["finished"] for row in shown] == [False, True]
        finally:
            for rank in range(2):
                (tmp_path / f"end-{rank}").touch()
        replicas.result(PATIENCE)


def test_a_script_that_fails_does_not_say_that_it_has_finished(service: Service) -> None:
    service.submit("failing", ["node-a"])
    beats = service.control.heartbeats
    for wrong, finished in ((RuntimeError, False), (SystemExit, True)):
        heartbeat = Heartbeat.start(JobEnvironment.read(environment(service, "failing")), int)
        assert heartbeat is not None
        eventually(lambda: beats.heard("failing", 1))
        with suppress(wrong):
            try:
                raise wrong(143)
            finally:
                heartbeat.close()
        assert beats.heard("failing", 1)[0].finished is finished


OUTLIVES = """
import time
from pipollux_hybrid.job.env import JobEnvironment
from pipollux_hybrid.job.heartbeat import Heartbeat
assert Heartbeat.start(JobEnvironment.read(), lambda: None)
time.sleep(240)
"""


@pytest.mark.exhaustive
def test_a_replica_whose_place_was_taken_ends(service: Service) -> None:
    """It was cut off, and would write to the checkpoints of those that came after it."""
    service.submit("moved", ["node-a"])
    service.store.transition("moved", Allocate(["node-b"], "it is better"))
    service.store.transition("moved", Exited(1, Outcome.STOPPED, step=1))
    own = {**os.environ, **environment(service, "moved")}
    done = subprocess.run(
        [sys.executable, "-c", OUTLIVES], env=own, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == heartbeat.REPLACED
    (line,) = done.stderr.splitlines()
    assert "attempt 1 of this job is over for the scheduler" in line
    assert "is not the current one (2)" in line
    assert service.control.heartbeats.heard("moved", 1) == {}
    refused = service.admin.post("/jobs/moved/heartbeats", json={"attempt": 1, "replica": 0})
    assert detail(refused) == "attempt 1 of job 'moved' is not the current one (2)"


def test_a_wrong_token_ends_them(service: Service, caplog: pytest.LogCaptureFixture) -> None:
    service.submit("wrong", ["node-a"])
    env = JobEnvironment.read(environment(service, "wrong", PIPOLLUX_TOKEN="a guess"))
    heartbeat = Heartbeat.start(env, lambda: None)
    assert heartbeat is not None
    eventually(lambda: not heartbeat._thread.is_alive())
    assert "refuses this job's heartbeats (status 401)" in caplog.text
    assert service.control.heartbeats.heard("wrong", 1) == {}
    heartbeat.close()


def test_one_that_accepts_and_never_answers_holds_nobody_up(
    service: Service, tmp_path: Path
) -> None:
    service.submit("patient", ["node-a"])
    end = tmp_path / "end"
    end.touch()
    with socket.create_server(("127.0.0.1", 0)) as mute:
        url = f"http://127.0.0.1:{mute.getsockname()[1]}"
        changes = environment(service, "patient", PIPOLLUX_SCHEDULER_URL=url)
        assert run_replicas(work_until, 1, end, environment=changes) == [0]


@pytest.mark.parametrize(
    "changes",
    [{"PIPOLLUX_HEARTBEAT_INTERVAL": "0"}, {"PIPOLLUX_ATTEMPT": "0"}, {"PIPOLLUX_JOB_ID": ""}],
)
def test_none_where_nobody_wants_them(service: Service, changes: dict[str, str]) -> None:
    service.submit("quiet", ["node-a"])
    env = JobEnvironment.read({**environment(service, "quiet"), **changes})
    assert Heartbeat.start(env, lambda: None) is None


@pytest.mark.parametrize("text", ["-1", "often", "inf", "nan"])
def test_intervals_that_make_no_sense(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"PIPOLLUX_HEARTBEAT_INTERVAL.*or 0 for none"):
        JobEnvironment.read({"PIPOLLUX_HEARTBEAT_INTERVAL": text})
