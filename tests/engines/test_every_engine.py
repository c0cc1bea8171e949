"""What every engine does, below `ReplicaGroupManager` and by itself: one suite for all of them."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from pipollux_sched.backend import ReplicaKey
from pipollux_sched.backend.base import Launch, Signal
from pipollux_sched.backend.replica_group import ReplicaGroup
from pipollux_sched.lifecycle import Exited, Membership, Outcome
from pipollux_sched.spec.job import JobSpec, SpecError
from tests.extent import first
from tests.sched.backends import assignments, first_membership
from tests.waiting import until

from .case import NODES, SLOTS, EngineCase, Scheduler

ENGINES = {
    "light local": (),
    "local": (),
    "memory": (),
    "trainjobs": (),
    "light ray": (),
    "ray": pytest.mark.exhaustive,
    "slurm": pytest.mark.exhaustive,
    "kubelets": pytest.mark.kubernetes,
}
"""The cases, and where they run."""
SUITE = [name for name in ENGINES if not name.startswith("light ")]
"""Those that each test runs on."""


def on(*names: str, rarely: tuple[str, ...] = ()) -> Any:
    """Run a test on the engines of these names; on some of them, left to `--exhaustive`."""
    marks = ENGINES | dict.fromkeys(rarely, pytest.mark.exhaustive)
    cases = [pytest.param(name, marks=marks[name]) for name in names]
    return pytest.mark.parametrize("case", cases, indirect=True)


on_all = on(*SUITE)
CLUSTERS = [name for name in SUITE if name != "local"]
"""Those that end what nobody has asked them to end, and have other users."""


@on_all
def test_nodes_and_refusals(case: EngineCase) -> None:
    """The slots of the nodes; and one sentence for each job that can never run."""
    nodes = until(case.engine.nodes, "there are nodes")
    assert {name: node.slots for name, node in nodes.items()} == dict.fromkeys(NODES, SLOTS)
    assert all(node.ready and not node.draining for node in nodes.values())
    good = {"name": "toy", "script": "train.py", "image": case.image}
    case.engine.check(JobSpec(**good))
    for fields, words in case.refused:
        with pytest.raises(SpecError, match=words) as refused:
            case.engine.check(JobSpec(**(good | fields)))
        assert "\n" not in str(refused.value)


@on(*ENGINES, rarely=("local",))
def test_an_attempt_from_start_to_stop(case: EngineCase, scheduler: Scheduler) -> None:
    """Two replicas with what they need to know; they save when told, and their logs stay."""
    program = scheduler.apply("toy", [*NODES], "--prints", num_stages=2)
    handles = scheduler.started("toy").replicas
    launch = scheduler.launch("toy")
    for replica, key in enumerate(launch.keys):
        said = scheduler.says(key, "goes on from step 0")
        environment = json.loads(next(x for x in said.splitlines() if x.startswith("{")))
        assert environment["PIPOLLUX_REPLICA"] == str(replica)
        assert environment["PIPOLLUX_NUM_NODES"] == environment["PIPOLLUX_NUM_STAGES"] == "2"
        assert len(environment["PIPOLLUX_DEVICES"].split(",")) == 2
        assert environment["PIPOLLUX_CHECKPOINT_DIR"] == launch.checkpoints
        scheduler.engine.start(program, launch, replica)  # nothing happens
    before, after = scheduler.listing(), scheduler.listing()
    assert before.version < after.version
    assert {key: state.handle for key, state in after.replicas.items()} == dict(
        zip(launch.keys, handles, strict=True)
    )
    assert scheduler.attempts.free() == dict.fromkeys(NODES, SLOTS - 2)
    scheduler.says(launch.keys[0], "step 5\n")
    assert scheduler.attempts.stop("toy", 60.0)
    for _ in range(3):
        for key in launch.keys:
            scheduler.engine.signal(key, Signal.STOP)
    exited = scheduler.exited("toy")
    assert (exited.outcome, exited.message) == (Outcome.STOPPED, "")
    assert exited.step
    assert case.processes() == []
    assert scheduler.attempts.free() == dict.fromkeys(NODES, SLOTS)
    assert not scheduler.attempts.stop("toy", 60.0)
    ends = [scheduler.listing().replicas[key].ended for key in launch.keys]
    assert [end and (end.status, end.lost, end.result.asked) for end in ends] == [
        (143, "", True)
    ] * 2

    def forgotten() -> bool:
        scheduler.attempts.forget("toy", 1)
        return scheduler.listing().replicas == {}

    until(forgotten, "nothing is listed")
    lines = scheduler.log(launch.keys[0]).splitlines()
    assert [line for line in lines if line.startswith(("replica", "step"))] == [
        "replica 0 of attempt 1 goes on from step 0",
        *(f"step {step + 1}" for step in range(exited.step)),
    ]


@on(*SUITE, rarely=("local", "memory", "trainjobs"))
def test_each_stage_has_a_process(case: EngineCase, scheduler: Scheduler) -> None:
    """Those of a replica write to its log, stop with it, and fail together."""
    both = [*NODES]
    program = scheduler.apply("toy", both, num_stages=2, process_per_stage=True)
    scheduler.started("toy")
    for replica, key in enumerate(scheduler.launch("toy").keys):
        for stage in range(2):
            said = scheduler.says(key, f"replica {2 * replica + stage} of attempt 1 goes on")
        told = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
        assert [x["PIPOLLUX_PROCESSES_PER_REPLICA"] for x in told] == ["2", "2"]
        assert [len(x["PIPOLLUX_DEVICES"].split(",")) for x in told] == [2, 2]
    again, url = scheduler.again(), program.environment["PIPOLLUX_SCHEDULER_URL"]
    assert again.attempts.adopt("toy", 1, url, first_membership(2)) is None
    assert again.attempts.free() == dict.fromkeys(NODES, SLOTS - 2)
    assert again.attempts.stop("toy", 60.0)
    assert again.exited("toy").outcome is Outcome.STOPPED
    assert case.processes() == []
    words = "--fail-at=3", "--fail-rank=3"
    again.apply("other", both, *words, num_stages=2, process_per_stage=True)
    exited = again.exited("other")
    assert exited.outcome is Outcome.FAILED
    assert "step 3 went wrong on replica 3" in exited.message
    assert case.processes() == []


@on(*SUITE, rarely=("local", "memory", "trainjobs"))
def test_replicas_meet(case: EngineCase, scheduler: Scheduler) -> None:
    """Also two on one node and one on another, where the engine can place them so."""
    nodes = ["n1", "n2"] if case.is_even else ["n1", "n1", "n2"]
    scheduler.apply("toy", nodes, "--steps=3", f"--ends-on={len(nodes)}")
    assert scheduler.exited("toy") == Exited(1, Outcome.COMPLETE)


@on("local", "memory", "ray", "slurm", "kubelets", rarely=("local", "memory"))
def test_replicas_push_to_servers_beside_them(case: EngineCase, scheduler: Scheduler) -> None:
    """Every sample is taken once per epoch, and the servers end with the replicas."""
    results, epochs = case.folder / "results", 2
    results.mkdir()
    results.chmod(0o777)  # in a container another user may write it
    scheduler.apply_push_pull("toy", [*NODES], results, epochs)
    exited = scheduler.exited("toy")
    assert exited == Exited(1, Outcome.COMPLETE), exited.message
    taken = Counter(
        (line["epoch"], number)
        for path in results.glob("*.txt")
        for line in map(json.loads, path.read_text().splitlines())
        for number in line["numbers"]
    )
    assert len(list(results.glob("1-*.txt"))) == len(NODES)
    assert set(taken.values()) == {1}
    assert {epoch for epoch, _ in taken} == set(range(epochs))
    assert case.processes() == []


@on(*SUITE, rarely=("local", "trainjobs"))
def test_one_failing_replica_ends_the_attempt(case: EngineCase, scheduler: Scheduler) -> None:
    """The other one ends too, and the message has the exception and the last words."""
    scheduler.apply("toy", [*NODES], "--fail-at=3", "--fail-rank=1")
    exited = scheduler.exited("toy")
    assert exited.outcome is Outcome.FAILED
    assert not exited.cannot_start
    error = "RuntimeError: step 3 went wrong on replica 1"
    assert error in exited.message
    first, second, *_, last = exited.message.splitlines()
    assert first == f"Replica 1 on n2 ended with exit status 1: {error}"
    assert second == "The end of attempt-1-replica-1.log:"
    assert last == error
    assert case.processes() == []


@on(*SUITE, rarely=("local", "trainjobs"))
@pytest.mark.parametrize("status", first(1, [-15, 143]))
def test_a_script_that_ends_as_if_stopped_has_failed(scheduler: Scheduler, status: int) -> None:
    """Nobody has asked for it: a restart would end the same way, and again."""
    scheduler.apply("toy", ["n1"], "--fail-at=2", f"--fail-status={status}")
    exited = scheduler.exited("toy")
    assert exited.outcome is Outcome.FAILED
    head, *_ = exited.message.splitlines()
    assert head.startswith("Replica 0 on n1 ")
    assert ", but was not asked to stop" in head


@on("light local", "local", "ray", "slurm", rarely=("local",))
def test_a_script_that_daemonises_itself_is_not_complete(
    case: EngineCase, scheduler: Scheduler
) -> None:
    """Its work is ended with it; children of other kinds may be left behind."""
    scheduler.apply("toy", ["n1"], "--steps=1", "--daemonise")
    exited = scheduler.exited("toy")
    assert exited.outcome is Outcome.FAILED
    head = exited.message.partition("\n")[0]
    assert "exit status 70: The script ended with exit status 0, but a process that" in head
    assert case.processes() == []


@on(*SUITE, rarely=("local", "memory", "trainjobs"))
def test_a_newer_attempt_goes_on_where_the_older_stopped(scheduler: Scheduler) -> None:
    """On another node, from the same checkpoint."""
    scheduler.apply("toy", ["n1"])
    scheduler.started("toy")
    scheduler.says(ReplicaKey("toy", 1, 0), "goes on from step 0")
    scheduler.apply("toy", ["n2"], "--steps=0", attempt=2)
    stopped = scheduler.exited("toy")
    assert (stopped.attempt, stopped.outcome) == (1, Outcome.STOPPED)
    assert scheduler.exited("toy") == Exited(2, Outcome.COMPLETE)
    said = scheduler.says(ReplicaKey("toy", 2, 0), "of attempt 2")
    assert f"goes on from step {stopped.step}\n" in said


@on("local", "memory", "ray", "slurm", "kubelets", rarely=("local",))
def test_a_replica_joins_and_another_leaves_while_one_runs(
    case: EngineCase, scheduler: Scheduler
) -> None:
    """Each has its own slots, and gives them back; the one that stays hears of nothing."""
    program = scheduler.apply("toy", ["n1"], "--prints")
    scheduler.started("toy")
    first, second, third = (ReplicaKey("toy", 1, replica) for replica in range(3))
    scheduler.says(first, "goes on from step 0")
    scheduler.attempts.start_replicas(program, 1, {1: "n2", 2: "n1"})
    scheduler.poll()
    for key in (second, third):
        said = scheduler.says(key, "goes on from step")
        environment = json.loads(next(x for x in said.splitlines() if x.startswith("{")))
        assert environment["PIPOLLUX_REPLICA"] == str(key.replica)
        assert environment["PIPOLLUX_JOINS"] == "1"
    assert scheduler.attempts.free() == {"n1": SLOTS - 2, "n2": SLOTS - 1}
    scheduler.attempts.admit("toy", 1, [0, 1], can_survive=True)
    scheduler.attempts.end_replicas("toy", 1, [2], at_once=True)

    def has_left() -> bool:
        scheduler.poll()
        return scheduler.attempts.free() == {"n1": SLOTS - 1, "n2": SLOTS - 1}

    until(has_left, "its slots are free")
    again = scheduler.again()
    membership = Membership(2, (0, 1), 3, highest=2)
    assert again.attempts.adopt("toy", 1, program.scheduler_url, membership) is None
    assert again.attempts.free() == {"n1": SLOTS - 1, "n2": SLOTS - 1}
    for key in (first, second):
        assert again.listing().replicas[key].ended is None
    assert again.attempts.stop("toy", 60.0)
    assert again.exited("toy").outcome is Outcome.STOPPED
    assert again.attempts.free() == dict.fromkeys(NODES, SLOTS)


@on(*SUITE, rarely=("local", "trainjobs"))
def test_a_kill_ends_what_does_not_stop(case: EngineCase, scheduler: Scheduler) -> None:
    """With all its processes, whoever their parent is."""
    scheduler.apply("toy", ["n1"], "--stubborn")
    scheduler.started("toy")
    key = ReplicaKey("toy", 1, 0)
    scheduler.says(key, "goes on from step 0")
    scheduler.engine.signal(key, Signal.STOP)
    assert len(case.processes()) >= 4  # agent, script, its child, its orphan
    assert scheduler.attempts.kill("toy", "its node is dead")
    exited = scheduler.exited("toy")
    assert (exited.outcome, exited.message) == (Outcome.FAILED, "its node is dead")
    ended = scheduler.listing().replicas[key].ended
    assert ended is not None
    assert (ended.status, ended.lost) == (-9, "")
    assert case.processes() == []


@on("local", "ray", "slurm", rarely=("local",))
def test_an_agent_that_is_killed_leaves_no_folder(
    case: EngineCase, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = case.folder / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    scheduler.apply("toy", ["n1"], "--stubborn")
    scheduler.started("toy")
    scheduler.says(ReplicaKey("toy", 1, 0), "goes on from step 0")
    assert scheduler.attempts.kill("toy", "its node is dead")
    assert scheduler.exited("toy").outcome is Outcome.FAILED
    assert list(temporary.iterdir()) == []
    scheduler.attempts.forget("toy", 1)
    assert not case.state_dir.attempt("toy", 1).exists()


@on(*SUITE, rarely=("local", "memory", "trainjobs"))
def test_another_scheduler_adopts_what_runs(scheduler: Scheduler) -> None:
    """What has ended meanwhile, too; and ends what nobody has adopted."""
    jobs = {"kept": ["n1"], "left": ["n2"], "done": ["n2"]}
    for job, nodes in jobs.items():
        scheduler.apply(job, nodes, "--prints", *(["--steps=3"] if job == "done" else []))
        scheduler.started(job)
    kept, left, done = (ReplicaKey(job, 1, 0) for job in jobs)
    scheduler.says(left, "goes on from step 0")
    scheduler.says(kept, "goes on from step 0")
    again = scheduler.again()
    again.holds(done, lambda state: state.ended, "has ended")
    assert set(again.listing().replicas) == {kept, left, done}
    one = first_membership(1)
    assert "ended before it had started" in str(again.attempts.adopt("never", 1, "", one))
    assert again.attempts.adopt("kept", 1, "", one) is None
    assert again.attempts.adopt("done", 1, "", one) is None
    found = again.attempts.recover(60.0)
    assert found
    assert all("left" in line for line in found)
    until(lambda: left not in again.listing().replicas, "it is not listed any more")
    assert Path(scheduler.launch("left").checkpoints, "stopped.json").exists(), "it has saved"
    assert again.exited("done") == Exited(1, Outcome.COMPLETE)
    assert again.listing().replicas[kept].ended is None
    again.attempts.stop("kept", 60.0)
    exited = again.exited("kept")
    assert exited.outcome is Outcome.STOPPED
    again.says(kept, f"step {exited.step}\n")


@on(*SUITE, rarely=("local", "memory", "trainjobs"))
def test_a_job_is_adopted_beside_others(case: EngineCase, scheduler: Scheduler) -> None:
    """It keeps its slots, which others cannot have taken; they have some of the rest."""
    for job in ("first", "kept"):
        scheduler.apply(job, ["n1"], num_stages=2)
        scheduler.started(job)
    kept = scheduler.launch("kept").assignments
    assert kept[0].slots == (2, 3)
    for job in ("first", "kept"):  # whoever is stopped before it trains has nothing to save
        scheduler.says(ReplicaKey(job, 1, 0), "goes on from step 0")
    scheduler.attempts.stop("first", 60.0)
    assert scheduler.exited("first").outcome is Outcome.STOPPED
    scheduler.attempts.forget("first", 1)
    seen = 1 if case.sees_others else 0
    with case.occupy("n1", 1):
        until(lambda: scheduler.engine.nodes()["n1"].taken == seen, "they are seen")
        scheduler.poll()
        again = scheduler.again()
        assert again.attempts.nodes()["n1"].taken == seen
        assert again.attempts.adopt("kept", 1, "", first_membership(1)) is None
        assert again.launch("kept").assignments == kept
        assert again.attempts.free() == {"n1": SLOTS - 2 - seen, "n2": SLOTS}
        again.poll()
        assert again.attempts.free() == {"n1": SLOTS - 2 - seen, "n2": SLOTS}
        assert again.listing().replicas[ReplicaKey("kept", 1, 0)].ended is None
        again.attempts.stop("kept", 60.0)
        exited = again.exited("kept")
        assert (exited.outcome, bool(exited.step)) == (Outcome.STOPPED, True)
        assert again.attempts.free() == {"n1": SLOTS - seen, "n2": SLOTS}


@on(*CLUSTERS, rarely=("memory", "trainjobs"))
def test_what_the_cluster_ends_is_lost(case: EngineCase, scheduler: Scheduler) -> None:
    """It is no failure of the job's, and the other replicas save."""
    scheduler.apply("toy", [*NODES])
    handles = scheduler.started("toy").replicas
    keys = scheduler.launch("toy").keys
    for key in keys:
        scheduler.says(key, "goes on from step 0")
    case.take_away(handles[1])
    assert scheduler.exited("toy").outcome is Outcome.STOPPED
    ended = scheduler.listing().replicas[keys[1]].ended
    assert ended is not None
    assert len(ended.lost.splitlines()) == 1


@on(*CLUSTERS, rarely=("memory", "trainjobs"))
def test_all_of_a_attempt_run_or_none(case: EngineCase, scheduler: Scheduler) -> None:
    """One whose node somebody else has taken meanwhile takes the others with it."""
    program = scheduler.program("toy", [*NODES])
    with case.occupy("n2"):
        launch = Launch(
            job="toy",
            attempt=1,
            assignments=assignments(NODES),
            num_first=len(NODES),
            scheduler_url=program.scheduler_url,
            checkpoints=scheduler.engine.checkpoints(program),
        )
        skipped = 0.0
        running = ReplicaGroup(
            scheduler.engine,
            launch,
            lambda key: case.state_dir.log(*key),
            stopped_step=lambda: None,
            program=program,
            grace=60.0,
            start_timeout=600.0,
            clock=lambda: time.monotonic() + skipped,
        )
        running.begin()

        def step() -> Exited | None:
            exited = running.step(scheduler.listing().replicas)
            assert running.take_started() is None
            return exited

        def waits() -> bool:
            found = scheduler.listing().replicas
            first, second = (found.get(key) for key in launch.keys)
            there = first is not None and second is not None and not first.waiting
            return step() is None and there and bool(second.waiting or second.ended)

        until(waits, "one runs and the other does not")
        skipped = 600.0
        exited = until(step, "it has ended")
        assert exited.outcome is not Outcome.COMPLETE
        assert case.processes() == []
