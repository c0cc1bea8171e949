"""Jobs whose replicas come and go again and again: nothing is left of those that have gone."""

from __future__ import annotations

import itertools
import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.hybrid.resize.changing_job import ChangingJob

STEPS = 20
"""Of a replica between two changes."""
MEMORY = 8 * 1024
"""Kilobytes that a process may have more after 50 changes than after 25."""


class LastingJob(ChangingJob):
    """A job that goes on until it is told to stop."""

    script = Path(__file__).with_name("lasting_training.py")


def lines_of(job: ChangingJob, pid: int) -> list[dict[str, Any]]:
    """What a replica wrote of its steps; the last line may be under way."""
    path = job.results / f"{pid}.txt"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def settle(job: ChangingJob, replicas: int) -> None:
    """Return when so many replicas have trained together for a while, and nothing of those that
    have gone is still about to end.
    """

    def trained() -> bool:
        running = [program.pid for program in job.programs if program.poll() is None]
        if len(running) != replicas * job.processes:
            return False
        last = [lines_of(job, pid)[-STEPS:] for pid in running]
        return all(
            len(steps) == STEPS
            and {step["replicas"] for step in steps} == {replicas}
            and any(step.get("ending") == 0 for step in steps)
            for steps in last
        )

    job.wait_for(trained, f"{replicas} replicas train")


def stop(job: ChangingJob) -> None:
    """Stop the job, and see that all of it ends."""
    running = [program for program in job.programs if program.poll() is None]
    running[0].send_signal(signal.SIGTERM)
    assert [program.wait() for program in running] == [143] * len(running)
    job.programs.clear()


def check_holdings(phases: list[list[dict[str, Any]]], early: int, late: int) -> None:
    """Check that a replica holds no more in a later phase than in an earlier one."""
    held = [[line for line in phases[index] if "threads" in line] for index in (early, late)]
    for name, more in {
        **dict.fromkeys(("threads", "descriptors", "ports", "keys"), 0),
        "memory": MEMORY,
        "objects": 1000,
    }.items():
        before, now = (min(line[name] for line in lines) for lines in held)
        assert now - before <= more, f"{name}: {before} in phase {early}, {now} in phase {late}"


def phases_of(lines: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The steps of a replica with the same number of others, in turn."""
    return [list(group) for _, group in itertools.groupby(lines, lambda x: x["replicas"])]


@pytest.mark.exhaustive
def test_after_fifty_changes_a_replica_holds_what_it_held_after_twentyfive(
    tmp_path: Path, repository: Path, over: dict[str, str]
) -> None:
    """The first two replicas leave; the third is replica 0 then, and others come and go."""
    with LastingJob(tmp_path / "job", repository, **over, SUMS="1") as job:
        job.begin(3)
        settle(job, 3)
        stays = job.programs[2].pid
        for replicas in (2, 1):
            job.ask_to_leave(0, replicas + 1)
            settle(job, replicas)
        for _ in range(24):
            job.add()
            settle(job, 2)
            job.ask_to_leave(1, 2)
            settle(job, 1)
        stop(job)
        lines = lines_of(job, stays)
    phases = phases_of(lines)
    assert [phase[0]["replicas"] for phase in phases] == [3, 2, *[1, 2] * 24, 1]
    check_holdings(phases, 24, 48)
    check_holdings(phases, 25, 49)
    assert not [x.name for x in job.rendezvous.folder.iterdir() if "-" in x.name]


@pytest.mark.exhaustive
def test_so_does_one_of_several_processes(
    tmp_path: Path, repository: Path, over: dict[str, str]
) -> None:
    """In each of them, after 16 changes what it held after eight."""
    with LastingJob(tmp_path / "job", repository, **over, SUMS="1", PROCESSES="2") as job:
        job.begin(1)
        settle(job, 1)
        stay = [program.pid for program in job.programs]
        for _ in range(8):
            job.add_stages()
            settle(job, 2)
            job.ask_to_leave(1, 2)
            settle(job, 1)
        stop(job)
        for pid in stay:
            phases = phases_of(lines_of(job, pid))
            assert [phase[0]["replicas"] for phase in phases] == [1, *[2, 1] * 8]
            check_holdings(phases, 7, 15)
            check_holdings(phases, 8, 16)


@pytest.mark.exhaustive
def test_replica_0_leaves_again_and_again(
    tmp_path: Path, repository: Path, over: dict[str, str]
) -> None:
    """Each joining replica replaces the one before; the folder does not grow."""
    with LastingJob(tmp_path / "job", repository, **over, SUMS="1") as job:
        job.begin(1)
        settle(job, 1)
        sizes = []
        for _ in range(3):
            job.add()
            settle(job, 2)
            job.ask_to_leave(0, 2)
            settle(job, 1)
            names = {x.name for x in job.rendezvous.folder.iterdir() if x.suffix}
            alive = {name for name in names if name.startswith("alive-")}
            assert len(alive) <= 1, "of nobody who has left"
            sizes.append(sorted(names - alive))
        stop(job)
    assert [len(names) for names in sizes] == [len(sizes[0])] * len(sizes), sizes


@pytest.mark.exhaustive
def test_after_eight_deaths_a_replica_holds_what_it_held_after_four(
    tmp_path: Path, repository: Path, over: dict[str, str]
) -> None:
    """Of two replicas one is killed, another one joins, and so on; no Accumulator has amounts."""
    with LastingJob(tmp_path / "job", repository, **over) as job:
        job.begin(1)
        settle(job, 1)
        stays = job.programs[0].pid
        for _ in range(8):
            job.add()
            settle(job, 2)
            killed = job.programs.pop()
            killed.send_signal(signal.SIGKILL)
            assert killed.wait() == -signal.SIGKILL
            settle(job, 1)
        stop(job)
        lines = lines_of(job, stays)
    phases = phases_of(lines)
    assert [phase[0]["replicas"] for phase in phases] == [1, *[2, 1] * 8]
    check_holdings(phases, 8, 16)
    check_holdings(phases, 7, 15)
