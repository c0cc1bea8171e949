"""Replicas that join and leave jobs in which each stage has a process of its own."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.hybrid.resize.changing_job import ChangingJob
from tests.hybrid.resize.test_resizes import MakeJob, make_job
from tests.programs import Forked

__all__ = ["make_job"]

STAGES = {"PROCESSES": "2", "STAGES": "2", "EPOCHS": "2"}


def hold_at_four(job: ChangingJob, replicas: int) -> None:
    (job.results / "hold-4").touch()
    job.begin(replicas)
    job.wait_for(lambda: (job.results / "reached-4-0").exists(), "step 4")


def end_without(job: ChangingJob, gone: list[Forked]) -> None:
    """Return when all but these have ended well."""
    for program in gone:
        job.programs.remove(program)
    job.wait()


def test_a_replica_joins_and_the_first_one_leaves(make_job: MakeJob) -> None:
    """With both processes, each of which loads its part. A skip connection goes over both."""
    settings = {"DATA": "per-stage", "LAYERS": "skips", **STAGES, "EPOCHS": "1"}
    job = make_job(CHANGES="5,9", **settings)
    job.begin(1)
    job.wait_until_at(5)
    job.add_stages()
    job.wait_until_at(9)
    job.ask_to_leave(0, 2)
    job.wait()
    assert job.check() == [(1, 1), (8, 2), (12, 1)]
    assert not list(job.rendezvous.folder.glob("joining-*"))
    assert not list(job.rendezvous.folder.glob("leave-*"))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("schedule", "kind"),
    [("1f1b", "text"), ("gpipe", "accumulation"), ("interleaved", "workers"), ("auto", "text")],
)
def test_replicas_join_and_leave_and_every_sample_is_taken_once(
    make_job: MakeJob, schedule: str, kind: str
) -> None:
    """One, two, three; then replica 0 leaves, and so does the last."""
    job = make_job(DATA=kind, CHANGES="5,9,13,17", SCHEDULE=schedule, **STAGES)
    job.begin(1)
    job.wait_until_at(5)
    job.add_stages()
    job.wait_until_at(9)
    job.add_stages()
    job.wait_until_at(13)
    job.ask_to_leave(0, 3)
    job.wait_until_at(17)
    job.ask_to_leave(1, 2)
    job.wait()
    assert [replicas for _, replicas in job.check()] == [1, 2, 3, 2, 1]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "case",
    [
        "1 to 2, 1f1b, tied, indices, 1",
        "2 to 1, 1f1b, tied, accumulation, 2",
        "2 to 3, gpipe, plain, indices, 2",
        "2 to 3, interleaved, tied, indices, 2",
        "2 to 3, 1f1b, skips, accumulation, 2",
        "1 to 2, gpipe, drifting, accumulation, 2",
        "2 to 3, 1f1b, plain, per-stage, 1",
    ],
)
def test_a_change_is_what_a_restart_would_be_to_the_last_bit(
    make_job: MakeJob, tmp_path: Path, case: str
) -> None:
    replicas, schedule, layers, kind, epochs = case.split(", ")
    before, after = map(int, replicas.split(" to "))
    settings = {"DATA": kind, "SCHEDULE": schedule, "LAYERS": layers, "CLIPS": "1"}
    settings |= {**STAGES, "EPOCHS": epochs}
    resized = make_job(CHANGES="5", **settings)
    resized.begin(before)
    resized.wait_until_at(5)
    if after > before:
        resized.add_stages()
    else:
        resized.ask_to_leave(0, before)
    resized.wait()
    assert resized.check() == [(1, before), (8, after)]

    checkpoints = {"PIPOLLUX_CHECKPOINT_DIR": str(tmp_path / "checkpoints")}
    restarted = make_job(PIPOLLUX_RENDEZVOUS="", **checkpoints, **settings)
    restarted.stop_at(5, before)
    restarted.begin(after)
    restarted.wait()
    assert restarted.check() == [(1, before), (8, after)]
    ours, theirs = resized.steps(), restarted.steps()
    assert ours.keys() == theirs.keys()
    for step, lines in ours.items():  # one after the other: a failure names the first
        for line, other in zip(lines, theirs[step], strict=True):
            assert line == other, step


def change_twice(job: ChangingJob) -> dict[int, list[dict[str, Any]]]:
    """Two replicas, then a third, then replica 0 leaves, each in the middle of an epoch."""
    job.begin(2)
    job.wait_until_at(5)
    job.add_stages()
    job.wait_until_at(12)
    job.ask_to_leave(0, 3)
    job.wait()
    assert job.check() == [(1, 2), (8, 3), (15, 2)]
    return job.steps()


@pytest.mark.exhaustive
def test_state_that_is_divided_is_divided_anew_as_replicas_come_and_go(make_job: MakeJob) -> None:
    whole = change_twice(make_job(CHANGES="5,12", LAYERS="tied", **STAGES))
    divided = change_twice(make_job(CHANGES="5,12", LAYERS="tied", SHARDED="1", **STAGES))
    assert divided == whole


@pytest.mark.exhaustive
@pytest.mark.parametrize("processes", ["1", "2"])
def test_compiled_layers_train_on_like_plain_ones(make_job: MakeJob, processes: str) -> None:
    settings = {"CHANGES": "5,12", **STAGES, "PROCESSES": processes}
    plain = change_twice(make_job(**settings))
    assert change_twice(make_job(LAYERS="compiled", **settings)) == plain


@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", [1, 0])
def test_a_joining_replica_that_loses_a_process_costs_the_others_nothing(
    make_job: MakeJob, stage: int
) -> None:
    """Its other process ends, and says why; the next one joins."""
    job = make_job(CHANGES="9", **{**STAGES, "EPOCHS": "1"})
    hold_at_four(job, 1)
    joining_replica = job.add_stages()
    job.wait_for(lambda: any(x.waiting_to_join for x in job.rendezvous.joining()), "it is there")
    killed, other = joining_replica[stage], joining_replica[1 - stage]
    killed.send_signal(signal.SIGKILL)
    assert other.wait() == 1
    assert "cannot join the job without all of its processes: rank" in other.errors
    (job.results / "hold-4").unlink()
    job.programs.remove(killed)
    job.programs.remove(other)
    job.wait_until_at(9)
    job.add_stages()
    job.wait()
    assert job.check() == [(1, 1), (12, 2)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_joining_replica_that_dies_when_all_have_met_is_left_out(
    make_job: MakeJob, replicas: int
) -> None:
    job = make_job(CHANGES="5", **STAGES)
    job.begin(replicas)
    job.wait_until_at(5)
    end_without(job, job.add_stages(DIES="1"))
    assert job.check() == [(1, replicas)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("ours", ["2", "1"])
def test_a_joining_replica_with_another_number_of_processes_is_refused(
    make_job: MakeJob, ours: str
) -> None:
    theirs = {"1": "2", "2": "1"}[ours]
    job = make_job(PROCESSES=ours, STAGES="2", EPOCHS="1")
    hold_at_four(job, 1)
    others = job.add_stages(PROCESSES=theirs)
    assert others[0].wait() == 1
    count = {"1": "one process", "2": "2 processes, one for each stage"}[ours]
    said = f"each replica of the job that runs there has {count}, and this one has {theirs}"
    assert said in others[0].errors
    for other in others[1:]:  # torchrun ends them
        other.send_signal(signal.SIGKILL)
        other.wait()
    (job.results / "hold-4").unlink()
    end_without(job, others)
    assert job.check() == [(1, 1)]


@pytest.mark.exhaustive
def test_joining_end_with_the_job(make_job: MakeJob) -> None:
    """All of their processes with status 0."""
    job = make_job(**STAGES)
    hold_at_four(job, 1)
    joining_replica = job.add_stages()
    job.wait_for(lambda: any(x.waiting_to_join for x in job.rendezvous.joining()), "it is there")
    for program in job.programs[:2]:
        program.send_signal(signal.SIGKILL)
    assert [program.wait() for program in joining_replica] == [0, 0]
    assert "the job that this replica was to join has ended" in joining_replica[0].errors
