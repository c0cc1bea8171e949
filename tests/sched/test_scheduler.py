"""The scheduler as a whole, with real processes: jobs start, move, fail, end, and go on."""

from __future__ import annotations

import re
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from pipollux_policies import JobInfo, NodeInfo
from pipollux_sched.backend import BackendError
from pipollux_sched.lifecycle import Phase
from pipollux_sched.scheduler import Scheduler
from pipollux_sched.server import UnavailableError
from pipollux_sched.spec.cluster import ClusterSpec, NodeSpec
from pipollux_sched.spec.job import JobSpec, SpecError
from pipollux_sched.store import (
    JobEndedError,
    JobRecord,
    StateDir,
    StateDirError,
    Store,
    UnknownJobError,
)
from pipollux_sched.utils import vital_thread
from pipollux_sched.utils.signals import Interruption
from pipollux_sched.views.cluster import list_nodes
from tests.programs import Forked
from tests.sched.processes import processes_of
from tests.sched.scripts import TOY

CLUSTER = ClusterSpec(
    nodes=(
        NodeSpec(name="node-a", slots=2, kind="cpu"),
        NodeSpec(name="node-b", slots=2, kind="cpu"),
    )
)
Jobs = Mapping[str, JobRecord]


class Wish:
    """A policy that does what the test wishes, and else leaves things as they are."""

    def __init__(self) -> None:
        self.allocations: dict[str, list[str]] = {}
        self.optimizing = threading.Event()
        self.may_decide = threading.Event()
        """Clear it, and the policy thinks until it is set."""
        self.may_decide.set()

    def allocate_job(self, job_info: JobInfo, nodes: Mapping[str, NodeInfo]) -> list[str]:
        need = job_info.resources["slots"]
        fitting = [name for name, node in nodes.items() if node.resources["slots"] >= need]
        return fitting[:1]

    def optimize(
        self,
        jobs: Mapping[str, JobInfo],
        nodes: Mapping[str, NodeInfo],
        base_allocations: Mapping[str, Sequence[str]],
        _node_template: NodeInfo,
    ) -> tuple[dict[str, list[str]], int]:
        self.optimizing.set()
        self.may_decide.wait(240)
        return {
            name: self.allocations.get(name, list(base_allocations.get(name, ())))
            if info.preemptible
            else list(base_allocations[name])
            for name, info in jobs.items()
        }, len(nodes)


def toy(name: str, *args: str, **fields: Any) -> JobSpec:
    return JobSpec(name=name, script=str(TOY), args=args, **fields)


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "state"
    assert processes_of(tmp_path / "state") == []


def scheduler_on(directory: Path, policy: Wish | None = None, **options: Any) -> Scheduler:
    return Scheduler(directory, CLUSTER, policy or Wish(), interval=0.3, **options)


def training(name: str) -> Any:
    return lambda jobs: jobs[name].state.reason == "Training"


def types(events: Sequence[Mapping[str, Any]], job: str) -> list[str]:
    """What happened to a job, progress left out."""
    return [e["type"] for e in events if e["job"] == job and e["type"] != "progress"]


@pytest.mark.usefixtures("light_agent")
def test_one_job_ends_well_and_one_does_not(directory: Path) -> None:
    """The bad one is started again after a second, fails again, and its last words are kept."""
    heard: list[Mapping[str, Any]] = []
    with scheduler_on(directory, on_event=heard.append) as scheduler:
        scheduler.submit(toy("good", "--steps", "10"))
        scheduler.submit(toy("bad", "--fail-at", "2", max_restarts=1))
        assert scheduler.wait(lambda jobs: all(j.phase.ended for j in jobs.values()), timeout=240)
        good, bad = scheduler.jobs()["good"], scheduler.jobs()["bad"]
        assert list_nodes(scheduler.store)[0].free == 2
    assert good.phase is Phase.COMPLETE
    assert (bad.phase, bad.state.failures) == (Phase.FAILED, 2)
    first, *_, last = bad.state.message.splitlines()
    assert first.startswith("Failed 2 times, max_restarts is 1: Replica 0 on node-a ended with")
    assert last == "RuntimeError: step 2 went wrong on replica 0"

    with Store(directory / "pipollux.db") as store:
        assert heard == store.events()  # all of them, in order
    assert heard[0]["type"] == "cluster"
    assert heard[0]["nodes"]["node-a"] == {"slots": 2, "kind": "cpu"}
    assert heard[0]["policy"] == "Wish"
    assert types(heard, "good") == ["submitted", "allocated", "started", "first_step", "complete"]
    once = ["allocated", "started", "first_step", "restarting", "started", "first_step", "failed"]
    assert types(heard, "bad") == ["submitted", *once]
    complete = next(event for event in heard if event["type"] == "complete")
    assert (complete["step"], complete["epoch"]) == (10, 1)
    restarting = next(event for event in heard if event["type"] == "restarting")
    again = [event for event in heard if event["type"] == "started" and event["job"] == "bad"][1]
    assert again["time"] - restarting["time"] >= 1.0
    assert again["attempt"] == 2


@pytest.mark.usefixtures("light_agent")
@pytest.mark.exhaustive
def test_a_job_that_beats_and_does_not_step(directory: Path) -> None:
    """Its processes are ended, and it goes on from what it had saved."""
    with scheduler_on(directory) as scheduler:
        scheduler.submit(toy("stuck", "--beats", "--hang-at", "3", "--steps", "6", hang_timeout=4))
        assert scheduler.wait(lambda jobs: jobs["stuck"].phase.ended, timeout=240)
        assert scheduler.jobs()["stuck"].phase is Phase.COMPLETE
        events = scheduler.store.events(job="stuck")
        log = scheduler.state_dir.log("stuck", 2, 0).read_text()
    told = types(events, "stuck")
    assert told[:6] == ["submitted", "allocated", "started", "first_step", "stalled", "restarting"]
    stalled, restarting = (event for event in events if event["type"] in told[4:6])
    assert stalled["attempt"] == 1
    assert re.fullmatch(
        r"Its step has been 3 for \d+ s although its replicas send heartbeats, "
        r"so all were ended\.",
        stalled["why"],
    )
    assert restarting["why"] == stalled["why"]
    assert "replica 0 of attempt 2 goes on from step 3" in log


@pytest.mark.usefixtures("light_agent")
def test_a_job_that_never_reports_gives_its_slots_back(directory: Path, tmp_path: Path) -> None:
    script = tmp_path / "silent.py"
    script.write_text("import time\ntime.sleep(600)\n")
    with scheduler_on(directory) as scheduler:
        silent = JobSpec(name="silent", script=str(script), start_timeout=1, max_restarts=0)
        scheduler.submit(silent)
        assert scheduler.wait(lambda jobs: jobs["silent"].phase.ended, timeout=240)
        state = scheduler.jobs()["silent"].state
        assert (state.phase, state.reason) == (Phase.FAILED, "TooManyFailures")
        assert "It ran for 1 s (start_timeout) and reported no optimizer step" in state.message
        assert processes_of(directory) == []


@pytest.mark.usefixtures("light_agent")
def test_a_job_grows_and_shrinks_without_losing_a_step(directory: Path) -> None:
    policy = Wish()
    with scheduler_on(directory, policy) as scheduler:
        scheduler.submit(toy("toy", num_stages=2, requested_replicas=2))
        assert scheduler.wait(training("toy"), timeout=240)
        policy.allocations = {"toy": ["node-a", "node-b"]}
        grown = ("node-a", "node-b")
        assert scheduler.wait(
            lambda jobs: jobs["toy"].state.running_on == grown and training("toy")(jobs),
            timeout=240,
        )
        policy.allocations = {"toy": []}
        assert scheduler.wait(lambda jobs: jobs["toy"].phase is Phase.SUSPENDED, timeout=240)
        assert processes_of(directory) == []
        cancelled = scheduler.control.cancel("toy")
        assert (cancelled.phase, cancelled.state.reason) == (Phase.FAILED, "Cancelled")
        events = scheduler.store.events(job="toy")
        seconds = scheduler.store.restart_seconds("toy", default=0.0)
    assert types(events, "toy") == [
        *("submitted", "allocated", "started", "first_step"),
        *("allocated", "stopping", "stopped", "started", "first_step"),
        *("allocated", "stopping", "stopped", "cancelled"),
    ]
    steps = [event["step"] for event in events if event["type"] == "progress"]
    assert steps == list(range(1, len(steps) + 1))  # none left out, none twice
    assert [e["num_replicas"] for e in events if e["type"] == "allocated"] == [1, 2, 0]
    assert 0.1 < seconds < 60


@pytest.mark.exhaustive
def test_jobs_go_on_when_the_scheduler_is_back(directory: Path) -> None:
    scheduler = scheduler_on(directory)
    scheduler.start()
    scheduler.submit(toy("toy", "--steps", "40"))
    assert scheduler.wait(training("toy"), timeout=240)
    with pytest.raises(StateDirError, match="another scheduler already serves"):
        scheduler_on(directory).start()
    assert (directory / "server.json").exists()
    scheduler.stop()
    scheduler.stop()
    assert processes_of(directory) == []
    assert not (directory / "server.json").exists()
    with pytest.raises(UnavailableError):
        scheduler.submit(toy("late"))
    with Store(directory / "pipollux.db") as store:
        state = store.job("toy").state
        stopped = store.events(types=["stopped"])[-1]["step"]
    assert (state.phase, state.reason) == (Phase.SUSPENDED, "SchedulerStopped")

    with scheduler_on(directory) as again:
        assert again.wait(lambda jobs: jobs["toy"].phase is Phase.COMPLETE, timeout=240)
        steps = [event["step"] for event in again.store.events(types=["progress"])]
    assert steps == list(range(1, 41))
    assert 0 < stopped < 40


KILLED = """
import os, sys
from pathlib import Path
from tests.sched.test_scheduler import scheduler_on, toy, training

scheduler = scheduler_on(Path(sys.argv[1]))
scheduler.start()
scheduler.submit(toy("toy"))
assert scheduler.wait(training("toy"), 240)
scheduler.store.heartbeats.keep([scheduler.control.heard("toy", 1, 0, 1)])
os._exit(9)
"""
"""A scheduler that dies as if killed, after it has heard of a replica."""


@pytest.mark.exhaustive
def test_a_replica_that_froze_while_nobody_looked(directory: Path, tmp_path: Path) -> None:
    """The next scheduler never hears of it: once it was then waited for without end."""
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    with Forked(script, [str(directory)]) as killed:
        assert killed.wait() == 9, killed.errors
    for process in processes_of(directory):
        if process.environ().get("RANK") == "0":
            process.suspend()
    with scheduler_on(directory, heartbeat_timeout=1.0) as scheduler:
        assert scheduler.wait(lambda jobs: jobs["toy"].state.attempt == 2, 240)
        events = types(list(scheduler.store.events()), "toy")
        kept = [event for event in events if event in ("adopted", "heartbeat_lost", "restarting")]
        assert kept == ["adopted", "heartbeat_lost", "restarting"]


class Both(Wish):
    """Gives each new job both nodes."""

    def allocate_job(self, _job_info: JobInfo, nodes: Mapping[str, NodeInfo]) -> list[str]:
        return list(nodes)


LEAVING = """
import pathlib, sys, time
import pipollux

pipollux.init_process_group("gloo")
end = pathlib.Path(sys.argv[1])
while pipollux.replica_rank() == 0 and not end.exists():
    time.sleep(0.05)
"""
"""All replicas but the first have nothing to do."""


@pytest.mark.exhaustive
def test_a_replica_that_ends_before_the_others(directory: Path, tmp_path: Path) -> None:
    """Its torchrun agent waits for theirs; that it is silent from then on is no loss."""
    script, end = tmp_path / "leaving.py", tmp_path / "end"
    script.write_text(LEAVING)
    spec = JobSpec(name="leaving", script=str(script), args=[str(end)], requested_replicas=2)
    with scheduler_on(directory, Both(), heartbeat_timeout=6.0) as scheduler:
        scheduler.submit(spec)
        deadline = time.monotonic() + 240
        while True:
            heard = scheduler.control.heartbeats.heard("leaving", 1)
            # The watchdog has had its chance to take it for lost.
            if 1 in heard and heard[1].finished and heard[1].seconds > 7.0:
                break
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert scheduler.store.heartbeats.of("leaving", 1)[1].finished
        assert not heard[0].finished
        end.touch()
        assert scheduler.wait(lambda jobs: jobs["leaving"].phase.ended, timeout=240)
        events = types(scheduler.store.events(), "leaving")
    assert "heartbeat_lost" not in events
    assert events[-1] == "complete"


@pytest.mark.exhaustive
@pytest.mark.usefixtures("light_agent")
def test_cancelling(directory: Path) -> None:
    """One that runs saves and ends; one that waits just ends; both can be submitted again."""
    one_node = ClusterSpec(nodes=CLUSTER.nodes[:1])
    with Scheduler(directory, one_node, Wish(), interval=0.3) as scheduler:
        scheduler.submit(toy("runs", num_stages=2, min_replicas=1))
        scheduler.submit(toy("waits", num_stages=2))
        assert scheduler.wait(
            lambda jobs: training("runs")(jobs) and jobs["waits"].phase is Phase.QUEUED, timeout=240
        )
        assert scheduler.control.cancel("waits").phase is Phase.FAILED
        assert scheduler.control.cancel("runs").state.message == (
            "The job was cancelled and is being stopped."
        )
        assert scheduler.wait(lambda jobs: jobs["runs"].phase is Phase.FAILED, timeout=240)
        with pytest.raises(JobEndedError, match="has ended"):
            scheduler.control.cancel("runs")
        with pytest.raises(UnknownJobError):
            scheduler.control.cancel("nobody")
        scheduler.submit(toy("runs", num_stages=2))
        assert scheduler.wait(training("runs"), timeout=240)
        assert scheduler.jobs()["runs"].state.attempt == 2
        first_steps = [e["step"] for e in scheduler.store.events(job="runs", types=["first_step"])]
    assert first_steps[0] == 1
    assert first_steps[1] > 1  # from the checkpoint


def test_jobs_that_can_never_run_are_refused(directory: Path, tmp_path: Path) -> None:
    with scheduler_on(directory) as scheduler:
        with pytest.raises(SpecError, match="'wide' fits no node: one replica needs 3 slots"):
            scheduler.submit(toy("wide", num_stages=3))
        with pytest.raises(SpecError, match="script: there is no file"):
            scheduler.submit(JobSpec(name="gone", script=str(tmp_path / "gone.py")))
        with pytest.raises(SpecError, match=r"working_dir: .* is not a folder"):
            scheduler.submit(toy("lost", working_dir=str(tmp_path / "gone")))
        assert scheduler.jobs() == {}
        assert not scheduler.wait(lambda jobs: bool(jobs), timeout=0.1)


@pytest.mark.usefixtures("light_agent")
@pytest.mark.exhaustive
def test_a_slow_policy_holds_nobody_up(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it thinks, requests are answered, and the scheduler can be stopped."""
    monkeypatch.setattr(vital_thread, "JOIN_TIMEOUT", 0.1)
    policy = Wish()
    policy.may_decide.clear()
    with scheduler_on(directory, policy) as scheduler:
        scheduler.submit(toy("toy"))
        assert policy.optimizing.wait(240)
        headers = {"Authorization": f"Bearer {scheduler.admin_token}"}
        with httpx.Client(base_url=scheduler.url, headers=headers, trust_env=False) as client:
            for path in ("/healthz", "/jobs", "/nodes"):
                assert client.get(path, timeout=240).status_code == 200
        policy.may_decide.set()
        assert scheduler.wait(training("toy"), timeout=240)
        policy.may_decide.clear()
        policy.optimizing.clear()
        assert policy.optimizing.wait(240)
    policy.may_decide.set()


def test_a_state_directory_that_cannot_be_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    scheduler = Scheduler(StateDir(tmp_path / "file"), CLUSTER)
    with pytest.raises(StateDirError):
        scheduler.start()
    scheduler.stop()


def test_gpu_nodes_without_the_gpus(directory: Path) -> None:
    """The default kind of a node is gpu; on a machine without, every job would fail in the end."""
    cluster = ClusterSpec(nodes=[NodeSpec(name="big", slots=1000)])
    scheduler = Scheduler(StateDir(directory), cluster)
    with pytest.raises(BackendError, match=r"big have 1000 slots of kind gpu.*kind: cpu"):
        scheduler.start()
    scheduler.stop()


def test_the_first_signal_raises_and_later_ones_are_counted() -> None:
    def connect() -> None:
        with interruption.raising(), ExitStack() as resources:
            resources.callback(signal.raise_signal, signal.SIGINT)  # while resources are released
            signal.raise_signal(signal.SIGINT)

    with Interruption() as interruption:
        with pytest.raises(KeyboardInterrupt):
            connect()
        assert interruption.count == 2
        signal.raise_signal(signal.SIGTERM)
        assert interruption.count == 3
        with pytest.raises(KeyboardInterrupt), interruption.raising():
            pytest.fail("signals had arrived before")
