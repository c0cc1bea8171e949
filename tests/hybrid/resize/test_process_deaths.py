"""Processes that are killed where each stage of a replica has one."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.extent import first
from tests.hybrid.resize.test_unplanned_death import LOST, DyingJob, MakeJob, make_job
from tests.waiting import until

__all__ = ["make_job"]

STAGES = {"PROCESSES": "2", "STAGES": "2", "EPOCHS": "1", "OPTIONS": "clips"}


def check_ends(job: DyingJob, before: int) -> None:
    """Check how all have ended: the rest of a replica that has lost a process says why, with 1."""
    killed = {x.split(":")[0] for x in job.environment["DIES"].split(",")}
    broken = {x.split(".")[0] for x in killed}
    statuses, expected = {}, {}
    for index, program in enumerate(job.programs):
        replica, stage = map(str, divmod(index, job.processes))
        who = f"{replica}.{stage}"
        statuses[who] = program.poll()
        expected[who] = -signal.SIGKILL if who in killed else 1 if replica in broken else 0
        if expected[who] == 1:
            assert "ReplicaBrokenError: " in program.errors
    if statuses != expected:  # an assertion would show a part of what they say
        said = "\n".join(
            f"--- {x}\n{y.errors}" for x, y in zip(statuses, job.programs, strict=True)
        )
        pytest.fail(f"ended with {statuses}, not with {expected}:\n{said}")


def run(make_job: MakeJob, before: int, **settings: str) -> DyingJob:
    job = make_job(**{**STAGES, **settings})
    job.begin(before)
    job.finish()
    check_ends(job, before)
    return job


@pytest.mark.parametrize("schedule", first(1, ["1f1b", "gpipe", "interleaved"]))
@pytest.mark.parametrize(
    "point",
    first(
        1,
        [
            *("exchange", "pipeline", "backward", "buckets"),
            *("share", "exchanged", "between", "step", "after"),
        ],
    ),
)
@pytest.mark.parametrize("who", first(1, ["0.0 of 2", "1.1 of 3", "0.1 of 3", "2.0 of 3"]))
def test_one_process_dies_and_every_sample_is_taken_once(
    make_job: MakeJob, who: str, point: str, schedule: str
) -> None:
    process, _, count = who.partition(" of ")
    if process.endswith(".0") and point == "buckets":
        pytest.skip("the first stage has one bucket")
    before = int(count)
    job = run(make_job, before, SCHEDULE=schedule, DIES=f"{process}:7:{point}")
    changes = job.check_done()
    assert [replicas for _, replicas in changes] == [before, before - 1], job.errors()
    assert changes[1][0] in (8, 9)
    ((_, _, left, step),) = job.said()
    assert left == before - 1
    assert step + 1 == changes[1][0]


@pytest.mark.exhaustive
@pytest.mark.parametrize("dies", ["0.0:7:loading", "1.1:7:loading", "0.1:7:pipeline"])
def test_a_process_dies_where_each_stage_loads_its_part(make_job: MakeJob, dies: str) -> None:
    job = run(make_job, 3, DATA="per-stage", DIES=dies)
    changes = job.check_done()
    assert [replicas for _, replicas in changes] == [3, 2], job.errors()
    assert changes[1][0] in (8, 9)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "dies",
    [
        *("0.0:7:backward,2.1:7:pipeline", "0.1:7:exchange,1.0:7:share"),
        *("0.0:7:exchange,0.1:7:exchange", "0.1:7:pipeline,1.0:9:step"),
    ],
)
def test_two_processes_of_three_replicas_die(make_job: MakeJob, dies: str) -> None:
    job = run(make_job, 3, DIES=dies)
    broken = {x.split(".")[0] for x in dies.split(",")}
    assert job.check_done()[-1][1] == 3 - len(broken), job.errors()


@pytest.mark.exhaustive
@pytest.mark.parametrize("point", ["backward", "exchange", "step"])
@pytest.mark.parametrize("process", ["0.1", "1.2", "0.0"])
def test_one_of_three_stages_dies(make_job: MakeJob, process: str, point: str) -> None:
    settings = {"PROCESSES": "3", "STAGES": "3", "DIES": f"{process}:7:{point}"}
    job = run(make_job, 2, **settings)
    assert [replicas for _, replicas in job.check_done()] == [2, 1], job.errors()


CASES = [
    "1.0 of 2, 1f1b, tied, indices, clips,scaler",
    "0.1 of 3, 1f1b, tied, indices, clips,scaler",
    "1.0 of 2, 1f1b, drifting, accumulation, clips,scaler",
    "2.1 of 3, gpipe, tied, text, ",
    "0.0 of 2, interleaved, tied, workers, clips",
    "0.0 of 3, gpipe, drifting, stream, clips",
]


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", CASES)
def test_a_death_is_what_a_restart_of_those_left_would_be_to_the_last_bit(
    make_job: MakeJob, tmp_path: Path, case: str
) -> None:
    who, schedule, layers, kind, options = case.split(", ")
    process, _, count = who.partition(" of ")
    before = int(count)
    settings = {"DATA": kind, "SCHEDULE": schedule, "LAYERS": layers, "OPTIONS": options}
    resized = run(make_job, before, **settings, DIES=f"{process}:7:exchange")
    assert resized.check_done() == [(1, before), (8, before - 1)], resized.errors()

    checkpoints = {"PIPOLLUX_CHECKPOINT_DIR": str(tmp_path / "checkpoints")}
    stopped = {**STAGES, **settings, **checkpoints, "PIPOLLUX_RENDEZVOUS": ""}
    restarted = make_job(**stopped)
    restarted.stop_at(5, before)
    restarted.begin(before - 1)
    restarted.finish()
    assert restarted.check_done() == [(1, before), (8, before - 1)], restarted.errors()
    ours, theirs = resized.done(), restarted.done()
    assert ours.keys() == theirs.keys()
    for step, lines in ours.items():  # one after the other: a failure names the first
        for line, other in zip(lines, theirs[step], strict=True):
            assert line == other, step


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["indices", "accumulation"])
def test_those_to_whom_a_step_came_through_win(make_job: MakeJob, kind: str) -> None:
    """The sums of step 8 come to one replica of two that are left, and it is not done again."""
    options = {"OPTIONS": "behind-1,clips", "BEHIND_AT": "7", "LAYERS": "tied"}
    job = run(make_job, 3, DATA=kind, DIES="0.0:7:between", **options)
    assert job.check_done() == [(1, 3), (9, 2)], job.errors()


@pytest.mark.exhaustive
@pytest.mark.parametrize("process", ["1.0", "1.1"])
def test_what_came_to_one_process_of_a_replica_has_come_to_all(
    make_job: MakeJob, process: str
) -> None:
    """The sums of step 8 do not come to one process of a replica that is left, but to its other."""
    options = {"OPTIONS": f"misses-{process},clips", "BEHIND_AT": "7"}
    job = run(make_job, 3, DIES="0.0:7:between", **options)
    assert job.check_done() == [(1, 3), (9, 2)], job.errors()


@pytest.mark.exhaustive
@pytest.mark.parametrize("point", ["evaluation", "outside"])
def test_a_process_dies_outside_of_training(make_job: MakeJob, point: str) -> None:
    job = run(make_job, 3, DIES=f"1.1:18:{point}", EPOCHS="2")
    assert job.check_done() == [(1, 3), (19, 2)], job.errors()


@pytest.mark.exhaustive
def test_a_process_dies_after_its_last_step(make_job: MakeJob) -> None:
    job = run(make_job, 3, DIES="1.0:18:over")
    assert job.check_done(ended=2) == [(1, 3)], job.errors()
    assert [found[1:] for found in job.said()] == [(18, 2, 18)]


@pytest.mark.exhaustive
def test_a_process_dies_while_a_checkpoint_is_written(make_job: MakeJob, tmp_path: Path) -> None:
    settings = {"PIPOLLUX_CHECKPOINT_DIR": str(tmp_path / "checkpoints")}
    settings["PIPOLLUX_CHECKPOINT_INTERVAL"] = "0.001"
    job = run(make_job, 3, DIES="1.1:-1:syncing", **settings)
    assert [replicas for _, replicas in job.check_done()] == [3, 2], job.errors()


@pytest.mark.exhaustive
def test_another_one_dies_while_those_that_are_left_meet(make_job: MakeJob) -> None:
    job = run(make_job, 3, DIES="0.0:7:backward,1.1:0:forming")
    assert [replicas for _, replicas in job.check_done()][-1] == 1, job.errors()


@pytest.mark.exhaustive
@pytest.mark.parametrize("process", ["1.0", "0.1"])
def test_a_process_dies_while_another_replica_joins(make_job: MakeJob, process: str) -> None:
    """The joining replica joins those that are left, at the next opportunity.

    It may still be about to leave the groups of the dead when those that are left have formed the
    next ones, so they may have to try again.
    """
    dies = f"{process}:-1:syncing"
    chances = ",".join(map(str, range(10, 17)))
    settings = {"CHANGES": "5", "CHANGES_IF_ALONE": chances, "OPTIONS": "scaler"}
    job = make_job(**{**STAGES, **settings, "DIES": dies})
    job.begin(2)
    job.wait_until_at(5)
    job.add_stages(DIES="9.9:0:never")
    job.finish()
    assert [replicas for _, replicas in job.check_done()] == [2, 1, 2], job.errors()


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("option", "point", "why"),
    [
        ("accumulates", "exchange", "an Accumulator holds amounts that were not synchronized"),
        ("clamps", "exchange", "the script has changed parameters in the step that is void"),
        ("sharded", "exchange", "each replica held the optimizer's state of its own parameters"),
        ("sharded", "step", "each replica held the optimizer's state of its own parameters"),
    ],
)
def test_what_cannot_be_had_again_ends_the_job_and_says_why(
    make_job: MakeJob, option: str, point: str, why: str
) -> None:
    job = make_job(**{**STAGES, "OPTIONS": option, "DIES": f"1.1:7:{point}"})
    job.begin(3)
    assert [program.wait() for program in job.programs] == [1, 1, 1, -signal.SIGKILL, 1, 1]
    left = [job.programs[index].errors for index in (0, 1, 4, 5)]
    told = [why in errors for errors in left]
    assert any(told) if point == "step" else all(told), left
    job.programs.clear()


@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", [0, 1])
def test_a_frozen_process_is_left_behind_with_its_replica(make_job: MakeJob, stage: int) -> None:
    job = make_job(**STAGES, PIPOLLUX_FROZEN_TIMEOUT="6")
    (job.results / "hold-7").touch()
    job.begin(3)
    job.wait_for(lambda: len(list(job.results.glob("reached-7-*"))) == 6, "step 7")
    frozen, other = (job.programs[2 + x] for x in (stage, 1 - stage))
    frozen.send_signal(signal.SIGSTOP)
    (job.results / "hold-7").unlink()
    until(lambda: any(LOST.search(x) for x in job.errors()), "they go on")
    assert other.wait() == 1
    assert "has given no sign of life" in other.errors
    frozen.send_signal(signal.SIGCONT)
    assert frozen.wait() == 1
    del job.programs[2:4]
    job.finish()
    assert job.check_done() == [(1, 3), (8, 2)], job.errors()
