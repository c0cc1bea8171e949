"""A real job that is cut into another number of stages: it goes on, and nobody forgets how."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from pipollux_perfmodel import SchedHints
from pipollux_policies import Allocation, JobInfo, NodeInfo
from pipollux_sched.scheduler import Scheduler
from pipollux_sched.spec.cluster import ClusterSpec, NodeSpec
from pipollux_sched.spec.job import JobSpec
from pipollux_sched.store import JobRecord, Store
from tests.sched.processes import processes_of
from tests.sched.scripts import LAYERED

SCRIPT = LAYERED
CLUSTER = ClusterSpec(nodes=(NodeSpec(name="node-a", slots=2, kind="cpu"),))
Jobs = Mapping[str, JobRecord]


class Widest:
    """A policy that gives every job one replica, of as many stages as it may have by now."""

    def allocate_job(self, job_info: JobInfo, nodes: Mapping[str, NodeInfo]) -> list[str]:
        need = job_info.resources["slots"]
        return [name for name, node in nodes.items() if node.resources["slots"] >= need][:1]

    def optimize(
        self,
        jobs: Mapping[str, JobInfo],
        nodes: Mapping[str, NodeInfo],
        base_allocations: Mapping[str, Sequence[str]],
        _node_template: NodeInfo,
    ) -> tuple[dict[str, Sequence[str]], int]:
        given: dict[str, Sequence[str]] = {}
        for name, job in jobs.items():
            base = base_allocations.get(name, ())
            widest = max(job.all_shapes, key=lambda shape: shape.num_stages)
            given[name] = Allocation(base, widest) if job.preemptible else base
        return given, len(nodes)


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "state"
    assert processes_of(tmp_path / "state") == []


def scheduler_on(directory: Path) -> Scheduler:
    return Scheduler(directory, CLUSTER, Widest(), interval=0.3, hints_interval=1.0)


def trains_in(num_stages: int, attempt: int) -> Any:
    def told(jobs: Jobs) -> bool:
        state = jobs["layered"].state
        running = (state.running_stages, state.attempt) == (num_stages, attempt)
        return running and state.reason == "Training"

    return told


def lines(path: Path) -> list[list[int]]:
    whole = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [[int(word) for word in line.split()] for line in whole]


@pytest.mark.exhaustive
def test_from_one_stage_to_two(directory: Path, tmp_path: Path) -> None:
    """Its layers are priced, it is cut in two, resumes its step, and stays so ever after."""
    job = JobSpec(
        name="layered",
        script=str(SCRIPT),
        stage_choices=(1, 2),
        environment={"RESULTS": str(tmp_path)},
    )
    with scheduler_on(directory) as scheduler:
        scheduler.submit(job)
        assert scheduler.wait(trains_in(1, 1), timeout=240)
        assert scheduler.wait(trains_in(2, 2), timeout=240)
        hinted = scheduler.wait(
            lambda _: scheduler.store.hints()["layered"]["numStages"] == 2, timeout=240
        )
        assert hinted, "it measures itself anew, in two stages"
        told = SchedHints.from_json_object(scheduler.store.hints()["layered"])
    assert told.layers is not None
    assert told.layers.num_layers == 5
    assert told.balance is not None
    assert len(told.balance) == 2
    assert told.remaining_samples == pytest.approx(64e6, rel=0.01)

    with scheduler_on(directory) as scheduler:  # which knows no more than what was stored
        assert scheduler.wait(trains_in(2, 3), timeout=240)
        scheduler.control.cancel("layered")

    with Store(directory / "pipollux.db") as store:
        events = store.events(job="layered")
        attempts = store.attempts("layered")
        service = store.attained_service()["layered"]
    assert [entry.num_stages for entry in attempts] == [1, 2, 2]
    held = [entry.num_stages * (entry.ended_at or 0) for entry in attempts]
    began = [entry.num_stages * entry.created_at for entry in attempts]
    assert service == pytest.approx(sum(held) - sum(began))
    of = {kind: [e for e in events if e["type"] == kind] for kind in ("allocated", "first_step")}
    first, second = of["allocated"][:2]
    assert (first["num_stages"], second["num_stages"]) == (1, 2)
    assert second["why"].startswith("changes from 1 replica of 1 stage to 1 replica of 2 stages")
    assert second["speedup"] > 0
    assert second["num_microbatches"] >= 1
    assert second["atomic_bsz"] == 8
    assert all("layers" not in e["hints"] for e in events if e["type"] == "hints")

    steps = lines(tmp_path / "steps.txt")
    assert [step for _, _, step, *_ in steps] == list(range(1, len(steps) + 1))
    assert {(attempt, stages) for attempt, stages, *_ in steps} >= {(1, 1), (2, 2)}
    resumed = {attempt: step for attempt, _, step, *_ in reversed(steps)}
    assert [e["step"] for e in of["first_step"]][:2] == [resumed[1], resumed[2]]
    trained = Counter((epoch, index) for _, _, _, epoch, *taken in steps for index in taken)
    assert set(trained.values()) == {1}, "no sample twice in an epoch"

    sums = [line.split() for line in (tmp_path / "sums.txt").read_text().splitlines()]
    begins, ends = sums[::2], sums[1::2]
    for end, begin in zip(ends, begins[1:], strict=False):
        assert end[2] == begin[2], "the step"
        assert float(end[3]) == pytest.approx(float(begin[3]), rel=1e-12), "the parameters"
