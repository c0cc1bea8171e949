"""A real job whose stages have processes of their own, under the scheduler."""

from __future__ import annotations

import json
import signal
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipollux_sched.spec.job import JobSpec
from tests.programs import Forked
from tests.sched.processes import processes_of
from tests.sched.scripts import STAGES
from tests.sched.test_scheduler import Jobs, Wish, scheduler_on
from tests.waiting import until

A, B = "node-a", "node-b"
SIZE = 90


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "state"
    assert processes_of(tmp_path / "state") == []


def trains_on(*nodes: str) -> Any:
    def told(jobs: Jobs) -> bool:
        state = jobs["stages"].state
        same = sorted(state.running_on) == sorted(nodes)
        return same and state.reason == "Training" and state.membership.change is None

    return told


def scripts_of(directory: Path, stage: int) -> list[psutil.Process]:
    """The processes that run a stage, of all replicas."""
    found = []
    for process in processes_of(directory):
        with suppress(psutil.Error):  # it has ended meanwhile
            if process.environ().get("LOCAL_RANK") == str(stage):
                found.append(process)
    return found


def check_steps(results: Path, *, killed: bool = False) -> set[tuple[int, int]]:
    """Fail unless every sample of an epoch was taken once, and all processes had the same loss.

    One that was killed may have died between a step and its line of it.

    Returns:
        The pairs of processes and stages that the job ran with.
    """
    steps: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for path in results.glob("*.txt"):
        for text in path.read_text().splitlines(keepends=True):
            if text.endswith("\n"):
                line = json.loads(text)
                steps[line["step"]].append(line)
    taken: dict[int, list[int]] = defaultdict(list)
    unwritten = []
    for step, lines in sorted(steps.items()):
        if step < max(steps) and len(lines) < lines[0]["processes"]:
            unwritten.append(lines[0]["epoch"])
        for replica in {line["replica"] for line in lines}:
            same = [line for line in lines if line["replica"] == replica]
            assert len({(line["loss"], tuple(line["numbers"])) for line in same}) == 1, step
            taken[same[0]["epoch"]] += same[0]["numbers"]
    assert len(unwritten) <= killed, unwritten
    for epoch in range(max(taken)):
        assert len(taken[epoch]) == len(set(taken[epoch])), f"epoch {epoch}: some are taken twice"
        assert len(taken[epoch]) == SIZE or epoch in unwritten, f"epoch {epoch}"
    return {(line["processes"], line["stages"]) for lines in steps.values() for line in lines}


def runs(directory: Path, replicas: int) -> bool:
    return [len(scripts_of(directory, stage)) for stage in (0, 1)] == [replicas] * 2


def job(results: Path, **fields: Any) -> JobSpec:
    return JobSpec(
        name="stages",
        script=str(STAGES),
        num_stages=2,
        max_replicas=2,
        requested_replicas=2,
        environment={"RESULTS": str(results)},
        **fields,
    )


@pytest.mark.exhaustive
def test_a_replica_of_two_processes_starts_and_stops(directory: Path, tmp_path: Path) -> None:
    """What it has told is one job's."""
    policy = Wish()
    with scheduler_on(directory, policy) as scheduler:
        policy.allocations["stages"] = [A]
        scheduler.submit(job(tmp_path, process_per_stage=True))
        assert scheduler.wait(trains_on(A), timeout=240)
        assert [len(scripts_of(directory, stage)) for stage in (0, 1)] == [1, 1]
        until(lambda: "stages" in scheduler.store.last_points(), "its steps are told")
        scheduler.control.cancel("stages")
        assert scheduler.wait(lambda jobs: jobs["stages"].phase.ended, timeout=240)
        state = scheduler.jobs()["stages"].state
    assert (state.attempt, state.failures) == (1, 0)
    assert check_steps(tmp_path) == {(2, 2)}


def can_change(jobs: Jobs) -> bool:
    return jobs["stages"].state.membership.why_not is None


@pytest.mark.exhaustive
def test_replicas_of_two_processes_join_and_leave_without_a_restart(
    directory: Path, tmp_path: Path
) -> None:
    """Another one joins, and the one that began leaves: one attempt loses no sample."""
    policy = Wish()
    with scheduler_on(directory, policy) as scheduler:
        policy.allocations["stages"] = [A]
        scheduler.submit(job(tmp_path, process_per_stage=True))
        assert scheduler.wait(trains_on(A), timeout=240)
        assert scheduler.wait(can_change, timeout=240)
        for nodes in ([A, B], [B], [A, B]):
            policy.allocations["stages"] = nodes
            assert scheduler.wait(trains_on(*nodes), timeout=240)
            until(partial(runs, directory, len(nodes)), "those that left have ended")
        scheduler.control.cancel("stages")
        assert scheduler.wait(lambda jobs: jobs["stages"].phase.ended, timeout=240)
        state = scheduler.jobs()["stages"].state
    assert (state.attempt, state.failures) == (1, 0)
    assert check_steps(tmp_path) == {(2, 2), (4, 2)}


@pytest.mark.exhaustive
def test_the_process_of_a_stage_is_killed(directory: Path, tmp_path: Path) -> None:
    """Its replica ends with it, and the job goes on from its checkpoint."""
    policy = Wish()
    with scheduler_on(directory, policy, checkpoint_interval=0.5) as scheduler:
        policy.allocations["stages"] = [A]
        scheduler.submit(job(tmp_path, process_per_stage=True))
        assert scheduler.wait(trains_on(A), timeout=240)
        until(lambda: list(directory.glob("**/model.pt.stage1")), "a checkpoint is there")
        (second,) = scripts_of(directory, 1)
        second.kill()
        assert scheduler.wait(
            lambda jobs: jobs["stages"].state.attempt == 2 and trains_on(A)(jobs), timeout=240
        )
        scheduler.control.cancel("stages")
        assert scheduler.wait(lambda jobs: jobs["stages"].phase.ended, timeout=240)
        state = scheduler.jobs()["stages"].state
    assert state.failures == 1


def is_of(process: psutil.Process, replica: int) -> bool:
    with suppress(psutil.Error):  # it has ended meanwhile
        return process.environ().get("PIPOLLUX_REPLICA") == str(replica)
    return False


def has_replaced_one(jobs: Jobs) -> bool:
    return trains_on(A, B)(jobs) and 2 in jobs["stages"].state.membership.replicas


def joining_of(directory: Path, stage: int) -> list[psutil.Process]:
    found = []
    for process in scripts_of(directory, stage):
        with suppress(psutil.Error):  # it has ended meanwhile
            if process.environ().get("PIPOLLUX_JOINS") == "1":
                found.append(process)
    return found


@pytest.mark.exhaustive
def test_a_process_of_a_joining_replica_is_killed(directory: Path, tmp_path: Path) -> None:
    """Another joining replica takes the place."""
    policy = Wish()
    with scheduler_on(directory, policy, checkpoint_interval=0.5) as scheduler:
        policy.allocations["stages"] = [A]
        scheduler.submit(job(tmp_path, process_per_stage=True))
        assert scheduler.wait(trains_on(A), timeout=240)
        assert scheduler.wait(can_change, timeout=240)
        policy.allocations["stages"] = [A, B]
        until(lambda: joining_of(directory, 1), "it is started")
        for process in joining_of(directory, 1):
            process.kill()
        assert scheduler.wait(trains_on(A, B), timeout=240)
        scheduler.control.cancel("stages")
        assert scheduler.wait(lambda jobs: jobs["stages"].phase.ended, timeout=240)
        state = scheduler.jobs()["stages"].state
    assert (state.attempt, state.failures) == (1, 0)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("replica", "stage", "how"),
    [
        *((1, 1, signal.SIGKILL), (0, 0, signal.SIGKILL), (0, 1, signal.SIGKILL)),
        # The scheduler hears nothing of it: its own replica's first process does.
        (1, 1, signal.SIGSTOP),
    ],
)
def test_a_process_of_one_of_two_replicas_is_killed_or_frozen(
    directory: Path, tmp_path: Path, replica: int, stage: int, how: signal.Signals
) -> None:
    """The other one goes on in the same attempt, and the place is filled again."""
    policy = Wish()
    patience = {"heartbeat_timeout": 6.0} if how is signal.SIGSTOP else {}
    with scheduler_on(directory, policy, **patience) as scheduler:
        policy.allocations["stages"] = [A, B]
        scheduler.submit(job(tmp_path, process_per_stage=True))
        assert scheduler.wait(trains_on(A, B), timeout=240)
        assert scheduler.wait(can_change, timeout=240)
        # It begins on one replica if it arrives between two rounds, and may then be restarted.
        begun = scheduler.jobs()["stages"].state.attempt
        (killed,) = (x for x in scripts_of(directory, stage) if is_of(x, replica))
        killed.send_signal(how)
        assert scheduler.wait(has_replaced_one, timeout=240)
        now = scheduler.jobs()["stages"].state
        until(partial(runs, directory, 2), "the rest of the replica has ended")
        scheduler.control.cancel("stages")
        assert scheduler.wait(lambda jobs: jobs["stages"].phase.ended, timeout=240)
        events = scheduler.store.events(job="stages")
    assert (now.attempt, now.failures, now.membership.replicas) == (begun, 0, (1 - replica, 2))
    (survived,) = (event for event in events if event["type"] == "survived")
    assert survived["lost"] == [replica]
    assert check_steps(tmp_path, killed=True) == {(2, 2), (4, 2)}


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.sched.test_stage_processes import A, Wish, job, scheduler_on, trains_on

directory, results = Path(sys.argv[1]), Path(sys.argv[2])
policy = Wish()
scheduler = scheduler_on(directory, policy)
scheduler.start()
policy.allocations["stages"] = [A]
scheduler.submit(job(results, process_per_stage=True))
scheduler.wait(trains_on(A), timeout=240)
os.kill(os.getpid(), signal.SIGKILL)
"""
"""Runs a scheduler that is killed when the job trains."""


@pytest.mark.exhaustive
def test_another_scheduler_takes_it_over(directory: Path, tmp_path: Path) -> None:
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    with Forked(script, [str(directory), str(tmp_path)]) as killed:
        assert killed.wait() == -9, killed.errors
    before = [process.pid for stage in (0, 1) for process in scripts_of(directory, stage)]
    policy = Wish()
    policy.allocations["stages"] = [A]
    with scheduler_on(directory, policy) as scheduler:
        assert scheduler.wait(trains_on(A), timeout=240)
        after = [process.pid for stage in (0, 1) for process in scripts_of(directory, stage)]
        assert after == before
        scheduler.control.cancel("stages")
        assert scheduler.wait(lambda jobs: jobs["stages"].phase.ended, timeout=240)
    assert check_steps(tmp_path) == {(2, 2)}
