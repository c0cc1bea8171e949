"""Replicas of a real job that the scheduler starts and ends while the others train."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipollux_sched.lifecycle import ChangeStage, Phase
from pipollux_sched.planning.explain import explanation
from pipollux_sched.report.page import render_report
from pipollux_sched.scheduler import Scheduler
from pipollux_sched.spec.job import JobSpec
from pipollux_sched.views.explanation import NextChange
from pipollux_sched.views.jobs import job_details
from tests.hybrid.resize.over import over_both
from tests.programs import Forked
from tests.sched.processes import processes_of
from tests.sched.report.page import charts
from tests.sched.scripts import ELASTIC
from tests.sched.test_scheduler import Jobs, Wish, scheduler_on, types
from tests.waiting import until

A, B = "node-a", "node-b"


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "state"
    assert processes_of(tmp_path / "state") == []


def elastic_job(results: Path, **environment: str) -> JobSpec:
    return JobSpec(
        name="elastic",
        script=str(ELASTIC),
        max_replicas=4,
        requested_replicas=4,
        environment={"RESULTS": str(results), **environment},
    )


def trains_on(*nodes: str) -> Any:
    def told(jobs: Jobs) -> bool:
        state = jobs["elastic"].state
        same = sorted(state.running_on) == sorted(nodes)
        return same and state.reason == "Training" and state.membership.change is None

    return told


def can_change(jobs: Jobs) -> bool:
    return trains_on(A)(jobs) and jobs["elastic"].state.membership.why_not is None


def begin(scheduler: Scheduler, policy: Wish, job: JobSpec) -> None:
    """Start the job with one replica, and wait until it can be resized."""
    policy.allocations["elastic"] = [A]
    scheduler.submit(job)
    assert scheduler.wait(can_change, timeout=240)


def change_to(scheduler: Scheduler, policy: Wish, *nodes: str) -> None:
    policy.allocations["elastic"] = list(nodes)
    assert scheduler.wait(trains_on(*nodes), timeout=240), scheduler.jobs()["elastic"].state


def steps_of(results: Path) -> dict[int, list[dict[str, Any]]]:
    """What the replicas wrote of each step that at least one has finished."""
    steps = defaultdict(list)
    for path in results.glob("*.txt"):
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                found = json.loads(line)
                steps[found["step"]].append(found)
    return dict(sorted(steps.items()))


def check_steps(results: Path, *, killed: bool = False) -> dict[int, list[dict[str, Any]]]:
    """Fail unless replicas agree after every step, and take every sample once an epoch.

    One that was killed may have died between a step and its line of it.
    """
    steps = steps_of(results)
    last = max(steps)
    taken: dict[int, list[int]] = defaultdict(list)
    unwritten: list[int] = []
    for step, lines in steps.items():
        (replicas,) = {line["replicas"] for line in lines}
        ranks = {line["rank"] for line in lines}
        assert len(ranks) == len(lines), step
        assert ranks <= set(range(replicas)), step
        if step < last and len(ranks) < replicas:  # of the last some may not have written yet
            unwritten.append(lines[0]["epoch"])
        assert len({line["parameters"] for line in lines}) == 1, f"replicas differ at step {step}"
        for line in lines:
            taken[line["epoch"]] += line["numbers"]
    assert len(unwritten) <= killed, unwritten
    for epoch in range(max(taken)):
        missing = set(range(90)) - set(taken[epoch])
        assert len(taken[epoch]) == 90 - len(missing), f"epoch {epoch}: some are taken twice"
        assert not missing or epoch in unwritten, f"epoch {epoch}"
    return steps


def restarted(scheduler: Scheduler) -> list[int]:
    return [entry.attempt for entry in scheduler.store.attempts("elastic")]


@over_both
@pytest.mark.parametrize(
    "agent", ["light_agent", pytest.param("torchrun", marks=pytest.mark.exhaustive)]
)
def test_a_job_grows_and_shrinks_without_a_restart(
    directory: Path,
    tmp_path: Path,
    agent: str,
    request: pytest.FixtureRequest,
    over: dict[str, str],
) -> None:
    """Also by the replica that was the first; what was measured is what the policy is told."""
    if agent == "light_agent":
        request.getfixturevalue(agent)
    policy = Wish()
    scalars = tmp_path / "scalars"
    job = elastic_job(tmp_path, SCALARS=str(scalars), PAUSE="0.1", **over)
    with scheduler_on(directory, policy) as scheduler:
        begin(scheduler, policy, job)
        until(lambda: len(list(scalars.glob("*"))) == 1, "replica 0 writes scalars")
        change_to(scheduler, policy, A, B)
        change_to(scheduler, policy, B)
        until(lambda: len(list(scalars.glob("*"))) == 2, "replica 1 goes on with them")
        until(
            lambda: scheduler.store.last_points()["elastic"].num_replicas == 1, "its steps are told"
        )
        memberships = scheduler.store.attempts("elastic")
        state = scheduler.jobs()["elastic"].state
        pauses = scheduler.store.pause_costs()
        record = scheduler.store.job("elastic")
        shown, why = job_details(scheduler.store, record), explanation(scheduler.store, record)
        until(lambda: scheduler._controller._backend.free()[A] == 2, "its slots are free")
        scheduler.control.cancel("elastic")
        assert scheduler.wait(lambda jobs: jobs["elastic"].phase.ended, timeout=240)
        events = scheduler.store.events(job="elastic")
    assert [(entry.attempt, entry.membership) for entry in memberships] == [(1, 1), (1, 2), (1, 3)]
    assert [entry.nodes for entry in memberships] == [(A,), (A, B), (B,)]
    assert [entry.outcome for entry in memberships] == ["changed", "changed", None]
    assert all(entry.ended_at == after.created_at for entry, after in pairwise(memberships))
    assert (state.membership.replicas, state.membership.num_ids, state.failures) == ((1,), 2, 0)
    assert 0 < pauses["elastic"] < 60
    assert (shown.num_restarts, shown.num_resizes, shown.changing) == (0, 2, None)
    assert [(one.replica, one.node) for one in shown.replicas] == [(1, B)]
    assert why.next_change == NextChange(elastic=True, why_restart=None)
    assert why.last_decision is not None
    assert (why.last_decision["elastic"], why.last_decision["why_restart"]) == (True, None)
    told = [kind for kind in types(events, "elastic") if kind not in ("timeline", "hints", "noise")]
    assert told == [
        *("submitted", "allocated", "started", "first_step"),
        *("allocated", "changing", "waiting_to_join", "changed"),
        *("allocated", "changing", "changed"),
        *("stopping", "stopped", "cancelled"),
    ]
    allocated = [event["elastic"] for event in events if event["type"] == "allocated"]
    assert allocated == [False, True, True]
    drawn = charts(render_report(events))
    assert [len(piece["pieces"]) for piece in drawn["loss-0-by-time"]["panels"][0]["lines"]] == [1]
    assert drawn["loss-0-by-time"]["bands"] == []
    steps = check_steps(tmp_path)
    sizes = [len(lines) for lines in steps.values()]
    assert {1, 2} <= set(sizes)
    assert {lines[0]["nodes"] for lines in steps.values() if len(lines) == 2} == {2}


@over_both
@pytest.mark.exhaustive
def test_a_joining_replica_that_fails_hurts_nobody(
    directory: Path, tmp_path: Path, over: dict[str, str]
) -> None:
    """The third one in a row is followed by a restart, which needs no joining replicas."""
    policy = Wish()
    job = elastic_job(tmp_path, NEWCOMER="raise RuntimeError('no memory here')", **over)
    with scheduler_on(directory, policy) as scheduler:
        begin(scheduler, policy, job)
        policy.allocations["elastic"] = [A, B]
        assert scheduler.wait(
            lambda jobs: jobs["elastic"].state.attempt == 2 and trains_on(A, B)(jobs), timeout=240
        )
        events = scheduler.store.events(job="elastic")
        state = scheduler.jobs()["elastic"].state
        scheduler.control.cancel("elastic")
        assert scheduler.wait(lambda jobs: jobs["elastic"].phase.ended, timeout=240)
    abandoned = [event["why"] for event in events if event["type"] == "change_abandoned"]
    assert len(abandoned) == 3
    assert all("Joining replica " in why and " is gone" in why for why in abandoned)
    assert "RuntimeError: no memory here" in abandoned[0]
    moved = [event for event in events if event["type"] == "allocated"][-1]
    assert moved["elastic"] is False
    assert moved["why_restart"].startswith("3 failures; the last resize was abandoned: ")
    assert state.failures == 0
    check_steps(tmp_path)


def joining_replica_of(directory: Path, scheduler: Scheduler) -> list[psutil.Process]:
    """The processes of replicas that are to join."""
    found = []
    for replica, _ in scheduler.jobs()["elastic"].state.membership.joining:
        found += [
            process
            for process in processes_of(directory)
            if process.environ().get("PIPOLLUX_REPLICA") == str(replica)
        ]
    return found


@over_both
@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", [ChangeStage.STARTING, ChangeStage.FORMING])
def test_a_joining_replica_that_is_killed_is_replaced(
    directory: Path, tmp_path: Path, stage: ChangeStage, over: dict[str, str]
) -> None:
    policy = Wish()
    with scheduler_on(directory, policy) as scheduler:
        begin(scheduler, policy, elastic_job(tmp_path, PAUSE="0.1", **over))
        policy.allocations["elastic"] = [A, B]

        def is_there(jobs: Jobs) -> bool:
            change = jobs["elastic"].state.membership.change
            return change is not None and change.stage is stage

        assert scheduler.wait(is_there, timeout=240)
        until(lambda: joining_replica_of(directory, scheduler), "it is started")
        for process in joining_replica_of(directory, scheduler):
            process.kill()
        assert scheduler.wait(trains_on(A, B), timeout=240)
        assert set(restarted(scheduler)) == {1}
        scheduler.control.cancel("elastic")
        assert scheduler.wait(lambda jobs: jobs["elastic"].phase.ended, timeout=240)
    check_steps(tmp_path)


KILLED = """
import json, os, signal, sys
from pathlib import Path
from pipollux_sched.backend.local.attempt_folder import AttemptFolder
from pipollux_sched.store import StateDir
from tests.waiting import until
from tests.sched.test_resizes import (
    A, B, Wish, begin, elastic_job, joining_replica_of, scheduler_on
)

directory, results, stage = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
policy = Wish()
scheduler = scheduler_on(directory, policy)
scheduler.start()
begin(scheduler, policy, elastic_job(results, PAUSE="0.1", **json.loads(sys.argv[4])))
policy.allocations["elastic"] = [A, B]

def has_come(jobs):
    membership = jobs["elastic"].state.membership
    if stage == "changed":
        return membership.number == 2
    expected = "starting" if stage == "unknown" else stage
    there = membership.change is not None and membership.change.stage == expected
    return there and (expected != "starting" or joining_replica_of(directory, scheduler))

scheduler.wait(has_come, timeout=240)
if stage == "unknown":
    identity = AttemptFolder(StateDir(directory), "elastic", 1).status(1)
    until(identity.exists, "the supervisor of the joining replica has written it")
    identity.unlink()
os.kill(os.getpid(), signal.SIGKILL)
"""
"""Runs a scheduler that is killed when the change of a job has come so far."""


@over_both
@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", ["unknown", "starting", "forming", "changed"])
def test_the_scheduler_is_killed_in_a_change(
    directory: Path, tmp_path: Path, stage: str, over: dict[str, str]
) -> None:
    """The next one goes on with it: joining replicas are starting, forming groups, or training.

    If the supervisor of one is unknown, it is ended, and another replica is started in its place.
    """
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    with Forked(script, [str(directory), str(tmp_path), stage, json.dumps(over)]) as killed:
        assert killed.wait() == -9, killed.errors
    policy = Wish()
    policy.allocations["elastic"] = [A, B]
    with scheduler_on(directory, policy) as scheduler:
        assert scheduler.wait(trains_on(A, B), timeout=240)
        change_to(scheduler, policy, B)
        assert set(restarted(scheduler)) == {1}
        until(lambda: scheduler._controller._backend.free()[A] == 2, "its slots are free")
        scheduler.control.cancel("elastic")
        assert scheduler.wait(lambda jobs: jobs["elastic"].phase.ended, timeout=240)
    assert {len(lines) for lines in check_steps(tmp_path).values()} == {1, 2}


@over_both
@pytest.mark.exhaustive
def test_a_job_that_is_stopped_in_a_change_goes_on_from_its_checkpoint(
    directory: Path, tmp_path: Path, over: dict[str, str]
) -> None:
    """Joining replicas end with it; it resumes with the replicas that it was to have."""
    policy = Wish()
    with scheduler_on(directory, policy) as scheduler:
        begin(scheduler, policy, elastic_job(tmp_path, PAUSE="0.1", **over))
        policy.allocations["elastic"] = [A, B]
        assert scheduler.wait(
            lambda jobs: jobs["elastic"].state.membership.change is not None, timeout=240
        )
        scheduler.control.suspend("elastic")
        assert scheduler.wait(lambda jobs: jobs["elastic"].phase is Phase.SUSPENDED, timeout=240)
        assert processes_of(directory) == []
        assert scheduler._controller._backend.free() == {A: 2, B: 2}
        scheduler.control.resume("elastic")
        assert scheduler.wait(trains_on(A, B), timeout=240)
        scheduler.control.cancel("elastic")
        assert scheduler.wait(lambda jobs: jobs["elastic"].phase.ended, timeout=240)
    check_steps(tmp_path)


def replica_of(directory: Path, replica: int) -> list[psutil.Process]:
    """The processes of one replica."""
    return [
        process
        for process in processes_of(directory)
        if process.environ().get("PIPOLLUX_REPLICA") == str(replica)
    ]


def lose(directory: Path, replica: int) -> None:
    """Kill a replica with kill -9, its script first, as the others wait for that."""
    for process in reversed(replica_of(directory, replica)):
        process.kill()


def has_replaced_one(jobs: Jobs) -> bool:
    state = jobs["elastic"].state
    return trains_on(A, B)(jobs) and 2 in state.membership.replicas and state.attempt == 1


@over_both
@pytest.mark.exhaustive
@pytest.mark.parametrize("replica", [0, 1])
def test_a_replica_that_is_killed_costs_no_restart(
    directory: Path, tmp_path: Path, replica: int, over: dict[str, str]
) -> None:
    """The others go on in the same attempt, and its place is filled again."""
    policy = Wish()
    with scheduler_on(directory, policy) as scheduler:
        begin(scheduler, policy, elastic_job(tmp_path, **over))
        change_to(scheduler, policy, A, B)
        lose(directory, replica)
        assert scheduler.wait(has_replaced_one, timeout=240)
        now = scheduler.jobs()["elastic"].state
        scheduler.control.cancel("elastic")
        assert scheduler.wait(lambda jobs: jobs["elastic"].phase.ended, timeout=240)
        events = scheduler.store.events(job="elastic")
    assert (now.membership.replicas, now.failures) == ((1 - replica, 2), 0)
    (survived,) = (event for event in events if event["type"] == "survived")
    assert (survived["lost"], survived["nodes"]) == ([replica], [A if replica else B])
    check_steps(tmp_path, killed=True)


@over_both
@pytest.mark.exhaustive
def test_a_replica_that_is_frozen_is_ended_and_the_others_go_on(
    directory: Path, tmp_path: Path, over: dict[str, str]
) -> None:
    """It sends no heartbeats any more, so it is killed; what waits for it learns so at once."""
    policy = Wish()
    with scheduler_on(directory, policy, heartbeat_timeout=3.0) as scheduler:
        begin(scheduler, policy, elastic_job(tmp_path, **over))
        change_to(scheduler, policy, A, B)
        for process in replica_of(directory, 1):
            process.suspend()
        assert scheduler.wait(has_replaced_one, timeout=240)
        scheduler.control.cancel("elastic")
        assert scheduler.wait(lambda jobs: jobs["elastic"].phase.ended, timeout=240)
        events = scheduler.store.events(job="elastic")
    assert {"replicas_lost", "survived"} <= {event["type"] for event in events}
    check_steps(tmp_path, killed=True)


@over_both
@pytest.mark.exhaustive
def test_a_job_with_too_few_replicas_left_is_stopped(
    directory: Path, tmp_path: Path, over: dict[str, str]
) -> None:
    """It saves, and waits for room for as many as its user wants."""
    policy = Wish()
    job = elastic_job(tmp_path, **over).model_copy(update={"min_replicas": 2})
    with scheduler_on(directory, policy) as scheduler:
        policy.allocations["elastic"] = [A, B]
        scheduler.submit(job)

        def ready(jobs: Jobs) -> bool:
            return trains_on(A, B)(jobs) and jobs["elastic"].state.membership.why_not is None

        assert scheduler.wait(ready, timeout=240)
        lose(directory, 1)
        assert scheduler.wait(
            lambda jobs: jobs["elastic"].state.attempt == 2 and trains_on(A, B)(jobs), timeout=240
        )
        first = scheduler.store.attempts("elastic")[0]
        assert first.outcome == "changed"
        stopped = scheduler.store.attempts("elastic")[1]
        assert (stopped.attempt, stopped.outcome) == (1, "stopped")
        scheduler.control.cancel("elastic")
        assert scheduler.wait(lambda jobs: jobs["elastic"].phase.ended, timeout=240)
    check_steps(tmp_path, killed=True)


@over_both
@pytest.mark.exhaustive
def test_when_all_are_frozen_the_job_restarts_from_its_checkpoint(
    directory: Path, tmp_path: Path, over: dict[str, str]
) -> None:
    """Each could be done without, as long as there is another one."""
    policy = Wish()
    with scheduler_on(directory, policy, heartbeat_timeout=3.0) as scheduler:
        begin(scheduler, policy, elastic_job(tmp_path, **over))
        change_to(scheduler, policy, A, B)
        for replica in (0, 1):
            for process in replica_of(directory, replica):
                process.suspend()
        assert scheduler.wait(
            lambda jobs: jobs["elastic"].state.attempt == 2 and trains_on(A, B)(jobs), timeout=240
        )
        first = [entry for entry in scheduler.store.attempts("elastic") if entry.attempt == 1]
        assert [entry.outcome for entry in first] == ["changed", "failed"]
        scheduler.control.cancel("elastic")
        assert scheduler.wait(lambda jobs: jobs["elastic"].phase.ended, timeout=240)
