"""Replicas that join and leave real jobs while the others train."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipollux_hybrid import init_process_group
from pipollux_hybrid.errors import ConfigurationError
from tests.extent import first
from tests.hybrid.resize.changing_job import ChangingJob

KINDS = ["indices", "workers", "accumulation", "stream", "text"]
MakeJob = Callable[..., ChangingJob]


@pytest.fixture
def make_job(tmp_path: Path, repository: Path, over: dict[str, str]) -> Iterator[MakeJob]:
    made: list[ChangingJob] = []

    def make(**settings: str) -> ChangingJob:
        made.append(ChangingJob(tmp_path / f"job-{len(made)}", repository, **over, **settings))
        return made[-1]

    yield make
    for job in made:
        with job:
            pass


@pytest.mark.usual_over_stand_in(alone=True)  # the test of restarts is over gloo
@pytest.mark.parametrize("kind", first(1, KINDS))
def test_replicas_join_and_leave_and_every_sample_is_taken_once(
    make_job: MakeJob, kind: str
) -> None:
    """From one to three; then replica 0 leaves, and so does its successor; another one comes."""
    epochs = "3" if kind == "text" else "2"  # of which one has fewer steps
    job = make_job(DATA=kind, CHANGES="5,9,13,17,21", EPOCHS=epochs)
    job.begin(1)
    job.wait_until_at(5)
    job.add()
    job.wait_until_at(9)
    job.add()
    job.wait_until_at(13)
    job.ask_to_leave(0, 3)
    job.wait_until_at(17)
    job.ask_to_leave(0, 2)
    job.wait_until_at(21)
    job.add()
    job.wait()
    assert [replicas for _, replicas in job.check()] == [1, 2, 3, 2, 1, 2]
    assert not list(job.rendezvous.folder.glob("joining-*"))
    assert not list(job.rendezvous.folder.glob("leave-*"))


@pytest.mark.parametrize("stages", first(1, ["2", "1"]))
@pytest.mark.parametrize("kind", first(1, ["indices", "accumulation", "text", "stream"]))
@pytest.mark.parametrize("replicas", first(1, ["1 to 2", "2 to 1", "2 to 3"]))
def test_a_change_is_what_a_restart_would_be_to_the_last_bit(
    make_job: MakeJob, tmp_path: Path, kind: str, stages: str, replicas: str
) -> None:
    before, after = map(int, replicas.split(" to "))
    settings = {"DATA": kind, "STAGES": stages, "EPOCHS": "1" if kind == "indices" else "2"}
    resized = make_job(CHANGES="5", **settings)
    resized.begin(before)
    resized.wait_until_at(5)
    if after > before:
        resized.add()
    else:
        resized.ask_to_leave(1, 2)
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
    job.add()
    job.wait_until_at(12)
    job.ask_to_leave(0, 3)
    job.wait()
    assert job.check() == [(1, 2), (8, 3), (15, 2)]
    return job.steps()


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["accumulation", "text"])
def test_state_that_is_divided_is_divided_anew_as_replicas_come_and_go(
    make_job: MakeJob, kind: str
) -> None:
    whole = change_twice(make_job(DATA=kind, CHANGES="5,12"))
    divided = change_twice(make_job(DATA=kind, CHANGES="5,12", SHARDED="1"))
    assert divided == whole


@pytest.mark.exhaustive
def test_a_joining_replica_that_dies_costs_the_others_nothing(make_job: MakeJob) -> None:
    job = make_job(CHANGES="20")
    (job.results / "hold-4").touch()
    job.begin(2)
    job.wait_for(lambda: (job.results / "reached-4-0").exists(), "step 4")
    killed = job.add()
    job.wait_for(lambda: any(x.waiting_to_join for x in job.rendezvous.joining()), "it is there")
    killed.send_signal(signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL
    (job.results / "hold-4").unlink()
    job.wait_until_at(20)
    job.add()
    job.wait()
    assert job.check() == [(1, 2), (23, 3)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("replicas", first(1, [2, 1]))
def test_a_joining_replica_that_dies_when_all_have_met_is_left_out(
    make_job: MakeJob, replicas: int
) -> None:
    job = make_job(CHANGES="5")
    job.begin(replicas)
    job.wait_until_at(5)
    killed = job.add(DIES="1")
    assert killed.wait() == -signal.SIGKILL
    job.wait()
    assert job.check() == [(1, replicas)]


def test_a_joining_replica_that_runs_another_script_is_refused(make_job: MakeJob) -> None:
    job = make_job(CHANGES="5", EPOCHS="1")
    (job.results / "hold-12").touch()
    job.begin(1)
    job.wait_until_at(5)
    other = job.add(DATA="other-script")
    assert other.wait() == 1
    assert "cannot join the job: the list of states is accumulator" in other.errors
    job.programs.remove(other)
    (job.results / "hold-12").unlink()
    job.wait()
    assert job.check() == [(1, 1)]


def test_a_joining_replica_that_initializes_again_is_found_out(make_job: MakeJob) -> None:
    """The weights that it was sent are the others', until its first forward."""
    job = make_job(LAYERS="initializing", CHANGES="5")
    job.begin(1)
    job.wait_until_at(5)
    job.add()
    assert [program.wait() for program in job.programs] == [1, 1]
    for errors in job.errors():
        assert "replicas differ before optimizer step 8: parameter '1.shift' is the" in errors
    assert list(job.steps()) == list(range(1, 8))


@pytest.mark.exhaustive
def test_nobody_joins_where_batches_cannot_be_cut_for_so_many(make_job: MakeJob) -> None:
    """Two replicas of at least four samples are a batch of eight; a third has no share."""
    job = make_job(DATA="bounded")
    (job.results / "hold-4").touch()
    job.begin(2)
    job.wait_for(lambda: (job.results / "reached-4-0").exists(), "step 4")
    joining_replica = job.add()
    job.wait_for(lambda: any(x.waiting_to_join for x in job.rendezvous.joining()), "it is there")
    (job.results / "hold-4").unlink()
    job.wait()
    assert job.check() == [(1, 2)]
    assert "the job that this replica was to join has ended" in joining_replica.errors


@pytest.mark.parametrize("kind", first(1, ["bound", "shrinking"]))
def test_a_state_that_cannot_be_taken_over_keeps_joining_out(make_job: MakeJob, kind: str) -> None:
    changes = "4" if kind == "shrinking" else ""
    job = make_job(DATA=kind, CHANGES=changes, EPOCHS="1")
    (job.results / "hold-4").touch()
    job.begin(2)
    job.wait_for(lambda: (job.results / "reached-4-0").exists(), "step 4")
    joining_replica = job.add()
    assert joining_replica.wait() == 1
    said = f"replicas cannot join while others train, as {kind.title()} sets elastic = False"
    assert f"{said} for the state table.bin" in joining_replica.errors
    job.programs.remove(joining_replica)
    job.ask_to_leave(1, 2)
    leaves = "replicas cannot leave while others train, as Bound"
    if kind == "bound":
        job.wait_for(lambda: leaves in job.programs[0].errors, "it is said")
    (job.results / "hold-4").unlink()
    job.wait()
    assert job.check() == [(1, 2)] + [(7, 1)] * (kind == "shrinking")


@pytest.mark.parametrize(
    ("variables", "backend", "said"),
    [
        ({}, "nccl", "over NCCL are experimental, so set PIPOLLUX_ELASTIC_NCCL=1"),
        ({"PIPOLLUX_ATTEMPT": "3"}, "gloo", "a scheduler runs this job"),
    ],
)
def test_where_nobody_can_join_the_variable_is_refused(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    variables: dict[str, str],
    backend: str,
    said: str,
) -> None:
    for name, value in {**variables, "PIPOLLUX_RENDEZVOUS": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError, match=said):
        init_process_group(backend)


def test_a_replica_that_is_to_join_and_cannot_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """And does not train by itself."""
    variables = {"PIPOLLUX_JOINS": "1", "PIPOLLUX_ELASTIC": "1", "PIPOLLUX_ATTEMPT": "3"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError, match="or 'nccl' with PIPOLLUX_ELASTIC_NCCL=1"):
        init_process_group("nccl")


def test_a_job_in_a_folder_that_is_in_use_is_refused(make_job: MakeJob) -> None:
    job = make_job(CHANGES="5")
    job.begin(1)
    job.wait_until_at(5)
    job.begin(2)
    first_of_two = job.programs[1]
    assert first_of_two.wait() == 1
    assert "start joining replicas one by one" in first_of_two.errors


@pytest.mark.exhaustive
def test_a_folder_of_a_job_that_has_ended_is_used_again(make_job: MakeJob) -> None:
    job = make_job()
    (job.results / "hold-4").touch()
    for _ in range(2):
        job.begin(1)
        job.wait_for(lambda: (job.results / "reached-4-0").exists(), "step 4")
        job.wait_for(job.rendezvous.announcement, "the job tells")
        job.programs[-1].send_signal(signal.SIGKILL)
        job.programs[-1].wait()
        (job.results / "reached-4-0").unlink()
    assert "waits to see whether" in job.programs[1].errors
    (job.results / "hold-4").unlink()
    job.begin(1)
    job.wait()
    assert not job.rendezvous.announcement(), "one that has come to its end says so"
    job.begin(1)
    job.wait()
    assert "waits to see whether" not in job.programs[3].errors


@pytest.mark.exhaustive
def test_joining_end_with_the_job(make_job: MakeJob) -> None:
    job = make_job()
    (job.results / "hold-4").touch()
    job.begin(1)
    job.wait_for(lambda: (job.results / "reached-4-0").exists(), "step 4")
    joining_replica = job.add()
    job.wait_for(lambda: any(x.waiting_to_join for x in job.rendezvous.joining()), "it is there")
    job.programs[0].send_signal(signal.SIGKILL)
    assert joining_replica.wait() == 0
    assert "the job that this replica was to join has ended" in joining_replica.errors
