"""Replicas that are killed at each point of a change: nobody hangs, and no sample is lost."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest

from tests.extent import first
from tests.hybrid.resize.changing_job import ChangingJob
from tests.hybrid.resize.changing_training import SIZE
from tests.waiting import until

TRAINING = [
    *("before they meet", "when they have met", "when it sends", "before the vote"),
    *("after the vote", "in the new groups", "when it goes on"),
]
OF_TRAINING = [(point, rank) for point in TRAINING for rank in "01"]
OF_TRAINING.remove(("when it sends", "1"))  # so small a model is one piece, which replica 0 sends
NEWCOMERS = [
    *("before it answers", "before it receives", "when it has received"),
    *("when it has joined", "before it takes over", "when it trains"),
]
UNTIL_THE_VOTE = 3
"""Of these points those at which a joining replica may die without costing the others anything."""
WAITED_OUT = {"when it has joined", "after the vote"}
"""Where those that are left may wait until their timeout, and should not do so for a minute."""
LEAVING = ["before they meet", "before the vote", "after the vote", "when it leaves"]


class FaultyJob(ChangingJob):
    """A job one of whose replicas dies, and which then is started again if it has ended."""

    script = Path(__file__).with_name("faulty_training.py")

    def end(self) -> list[int]:
        """Return the exit statuses when all replicas have ended."""
        until(lambda: all(x.poll() is not None for x in self.programs), "all replicas end")
        return [code for code in (program.poll() for program in self.programs) if code is not None]

    def resume(self) -> None:
        """Start it again with its checkpoints, until its end."""
        self.programs.clear()
        for name in ("FAULT", "FREEZES", "FAULTY_RANK", "CHANGES", "PIPOLLUX_TIMEOUT"):
            self.environment.pop(name, None)
        shutil.rmtree(self.rendezvous.folder)
        self.rendezvous.folder.mkdir()
        self.begin(2)
        self.wait()

    def check_totals(self) -> None:
        """Check that every sample was counted once in each epoch."""
        found = [json.loads(x.read_text()) for x in self.results.glob("found-*.json")]
        whole = {"sum": sum(range(SIZE)), "count": SIZE, "checked": SIZE}
        assert found
        assert all(x == {name: self.epochs * v for name, v in whole.items()} for x in found)


def run(job: FaultyJob, *, leaves: int | None = None, **joining_replica: str) -> list[int]:
    """Change once at step 5, where a replica dies; return how all ended after that."""
    job.begin(2)
    job.wait_until_at(5)
    if leaves is None:
        job.add_stages(**joining_replica)
    else:
        job.ask_to_leave(leaves, 2)
    codes = job.end()
    assert -9 in codes, "it came to the point"
    if not list(job.results.glob("found-*.json")):  # those that were left could not go on
        job.resume()
    job.check_totals()
    return codes


def make(tmp_path: Path, repository: Path, **settings: str) -> FaultyJob:
    checkpoints = str(tmp_path / "checkpoints")
    return FaultyJob(
        tmp_path / "job",
        repository,
        CHANGES="5",
        PIPOLLUX_CHECKPOINT_DIR=checkpoints,
        PIPOLLUX_CHECKPOINT_INTERVAL="0.2",
        **{"EPOCHS": "2", **settings},
    )


def run_frozen(
    job: FaultyJob, *, leaves: int | None = None, **joining_replica: str
) -> tuple[int, str]:
    """Change once at step 5, where a replica is frozen until the others have ended; return how it
    ended then.
    """
    job.begin(2)
    job.wait_until_at(5)
    if leaves is None:
        job.add_stages(**joining_replica)
    else:
        job.ask_to_leave(leaves, 2)
    until(lambda: list(job.results.glob("frozen-*")), "it comes to the point")
    (path,) = job.results.glob("frozen-*")
    (frozen,) = (x for x in job.programs if x.pid == int(path.name.removeprefix("frozen-")))
    others = [program for program in job.programs if program is not frozen]
    until(lambda: all(x.poll() is not None for x in others), "the others end", 120.0)
    frozen.send_signal(signal.SIGCONT)
    code, errors = frozen.wait(60.0), frozen.errors
    print(*job.errors(), sep="\n\n")  # of a failed test
    for program in job.programs:
        if program.poll() != 0:
            assert "PeerLostError: replica " in program.errors
    if not list(job.results.glob("found-*.json")):  # those that were left could not go on
        job.resume()
    job.check_totals()
    return code, errors


def patience(point: str) -> dict[str, str]:
    names = ("PIPOLLUX_TIMEOUT", "PIPOLLUX_FROZEN_TIMEOUT")
    return dict.fromkeys(names, "20") if point in WAITED_OUT else {}


@pytest.mark.parametrize("point", first(1, NEWCOMERS))
def test_a_joining_replica_is_killed(
    tmp_path: Path, repository: Path, over: dict[str, str], point: str
) -> None:
    with make(tmp_path, repository, **over, **patience(point), EPOCHS="1") as job:
        codes = run(job, FAULT=point)
        if point in NEWCOMERS[:UNTIL_THE_VOTE]:
            assert codes == [0, 0, -9]
            assert job.check() == [(1, 2)]


@pytest.mark.parametrize(("point", "rank"), OF_TRAINING)
@pytest.mark.exhaustive
def test_one_that_trains_is_killed(
    tmp_path: Path, repository: Path, over: dict[str, str], point: str, rank: str
) -> None:
    fault = {"FAULT": point, "FAULTY_RANK": rank}
    with make(tmp_path, repository, **over, **fault, **patience(point)) as job:
        run(job, FAULT="when it trains", FAULTY_RANK="none")


@pytest.mark.parametrize("rank", [1, 0])
@pytest.mark.parametrize("point", LEAVING)
@pytest.mark.exhaustive
def test_one_that_leaves_is_killed(
    tmp_path: Path, repository: Path, over: dict[str, str], point: str, rank: int
) -> None:
    """Or one that stays, where only they come to that point."""
    faulty = rank if point != "after the vote" else 1 - rank
    with make(tmp_path, repository, **over, FAULT=point, FAULTY_RANK=str(faulty)) as job:
        run(job, leaves=rank)


STAGES = {"PROCESSES": "2", "STAGES": "2", "EPOCHS": "2"}


@pytest.mark.parametrize(
    ("point", "stage"),
    [
        *(("before it answers", "0"), ("when it has received", "1")),
        *(("when it has joined", "1"), ("when it trains", "0")),
    ],
)
@pytest.mark.exhaustive
def test_a_process_of_a_joining_replica_is_killed(
    tmp_path: Path, repository: Path, over: dict[str, str], point: str, stage: str
) -> None:
    """Where each stage has a process, its other one ends, too."""
    with make(tmp_path, repository, **over, **STAGES, **patience(point)) as job:
        codes = run(job, FAULT=point, FAULTY_STAGE=stage)
        if point in NEWCOMERS[:UNTIL_THE_VOTE]:
            assert sorted(codes) == [-9, 0, 0, 0, 0, 1]
            assert job.check() == [(1, 2)]


@pytest.mark.parametrize(
    ("point", "rank", "stage"),
    [("when it sends", "0", "1"), ("after the vote", "1", "0"), ("when it goes on", "0", "1")],
)
@pytest.mark.exhaustive
def test_a_process_of_one_that_trains_is_killed(
    tmp_path: Path, repository: Path, over: dict[str, str], point: str, rank: str, stage: str
) -> None:
    """The job goes on from its checkpoint, and loses no sample."""
    fault = {"FAULT": point, "FAULTY_RANK": rank, "FAULTY_STAGE": stage, **STAGES}
    with make(tmp_path, repository, **over, **fault, **patience(point)) as job:
        run(job, FAULT="when it trains", FAULTY_RANK="none")


FREEZES = {"FREEZES": "1", "PIPOLLUX_TIMEOUT": "8", "PIPOLLUX_FROZEN_TIMEOUT": "6"}


@pytest.mark.parametrize("point", NEWCOMERS)
@pytest.mark.exhaustive
def test_a_joining_replica_is_frozen(
    tmp_path: Path, repository: Path, over: dict[str, str], point: str
) -> None:
    with make(tmp_path, repository, **over, **FREEZES) as job:
        code, errors = run_frozen(job, FAULT=point)
        if point in NEWCOMERS[:UNTIL_THE_VOTE]:
            assert (code, "the job that this replica was to join has ended" in errors) == (0, True)
        else:
            assert code == 1


@pytest.mark.parametrize(
    ("point", "rank"), [x for x in OF_TRAINING if x != ("after the vote", "0")]
)
@pytest.mark.exhaustive
def test_one_that_trains_is_frozen(
    tmp_path: Path, repository: Path, over: dict[str, str], point: str, rank: str
) -> None:
    """It trains no second time what the others have trained. Replica 0 has the store of the next
    groups, for which torch waits in the moment after the vote.
    """
    fault = {"FAULT": point, "FAULTY_RANK": rank}
    with make(tmp_path, repository, **over, **fault, **FREEZES) as job:
        assert run_frozen(job, FAULT="when it trains", FAULTY_RANK="none")[0] == 1


@pytest.mark.parametrize("rank", [1, 0])
@pytest.mark.parametrize("point", LEAVING)
@pytest.mark.exhaustive
def test_one_that_leaves_is_frozen(
    tmp_path: Path, repository: Path, over: dict[str, str], point: str, rank: int
) -> None:
    """Or one that stays, which goes on alone."""
    faulty = rank if point != "after the vote" else 1 - rank
    with make(tmp_path, repository, **over, **FREEZES, FAULT=point, FAULTY_RANK=str(faulty)) as job:
        assert run_frozen(job, leaves=rank)[0] == (point in ("before they meet", "before the vote"))
