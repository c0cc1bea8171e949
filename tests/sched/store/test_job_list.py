"""Lists of jobs a page at a time, and how full nodes were, in each kind of database."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipollux_sched.lifecycle import (
    Allocate,
    Cancel,
    Exited,
    Outcome,
    Suspend,
    Switched,
    WaitingToJoin,
)
from pipollux_sched.store import Glance, Holder, JobOrder, JobQuery, ListedPhase, Store
from pipollux_sched.views.cluster import list_nodes
from pipollux_sched.views.jobs import IN_ORDER, list_jobs
from tests.sched.resize_events import GROWS, JOB, begin
from tests.sched.store.stores import Clock, point

REASON = 'conditions: {"reason": "Cancelled"}'
"""What a job may say of itself when it fails; it was not cancelled all the same."""


@pytest.fixture
def jobs(store: Store, clock: Clock) -> Store:
    """One in each of several phases, a second apart."""
    for name in ("small", "Wide", "stops", "waits", "broken", "gone", "done"):
        clock.now += 1
        store.submit(name, {"name": name, "num_stages": 2 if name == "Wide" else 1}, "token", 0)
    for name in ("small", "Wide", "stops", "broken", "done"):
        nodes = ["a", "b"] if name == "Wide" else ["a"]
        store.transition(name, Allocate(nodes, "free", num_stages=2 if name == "Wide" else 1))
    for name, loss in (("small", 2.0), ("Wide", 1.0), ("done", 3.0)):
        store.add_report(name, 1, [replace(point(2), loss=loss, goodput=10.0 * loss)])
    clock.now += 10
    store.transition("waits", Allocate((), "waits: there is no room"))
    store.transition("stops", Suspend())
    store.transition("broken", Exited(1, Outcome.FAILED, message=REASON))
    clock.now += 1
    store.transition("gone", Cancel())
    clock.now += 1
    store.transition("done", Exited(1, Outcome.COMPLETE, step=2, epoch=0))
    return store


def names(store: Store, now: float = 2000.0, **query: object) -> list[str]:
    page = store.overview.jobs(JobQuery(**query), now)  # type: ignore[arg-type]  # the tests' own
    return [job.name for job in page.jobs]


def test_a_page_of_whole_jobs(jobs: Store) -> None:
    """`GET /jobs` has the specification of each job, and reads no more jobs than the page has."""
    found, num_found = list_jobs(jobs)
    submitted = ["small", "Wide", "stops", "waits", "broken", "gone", "done"]
    assert ([job.name for job in found], num_found) == (submitted, 7)
    asked = JobQuery((ListedPhase.RUNNING,), "W", JobOrder.SUBMITTED)
    (wide,), num_found = list_jobs(jobs, asked)
    assert (wide.name, wide.num_attempts, num_found) == ("Wide", 1, 1)
    assert wide.progress is not None
    assert wide.progress.loss == 1.0
    page, num_found = list_jobs(jobs, replace(IN_ORDER, offset=2, limit=3))
    assert ([job.name for job in page], num_found) == (submitted[2:5], 7)
    assert [job.num_attempts for job in page] == [1, 0, 1]
    assert names(jobs, order=JobOrder.SUBMITTED, descending=True) == submitted[::-1]


def test_filtered_sorted_and_cut(jobs: Store) -> None:
    usual = ["small", "Wide", "stops", "waits", "done", "gone", "broken"]
    assert names(jobs) == usual
    assert names(jobs, offset=2, limit=3) == usual[2:5]
    assert jobs.overview.jobs(JobQuery(limit=0), 0.0).num_found == 7
    assert names(jobs, phases=[ListedPhase.CANCELLED]) == ["gone"]
    assert names(jobs, phases=[ListedPhase.FAILED, ListedPhase.STOPPING]) == ["stops", "broken"]
    assert names(jobs, name="W") == ["Wide", "waits"]
    assert names(jobs, name="%") == names(jobs, name="_") == []
    loss = ["Wide", "small", "done"]
    assert names(jobs, order=JobOrder.LOSS)[:3] == loss
    assert names(jobs, order=JobOrder.LOSS, descending=True)[:3] == loss[::-1], "unknown is last"
    goodput = names(jobs, order=JobOrder.GOODPUT, descending=True)[:2]
    assert goodput == ["small", "Wide"], "not of one that ended"
    assert names(jobs, order=JobOrder.SLOTS, descending=True)[0] == "Wide"
    assert names(jobs, order=JobOrder.AGE, descending=True)[0] == "small"
    for order in JobOrder:
        assert sorted(names(jobs, order=order)) == sorted(usual)


def test_the_line_of_a_job(jobs: Store) -> None:
    found = {job.name: job for job in jobs.overview.jobs(JobQuery(), 0.0).jobs}
    wide = found["Wide"]
    assert (wide.number, wide.nodes, wide.num_stages) == (2, ("a", "b"), 2)
    assert wide.point is not None
    assert (wide.point.loss, wide.num_restarts) == (1.0, 0)
    assert (found["waits"].message, found["waits"].point) == ("waits: there is no room", None)
    assert found["broken"].phase is ListedPhase.FAILED
    assert jobs.overview.job_number("gone") == 6
    assert jobs.overview.job_number("never") == 0


def test_at_a_glance(jobs: Store) -> None:
    phases = {
        ListedPhase.RUNNING: 2,
        ListedPhase.STOPPING: 1,
        ListedPhase.QUEUED: 1,
        ListedPhase.FAILED: 1,
        ListedPhase.CANCELLED: 1,
        ListedPhase.COMPLETE: 1,
    }
    holders = (
        *(Holder("small", 1, ("a",), 1), Holder("Wide", 2, ("a", "b"), 2)),
        Holder("stops", 3, ("a",), 1),
    )
    assert jobs.overview.glance() == Glance(phases, holders, 30.0, 1007.0)


def test_a_store_without_jobs(store: Store) -> None:
    assert store.overview.glance() == Glance({}, (), None, None)
    assert store.overview.jobs(JobQuery(), 0.0).jobs == ()
    assert store.overview.node_usage(0.0, 10.0, 3) == {}


def test_how_full_nodes_were(jobs: Store, clock: Clock) -> None:
    """Started at 1007: small, Wide, stops go on; broken until 1017, done until 1019."""
    assert clock.now == 1019.0
    found = jobs.overview.node_usage(1000.0, 1024.0, 6)
    # Node a has 1 + 2 + 1 + 1 + 1 slots held from 1007 on, and node b 2 of Wide.
    assert found["b"] == [0.0, 0.5, 2.0, 2.0, 2.0, 2.0]
    assert found["a"] == [0.0, 1.5, 6.0, 6.0, 5.0, 4.0]
    whole = jobs.overview.node_usage(1000.0, 1024.0, 1)["a"][0]
    assert whole == pytest.approx((4 * 17 + 10 + 12) / 24, abs=0.01)
    assert sum(found["a"]) / 6 == pytest.approx(whole, abs=0.01)
    assert jobs.overview.node_usage(1017.5, 1018.5, 2)["a"] == [5.0, 5.0]
    on_b = [record.job for record, _ in jobs.overview.attempts_since(0.0, 10, ["b"])]
    assert on_b == ["Wide"]


def test_joining_hold_their_slots_before_they_train(store: Store, clock: Clock) -> None:
    at = begin(store, clock)
    at(1010.0, Allocate(["node-a", "node-b"], GROWS))
    assert [(node.name, node.jobs) for node in list_nodes(store)] == [
        *(("node-a", {JOB: 1}), ("node-b", {JOB: 1}))
    ]
    at(1020.0, WaitingToJoin(1, (1,)), Switched(1, 2, 10, 0.1))
    assert [node.free for node in list_nodes(store)] == [1, 1]
