"""Jobs whose replicas push and pull, with servers that a scheduler starts beside them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from pipollux_perfmodel import SchedHints
from pipollux_sched.scheduler import Scheduler
from pipollux_sched.spec.job import JobSpec
from tests.sched.processes import processes_of
from tests.sched.scripts import ELASTIC, PUSH_PULL
from tests.sched.test_scheduler import Jobs, Wish, scheduler_on
from tests.waiting import until

A, B = "node-a", "node-b"


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "state"
    assert processes_of(tmp_path / "state") == []


def job(
    results: Path, script: Path = PUSH_PULL, servers: int = 1, min_replicas: int = 1
) -> JobSpec:
    results.mkdir(exist_ok=True)
    return JobSpec(
        name="pp",
        script=str(script),
        servers=servers,
        min_replicas=min_replicas,
        max_replicas=4,
        requested_replicas=4,
        max_restarts=0,
        environment={"RESULTS": str(results)},
    )


def change_to(scheduler: Scheduler, policy: Wish, *nodes: str) -> None:
    def trains(jobs: Jobs) -> bool:
        state = jobs["pp"].state
        there = sorted(state.running_on) == sorted(nodes)
        ready = state.membership.change is None and state.membership.why_not is None
        return there and ready and state.reason == "Training"

    policy.allocations["pp"] = list(nodes)
    assert scheduler.wait(trains, timeout=240), scheduler.jobs()["pp"].state


def find(directory: Path, word: str, replica: int) -> list[psutil.Process]:
    """Return the processes of a replica with this word in their command line."""
    return [
        process
        for process in processes_of(directory)
        if process.environ().get("PIPOLLUX_REPLICA") == str(replica)
        and any(word in part for part in process.cmdline())
    ]


def epochs_of(results: Path) -> dict[int, Counter[int]]:
    """Return how often each sample was taken, by epoch."""
    taken: dict[int, Counter[int]] = {}
    for path in results.glob("*.txt"):
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                found = json.loads(line)
                taken.setdefault(found["epoch"], Counter()).update(found["numbers"])
    return taken


def kinds_of(scheduler: Scheduler) -> list[str]:
    return [event["type"] for event in scheduler.store.events(job="pp")]


def trained_epochs(results: Path) -> int:
    return max(epochs_of(results), default=0)


@pytest.mark.exhaustive
def test_a_replica_joins_and_leaves(directory: Path, tmp_path: Path) -> None:
    """With a server beside the first; what is measured is of the job, not of a replica."""
    policy, results = Wish(), tmp_path / "results"
    with scheduler_on(directory, policy) as scheduler:
        scheduler.submit(job(results, servers=2))
        change_to(scheduler, policy, A)
        assert len(find(directory, "pipollux.server", 0)) == 1  # one beside each first replica
        change_to(scheduler, policy, A, B)
        joined = trained_epochs(results)
        until(lambda: trained_epochs(results) > joined + 2, "two replicas train")
        until(lambda: scheduler.store.last_points()["pp"].batch_size == 8, "it is told")
        change_to(scheduler, policy, A)
        until(lambda: not find(directory, "script_main.py", 1), "a replica leaves")
        left = trained_epochs(results)
        until(lambda: trained_epochs(results) > left + 2, "one replica trains")
        hints = until(lambda: scheduler.store.hints().get("pp"), "hints are sent")
        kinds, attempt = kinds_of(scheduler), scheduler.jobs()["pp"].state.attempt
        scheduler.control.cancel("pp")
        assert scheduler.wait(lambda jobs: jobs["pp"].phase.ended, timeout=240)
    assert (attempt, kinds.count("changed"), kinds.count("survived")) == (1, 2, 0)
    found = SchedHints.from_json_object(hints)
    assert found.perf_params is not None
    assert found.perf_params.sync_every == 3
    assert found.local_bsz_bounds == (4, 4)
    taken = epochs_of(results)
    assert taken[joined + 1] == taken[left + 1] == Counter(range(120))


@pytest.mark.exhaustive
def test_replicas_come_and_go_and_one_is_killed(directory: Path, tmp_path: Path) -> None:
    policy, results = Wish(), tmp_path / "results"
    with scheduler_on(directory, policy) as scheduler:
        scheduler.submit(job(results, servers=2))
        change_to(scheduler, policy, A)
        change_to(scheduler, policy, A, B, B)
        before = trained_epochs(results)
        until(lambda: trained_epochs(results) > before + 2, "three replicas train")
        find(directory, "script_main.py", 2)[0].kill()
        until(lambda: "survived" in kinds_of(scheduler), "the others go on")
        change_to(scheduler, policy, A, B)
        lost = trained_epochs(results)
        until(lambda: trained_epochs(results) > lost + 2, "two replicas train")
        change_to(scheduler, policy, A)
        until(lambda: not find(directory, "script_main.py", 1), "a replica leaves")
        left = trained_epochs(results)
        until(lambda: trained_epochs(results) > left + 2, "one replica trains")
        kinds = kinds_of(scheduler)
        attempt = scheduler.jobs()["pp"].state.attempt
        scheduler.control.cancel("pp")
        assert scheduler.wait(lambda jobs: jobs["pp"].phase.ended, timeout=240)
    assert attempt == 1
    assert kinds.count("survived") == 1
    assert kinds.count("changed") >= 2
    taken = epochs_of(results)
    everything = set(range(120))
    missing = {epoch: everything - set(taken[epoch]) for epoch in range(max(taken))}
    assert not any(missing.values()), missing
    # Epochs of three replicas that nobody joined or left: each sample was taken once.
    assert taken[before + 1] == taken[left + 1] == Counter(everything)


@pytest.mark.exhaustive
def test_a_server_that_is_killed_is_started_again_and_moves_with_its_replica(
    directory: Path, tmp_path: Path
) -> None:
    policy, results = Wish(), tmp_path / "results"
    with scheduler_on(directory, policy) as scheduler:
        policy.allocations["pp"] = [A, B]
        scheduler.submit(job(results, servers=2, min_replicas=2))
        change_to(scheduler, policy, A, B)
        (server,) = find(directory, "pipollux.server", 1)
        server.kill()
        until(lambda: find(directory, "pipollux.server", 1), "it is started again")
        killed = trained_epochs(results)
        until(lambda: trained_epochs(results) > killed + 2, "training goes on")
        assert scheduler.jobs()["pp"].state.attempt == 1
        change_to(scheduler, policy, B, B)
        events = scheduler.store.events(job="pp")
        moved = trained_epochs(results)
        until(lambda: trained_epochs(results) > moved + 1, "training goes on")
        scheduler.control.cancel("pp")
        assert scheduler.wait(lambda jobs: jobs["pp"].phase.ended, timeout=240)
    why = [event["why_restart"] for event in events if event["type"] == "allocated"]
    assert why[-1] == "a server runs beside a replica that would leave"
    taken = epochs_of(results)
    assert all(set(taken[epoch]) == set(range(120)) for epoch in range(max(taken)))
    assert moved > 0


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("script", "servers", "said"),
    [
        (ELASTIC, 1, "give it synchronization=pipollux.PushPull(…), or remove the variable, or"),
        (PUSH_PULL, 0, "under a scheduler, add servers: 1 to the job file"),
    ],
)
def test_a_script_and_its_job_file_have_to_agree(
    directory: Path, tmp_path: Path, script: Path, servers: int, said: str
) -> None:
    with scheduler_on(directory) as scheduler:
        scheduler.submit(job(tmp_path / "results", script, servers))
        assert scheduler.wait(lambda jobs: jobs["pp"].phase.ended, timeout=240)
        assert said in scheduler.jobs()["pp"].state.message


def test_servers_need_a_script() -> None:
    with pytest.raises(ValueError, match="1 needs a script, as an image"):
        JobSpec(name="pp", image="registry.example/train:2.1", servers=1)
