"""How a replica ended, from what its step has left and what Slurm says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipollux_sched.backend.base import Ended
from pipollux_sched.backend.slurm.output import SlurmJob
from pipollux_sched.backend.slurm.record import ReplicaFiles, ReplicaRecord
from pipollux_sched.backend.slurm.replica_step import how_ended
from pipollux_sched.backend.slurm.snapshot import SlurmSnapshot

POOL = SlurmJob(5, "RUNNING", None, None, "n1", "", "pool")
RECORD = ReplicaRecord(pool=5, node="n1")


def ended(
    folder: Path,
    said: str = "",
    status: int | None = None,
    told: str = "",
    code: int | None = 1,
) -> Ended:
    """Return how a replica ended whose srun ended with 1, in an allocation that is well."""
    files = ReplicaFiles(folder / "replica-0")
    if status is not None:
        files.exit.write_text(json.dumps({"code": status}))
    files.prepare_signal()
    if told:
        files.write_signal(told)
    files.srun.write_text(f"{said}\n")
    snapshot = SlurmSnapshot(number=1, jobs={5: POOL})
    return how_ended(RECORD, files, code, snapshot)


@pytest.mark.parametrize(
    "said",
    [
        "srun: error: Unable to create step for job 5: Memory required by task is not available",
        "srun: error: Unable to create step for job 5: Requested nodes are busy",
        "srun: error: Application launch failed: Job credential revoked",
        "srun: error: Unable to create step for job 5: Job/step already completing or completed",
        "slurmstepd: error: *** STEP 5.2 ON n1 CANCELLED AT 2026-11-22T10:00:00 DUE TO TIME LIMIT",
    ],
)
def test_what_slurm_does_is_no_failure_of_the_job(tmp_path: Path, said: str) -> None:
    assert ended(tmp_path, said).lost == f"Slurm ended it: {said}"
    assert ended(tmp_path, said, status=3) == Ended(3), "the agent itself says how it ended"


def test_what_the_job_did(tmp_path: Path) -> None:
    assert ended(tmp_path) == Ended(1)
    assert ended(tmp_path, "slurmstepd: error: Detected 1 oom_kill event in StepId=5.2").lost == ""
    assert ended(tmp_path, told="kill") == Ended(-9)


@pytest.mark.parametrize(
    ("said", "how"),
    [
        ("", Ended(None, lost="Slurm ended it: its step left no exit status")),
        ("srun: error: Unable to create step for job 5: More processors requested", Ended(1)),
        (
            "slurmstepd: error: execve(): no\nsrun: error: n1: task 0: Exited with exit code 2",
            Ended(2),
        ),
    ],
)
def test_the_end_of_a_srun_that_an_earlier_scheduler_started(
    tmp_path: Path, said: str, how: Ended
) -> None:
    assert ended(tmp_path, said, code=None) == how


def test_a_step_that_was_ended_as_slurm_had_lost_it(tmp_path: Path) -> None:
    how = ended(tmp_path, status=-9, told="gone")
    assert (how.status, how.lost) == (-9, "Slurm did not know of the step on node n1 any more.")


def test_an_allocation_that_is_over(tmp_path: Path) -> None:
    gone = how_ended(
        RECORD,
        ReplicaFiles(tmp_path / "replica-0"),
        0,
        SlurmSnapshot(number=1, jobs={5: POOL._replace(state="PREEMPTED", reason="None")}),
    )
    assert gone.lost == "Slurm's allocation 5 with node n1 has ended: PREEMPTED, None."
