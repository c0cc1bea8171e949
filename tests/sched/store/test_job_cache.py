"""Jobs in memory are as the database has them, whatever changes them and whoever asks meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest
from sqlalchemy import event
from sqlalchemy.orm import Session

from pipollux_sched.lifecycle import Allocate, Cancel, Exited, Outcome, Started
from pipollux_sched.store import JobCache, JobRecord, Store, UnknownJobError
from tests.sched.store.stores import point


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path / "pipollux.db", create=True) as store:
        store.submit("toy", {"name": "toy"}, "token", 3)
        yield store


def test_every_change_is_seen_at_once(store: Store) -> None:
    """Each way in which a job changes; once it was asked for it stays in memory."""

    def seen() -> JobRecord:
        known = store.present.get("toy")
        found = store.present.find("toy")
        assert found == store.job("toy")
        assert known in (None, found)
        return found

    assert store.present.get("toy") == store.job("toy"), "it was just submitted"
    assert seen() is store.present.get("toy")
    store.transition("toy", Allocate(["node-a"], "it is free"))
    assert store.present.get("toy") == store.job("toy"), "it is not read again"
    assert seen().state.attempt == 1
    store.transition("toy", Started(1, ("1",)))
    seen()
    store.add_report("toy", 1, [point(1)])
    assert store.present.get("toy") == seen()
    assert seen().state.training
    store.transition_all([("toy", Exited(1, Outcome.STOPPED, step=1))])
    assert not seen().state.running_on
    store.transition("toy", Cancel())
    assert seen().phase.ended
    assert store.present.get("toy") is None, "nobody asks for those that have ended"
    store.submit("toy", {"name": "toy"}, "another token", 3)
    assert seen().token == "another token"
    store.transition("toy", Cancel())
    store.deletions.begin("toy")
    with pytest.raises(UnknownJobError):
        store.present.find("toy")


def test_what_changes_no_job_leaves_it_in_memory(store: Store) -> None:
    store.transition("toy", Allocate(["node-a"], "it is free"))
    store.add_report("toy", 1, [point(1)])
    known = store.present.find("toy")
    store.put_hints("toy", 1, {"numStages": 1})
    store.add_report("toy", 1, [point(2)])
    store.submit("other", {"name": "other"}, "token", 3)
    assert store.present.get("toy") is known


def test_a_change_that_was_not_committed_is_none(store: Store) -> None:
    known = store.present.find("toy")
    with pytest.raises(UnknownJobError):
        store.transition("nobody", Cancel())
    assert store.present.get("toy") is known


def test_where_a_commit_fails_it_is_read_again(store: Store) -> None:
    """It may have come about all the same: the connection broke before the answer."""

    def broken(_session: Session) -> NoReturn:
        raise KeyboardInterrupt

    store.present.find("toy")
    event.listen(Session, "after_commit", broken)
    try:
        with pytest.raises(KeyboardInterrupt):
            store.transition("toy", Allocate(["node-a"], "it is free"))
    finally:
        event.remove(Session, "after_commit", broken)
    assert store.present.get("toy") is None
    assert store.present.find("toy").state.attempt == 1


def test_what_changed_while_it_was_read_is_not_kept(store: Store) -> None:
    """The reader has the old record when the change is announced."""

    def read(name: str) -> JobRecord:
        before = store.job(name)
        store.transition(name, Allocate(["node-a"], "it is free"))
        cache.keep({name: store.job(name)})
        return before

    cache = JobCache(read)
    assert cache.find("toy") != store.job("toy")
    assert cache.get("toy") == store.job("toy")


def test_what_was_deleted_while_it_was_read_is_not_kept(store: Store) -> None:
    def read(name: str) -> JobRecord:
        cache.keep({name: None})
        return store.job(name)

    cache = JobCache(read)
    assert cache.find("toy") == store.job("toy")
    assert cache.get("toy") is None


def test_what_others_change_meanwhile_does_not_matter(store: Store) -> None:
    """Else, where something changes all the time, nothing would ever be in memory."""

    def read(name: str) -> JobRecord:
        cache.keep({"other": None})
        return store.job(name)

    cache = JobCache(read)
    known = cache.find("toy")
    assert cache.get("toy") is known


def test_of_two_that_read_a_job_the_one_from_before_a_change_is_not_kept(store: Store) -> None:
    """It began before the change and ends after the other one, which began after it."""
    old = store.job("toy")
    begun: list[str] = []

    def read(name: str) -> JobRecord:
        begun.append(name)
        if len(begun) > 1:
            return store.job(name)
        store.transition("toy", Allocate(["node-a"], "it is free"))
        cache.keep({name: store.job(name)})
        assert cache.find(name).state.attempt == 1
        return old

    cache = JobCache(read)
    assert cache.find("toy") is old
    found = cache.get("toy")
    assert found is not None
    assert found.state.attempt == 1
