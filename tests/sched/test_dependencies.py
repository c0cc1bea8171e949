"""Jobs that wait for other jobs, with real processes, and across schedulers."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipollux_sched.controller.admission import SpecError
from pipollux_sched.lifecycle import Phase
from pipollux_sched.store import DependencyError
from tests.sched.test_scheduler import directory, scheduler_on, toy, training

__all__ = ["directory"]


@pytest.mark.usefixtures("light_agent")
@pytest.mark.exhaustive
def test_jobs_run_one_after_the_other_across_schedulers(directory: Path) -> None:
    with scheduler_on(directory) as scheduler:
        scheduler.control.submit_all(
            [
                toy("clean", "--steps", "2", after=[{"job": "train", "when": "ended"}]),
                toy("train", "--fail-at", "2", max_restarts=0, after=["prepare"]),
                toy("publish", after=["train"]),
                toy("prepare", "--steps", "40"),
            ]
        )
        assert scheduler.wait(training("prepare"), 240)
        for circle in ([toy("x", after=["y"]), toy("y", after=["x"])], [toy("x", after=["x"])]):
            with pytest.raises(SpecError, match="job 'x': after: jobs that wait for each other"):
                scheduler.control.submit_all(circle)
        with pytest.raises(DependencyError, match="no job of this name"):
            scheduler.submit(toy("x", after=["nobody"]))
        jobs = scheduler.jobs()
        assert list(jobs) == ["clean", "train", "publish", "prepare"]
        assert [jobs[name].state.attempt for name in jobs] == [0, 0, 0, 1]
    with scheduler_on(directory) as again:
        assert again.jobs()["train"].state.message == "The job waits for job prepare to complete."
        assert again.wait(lambda jobs: all(job.phase.ended for job in jobs.values()), 240)
        events = [(event["job"], event["type"]) for event in again.store.events()]
        jobs = again.jobs()
    assert {name: job.phase for name, job in jobs.items()} == {
        "prepare": Phase.COMPLETE,
        "train": Phase.FAILED,
        "publish": Phase.FAILED,
        "clean": Phase.COMPLETE,
    }
    assert jobs["publish"].state.reason == "DependencyNotMet"
    assert jobs["publish"].state.attempt == 0
    order = [
        *(("prepare", "complete"), ("train", "ready"), ("train", "first_step")),
        *(("train", "failed"), ("publish", "failed")),
    ]
    assert [event for event in events if event in order] == order
    assert events.index(("clean", "ready")) > events.index(("train", "failed"))
    assert events.index(("clean", "complete")) > events.index(("clean", "ready"))
