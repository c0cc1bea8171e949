"""Which database a store is in: what may be named, who may write when, and what is lost when."""

from __future__ import annotations

import logging
import signal
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from pipollux_sched.scheduler import Scheduler
from pipollux_sched.spec.cluster import ClusterSpec
from pipollux_sched.store import (
    JobExistsError,
    StateDir,
    Store,
    StoreError,
    StoreTakenError,
    StoreUnavailableError,
)
from pipollux_sched.store.location import Location
from tests.programs import Forked
from tests.sched.store.postgresql import Server
from tests.waiting import until

LOCK = """
import signal, sys
from pipollux_sched.store import Store
store = Store(sys.argv[1], create=True)
store.acquire_leader_lock()
print("locked", flush=True)
signal.pause()
"""


FILL = """
import resource, sys
from pipollux_sched.store import Store, StoreUnavailableError
store = Store(sys.argv[1], create=True)
resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, resource.RLIM_INFINITY))
taken = 0
try:
    while True:
        store.submit(f"job-{taken}", {"text": "x" * 5000}, "token", 0)
        taken += 1
except StoreUnavailableError as error:
    print(taken, error, sep="\\n")
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
store.submit("after", {}, "token", 0)
print(*(job.name for job in store.jobs()), sep="\\n")
"""


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("mysql://u:hunter2@h/d", "'mysql' databases are not supported; allowed are postgresql://"),
        ("postgresql://u:hunter2@h:port/d", "the value is not the URL of a database"),
        ("sqlite://", "sqlite:// needs the path of a file"),
        ("sqlite:///:memory:", "sqlite:// needs the path of a file"),
        ("sqlite:///x.db?mode=ro", "sqlite:// needs the path of a file"),
        ("postgresql://u:hunter2@127.0.0.1:1/d", "cannot be used as a store: connection"),
        ("postgresql://u:hunter2@/d?host=/none", "cannot be used as a store: connection"),
        ("postgresql://u@/d?host=/none&password=hunter2", "cannot be used as a store"),
        ("/none/pipollux.db", "No such file or directory"),
    ],
)
def test_what_cannot_be_a_store(url: str, words: str) -> None:
    with pytest.raises(StoreError) as refused:
        Store(url, create=True)
    assert words in str(refused.value)
    assert "hunter2" not in str(refused.value)
    assert "\n" not in str(refused.value)


def test_what_a_place_is_called(tmp_path: Path) -> None:
    shown = {
        "postgres://me:hunter2@db:5433/jobs": "postgresql://me@db:5433/jobs",
        "postgresql+psycopg://me@/jobs?host=/run/pg": "postgresql://me@/run/pg/jobs",
        f"sqlite:///{tmp_path}/x.db": f"{tmp_path}/x.db",
        "x.db": str(Path.cwd() / "x.db"),
    }
    assert {given: str(Location.of(given)) for given in shown} == shown


def test_writers_do_not_see_each_other_half_done(place: Path | str) -> None:
    """Of many that submit the same job, one does; whoever reads all after an id misses none."""
    stores = [Store(place, create=True) for _ in range(4)]
    writing = threading.Event()

    def submit_all(store: Store) -> int:
        taken = 0
        for number in range(15):
            try:
                store.submit(f"job-{number}", {}, "token", max_restarts=0)
            except JobExistsError:
                taken += 1
        return taken

    def follow(store: Store) -> list[int]:
        seen = [0]
        while True:
            ended = writing.is_set()
            seen += [event["id"] for event in store.events(seen[-1])]
            if ended:
                return seen[1:]

    with Store(place) as reader, ThreadPoolExecutor(5) as pool:
        following = pool.submit(follow, reader)
        taken = list(pool.map(submit_all, stores))
        writing.set()
        assert following.result(240) == [event["id"] for event in reader.events()]
        assert sum(taken) == 3 * 15
        assert len(reader.jobs()) == len(reader.events(types=["submitted"])) == 15
    for store in stores:
        store.close()


def test_one_scheduler_a_store(place: Path | str, tmp_path: Path) -> None:
    """Others may read, and write as users do; the lock ends with its process, however that ends."""
    script = tmp_path / "lock.py"
    script.write_text(LOCK)
    with Forked(script, [str(place)]) as first, Store(place, create=True) as second:
        until(lambda: first.output == "locked\n", "it has the lock")
        with pytest.raises(StoreTakenError, match="another scheduler already serves the store"):
            second.acquire_leader_lock()
        assert second.jobs() == []
        first.send_signal(signal.SIGKILL)
        first.wait()
        until_locked(second)
    with Store(place) as third:
        until_locked(third)
        third.submit("toy", {}, "token", 0)


def until_locked(store: Store) -> None:
    """A server needs a moment to notice that somebody is gone."""
    for _ in range(1000):
        try:
            store.acquire_leader_lock()
        except StoreTakenError:
            store.wait(store.version, 0.01)
        else:
            return
    raise AssertionError("the lock of one that has ended is still held")


def test_whoever_lost_the_store_writes_no_more(postgresql: Server) -> None:
    """The lock is gone with a connection that broke; another scheduler takes the store over."""
    place = postgresql.new_database()
    with Store(place, create=True) as first, Store(place) as second:
        first.acquire_leader_lock()
        first.submit("toy", {}, "token", 0)
        postgresql.end_connections()
        until_locked(second)
        with pytest.raises(StoreTakenError, match=r"has taken over the store .* without touching"):
            first.submit("other", {}, "token", 0)
        with pytest.raises(StoreTakenError, match=r"has taken over the store"):
            first.check_leader_lock()
        second.check_leader_lock()
        assert [job.name for job in first.jobs()] == ["toy"]
        second.submit("other", {}, "token", 0)


def test_a_server_that_is_started_again(postgresql: Server) -> None:
    """What was acknowledged is there, and the store works on; meanwhile it says what is wrong."""
    place = postgresql.new_database()
    with Store(place, create=True) as store:
        store.acquire_leader_lock()
        store.submit("before", {}, "token", 0)
        postgresql.stop()
        try:
            for ask in (store.jobs, lambda: store.submit("lost", {}, "token", 0)):
                with pytest.raises(StoreUnavailableError) as refused:
                    ask()
                assert "cannot be used now: connection" in str(refused.value)
                assert "hunter2" not in str(refused.value)
        finally:
            postgresql.start()
        store.submit("after", {}, "token", 0)
        assert [job.name for job in store.jobs()] == ["before", "after"]


def test_a_full_disk(tmp_path: Path) -> None:
    """Whoever writes is told; what was acknowledged stays, and with room again it goes on."""
    script = tmp_path / "fill.py"
    script.write_text(FILL)
    with Forked(script, [str(tmp_path / "pipollux.db")]) as filling:
        assert filling.wait() == 0, filling.errors
        taken, refused, *names = filling.output.splitlines()
    assert int(taken) > 5
    assert refused.startswith(f"the store {tmp_path}/pipollux.db cannot be used now: ")
    assert len(names) == int(taken) + 1
    assert names[-1] == "after"


def test_a_backup_of_a_store_in_use(tmp_path: Path) -> None:
    """Holds one moment of it, and is a store."""
    with Store(tmp_path / "pipollux.db", create=True) as store, ThreadPoolExecutor(1) as pool:
        store.submit("job-0", {}, "token", 0)

        def submit_all() -> None:
            for number in range(1, 60):
                store.submit(f"job-{number}", {}, "token", 0)

        writing = pool.submit(submit_all)
        with (
            closing(sqlite3.connect(tmp_path / "pipollux.db")) as source,
            closing(sqlite3.connect(tmp_path / "copy.db")) as copy,
        ):
            source.backup(copy, pages=3)
        writing.result(240)
    with Store(tmp_path / "copy.db") as store:
        jobs = store.jobs()
        assert [job.name for job in jobs] == [f"job-{n}" for n in range(len(jobs))] != []
        assert len(store.events(types=["submitted"])) == len(jobs)


def test_a_state_directory_remembers_where_its_store_is(
    place: Path | str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Readable for the owner alone, as the password may be in it."""
    directory = StateDir(tmp_path / "state")
    nodes = ClusterSpec.model_validate({"nodes": [{"name": "a", "slots": 1, "kind": "cpu"}]})
    with Scheduler(directory, nodes, store=str(place)):
        pass
    assert directory.store_url.stat().st_mode & 0o077 == 0
    assert not directory.database.exists()
    with Store(directory.store) as store:
        assert store.nodes().keys() == {"a"}
        store.submit("toy", {"name": "toy", "script": "x.py"}, "token", 0)
    with Scheduler(directory, nodes) as scheduler:
        assert scheduler.jobs().keys() == {"toy"}
    assert caplog.messages == []
    with caplog.at_level(logging.WARNING), Scheduler(directory, nodes, store=f"{tmp_path}/new.db"):
        pass
    told = f"the store was {Location.of(place)}; its jobs are not in {tmp_path}/new.db"
    assert caplog.messages == [told]
