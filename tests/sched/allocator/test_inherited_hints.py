"""Jobs that have measured nothing are planned for by what the last of their family measured."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console, RenderableType

from pipollux_perfmodel import GradParams
from pipollux_policies import PolluxPolicy
from pipollux_sched.allocator.job_infos import linear_speedup
from pipollux_sched.cli.describe import job_sections
from pipollux_sched.cli.explain import explanation_text
from pipollux_sched.forecasting.state import StateReader
from pipollux_sched.lifecycle import Exited, Outcome
from pipollux_sched.planning.explain import LimitKind, explanation
from pipollux_sched.spec.job import parse_job
from pipollux_sched.views.jobs import job_details
from tests.sched.allocator.test_allocator import Answer, World
from tests.sched.allocator.test_hints import NOTHING_FITS, SANE

ROW = {
    "numStages": 1,
    "numNodes": 1,
    "numReplicas": 1,
    "atomicBsz": 32,
    "numMicrobatches": 1,
    "accumStepTime": 0.1,
    "optimStepTime": 0.2,
}
PROFILE = {"numLayers": 3, "numParameters": 7, "rows": [ROW, {**ROW, "numReplicas": 2}]}


def plain(shown: RenderableType) -> str:
    console = Console(file=io.StringIO(), width=160, _environ={})
    with console.capture() as capture:
        console.print(shown)
    return capture.get()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path / "pipollux.db")
    yield world
    world.store.close()


def complete(world: World, name: str, **hints: Any) -> None:
    """Have a job complete that measured itself."""
    world.submit(name)
    world.allocator(Answer()).run_once()
    world.step(name, 1)
    world.store.put_hints(name, 1, {**SANE, "remainingSamples": 5.0, **hints})
    world.store.transition(name, Exited(1, Outcome.COMPLETE))
    world.now += 1


def test_it_begins_with_the_gradients_with_which_the_other_began(world: World) -> None:
    """Forecasts have the latest ones, which tell how the job goes on."""
    began, ended = {"norm": 1.0, "var": 0.5}, {"norm": 1.0, "var": 50.0}
    world.submit("toy-1")
    world.allocator(Answer()).run_once()
    world.step("toy-1", 1)
    for gradients in (began, ended):
        world.store.put_hints("toy-1", 1, {**SANE, "maxBatchSize": 4096, "gradParams": gradients})
    world.store.transition("toy-1", Exited(1, Outcome.COMPLETE))
    world.submit("toy-2", max_replicas=16)
    (begins,) = world.candidates()
    reader = StateReader(world.store, restart_seconds=30.0, interval=60.0)
    goes_on = {job.name: job.info for job in reader.read().jobs}["toy-2"]
    asked = StateReader(world.store, restart_seconds=30.0, interval=60.0).read(
        [parse_job({"name": "toy-3", "script": "x.py", "max_replicas": 16})]
    )
    to_come = {job.name: job.info for job in asked.jobs}["toy-3"]
    assert begins.warm_start is not None
    assert begins.warm_start.hints.grad_params == GradParams(1.0, 0.5)
    planned, foreseen, new = (
        float(info.speedup_fn(1, 4)) for info in (begins.info, goes_on, to_come)
    )
    assert foreseen == new > 1.5 * planned


def test_it_gets_at_once_what_pays(world: World) -> None:
    """Until it has sent hints of its own; and whoever asks is told why."""
    complete(world, "toy-1")
    world.submit("toy-2", max_replicas=16)
    world.submit("else-1", max_replicas=16)
    warm_start, other = world.candidates()
    assert warm_start.warm_start is not None
    assert warm_start.warm_start.predecessor == "toy-1"
    assert (warm_start.info.max_replicas, warm_start.info.remaining_work) == (8, None)
    assert (other.warm_start, other.info.max_replicas) == (None, 1)
    assert other.info.speedup_fn is linear_speedup
    decisions = {
        d.job: d for d in world.allocator(PolluxPolicy(population=20, generations=10)).run_once()
    }
    assert len(decisions["toy-2"].nodes) > 1
    assert len(decisions["else-1"].nodes) == 1
    job = world.store.job("toy-2")
    why, shown = explanation(world.store, job), job_details(world.store, job)
    assert why.planned_by == shown.planned_by == "toy-1"
    assert "is planned with the measurements of job toy-1" in plain(explanation_text(why))
    assert "those of job toy-1 of its family" in plain(job_sections(shown))
    world.step("toy-2", 1)
    world.store.put_hints("toy-2", 1, {**SANE, "maxProfiledReplicas": 8, "stepProfile": PROFILE})
    warm_start = world.candidates()[0]
    assert (warm_start.warm_start, warm_start.info.max_replicas) == (None, 16)
    job = world.store.job("toy-2")
    why, shown = explanation(world.store, job), job_details(world.store, job)
    assert (why.planned_by, shown.planned_by) == (None, None)
    assert "2 configurations for other jobs of the family" in plain(job_sections(shown))
    (logged,) = world.store.events(job="toy-2", types=["hints"])
    assert "stepProfile" not in logged["hints"]


def test_the_cap_says_who_measured(world: World) -> None:
    """Rows that are too old to be handed down vouch for nothing."""
    one_row = {**PROFILE, "rows": [ROW]}
    complete(world, "toy-1", maxProfiledReplicas=8, stepProfile=one_row)
    world.submit("toy-2", max_replicas=16)
    policy = Answer({"toy-2": ["a", "a", "b", "b"]})
    (decision,) = world.allocator(policy).run_once()
    assert len(decision.nodes) == 4
    why = explanation(world.store, world.store.job("toy-2"))
    (limit,) = (limit for limit in why.limits if limit.kind is LimitKind.PROFILED)
    assert limit.text == (
        "Job toy-1's step time was measured on up to 1 replica, and it gets at most 4 times as "
        "many (4) until it is on more."
    )


def test_a_policy_that_gives_it_nothing_does_not_keep_it_waiting(world: World) -> None:
    complete(world, "toy-1")
    world.submit("toy-2")
    allocator = world.allocator(Answer())  # which optimizes nothing
    assert allocator.run_once() == []
    assert [(d.job, d.nodes) for d in allocator.run_once()] == [("toy-2", ("a",))]


def test_hints_of_the_user_go_first(world: World) -> None:
    complete(world, "toy-1")
    world.submit("toy-2", hints={**SANE, "maxProfiledReplicas": 3})
    (candidate,) = world.candidates()
    assert (candidate.warm_start, candidate.info.max_replicas) == (None, 12)


@pytest.mark.parametrize("useless", ["absurd", "no goodput", "of another version"])
def test_hints_that_say_nothing_are_not_inherited(
    world: World, useless: str, caplog: pytest.LogCaptureFixture
) -> None:
    complete(world, "toy-1")
    hints: dict[str, Any] = {
        "absurd": NOTHING_FITS.to_json_object(),
        "no goodput": {**SANE, "gradParams": None},
        "of another version": {**SANE, "unheardOf": 1},
    }[useless]
    world.submit("toy-2")
    world.allocator(Answer()).run_once()
    world.allocator(Answer()).run_once()
    world.step("toy-2", 1)
    world.store.put_hints("toy-2", 1, hints)
    world.store.transition("toy-2", Exited(1, Outcome.COMPLETE))
    world.now += 1
    world.submit("toy-3", max_replicas=4)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            (candidate,) = world.candidates()
    assert (candidate.warm_start, candidate.info.max_replicas) == (None, 1)
    assert len(caplog.messages) == (useless == "of another version")
