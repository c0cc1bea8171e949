"""Jobs that wait for others start when those have ended as they need, or never."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from pipollux_sched.allocator.snapshot import SnapshotReader
from pipollux_sched.lifecycle import (
    Allocate,
    Cancel,
    Exited,
    Expire,
    Outcome,
    Phase,
    Recover,
    Resume,
    Suspend,
)
from pipollux_sched.planning.explain import explanation
from pipollux_sched.spec.job import JobSpec
from pipollux_sched.store import DependencyError, JobRecord, Store, Submission
from tests.extent import turns
from tests.sched.store.stores import DATABASES, Clock, serve_nodes

ENDS = {
    "succeeded": Outcome.COMPLETE,
    "failed": Outcome.FAILED,
}


def submission(name: str, after: Sequence[object] = ()) -> Submission:
    spec = JobSpec.model_validate({"name": name, "script": "a.py", "after": after})
    return Submission(name, spec.model_dump(mode="json"), "token", max_restarts=0)


def submit(store: Store, name: str, *after: object) -> JobRecord:
    return store.submit_all([submission(name, after)])[0].job


def end(store: Store, name: str, how: str = "succeeded") -> None:
    if how == "cancelled":
        store.transition(name, Cancel())
        return
    attempt = store.transition(name, Allocate(["a"], "free")).job.state.attempt
    store.transition(name, Exited(attempt, ENDS[how], message="it broke"))


def candidates(store: Store) -> list[str]:
    snapshot = SnapshotReader(store, restart_seconds=1.0).read()
    return [job.name for job in snapshot.candidates]


STARTS = {
    ("succeeded", "succeeded"): True,
    ("succeeded", "failed"): False,
    ("succeeded", "cancelled"): False,
    ("failed", "succeeded"): False,
    ("failed", "failed"): True,
    ("failed", "cancelled"): True,
    ("ended", "succeeded"): True,
    ("ended", "failed"): True,
    ("ended", "cancelled"): True,
}


@pytest.mark.parametrize(("place", "ends"), turns(DATABASES, list(STARTS)), indirect=["place"])
def test_a_job_starts_when_the_other_has_ended_as_it_needs(
    store: Store, clock: Clock, ends: tuple[str, str]
) -> None:
    (when, how), starts = ends, STARTS[ends]
    serve_nodes(store, a=4)
    submit(store, "first")
    held = submit(store, "second", {"job": "first", "when": when})
    assert (held.phase, held.state.reason) == (Phase.QUEUED, "WaitsForJobs")
    verb = {"succeeded": "complete", "failed": "fail", "ended": "end"}[when]
    assert held.state.message == f"The job waits for job first to {verb}."
    assert explanation(store, held).waits_for == f"job first to {verb}"
    assert candidates(store) == ["first"]
    assert store.transition("second", Allocate(["a"], "free")).job == held  # a late decision
    clock.now += 50
    end(store, "first", how)
    job = store.job("second")
    if starts:
        assert (job.phase, job.state.reason) == (Phase.CREATED, "Ready")
        assert job.ready_at == job.submitted_at + 50
        assert candidates(store) == ["second"]
        assert store.events(job="second")[-1]["type"] == "ready"
        return
    assert (job.phase, job.state.reason, job.ended_at) == (
        *(Phase.FAILED, "DependencyNotMet"),
        clock.now,
    )
    told = {"succeeded": "is complete", "failed": "failed", "cancelled": "was cancelled"}[how]
    why = f"The job can never start: it waits for job first to {verb}, which {told}."
    assert job.state.message == store.events(job="second")[-1]["why"] == why
    assert candidates(store) == []


def test_the_last_of_several_lets_a_job_start(store: Store, place: Path | str) -> None:
    for name in "abcd":
        submit(store, name)
    job = submit(store, "last", *"abcd")
    assert job.state.message == (
        "The job waits for job a to complete and for job b to complete and for job c to complete "
        "and for 1 more."
    )
    end(store, "b")
    with Store(place) as later:  # what is left to wait for is in the store
        assert [entry.job for entry in later.job("last").state.waits_for] == ["a", "c", "d"]
    store.transition("last", Recover())  # by another scheduler
    for name in "acd":
        assert store.job("last").state.reason == "WaitsForJobs"
        end(store, name)
    assert store.job("last").phase is Phase.CREATED


def test_a_job_that_can_never_start_fails_those_that_wait_for_it(store: Store) -> None:
    chain = [submission(name, [before]) for before, name in pairwise("abcd")]
    cleanup = submission("cleanup", [{"job": "d", "when": "failed"}])
    store.submit_all([submission("a"), *chain, cleanup])
    end(store, "a", "failed")
    jobs = {job.name: job for job in store.jobs()}
    assert [jobs[name].phase for name in "bcd"] == [Phase.FAILED] * 3
    assert jobs["d"].state.message == (
        "The job can never start: it waits for job c to complete, which can never start itself."
    )
    assert jobs["cleanup"].phase is Phase.CREATED
    # Together they are submitted again, and wait again.
    store.submit_all([submission("b", ["a"]), submission("a")])
    assert store.job("b").state.reason == "WaitsForJobs"
    end(store, "a")
    assert store.job("b").phase is Phase.CREATED


def test_what_cannot_be_waited_for_is_refused(store: Store) -> None:
    with pytest.raises(DependencyError, match="job 'b' waits for 'a', and there is no job"):
        submit(store, "b", "a")
    submit(store, "a")
    end(store, "a", "failed")
    with pytest.raises(DependencyError, match=r"waits for job a to complete, which has ended \(Fa"):
        store.submit_all([submission("c"), submission("b", ["a"])])
    assert [job.name for job in store.jobs()] == ["a"]
    assert submit(store, "b", {"job": "a", "when": "ended"}).phase is Phase.CREATED
    store.transition("b", Cancel())
    with pytest.raises(DependencyError, match=r"which has ended \(Cancelled\); run that one again"):
        submit(store, "c", "b")


def test_a_user_may_suspend_cancel_and_rerun_a_job_that_waits(store: Store, clock: Clock) -> None:
    submit(store, "a")
    for name in ("paused", "resumed", "cancelled", "late", "again"):
        submit(store, name, "a")
    for name in ("paused", "resumed"):
        store.transition(name, Suspend())
    resumed = store.transition("resumed", Resume()).job
    assert (resumed.phase, resumed.state.reason) == (Phase.QUEUED, "WaitsForJobs")
    store.transition("cancelled", Cancel())
    store.transition("late", Expire("too late"))
    end(store, "a", "cancelled")
    assert store.job("cancelled").state.reason == "Cancelled"
    assert store.job("late").state.reason == "DeadlineExceeded"
    assert {store.job(n).state.reason for n in ("paused", "resumed")} == {"DependencyNotMet"}

    with pytest.raises(DependencyError, match="job 'again' can never start"):
        store.rerun("again", from_scratch=False)
    store.rerun("a", from_scratch=False)
    assert store.rerun("again", from_scratch=False).job.state.reason == "WaitsForJobs"
    store.transition("again", Suspend())
    end(store, "a")
    paused = store.job("again")
    assert (paused.phase, paused.state.waits_for) == (Phase.SUSPENDED, ())
    assert store.transition("again", Resume()).job.state.reason == "Resumed"
    # A job that has run does not wait again, even if the other is gone.
    end(store, "again", "failed")
    store.deletions.begin("a")
    assert store.rerun("again", from_scratch=False).job.phase is Phase.CREATED
