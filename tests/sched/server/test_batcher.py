"""What comes together is written together; each is answered for itself."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipollux_sched.lifecycle import Allocate
from pipollux_sched.server.batcher import Batcher
from pipollux_sched.store import (
    ReceivedHints,
    StaleAttemptError,
    Store,
    StoreUnavailableError,
    UnknownJobError,
)

JOBS = [f"job-{number}" for number in range(20)]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path / "pipollux.db", create=True) as store:
        store.acquire_leader_lock()
        for name in JOBS:
            store.submit(name, {"name": name}, "token", 3)
            store.transition(name, Allocate(["node-a"], "it is free"))
        yield store


def hints_inbox(store: Store) -> Batcher[ReceivedHints, None]:
    return Batcher(lambda told: store.put_all_hints(told))


def put_all(store: Store, told: list[ReceivedHints]) -> list[Any]:
    """Put hints at the same moment; return what each came to: None, or what was raised."""

    async def put() -> list[Any]:
        inbox = hints_inbox(store)
        waiting = (inbox.put(each) for each in told)
        return await asyncio.gather(*waiting, return_exceptions=True)

    return asyncio.run(put())


def test_what_comes_together_is_one_transaction_and_all_of_it_is_kept(store: Store) -> None:
    before, first = store.version, store.last_event()
    told = [ReceivedHints(name, 1, {"numStages": n + 1}) for n, name in enumerate(JOBS)]
    assert put_all(store, told) == [None] * len(JOBS)
    assert store.version == before + 1
    assert store.hints() == {each.job: each.hints for each in told}
    events = store.events(first)
    assert [(event["job"], event["hints"]) for event in events] == [
        (each.job, each.hints) for each in told
    ]
    put_all(store, [ReceivedHints(JOBS[0], 1, {"numStages": 9}), ReceivedHints(JOBS[1], 1, {})])
    kept = store.hints()
    assert (kept[JOBS[0]], kept[JOBS[1]], kept[JOBS[2]]) == ({"numStages": 9}, {}, {"numStages": 3})


def test_of_several_of_one_job_the_last_is_kept_and_each_is_an_event(store: Store) -> None:
    told = [ReceivedHints("job-0", 1, {"numStages": n, "layers": [n]}) for n in (1, 2, 3)]
    assert put_all(store, told) == [None] * 3
    assert store.hints() == {"job-0": {"numStages": 3, "layers": [3]}}
    events = store.events(job="job-0", types=["hints"])
    assert [event["hints"] for event in events] == [{"numStages": n} for n in (1, 2, 3)]


def test_one_that_is_refused_holds_up_no_other(store: Store) -> None:
    told = [
        ReceivedHints("job-0", 1, {"numStages": 1}),
        ReceivedHints("job-1", 2, {"numStages": 2}),
        ReceivedHints("nobody", 1, {"numStages": 3}),
        ReceivedHints("job-3", 1, {"numStages": 4}),
    ]
    first, stale, unknown, last = put_all(store, told)
    assert (first, last) == (None, None)
    assert isinstance(stale, StaleAttemptError)
    assert "attempt 2 of job 'job-1' is not the current one (1)" in str(stale)
    assert isinstance(unknown, UnknownJobError)
    assert store.hints() == {"job-0": {"numStages": 1}, "job-3": {"numStages": 4}}


def test_a_store_that_fails_is_told_to_each_and_the_next_is_kept(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def put() -> list[Any]:
        inbox = hints_inbox(store)
        both = (inbox.put(ReceivedHints(name, 1, {"numStages": 1})) for name in JOBS[:2])
        with monkeypatch.context() as patch:
            patch.setattr(store, "put_all_hints", fail)
            outcomes: list[Any] = await asyncio.gather(*both, return_exceptions=True)
        await inbox.put(ReceivedHints(JOBS[2], 1, {"numStages": 1}))
        return outcomes

    def fail(told: list[ReceivedHints]) -> None:
        raise StoreUnavailableError("the disk is full")

    outcomes = asyncio.run(put())
    assert [str(error) for error in outcomes] == ["the disk is full"] * 2
    assert store.hints() == {JOBS[2]: {"numStages": 1}}


def test_nobody_waits_for_hints_of_a_request_that_was_given_up(store: Store) -> None:
    async def put() -> None:
        inbox = hints_inbox(store)
        told = [ReceivedHints(name, 1, {"numStages": 2}) for name in JOBS[:2]]
        given_up, other = (asyncio.ensure_future(inbox.put(each)) for each in told)
        await asyncio.sleep(0)  # lets both begin to wait
        given_up.cancel()
        await other

    asyncio.run(put())
    assert store.hints()[JOBS[1]] == {"numStages": 2}
