"""Many jobs at once: all of them or none, in one transaction, with one decision."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipollux_policies import ExactPolicy
from pipollux_sched.allocator.allocator import Allocator
from pipollux_sched.allocator.snapshot import SnapshotReader
from pipollux_sched.allocator.strategy import PolicyStrategy
from pipollux_sched.client.client import Client
from pipollux_sched.client.connection import ClientError
from pipollux_sched.lifecycle import Allocate, Cancel, Exited, Outcome, Phase, Started
from pipollux_sched.spec.job import JobSpec
from pipollux_sched.store import ReceivedReport, ServerInfo, StaleAttemptError, Store, Submission
from tests.cli.kept import HINTS, point
from tests.sched.store.stores import serve_nodes
from tests.sched.supervised import ADMIN, SCRIPT, Service


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with Service(tmp_path_factory.mktemp("state")) as service:
        service.state_dir.write_server(ServerInfo(service.server.url, os.getpid(), ADMIN))
        yield service


@pytest.fixture
def client(service: Service) -> Iterator[Client]:
    with Client.of(service.state_dir) as client:
        yield client


def spec(name: str, **fields: object) -> JobSpec:
    return JobSpec.model_validate({"name": name, "script": SCRIPT, **fields})


def test_a_batch_is_one_transaction_and_one_decision(service: Service, client: Client) -> None:
    decisions, commits = service.num_reconsidered, service.store.version
    taken = client.submit_all([spec(f"job-{n}", max_replicas=1 + n) for n in range(200)])
    assert [job.name for job in taken] == [f"job-{n}" for n in range(200)]
    assert [job.spec["max_replicas"] for job in taken] == list(range(1, 201))
    assert service.num_reconsidered == decisions + 1
    assert service.store.version == commits + 1
    assert len({job.token for job in service.store.jobs()}) == len(service.store.jobs())
    submitted = [e["job"] for e in service.store.events(types=["submitted"])]
    assert submitted[-200:] == [f"job-{n}" for n in range(200)]


@pytest.mark.parametrize(
    ("bad", "sentence"),
    [
        ({"num_stages": 3}, "job 'bad' fits no node"),
        ({"script": "/nowhere.py"}, "job 'bad': script: there is no file"),
        ({"name": "there"}, "a job named 'there' already exists (Created)"),
        ({"name": "fine"}, "jobs[1].name: 'fine' is also the name of jobs[0]"),
    ],
)
def test_a_batch_with_one_bad_job_is_refused_whole(
    service: Service, client: Client, bad: dict[str, object], sentence: str
) -> None:
    if "there" not in {job.name for job in service.store.jobs()}:
        client.submit(spec("there"))
    before, decisions = service.store.last_event(), service.num_reconsidered
    with pytest.raises(ClientError) as refused:
        client.submit_all([spec("fine"), spec(**{"name": "bad", **bad})])  # type: ignore[arg-type]  # it is bad
    assert sentence in str(refused.value)
    assert "fine" not in {job.name for job in service.store.jobs()}
    assert (service.store.last_event(), service.num_reconsidered) == (before, decisions)


def test_a_client_that_asks_again_submits_nothing_twice(service: Service, client: Client) -> None:
    batch = [spec(f"once-{n}") for n in range(7)]
    client.submit_all(batch)
    before = service.store.last_event()
    with pytest.raises(ClientError, match=r"7 of the jobs already exist: 'once-0' \(Created\)"):
        client.submit_all(batch)
    assert service.store.last_event() == before


def test_two_jobs_of_a_batch_do_not_share_checkpoints(client: Client, tmp_path: Path) -> None:
    both = [spec(name, checkpoint_dir=str(tmp_path)) for name in ("first", "second")]
    with pytest.raises(ClientError, match=r"job 'second': checkpoint_dir: .* is job 'first''s"):
        client.submit_all(both)


def test_a_batch_takes_up_again_what_was_cancelled(tmp_path: Path) -> None:
    with Store(tmp_path / "store.db", create=True) as store:
        first = store.submit_all([Submission(name, {}, "old", 0) for name in ("a", "b")])
        assert [change.job.phase for change in first] == [Phase.CREATED] * 2
        done = store.transition_all([("a", Cancel()), ("nobody", Cancel())])
        assert [change and change.job.phase for change in done] == [Phase.FAILED, None]
        again = store.submit_all([Submission(name, {}, "new", 0) for name in ("a", "c")])
        assert [change.job.state.reason for change in again] == ["SubmittedAgain", "Submitted"]
        assert {job.name: job.token for job in store.jobs()} == {"a": "new", "b": "old", "c": "new"}


def test_a_round_is_as_many_transactions_for_a_thousand_jobs_as_for_one(tmp_path: Path) -> None:
    """What is decided is written down at once, and a round that changes nothing writes nothing."""
    with Store(tmp_path / "store.db", create=True) as store:
        plain = spec("any", max_replicas=1).model_dump(mode="json")
        store.submit_all([Submission(f"job-{n}", plain, "", 0) for n in range(60)])
        serve_nodes(store, a=4)
        reader = SnapshotReader(store, restart_seconds=30.0)
        strategy = PolicyStrategy(ExactPolicy())
        allocator = Allocator(reader, strategy, carry_out=store.transition_all)
        before = store.version
        assert len(allocator.run_once()) == 4
        assert store.version <= before + 3  # started at once, weighed, and told why they wait
        phases = [job.phase for job in store.jobs()]
        assert (phases.count(Phase.RUNNING), phases.count(Phase.QUEUED)) == (4, 56)
        before = store.version
        assert allocator.run_once() == []
        assert store.version == before


def test_a_narrow_job_does_not_start_before_a_wide_one_that_waits(tmp_path: Path) -> None:
    """Started at once it would be left alone until its first step, and the next one after it."""
    with Store(tmp_path / "store.db", create=True) as store:
        names = {"running": 1, "wide": 2, "narrow": 1}
        for name, stages in names.items():
            plain = spec(name, num_stages=stages, max_replicas=1).model_dump(mode="json")
            store.submit_all([Submission(name, plain, "", 0)])
        store.transition("running", Allocate(["a"], "it is free"))
        started: list[str] = []

        class Watched(ExactPolicy):
            def allocate_job(self, job_info, nodes):  # type: ignore[no-untyped-def]  # the base class has the types
                started.append(str(job_info.num_stages))
                return super().allocate_job(job_info, nodes)

        serve_nodes(store, a=2)
        reader = SnapshotReader(store, restart_seconds=30.0)
        allocator = Allocator(reader, PolicyStrategy(Watched()), carry_out=store.transition_all)
        allocator.run_once()
        assert started == ["2"]  # the narrow one is weighed with all, not put where room is


def test_starts_and_first_steps_that_come_together(tmp_path: Path) -> None:
    """Of each job what it alone would have brought about, and each job's first step once."""
    names = ("a", "b", "c")
    now = time.time()
    with Store(tmp_path / "store.db", create=True) as store:
        store.submit_all([Submission(name, {}, "", 0) for name in names])
        store.transition_all([(name, Allocate([f"node-{name}"], "free")) for name in names])
        store.transition_all([(name, Started(1, (f"pid of {name}",))) for name in names])
        received = [ReceivedReport(name, 1, [point(7, now)]) for name in ("a", "b", "a")]
        late = ReceivedReport("c", 2, [point(7, now)])
        first = store.add_all_reports([*received, late, ReceivedReport("c", 1, [])])
        assert first[:3] == [True, True, False]
        assert isinstance(first[3], StaleAttemptError)
        assert first[4] is False, "it held no step"
        jobs = {job.name: job for job in store.jobs()}
        assert [jobs[name].state.training for name in names] == [True, True, False]
        for name in names:
            (attempt,) = store.attempts(name)
            assert attempt.started_at is not None
            assert attempt.first_step == (None if name == "c" else 7)
            kinds = [event["type"] for event in store.events(job=name)]
            assert kinds[:3] == ["submitted", "allocated", "started"]
            assert kinds.count("progress") == {"a": 2, "b": 1, "c": 0}[name]
        assert store.hint_texts() == {}
        store.put_hints("a", 1, HINTS)
        assert {name: json.loads(text) for name, text in store.hint_texts().items()} == {"a": HINTS}


def test_jobs_of_different_attempts_start_together(tmp_path: Path) -> None:
    """What is noted is noted of the present attempt of each."""
    now = iter(range(1, 1000))
    with Store(tmp_path / "store.db", create=True, clock=lambda: float(next(now))) as store:
        store.submit_all([Submission(name, {}, "", 0) for name in ("a", "b")])
        store.transition_all([(name, Allocate(["node-a"], "free")) for name in ("a", "b")])
        store.transition("a", Started(1, ("pid",)))
        store.transition("a", Allocate(["node-b"], "better"))
        store.transition("a", Exited(1, Outcome.STOPPED, step=0))
        (before,) = (x for x in store.attempts("a") if x.attempt == 1)
        store.transition_all([("a", Started(2, ("pid",))), ("b", Started(1, ("pid",)))])
        reports = [ReceivedReport("a", 2, [point(7, 2.0)]), ReceivedReport("b", 1, [point(9, 2.0)])]
        assert store.add_all_reports(reports) == [True, True]
        old, new = store.attempts("a")
        assert old == before
        assert new.started_at is not None
        assert [new.first_step, store.attempts("b")[0].first_step] == [7, 9]
