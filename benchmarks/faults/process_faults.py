"""Faults of the processes of jobs: they are killed, frozen, or stopped from outside.

Like all faults, each is a function of the world and a random generator that returns its target, or
None if there was none.
"""

from __future__ import annotations

import random
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

from world import World  # same folder

from pipollux_sched.lifecycle import Phase
from pipollux_sched.store import JobRecord

_AGENT = re.compile(r"\S*python\S* -P \S*/agent\.py ")
"""Occurs in the command of an agent, and of none of its ancestors."""


def kill_runner(world: World, rng: random.Random) -> str | None:
    """SIGKILL of the parent that supervises an agent."""
    return _hit_one(world, rng, runners, signal.SIGKILL)


def kill_agent(world: World, rng: random.Random) -> str | None:
    return _hit_one(world, rng, agents, signal.SIGKILL)


def kill_worker(world: World, rng: random.Random) -> str | None:
    """SIGKILL of the training process."""
    return _hit_one(world, rng, workers, signal.SIGKILL)


def freeze_worker(world: World, rng: random.Random) -> str | None:
    """SIGSTOP of a training process: it exists, but sends nothing."""
    return _hit_one(world, rng, workers, signal.SIGSTOP)


def stop_from_outside(world: World, rng: random.Random) -> str | None:
    """SIGTERM of a job's agent, not by the scheduler."""
    return _hit_one(world, rng, runners, signal.SIGTERM)


def kill_attempt(world: World, rng: random.Random) -> str | None:
    """SIGKILL of every process of an attempt at once."""
    for job in rng.sample(world.training(), len(world.training())):
        pids = list(world.processes(job.name))
        for pid in pids:
            world.signal(pid, signal.SIGKILL)
        if pids:
            return noticed(world, job)
    return None


def kill_worker_in_a_save(world: World, _: random.Random) -> str | None:
    """SIGKILL of the training process while it writes a checkpoint."""
    jobs = world.training()
    deadline = time.monotonic() + 10.0
    while time.monotonic() < deadline:
        for job in jobs:
            if _saves(world.checkpoints(job)):
                for pid in workers(world, job.name, rank="0"):
                    world.signal(pid, signal.SIGKILL)
                    return noticed(world, job)
        time.sleep(0.005)
    return None


def _saves(folder: Path) -> bool:
    """Whether the counting job, or the library, is about to save here."""
    return (folder / "saving").exists() or any(folder.glob(".checkpoint-*"))


def noticed(world: World, job: JobRecord) -> str:
    """Wait until the scheduler has noticed the fault of a job's attempt."""

    def has() -> bool:
        state = world.jobs()[job.name].state
        there = (state.attempt, state.phase) == (job.state.attempt, Phase.RUNNING)
        return (
            not there
            or bool(state.intent)
            or state.membership.number != job.state.membership.number
        )

    world.until(f"the scheduler knows of {job.name}", has)
    return job.name


def runners(world: World, job: str) -> list[int]:
    """Processes that supervise an agent of a job."""
    return [pid for pid in world.processes(job) if "supervisor.py" in _command(pid)]


def agents(world: World, job: str) -> list[int]:
    return [pid for pid in world.processes(job) if _AGENT.match(_command(pid))]


def workers(world: World, job: str, rank: str | None = None) -> list[int]:
    """Training processes of a job; all, or replica `rank` only."""
    return [
        pid
        for pid, environment in world.processes(job).items()
        # Only agents set it.
        if "RANK" in environment and rank in (None, environment["RANK"])
    ]


def _hit_one(
    world: World,
    rng: random.Random,
    find: Callable[[World, str], list[int]],
    number: signal.Signals,
) -> str | None:
    for job in rng.sample(world.training(), len(world.training())):
        pids = find(world, job.name)
        if pids:
            world.signal(rng.choice(pids), number)
            return noticed(world, job)
    return None


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""
