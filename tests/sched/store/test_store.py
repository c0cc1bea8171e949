"""The store: what it remembers, who may read it when, and that nothing acknowledged is lost."""

from __future__ import annotations

import json
import os
import signal
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.exc import StatementError

from pipollux_sched.lifecycle import Allocate, Cancel, Exited, Outcome, Phase, Recover
from pipollux_sched.store import (
    JobExistsError,
    NodeCondition,
    NodeRecord,
    ServerInfo,
    StaleAttemptError,
    StateDir,
    StateDirError,
    Store,
    StoreError,
    Timeline,
    UnknownJobError,
    UnknownNodeError,
    moving_average,
)
from pipollux_sched.store.database import Database
from tests.programs import Forked
from tests.sched.store.stores import Clock, point
from tests.waiting import until


def submit(store: Store, name: str = "toy") -> None:
    store.submit(name, {"name": name}, f"token of {name}", max_restarts=1)


def run(store: Store, *nodes: str, name: str = "toy") -> int:
    return store.transition(name, Allocate(nodes, "because")).job.state.attempt


def test_a_job_comes_back_as_it_was_written(store: Store, place: Path | str) -> None:
    submit(store)
    change = store.transition("toy", Allocate(["a", "b"], "both are free"))
    with Store(place) as other:
        assert other.job("toy") == change.job
        assert [job.name for job in other.jobs()] == ["toy"]
    assert change.job.state.running_on == ("a", "b")
    assert change.job.state.max_restarts == 1
    assert "token" not in json.dumps(change.job.to_json_object())


def test_names_are_taken_once(store: Store) -> None:
    submit(store)
    with pytest.raises(JobExistsError, match=r"'toy' already exists \(Created\)"):
        submit(store)
    with pytest.raises(UnknownJobError, match=r"no job is named 'tyo'; there is toy$"):
        store.job("tyo")
    for number in range(6):
        submit(store, f"job-{number}")
    said = "there are job-1, job-2, job-3, job-4, job-5 and 2 others$"
    with pytest.raises(UnknownJobError, match=said):
        store.job("tyo")


def test_a_failed_job_can_be_taken_up_again(store: Store) -> None:
    submit(store)
    for _ in range(2):
        attempt = run(store, "a")
        store.transition("toy", Exited(attempt, Outcome.FAILED, message="boom"))
        store.transition("toy", Recover())
    assert store.job("toy").phase is Phase.FAILED
    assert store.job("toy").ended_at == 1000.0
    submit(store)
    assert (store.job("toy").phase, store.job("toy").ended_at) == (Phase.CREATED, None)
    assert run(store, "a") == 3


def test_events_are_flat_and_in_order(store: Store) -> None:
    store.add_event("cluster", {"nodes": {"a": {"slots": 2, "kind": "cpu"}}, "policy": "P"})
    submit(store)
    attempt = run(store, "a")
    timeline = Timeline(1, 1, 1, ((0, 0, "forward", 0.0, 0.1),))
    assert store.add_report("toy", attempt, [point(1), point(2)], timeline)
    assert not store.add_report("toy", attempt, [point(3)])
    store.put_hints("toy", attempt, {"numStages": 1})
    store.transition("toy", Exited(attempt, Outcome.COMPLETE, step=3, epoch=0))
    events = store.events()
    assert [event["type"] for event in events] == [
        *("cluster", "submitted", "allocated", "first_step", "progress", "progress"),
        *("timeline", "progress", "hints", "complete"),
    ]
    assert [event["id"] for event in events] == list(range(1, 11))
    progress = events[5]
    assert (progress["step"], progress["time"], progress["num_epochs"]) == (2, 1002.0, 3)
    assert progress["predicted_step_time"] is None
    assert events[6]["events"] == [[0, 0, "forward", 0.0, 0.1]]
    assert [event["id"] for event in store.events(after=8)] == [9, 10]
    assert len(store.events(job="toy", types=["progress"], limit=2)) == 2
    assert store.last_points() == store.last_points(["toy", "other"]) == {"toy": point(3)}
    assert store.last_points(["other"]) == {}
    assert store.last_event() == 10


def test_only_the_present_attempt_is_listened_to(store: Store) -> None:
    submit(store)
    run(store, "a")
    store.put_hints("toy", 1, {"numStages": 1})
    store.put_hints("toy", 1, {"numStages": 2})
    assert store.hints() == {"toy": {"numStages": 2}}
    store.transition("toy", Allocate(["b"], "move"))
    store.put_hints("toy", 1, {"numStages": 3})  # it still runs while it is being stopped
    store.transition("toy", Exited(1, Outcome.STOPPED, step=1))
    with pytest.raises(StaleAttemptError, match="attempt 1 of job 'toy'"):
        store.put_hints("toy", 1, {"numStages": 4})
    with pytest.raises(StaleAttemptError):
        store.add_report("toy", 1, [point(9)])
    assert store.hints() == {"toy": {"numStages": 3}}


def test_what_a_restart_costs_is_measured(store: Store, clock: Clock) -> None:
    """From the moment an attempt is asked to stop to the first step of the next."""
    submit(store)
    store.add_report("toy", run(store, "a"), [point(1)])
    assert store.restart_seconds("toy", default=30.0) == 30.0
    clock.now += 100
    store.transition("toy", Allocate(["a", "b"], "grow"))
    clock.now += 3
    store.transition("toy", Exited(1, Outcome.STOPPED, step=1))
    clock.now += 5
    store.add_report("toy", 2, [point(2)])
    assert store.restart_seconds("toy", default=30.0) == 8.0
    assert store.events(types=["first_step"])[-1]["restart_seconds"] == 8.0
    first, second = store.attempts("toy")
    assert (first.stopping_at, first.ended_at, first.outcome) == (1100.0, 1103.0, "stopped")
    assert (second.nodes, second.first_step, second.restart_seconds) == (("a", "b"), 2, 8.0)

    # A failure says nothing about what a move would cost.
    store.transition("toy", Exited(2, Outcome.FAILED))
    store.transition("toy", Recover())
    clock.now += 500
    store.add_report("toy", run(store, "a"), [point(3)])
    assert store.attempts("toy")[-1].restart_seconds is None
    assert moving_average([10.0, 20.0], 0.0) == pytest.approx(13.0)


def test_many_threads(store: Store) -> None:
    """Reports from many jobs at once: none is lost, and every reader sees whole transactions."""
    names = [f"job-{index}" for index in range(8)]
    for name in names:
        submit(store, name)
        run(store, "a", name=name)
    failures: list[BaseException] = []

    def report(name: str) -> None:
        try:
            for step in range(8):
                store.add_report(name, 1, [point(step), point(step)])
                assert len(store.events(job=name, types=["progress"])) % 2 == 0
        except BaseException as error:  # handed to the test, whatever it is
            failures.append(error)

    threads = [threading.Thread(target=report, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
    assert failures == []
    assert len(store.events(types=["progress"])) == 8 * 16


def test_waiting_for_a_commit(store: Store) -> None:
    version = store.version
    assert store.wait(version, timeout=0.01) == version
    thread = threading.Thread(target=submit, args=(store,))
    thread.start()
    assert store.wait(version, timeout=240) > version
    thread.join(240)


def test_what_is_acknowledged_survives_a_kill(place: Path | str, tmp_path: Path) -> None:
    """A writer that is killed right after its answer has lost nothing that it said it had."""
    script = tmp_path / "writer.py"
    script.write_text(f"""
import itertools
from pipollux_sched.store import Store
store = Store({str(place)!r}, create=True)
for number in itertools.count():
    store.submit(f"job-{{number}}", {{}}, "token", 0)
    print(number, flush=True)
""")
    with Forked(script) as writer:
        until(lambda: writer.output.count("\n") >= 20, "it has written")
        acknowledged = writer.output.splitlines()
        with Store(place) as store:
            assert len(store.jobs()) >= len(acknowledged)  # readable while the other writes
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        acknowledged = writer.output.splitlines()
    with Store(place) as store:
        assert len(store.jobs()) - len(acknowledged) in (0, 1)


def test_a_failing_transaction_leaves_no_trace(store: Store) -> None:
    submit(store)
    run(store, "a")
    with pytest.raises((StatementError, ValueError)):  # the driver of PostgreSQL wraps nothing
        store.put_hints("toy", 1, {"numStages": float("nan")})
    assert store.hints() == {}
    assert store.events(types=["hints"]) == []


def test_stores_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"none\.db does not exist.*pipollux serve"):
        Store(tmp_path / "none.db")
    garbage = tmp_path / "garbage.db"
    garbage.write_text("this is not a database" * 100)
    with pytest.raises(StoreError, match=r"garbage\.db cannot be used as a store"):
        Store(garbage)


def test_only_what_is_told_again_soon_does_not_wait_for_the_disk(place: Path | str) -> None:
    """Every connection is used for both, one after the other."""
    database = Database(place, create=True)
    try:
        asked = {
            "sqlite": ("PRAGMA synchronous", {True: 2, False: 1}),
            "postgresql": ("SHOW synchronous_commit", {True: "on", False: "off"}),
        }
        for durable in (True, False, True):
            with database.write(durable=durable) as session:
                question, answers = asked[session.get_bind().dialect.name]
                assert session.execute(text(question)).scalar() == answers[durable]
    finally:
        database.close()


def test_nodes_keep_their_condition(store: Store, clock: Clock) -> None:
    """Also over a restart of the scheduler; one that was taken out of the cluster is forgotten."""
    spec = {"name": "a", "slots": 2}
    store.set_nodes([("a", 2, "cpu", spec), ("b", 1, "cpu", {})])
    clock.now += 5
    node = store.set_node_condition("a", NodeCondition.DRAINING, "new disk")
    assert node == NodeRecord("a", 2, "cpu", spec, NodeCondition.DRAINING, "new disk", clock.now)
    began = clock.now
    clock.now += 5
    assert store.set_node_condition("a", NodeCondition.DRAINING, "newer").since == began
    store.set_nodes([("a", 4, "cpu", spec)])
    assert store.nodes() == {"a": replace(node, slots=4, reason="newer")}
    assert [(event["type"], event["node"]) for event in store.events()] == [("node", "a")]
    with pytest.raises(UnknownNodeError, match="no node is named 'b'; there are a"):
        store.set_node_condition("b", NodeCondition.READY)


def test_a_deadline_counts_from_the_last_submission(store: Store, clock: Clock) -> None:
    submit(store)
    assert store.job("toy").deadline_at is None
    store.transition("toy", Cancel())
    clock.now += 10
    store.submit("toy", {"name": "toy"}, "token", 3, deadline=60.0)
    assert store.job("toy").deadline_at == clock.now + 60.0


def test_what_a_job_has_held(store: Store, clock: Clock) -> None:
    """Slots of every attempt, from its start to its end, or until now."""
    submit(store)
    assert store.attained_service() == {}
    store.transition("toy", Allocate(["a", "b"], "free", num_stages=2))
    clock.now += 10
    assert store.attained_service() == {"toy": 40.0}
    store.transition("toy", Exited(1, Outcome.FAILED))
    clock.now += 100
    assert store.attained_service() == {"toy": 40.0}
    store.transition("toy", Recover())
    store.transition("toy", Allocate(["a"], "free", num_stages=4))
    clock.now += 5
    store.transition("toy", Recover())
    clock.now += 100
    assert store.attained_service() == {"toy": 60.0}


def test_a_closed_store_says_so(place: Path | str) -> None:
    store = Store(place, create=True)
    store.close()
    with pytest.raises(StoreError, match="has been closed"):
        store.jobs()


def test_secrets_are_for_the_owner_alone(tmp_path: Path) -> None:
    directory = StateDir(tmp_path / "state")
    directory.create()
    with Store(directory.database, create=True):
        directory.write_server(ServerInfo("http://127.0.0.1:1", 7, "secret"))
        for path in (directory.path, directory.database, directory.server):
            assert path.stat().st_mode & 0o077 == 0, path
    assert directory.read_server() == ServerInfo("http://127.0.0.1:1", 7, "secret")
    directory.remove_server()
    directory.remove_server()
    assert directory.read_server() is None


def test_one_scheduler_a_directory(tmp_path: Path) -> None:
    directory = StateDir(tmp_path / "state")
    directory.create()
    with directory.lock():
        directory.write_server(ServerInfo("http://127.0.0.1:1", 7, "secret"))
        refused = pytest.raises(
            StateDirError, match=r"another scheduler already serves .*process 7"
        )
        with refused, directory.lock():
            pass
    with directory.lock():
        pass


def test_where_the_state_directory_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPOLLUX_STATE_DIR", str(tmp_path))
    assert StateDir.choose(Path("given")).path == Path.cwd() / "given"
    assert StateDir.choose().path == tmp_path
    monkeypatch.delenv("PIPOLLUX_STATE_DIR")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    assert StateDir.choose().path == tmp_path / ".local/state/pipollux"
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "states"))
    assert StateDir.choose().path == tmp_path / "states/pipollux"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(StateDirError, match="choose another with --state-dir"):
        StateDir(tmp_path / "state").create()


def test_a_file_in_the_place_of_the_directory(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("")
    with pytest.raises(StateDirError, match="choose another with --state-dir"):
        StateDir(tmp_path / "state").create()


def test_jobs_that_have_ended_can_be_left_out(store: Store, clock: Clock) -> None:
    for name in ("done", "failed", "runs", "waits"):
        submit(store, name)
    for name in ("done", "failed", "runs"):
        store.transition(name, Allocate(["a"], "free"))
        store.put_hints(name, 1, {"numStages": 1})
    clock.now += 10
    store.transition("done", Exited(1, Outcome.COMPLETE, step=1, epoch=0))
    store.transition("failed", Cancel())
    store.transition("failed", Exited(1, Outcome.STOPPED, step=1))
    assert [job.name for job in store.jobs()] == ["done", "failed", "runs", "waits"]
    assert [job.name for job in store.jobs(unfinished=True)] == ["runs", "waits"]
    assert store.hints().keys() == {"done", "failed", "runs"}
    assert store.hints(unfinished=True).keys() == {"runs"}
    assert store.num_attempts(unfinished=True) == {"runs": 1}
    assert store.attained_service(unfinished=True) == {"runs": 10.0}
    assert store.attained_service()["done"] == 10.0
