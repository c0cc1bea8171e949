"""How often Slurm is asked, with scripts in place of its commands."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipollux_sched.backend.slurm.output import split_jobs
from pipollux_sched.backend.slurm.snapshot import ASKED_FOR_ALONE, SlurmReader

SQUEUE = 'case "$*" in *" -s "*) ;; *) cat {folder}/jobs;; esac'
SCONTROL = """\
echo "$*" >> {folder}/calls
case "$*" in
"show node"*) ;;
"show job -d -o") cat {folder}/all;;
*) echo "JobId=$5 Nodes=n$5 CPU_IDs=0-3 Mem=0 GRES=gpu:4";;
esac
"""


class Commands:
    """Commands that print what is in files, and note how they were called."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._calls = folder / "calls"
        for program, text in (("squeue", SQUEUE), ("scontrol", SCONTROL)):
            script = folder / program
            script.write_text(f"#!/bin/sh\n{text.format(folder=folder)}")
            script.chmod(0o755)

    def list_jobs(self, *numbers: int, known: int = 0) -> None:
        """Let allocations run, of which Slurm shows but `known` when it is asked for all."""
        lines = [f"{n}|RUNNING|9:00|10:00|n{n}|None|pool\n" for n in numbers]
        (self.folder / "jobs").write_text("".join(lines))
        shown = [f"JobId={n} Nodes=n{n} CPU_IDs=0-3 Mem=0 GRES=gpu:4\n" for n in numbers]
        (self.folder / "all").write_text("".join(shown[: known or len(shown)]))

    def calls(self) -> list[str]:
        """Return how scontrol was called for jobs since the last time."""
        calls = self._calls.read_text().splitlines()
        self._calls.unlink()
        return [call for call in calls if call.startswith("show job")]


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Commands:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return Commands(tmp_path)


def test_many_new_allocations_are_asked_for_at_once(commands: Commands) -> None:
    """One that is missing in the answer, as it has just begun, is asked for alone."""
    reader = SlurmReader(sorted)
    few = range(1, ASKED_FOR_ALONE + 1)
    commands.list_jobs(*few)
    assert [*reader.read().allocations] == [*few]
    assert commands.calls() == [f"show job -d -o {number}" for number in few]
    many = range(1, 2 * ASKED_FOR_ALONE + 3)
    commands.list_jobs(*many, known=len(many) - 1)
    found = reader.read().allocations
    assert {number: held.shares[f"n{number}"].gpus for number, held in found.items()} == (
        dict.fromkeys(many, 4)
    )
    assert commands.calls() == ["show job -d -o", f"show job -d -o {many[-1]}"]
    assert [*reader.read().allocations] == [*many]
    assert commands.calls() == []


def test_what_a_job_says_of_itself_is_not_taken_for_another_job() -> None:
    forged = "JobId=1 Nodes=n1\nJobId=2 Comment=x\nJobId=1 Nodes=n1 GRES=gpu:8\nx JobId=3\n"
    assert split_jobs(forged) == {2: "JobId=2 Comment=x"}
