"""Jobs that have ended are deleted, or run again; whatever is killed in the middle is finished."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipollux_sched.client.client import Client
from pipollux_sched.client.connection import ClientError
from pipollux_sched.controller.admission import program
from pipollux_sched.controller.deletion import JobDeletion
from pipollux_sched.lifecycle import Allocate, Exited, Outcome, Phase
from pipollux_sched.spec.job import JobSpec
from pipollux_sched.store import ServerInfo, StateDir, Store, UnknownJobError
from tests.sched.supervised import ADMIN, SCRIPT, Service, report

# Deletes a job, and is killed before a later statement each time, until one gets through.
KILLED = """
import os, signal, sys
from pathlib import Path
from shutil import copytree
from sqlalchemy import event
from sqlalchemy.engine import Engine
from pipollux_sched.controller.deletion import JobDeletion
from pipollux_sched.store import StateDir, Store

original = Path(sys.argv[1])
killed = 0
while True:
    path = original.with_name(f"killed-{killed}")
    copytree(original, path)
    child = os.fork()
    if child == 0:
        left = killed
        def count(*_):
            global left
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
        state_dir = StateDir(path)
        with Store(state_dir.database) as store:
            event.listen(Engine, "before_cursor_execute", count)
            event.listen(Engine, "commit", count)
            JobDeletion(store, state_dir).delete("gone")
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    if status == 0:
        break
    assert os.WTERMSIG(status) == signal.SIGKILL, status
    killed += 1
print(killed)
"""


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


def leave_files(state_dir: StateDir, name: str) -> None:
    for file in (state_dir.log(name, 1, 0), state_dir.checkpoints(name) / "checkpoint-00000007"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("kept")


def test_a_deleted_job_is_gone_with_all_that_it_left(
    service: Service, client: Client, tmp_path: Path
) -> None:
    store, own = service.store, tmp_path / "own"
    client.submit(JobSpec(name="done", script=SCRIPT, checkpoint_dir=str(own)))
    store.transition("done", Allocate(["node-a"], "it is free"))
    token = store.job("done").token
    service.client(token).post("/jobs/done/reports", json=report()).raise_for_status()
    counted = store.overview.attempt_counts()
    with pytest.raises(ClientError, match="is Running and cannot be deleted; cancel it first, wit"):
        client.delete("done")
    leave_files(service.state_dir, "done")
    own.mkdir()
    store.transition("done", Exited(1, Outcome.FAILED, message="it broke"))
    store.transition("done", Allocate(["node-a"], "again"))
    client.cancel("done")
    counted = store.overview.attempt_counts()
    assert counted.failures == 1
    gone = client.delete("done")
    assert gone.to_dict() == {
        "name": "done",
        "phase": "Failed",
        "reason": "Cancelled",
        "left": [str(own)],
    }
    assert not service.state_dir.job("done").exists()
    with pytest.raises(ClientError, match="no job is named 'done'"):
        client.delete("done")
    (event,) = store.events(job="done")
    assert (event["type"], event["phase"], event["num_attempts"]) == ("deleted", "Cancelled", 1)
    assert "done" not in store.hints()
    assert store.overview.points("done", 10) == []
    assert store.overview.attempt_counts() == counted, "counters do not go back"
    assert store.deletions.pending() == []
    client.submit(JobSpec(name="done", script=SCRIPT))
    assert store.job("done").state.attempt == 0
    client.cancel("done")


def test_files_that_cannot_be_removed_keep_the_name(
    service: Service, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.submit(JobSpec(name="stuck", script=SCRIPT))
    client.cancel("stuck")
    leave_files(service.state_dir, "stuck")

    def refuse(_path: Path) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", refuse)
        assert client.delete("stuck").left == [str(service.state_dir.job("stuck"))]
    with pytest.raises(ClientError, match="'stuck' is still being deleted; wait, or give"):
        client.submit(JobSpec(name="stuck", script=SCRIPT))
    JobDeletion(service.store, service.state_dir).finish()  # as the watchdog does now and then
    assert not service.state_dir.job("stuck").exists()
    client.submit(JobSpec(name="stuck", script=SCRIPT))
    client.cancel("stuck")


@pytest.mark.exhaustive
def test_killed_at_any_moment_it_is_whole_or_gone(tmp_path: Path) -> None:
    state_dir = StateDir(tmp_path / "state")
    state_dir.create()
    with Store(state_dir.database, create=True) as store:
        store.submit("gone", {"name": "gone"}, "token", 0)
        store.transition("gone", Allocate(["a"], "free"))
        store.put_hints("gone", 1, {"initBatchSize": 8})
        store.transition("gone", Exited(1, Outcome.COMPLETE))
    leave_files(state_dir, "gone")
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(state_dir.path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    num_killed = int(done.stdout)
    assert num_killed > 8
    whole = 0
    for number in range(num_killed + 1):
        left = StateDir(tmp_path / f"killed-{number}")
        with Store(left.database) as store:
            JobDeletion(store, left).finish()  # as the next scheduler does when it starts
            kinds = [event["type"] for event in store.events(job="gone")]
            if kinds == ["deleted"]:
                assert not left.job("gone").exists()
                with pytest.raises(UnknownJobError):
                    store.job("gone")
            else:
                whole += 1
                assert kinds[-1] == "complete"
                assert store.job("gone").phase is Phase.COMPLETE
                assert len(store.hints()) == len(store.attempts("gone")) == 1
                assert left.log("gone", 1, 0).exists()
    assert 0 < whole < num_killed


def test_a_job_is_run_again(service: Service, client: Client, tmp_path: Path) -> None:
    store = service.store
    client.submit(JobSpec(name="again", script=SCRIPT, deadline=500.0, max_restarts=0))
    with pytest.raises(ClientError, match="is Created; only a job that has ended is run again"):
        client.rerun("again")
    store.transition("again", Allocate(["node-a"], "it is free"))
    store.put_hints("again", 1, {"initBatchSize": 8})
    store.transition("again", Exited(1, Outcome.FAILED, message="it broke"))
    before = service.num_reconsidered
    job = client.rerun("again")
    assert (job.phase, job.failures, job.first_attempt) == ("Created", 0, 1)
    assert job.message == "The job is run again, from its last checkpoint."
    assert job.ended_at is None
    assert job.deadline_at > job.submitted_at
    assert service.num_reconsidered == before + 1
    assert "again" in store.hints()
    store.transition("again", Allocate(["node-a"], "it is free"))
    assert program(store.job("again"), {}).first_attempt == 1
    store.transition("again", Exited(2, Outcome.COMPLETE))
    with pytest.raises(ClientError, match="start: pipollux rerun again --from-scratch"):
        client.rerun("again")
    assert client.rerun("again", from_scratch=True).first_attempt == 3
    assert "again" not in store.hints()
    store.transition("again", Allocate(["node-a"], "it is free"))
    first = program(store.job("again"), {}).first_attempt
    assert service.state_dir.checkpoints("again", first).name == "checkpoints-3"
    assert [event["type"] for event in store.events(job="again")].count("rerun") == 2


def test_what_a_user_has_saved_is_moved_away_by_the_user(
    service: Service, client: Client, tmp_path: Path
) -> None:
    own = tmp_path / "own"
    client.submit(JobSpec(name="mine", script=SCRIPT, checkpoint_dir=str(own)))
    client.cancel("mine")
    (own / "checkpoint-00000001").mkdir(parents=True)
    with pytest.raises(ClientError, match="which the scheduler leaves as they are; to start from"):
        client.rerun("mine", from_scratch=True)
    own.rename(tmp_path / "moved")
    assert client.rerun("mine", from_scratch=True).phase == "Created"


def test_a_retry_of_a_job_that_was_deleted_meanwhile_is_dropped(
    service: Service, client: Client
) -> None:
    """It waits after a failure, is cancelled and deleted, and then the wait is over."""
    executor = service.control._executor
    client.submit(JobSpec(name="failing", script=SCRIPT))
    service.store.transition("failing", Allocate(["node-a"], "it is free"))
    executor.handle("failing", Exited(1, Outcome.FAILED, message="it broke"))
    executor.step()
    ((_, order, name, retry),) = executor._retries
    assert name == "failing"
    client.cancel("failing")
    client.delete("failing")
    executor._retries[0] = (0.0, order, name, retry)  # the wait is over
    executor.step()
    assert executor._retries == []
