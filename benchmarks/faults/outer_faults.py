"""Faults outside of the scheduler: disks, nodes, clocks, and requests of users and jobs.

Like all faults, each is a function of the world and a random generator that returns its target, or
None if there was none.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from scheduler_faults import being_moved  # same folder
from world import World

from pipollux_sched.store import JobRecord


def fill_disk(world: World, rng: random.Random) -> str | None:
    """The disk of a job's checkpoints is full for a while."""
    job = _on_small_disk(world, rng)
    if job is None:
        return None
    with _full(world.checkpoints(job)):
        time.sleep(rng.uniform(2.0, 4.0))
    return job.name


def fill_disk_in_a_move(world: World, rng: random.Random) -> str | None:
    """The disk is full for a job that has to save, to be started elsewhere."""
    job = _on_small_disk(world, rng)
    if job is None or not job.spec["preemptible"]:
        return None
    node = job.state.running_on[0]
    with _full(world.checkpoints(job)):
        if not being_moved(world, job.name, node):
            return None
        time.sleep(rng.uniform(0.5, 3.0))
    world.set_node(node, "ready")
    return job.name


def drain_node(world: World, rng: random.Random) -> str | None:
    """A node drains, and is ready again later."""
    return _out_for_a_while(world, rng, "draining")


def lose_node(world: World, rng: random.Random) -> str | None:
    """A node is declared dead, and is ready again later."""
    return _out_for_a_while(world, rng, "dead")


def suspend_and_resume(world: World, rng: random.Random) -> str | None:
    """A user suspends a job and resumes it, perhaps before it has stopped."""
    jobs = world.training()
    if not jobs:
        return None
    name = rng.choice(jobs).name
    with world.client() as client:
        client.post(f"/jobs/{name}/suspend").raise_for_status()
        time.sleep(rng.uniform(0.0, 3.0))
        client.post(f"/jobs/{name}/resume").raise_for_status()
    return name


def send_a_large_hint(world: World, rng: random.Random) -> str | None:
    return _send(world, rng, b'{"padding": "' + b"x" * 10_000_000 + b'"}', 413)


def send_a_nan_hint(world: World, rng: random.Random) -> str | None:
    """Hints that are not numbers."""
    content = {"initBatchSize": 32, "gradParams": {"sqr": float("nan"), "var": 1.0}}
    return _send(world, rng, json.dumps(content).encode(), 422)


def send_a_large_submission(world: World, _: random.Random) -> str | None:
    spec = {"name": "large", "script": "job.py", "environment": {"PADDING": "x" * 10_000_000}}
    with world.client() as client:
        answer = client.post("/jobs", json=spec)
    assert answer.status_code == 413, (answer.status_code, answer.text[:200])
    assert "large" not in world.jobs(), "a submission that was refused is in the store"
    return "the scheduler"


def send_with_a_wrong_token(world: World, rng: random.Random) -> str | None:
    """Hints, and a cancellation, with another job's token, or none."""
    jobs = world.under_way()
    if len(jobs) < 2:
        return None
    mine, other = rng.sample(jobs, 2)
    with world.client(mine.token) as client:
        path = f"/jobs/{other.name}"
        asked = [client.put(f"{path}/hints?attempt=1", json={}), client.delete(path)]
    assert [answer.status_code for answer in asked] == [401, 401], asked
    return other.name


def set_clock(world: World, rng: random.Random) -> str | None:
    """The clock jumps by up to a day, forwards or back."""
    jump = rng.choice([-86400, -3600, -30, 30, 3600, 86400])
    world.clock.write_text(str(float(world.clock.read_text()) + jump))
    return f"{jump:+d} s"


def mount_small_disk(folder: Path) -> bool:
    """Mount a disk of eight megabytes on a folder; False if this user may not."""
    folder.mkdir(parents=True)
    if os.geteuid() != 0:
        return False
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def unmount(folder: Path) -> None:
    subprocess.run(["umount", str(folder)], capture_output=True, check=False)


def _on_small_disk(world: World, rng: random.Random) -> JobRecord | None:
    small = [job for job in world.training() if job.spec.get("checkpoint_dir")]
    return rng.choice(small) if small else None


@contextmanager
def _full(folder: Path) -> Iterator[None]:
    """Fill the disk of a folder."""
    filler = folder / "filler"
    try:
        with filler.open("wb", buffering=0) as file:
            for size in (65536, 64):
                with suppress(OSError):
                    while True:
                        file.write(b"0" * size)
        yield
    finally:
        filler.unlink()


def _out_for_a_while(world: World, rng: random.Random, condition: str) -> str:
    node = rng.choice(list(world.nodes))
    world.set_node(node, condition)
    time.sleep(rng.uniform(1.0, 5.0))
    world.set_node(node, "ready")
    return node


def _send(world: World, rng: random.Random, content: bytes, status: int) -> str | None:
    jobs = world.training()
    if not jobs:
        return None
    job = rng.choice(jobs)
    with world.client(job.token) as client:
        path = f"/jobs/{job.name}/hints?attempt={job.state.attempt}"
        answer = client.put(path, content=content)
    assert answer.status_code in (status, 409), (answer.status_code, answer.text[:200])
    return job.name
