"""What a scheduler makes of jobs whose scheduler died: how they ended, what they told last."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from pipollux_sched.lifecycle import (
    Adopt,
    Exited,
    Intent,
    JobState,
    NotAdopted,
    Outcome,
    Phase,
    Recover,
    Stop,
    advance,
)
from pipollux_sched.report.event_text import event_text
from pipollux_sched.server.address import ServerAddress
from pipollux_sched.spec.job import JobSpec
from pipollux_sched.store import Store
from tests.programs import free_port
from tests.sched.backend.local.test_backend import wait_for_text
from tests.sched.processes import processes_of
from tests.sched.test_scheduler import scheduler_on, toy, types

STARTED = """
import os, sys
from pathlib import Path
from tests.sched.test_scheduler import scheduler_on, toy, training

scheduler = scheduler_on(Path(sys.argv[1]))
scheduler.start()
for job in (toy("long"), toy("short", "--steps", "100")):
    scheduler.submit(job)
    assert scheduler.wait(training(job.name), 240)
os._exit(9)
"""
"""A scheduler that dies as if killed, while its jobs train."""

KILLED_AS_IT_TAKES_OVER = """
import os, sys
from pathlib import Path
from pipollux_sched.backend.local import processes
from pipollux_sched.backend.local.engine import LocalEngine
from pipollux_sched.server.address import ServerAddress
from tests.sched.test_scheduler import scheduler_on

def die(engine, left, signal):
    processes.kill(left)
    os._exit(9)

LocalEngine.end_left = die
scheduler_on(Path(sys.argv[1]), address=ServerAddress(port=int(sys.argv[2]))).start()
"""
"""A scheduler at another address, which dies when it has just killed what it cannot look after."""


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "state"
    assert processes_of(tmp_path / "state") == []


def run(code: str, *args: str) -> None:
    """Run a scheduler that dies with status 9."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code, *args]
    assert subprocess.run(command, env=environment, timeout=90, check=False).returncode == 9


@pytest.mark.exhaustive
def test_two_jobs_whose_scheduler_died_and_the_next_one_too(directory: Path) -> None:
    """The end of a job that none of them saw is known, with what it last told; each step once.

    The other was ended because the second one listened elsewhere. The third knows that the job is
    not to blame for that, nor anybody outside.
    """
    run(STARTED, str(directory))
    wait_for_text(directory / "jobs/short/attempts/attempt-1/replica-0.json", "code")
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        port = other.getsockname()[1]
    run(KILLED_AS_IT_TAKES_OVER, str(directory), str(port))
    with Store(directory / "pipollux.db") as store:
        state = store.job("long").state
    assert (state.intent, state.reason) == (Intent.REPLACE, "NotAdopted")
    assert f"The scheduler now listens at http://127.0.0.1:{port}" in state.message
    with scheduler_on(directory) as scheduler:
        assert scheduler.wait(
            lambda jobs: jobs["long"].state.attempt == 2 and jobs["short"].phase.ended, 60
        )
        assert scheduler.jobs()["long"].state.failures == 0
        events = scheduler.store.events()
    assert types(events, "long")[:4] == ["submitted", "allocated", "started", "first_step"]
    assert types(events, "long")[4:8] == ["stopping", "adopted", "stopped", "allocated"]
    told = [event for event in events if event["job"] == "short"]
    assert [e["step"] for e in told if e["type"] == "progress"] == list(range(1, 101))
    assert (told[-1]["type"], told[-1]["step"], told[-1]["epoch"]) == ("complete", 100, 1)


@pytest.mark.exhaustive
def test_the_step_of_a_job_that_is_stopped_as_its_scheduler_moved_is_known(directory: Path) -> None:
    """The job tells the address that it knows, where nobody listens; its marker says the same."""
    run(STARTED, str(directory))
    marker = directory / "jobs" / "long" / "checkpoints" / "stopped.json"
    address = ServerAddress(port=free_port())
    with scheduler_on(directory, address=address) as scheduler:
        step = json.loads(marker.read_text())["step"]
        events = [e for e in scheduler.store.events() if e["job"] == "long"]
        (stopped,) = [event for event in events if event["type"] == "stopped"]
        assert (stopped["attempt"], stopped["step"]) == (1, step)
        assert event_text(stopped) == f"stopped and saved at step {step}"
        assert scheduler.wait(lambda jobs: jobs["long"].state.attempt == 2, 60)


LATE_IMPORT = """
import os, runpy
assert os.environ["HANDED_ON"] == "by the operator"
if os.environ["PIPOLLUX_ATTEMPT"] == "2":
    import nowhere_to_be_found
runpy.run_path({toy!r}, run_name="__main__")
"""


@pytest.mark.usefixtures("light_agent")
def test_a_script_that_cannot_start_is_not_tried_again(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that has trained before is: what it lacks now it may find again."""
    scripts = {
        "module": "import nowhere_to_be_found\n",
        "late": LATE_IMPORT.format(toy=toy("toy").script),
    }
    jobs = []
    for name, code in scripts.items():
        script = tmp_path / f"{name}.py"
        script.write_text(code)
        jobs.append(JobSpec(name=name, script=str(script), args=("--fail-at", "2"), max_restarts=1))
    monkeypatch.setenv("HANDED_ON", "by the operator")
    with scheduler_on(directory, pass_environment=["HANDED_ON"]) as scheduler:
        for job in jobs:
            scheduler.submit(job)
        assert scheduler.wait(lambda jobs: all(j.phase.ended for j in jobs.values()), timeout=90)
        found = scheduler.jobs()
    state = found["module"].state
    assert (state.phase, state.reason, state.attempt) == (Phase.FAILED, "CannotStart", 1)
    assert state.message.splitlines()[0] == (
        "The script cannot start, and is not tried again. Replica 0 on node-a ended with exit "
        "status 1: ModuleNotFoundError: No module named 'nowhere_to_be_found'"
    )
    late = found["late"].state
    assert (late.reason, late.attempt, late.failures) == ("TooManyFailures", 2, 2)
    assert "ModuleNotFoundError" in late.message


TRAINING = JobState(phase=Phase.RUNNING, attempt=1, assigned=("a",), running_on=("a",))
UNREACHABLE = NotAdopted(1, "it reports elsewhere")


def test_who_is_not_adopted_is_not_to_blame() -> None:
    """However its processes end, it waits for the allocator; the reason stays what it was."""
    stopping, actions = advance(TRAINING, UNREACHABLE, now=1.0)
    assert (stopping.intent, stopping.reason) == (Intent.REPLACE, "NotAdopted")
    assert [action.type for action in actions] == ["stopping"]
    for outcome in (Outcome.STOPPED, Outcome.FAILED):
        state, _ = advance(stopping, Exited(1, outcome), now=2.0)
        assert (state.phase, state.reason, state.failures) == (Phase.QUEUED, "NotAdopted", 0)
        assert state.message == "it reports elsewhere"
    suspended, _ = advance(replace(stopping, suspended=True), Exited(1, Outcome.STOPPED), now=2.0)
    assert (suspended.phase, suspended.reason) == (Phase.SUSPENDED, "SuspendedByUser")
    adopted, actions = advance(stopping, Adopt(1), now=2.0)
    assert Stop(1, "it reports elsewhere", graceful=False) in actions
    assert adopted.intent is Intent.REPLACE
    queued, _ = advance(stopping, Recover(), now=2.0)
    assert (queued.phase, queued.intent, queued.running_on) == (Phase.QUEUED, None, ())


def test_what_was_being_stopped_is_still_stopped_for_the_same_reason() -> None:
    for intent in (Intent.CANCEL, Intent.SUSPEND, Intent.MOVE, Intent.EXPIRE):
        state, _ = advance(replace(TRAINING, intent=intent), UNREACHABLE, now=1.0)
        assert state.intent is intent
    for state in (replace(TRAINING, attempt=2), replace(TRAINING, running_on=())):
        assert advance(state, UNREACHABLE, now=1.0) == (state, ())
