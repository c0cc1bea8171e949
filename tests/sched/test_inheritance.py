"""What a job measured, handed down to the next one of its family: by a scheduler, to real jobs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipollux_policies import PolluxPolicy
from pipollux_sched.lifecycle import Exited, Outcome, Phase
from pipollux_sched.scheduler import Scheduler
from pipollux_sched.spec.job import JobSpec
from tests.hybrid.replicas import run_replicas
from tests.hybrid.telemetry.inheriting_job import NUM_LAYERS, Told, num_parameters, train
from tests.programs import free_port
from tests.sched.processes import processes_of
from tests.sched.sane_hints import SANE
from tests.sched.scripts import ELASTIC, TOY
from tests.sched.supervised import Service
from tests.sched.test_scheduler import CLUSTER, Wish, scheduler_on, training

WIDTH = 6
ROW: dict[str, Any] = {
    "numStages": 1,
    "numNodes": 2,
    "numReplicas": 4,
    "atomicBsz": 3,
    "numMicrobatches": 1,
    "accumStepTime": 0.25,
    "optimStepTime": 0.3,
    "scatter": 0.125,
}
PROFILE: dict[str, Any] = {
    "checkpoint": "except_last",
    "numLayers": NUM_LAYERS,
    "numParameters": num_parameters(WIDTH),
    "rows": [ROW],
}


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    with Service(tmp_path / "state") as service:
        yield service


def complete(service: Service, name: str, hints: dict[str, Any]) -> None:
    """Have a job complete that measured something."""
    with service.submit(name, ["node-a"]) as job:
        job.put(f"/jobs/{name}/hints?attempt=1", json=hints).raise_for_status()
    service.store.transition(name, Exited(1, Outcome.COMPLETE))


def run_job(service: Service, name: str, replicas: int, width: int = WIDTH) -> list[Told]:
    """Train as the processes of a job do that the scheduler has started."""
    service.submit(name, ["node-a"] * replicas)
    environment = {
        "PIPOLLUX_SCHEDULER_URL": service.server.url,
        "PIPOLLUX_JOB_ID": name,
        "PIPOLLUX_ATTEMPT": "1",
        "PIPOLLUX_TOKEN": service.store.job(name).token,
        "PIPOLLUX_HEARTBEAT_INTERVAL": "0",
    }
    return run_replicas(train, replicas, width, environment=environment)


def test_a_job_begins_with_what_its_predecessor_measured(service: Service) -> None:
    """All replicas know it; the largest number that was measured is told from the first hints on,
    and what is handed down is what both have measured."""
    complete(service, "toy-1", {**SANE, "maxProfiledReplicas": 4, "stepProfile": PROFILE})
    told = run_job(service, "toy-2", 2)
    for replica in told:
        (row,) = replica.at_first
        assert (row["num_replicas"], row["optim"], row["passed_on"]) == (4, 0.3, 1)
        assert row["scatter"] == 0.125
        assert replica.at_last == replica.at_first
        assert replica.lines == []
    hints = service.store.hints()["toy-2"]  # sent as the job ended
    assert hints["maxProfiledReplicas"] == 4
    rows = hints["stepProfile"]["rows"]
    assert (rows[-1]["numReplicas"], rows[-1]["passedOn"], rows[-1]["scatter"]) == (4, 1, 0.125)
    assert {(row["numReplicas"], row["passedOn"]) for row in rows[:-1]} == {(2, 0)}


def test_a_job_begins_with_what_jobs_at_work_have_measured_so_far(service: Service) -> None:
    complete(service, "toy-1", {**SANE, "maxProfiledReplicas": 4, "stepProfile": PROFILE})
    rows = [{**ROW, "numReplicas": 8, "optimStepTime": 0.4}, {**ROW, "optimStepTime": 9.0}]
    hints = {**SANE, "maxProfiledReplicas": 8, "stepProfile": {**PROFILE, "rows": rows}}
    with service.submit("toy-2", ["node-b"]) as job:
        job.put("/jobs/toy-2/hints?attempt=1", json=hints).raise_for_status()
        (told,) = run_job(service, "toy-3", 1)
    found = [(row["num_replicas"], row["optim"], row["passed_on"]) for row in told.at_first]
    assert found == [(4, 0.3, 1), (8, 0.4, 1)]  # of the same the one that completed counts
    assert service.store.hints()["toy-3"]["maxProfiledReplicas"] == 8


@pytest.mark.exhaustive
def test_another_model_of_the_family_goes_on_without(service: Service) -> None:
    complete(service, "toy-1", {**SANE, "maxProfiledReplicas": 4, "stepProfile": PROFILE})
    other, silent = run_job(service, "toy-3", 2, WIDTH + 1)
    assert len(other.at_first) == len(silent.at_first) == 1
    assert (silent.at_last, silent.lines) == ([], [])  # one of them says so
    assert other.at_last == []
    assert other.lines == [
        "step times of other jobs of the family are dropped: they are of another model, with "
        f"num_parameters {num_parameters(WIDTH)} instead of {num_parameters(WIDTH + 1)}"
    ]
    assert service.store.hints()["toy-3"]["maxProfiledReplicas"] == 2


def test_a_job_without_predecessor_or_scheduler_begins_as_ever(service: Service) -> None:
    complete(service, "toy-1", {**SANE, "stepProfile": PROFILE})
    (told,) = run_job(service, "else-1", 1)
    assert (told.at_first, told.at_last, told.lines) == ([], [], [])
    assert service.store.hints()["else-1"]["maxProfiledReplicas"] == 1
    gone = {
        "PIPOLLUX_SCHEDULER_URL": f"http://127.0.0.1:{free_port()}",
        "PIPOLLUX_JOB_ID": "toy-2",
        "PIPOLLUX_ATTEMPT": "1",
        "PIPOLLUX_HEARTBEAT_INTERVAL": "0",
    }
    (told,) = run_replicas(train, 1, WIDTH, environment=gone)
    assert told.at_first == []
    assert told.hints is not None
    assert "did not answer" in told.lines[0]


def test_processes_are_told_by_their_own_token_alone(service: Service) -> None:
    warm_start = service.submit("toy-2", ["node-a"])
    nothing = {"predecessor": None, "relatives": [], "step_profile": None}
    assert warm_start.get("/jobs/toy-2/inheritance?attempt=1").json() == nothing
    complete(service, "toy-1", {**SANE, "stepProfile": PROFILE})
    answer = warm_start.get("/jobs/toy-2/inheritance?attempt=1")
    assert answer.status_code == 200
    assert answer.json()["predecessor"] == "toy-1"
    assert answer.json()["step_profile"]["rows"][0].items() >= ROW.items()
    assert warm_start.get("/jobs/toy-2/inheritance?attempt=2").status_code == 409
    assert warm_start.get("/jobs/toy-1/inheritance?attempt=1").status_code == 401
    with service.submit("toy-3", ["node-a"], family="") as alone:
        assert alone.get("/jobs/toy-3/inheritance?attempt=1").json() == nothing


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "state"
    assert processes_of(tmp_path / "state") == []


@pytest.mark.exhaustive
@pytest.mark.usefixtures("light_agent")
def test_the_next_job_starts_as_large_as_pays(directory: Path, tmp_path: Path) -> None:
    """One of another family starts with one replica, as nothing is known of it."""
    hints = tmp_path / "hints.json"
    hints.write_text(json.dumps({**SANE, "stepProfile": PROFILE}))
    policy = PolluxPolicy(population=20, generations=10)

    def toy(name: str, *args: str, **fields: Any) -> JobSpec:
        return JobSpec(name=name, script=str(TOY), args=args, max_replicas=4, **fields)

    with Scheduler(directory, CLUSTER, policy, interval=0.3) as scheduler:
        first = ("--hints", str(hints), "--steps", "5")
        scheduler.submit(toy("toy-1", *first, min_replicas=2))
        assert scheduler.wait(lambda jobs: jobs["toy-1"].phase.ended, timeout=240)
        for name in ("else-1", "toy-2"):
            scheduler.submit(toy(name))
            assert scheduler.wait(training(name), timeout=240)
            scheduler.control.cancel(name)
            assert scheduler.wait(lambda jobs, name=name: jobs[name].phase.ended, timeout=240)
        events = scheduler.store.events(types=["allocated"])
    allocated = {event["job"]: event for event in reversed(events)}
    assert len(allocated["toy-1"]["nodes"]) == 2
    assert len(allocated["else-1"]["nodes"]) == 1
    assert len(allocated["toy-2"]["nodes"]) > 2
    assert allocated["else-1"]["speedup"] is None
    assert allocated["toy-2"]["speedup"] > 1


@pytest.mark.exhaustive
def test_real_jobs_hand_down_what_they_measured(directory: Path, tmp_path: Path) -> None:
    """One on two replicas to one on one, which keeps the cap and hands it down in its turn."""
    policy = Wish()
    policy.allocations = {"real-1": ["node-a", "node-b"]}

    def job(name: str, **fields: Any) -> JobSpec:
        results = tmp_path / name
        results.mkdir()
        environment = {"RESULTS": str(results), "EPOCHS": "2"}
        return JobSpec(name=name, script=str(ELASTIC), environment=environment, **fields)

    with scheduler_on(directory, policy) as scheduler:
        for spec in (job("real-1", min_replicas=2), job("real-2"), job("else-1")):
            scheduler.submit(spec)
            name = spec.name
            assert scheduler.wait(lambda jobs, name=name: jobs[name].phase.ended, timeout=240)
            assert scheduler.jobs()[name].phase is Phase.COMPLETE
        hints = scheduler.store.hints()
        allocated = scheduler.store.events(types=["allocated"])
    assert {event["job"]: len(event["nodes"]) for event in allocated} == {
        "real-1": 2,
        "real-2": 1,
        "else-1": 1,
    }
    told = {
        name: {(row["numReplicas"], row["passedOn"]) for row in found["stepProfile"]["rows"]}
        for name, found in hints.items()
    }
    assert told == {"real-1": {(2, 0)}, "real-2": {(1, 0), (2, 1)}, "else-1": {(1, 0)}}
    most = {name: found["maxProfiledReplicas"] for name, found in hints.items()}
    assert most == {"real-1": 2, "real-2": 2, "else-1": 1}
