"""What goes wrong, one function per kind; each returns when it has been done, not when it is over.

A function is given the world and a generator of random numbers, and returns whom or what it hit, or
None where there was nothing to hit.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

import httpx
from world import NODES, World

from pipollux_sched.lifecycle import Intent, Phase
from pipollux_sched.store import JobRecord

Injection: TypeAlias = Callable[[World, random.Random], str | None]


def kill_scheduler(world: World, _: random.Random) -> str | None:
    """SIGKILL of the scheduler at any moment."""
    world.kill()
    world.serve()
    return "the scheduler"


def kill_scheduler_in_a_move(world: World, rng: random.Random) -> str | None:
    """SIGKILL of the scheduler while a job is asked to save, to be started elsewhere."""
    jobs = [job for job in world.training() if job.state.launched]
    if not jobs:
        return None
    job = rng.choice(jobs)
    node = job.state.launched[0]
    _set_node(world, node, "draining")
    try:
        world.until(
            f"{job.name} is being moved",
            lambda: (
                world.jobs()[job.name].state.intent is not None
                or world.jobs()[job.name].phase.ended
                or node not in world.jobs()[job.name].state.launched
            ),
            10.0,
        )
    except AssertionError:
        _set_node(world, node, "ready")
        return None
    time.sleep(rng.uniform(0.0, 1.5))
    moved = world.jobs()[job.name].state.intent is Intent.MOVE
    world.kill()
    world.serve()
    _set_node(world, node, "ready")
    return f"{job.name}, {'stopping' if moved else 'starting'}"


def kill_scheduler_in_a_submission(world: World, rng: random.Random) -> str | None:
    """SIGKILL of the scheduler while a submission is on its way."""
    name = f"raced-{len(world.acknowledged)}-{rng.randrange(10**6)}"

    def submit() -> None:
        with suppress(httpx.HTTPError):
            world.submit(name, rng.randrange(20, 60), num_stages=1)

    thread = threading.Thread(target=submit)
    thread.start()
    time.sleep(rng.uniform(0.0, 0.06))
    world.kill()
    thread.join(30)
    world.serve()
    known = name in world.jobs()
    if known and name not in world.acknowledged:  # taken in, though nobody was told: it must run
        world.acknowledged[name] = int(world.jobs()[name].spec["args"][1])
    return f"{name}, {'taken in' if known else 'not taken in'}"


def _kill_one(world: World, rng: random.Random, is_it: Callable[[int], bool]) -> str | None:
    for job in rng.sample(world.training(), len(world.training())):
        pids = [pid for pid in world.processes(job.name) if is_it(pid)]
        if pids:
            world.signal(rng.choice(pids), signal.SIGKILL)
            return _noticed(world, job)
    return None


def _noticed(world: World, job: JobRecord) -> str:
    """Wait until the scheduler has noticed what happened to a job's generation."""

    def has() -> bool:
        state = world.jobs()[job.name].state
        there = (state.generation, state.phase) == (job.state.generation, Phase.RUNNING)
        return not there or bool(state.intent)

    world.until(f"the scheduler knows of {job.name}", has)
    return job.name


def kill_runner(world: World, rng: random.Random) -> str | None:
    """SIGKILL of the process that watches over an agent."""
    return _kill_one(world, rng, lambda pid: "runner.py" in _command(pid))


def kill_agent(world: World, rng: random.Random) -> str | None:
    """SIGKILL of a torchrun agent."""
    return _kill_one(
        world,
        rng,
        lambda pid: "torch.distributed.run" in _command(pid) and "runner.py" not in _command(pid),
    )


def kill_worker(world: World, rng: random.Random) -> str | None:
    """SIGKILL of the process that trains."""
    return _kill_one(world, rng, _is_worker)


def kill_worker_in_a_save(world: World, _: random.Random) -> str | None:
    """SIGKILL of the process that trains while it writes a checkpoint."""
    jobs = world.training()
    deadline = time.monotonic() + 10.0
    while time.monotonic() < deadline:
        for job in jobs:
            if (world.directory.checkpoints(job.name) / "saving").exists():
                for pid, environment in world.processes(job.name).items():
                    if _is_worker(pid) and environment.get("RANK") == "0":
                        world.signal(pid, signal.SIGKILL)
                        return _noticed(world, job)
        time.sleep(0.005)
    return None


def freeze_worker(world: World, rng: random.Random) -> str | None:
    """SIGSTOP of a process that trains: it is there, and says nothing any more."""
    for job in rng.sample(world.training(), len(world.training())):
        pids = [pid for pid in world.processes(job.name) if _is_worker(pid)]
        if pids:
            world.signal(rng.choice(pids), signal.SIGSTOP)
            return _noticed(world, job)
    return None


def stop_from_outside(world: World, rng: random.Random) -> str | None:
    """SIGTERM of a job's agent by somebody who is not the scheduler."""
    for job in rng.sample(world.training(), len(world.training())):
        pids = [pid for pid in world.processes(job.name) if "runner.py" in _command(pid)]
        if pids:
            world.signal(rng.choice(pids), signal.SIGTERM)
            return _noticed(world, job)
    return None


def fill_disk(world: World, rng: random.Random) -> str | None:
    """No space left where a job saves, for a while."""
    small = [job for job in world.training() if job.spec.get("checkpoint_dir")]
    if not small:
        return None
    folder = Path(rng.choice(small).spec["checkpoint_dir"])
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (65536, 64):
            with suppress(OSError):
                while True:
                    file.write(b"0" * size)
    time.sleep(rng.uniform(2.0, 4.0))
    filler.unlink()
    return folder.name


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
    """Hints of 10 MB."""
    return _send(world, rng, b'{"padding": "' + b"x" * 10_000_000 + b'"}', 413)


def send_a_nan_hint(world: World, rng: random.Random) -> str | None:
    """Hints that are not numbers."""
    content = {"initBatchSize": 32, "gradParams": {"sqr": float("nan"), "var": 1.0}}
    return _send(world, rng, json.dumps(content).encode(), 422)


def send_with_a_wrong_token(world: World, rng: random.Random) -> str | None:
    """Hints, and a cancellation, by somebody who has another job's token, or none."""
    jobs = world.under_way()
    if len(jobs) < 2:
        return None
    mine, other = rng.sample(jobs, 2)
    with world.client(mine.token) as client:
        path = f"/jobs/{other.name}"
        asked = [client.put(f"{path}/hints?generation=1", json={}), client.delete(path)]
    assert [answer.status_code for answer in asked] == [401, 401], asked
    return other.name


def set_clock(world: World, rng: random.Random) -> str | None:
    """The clock jumps by up to a day, forwards or back."""
    jump = rng.choice([-86400, -3600, -30, 30, 3600, 86400])
    world.clock.write_text(str(float(world.clock.read_text()) + jump))
    return f"{jump:+d} s"


def _out_for_a_while(world: World, rng: random.Random, condition: str) -> str:
    node = rng.choice(list(NODES))
    _set_node(world, node, condition)
    time.sleep(rng.uniform(1.0, 5.0))
    _set_node(world, node, "ready")
    return node


def _set_node(world: World, node: str, condition: str) -> None:
    with world.client() as client:
        body = {"condition": condition, "reason": "a fault"}
        client.put(f"/nodes/{node}", json=body).raise_for_status()


def _send(world: World, rng: random.Random, content: bytes, status: int) -> str | None:
    jobs = world.training()
    if not jobs:
        return None
    job = rng.choice(jobs)
    with world.client(job.token) as client:
        path = f"/jobs/{job.name}/hints?generation={job.state.generation}"
        answer = client.put(path, content=content)
    assert answer.status_code in (status, 409), (answer.status_code, answer.text[:200])
    return job.name


def _is_worker(pid: int) -> bool:
    command = _command(pid)
    return "counting_job.py" in command and "torch.distributed.run" not in command


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def mount_small_disk(folder: Path) -> bool:
    """Make a folder a disk of one megabyte; False where this user may not."""
    folder.mkdir(parents=True)
    if os.geteuid() != 0:
        return False
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def unmount(folder: Path) -> None:
    """Undo `mount_small_disk`."""
    subprocess.run(["umount", str(folder)], capture_output=True, check=False)


INJECTIONS: Mapping[str, tuple[int, Injection]] = {
    "scheduler killed": (3, kill_scheduler),
    "scheduler killed in a move": (3, kill_scheduler_in_a_move),
    "scheduler killed in a submission": (3, kill_scheduler_in_a_submission),
    "runner killed": (2, kill_runner),
    "torchrun agent killed": (2, kill_agent),
    "worker killed": (2, kill_worker),
    "worker killed in a save": (2, kill_worker_in_a_save),
    "worker frozen": (1, freeze_worker),
    "agent stopped from outside": (1, stop_from_outside),
    "disk full": (1, fill_disk),
    "node drained": (1, drain_node),
    "node dead": (1, lose_node),
    "job suspended and resumed": (1, suspend_and_resume),
    "hints of 10 MB": (1, send_a_large_hint),
    "hints that are not numbers": (1, send_a_nan_hint),
    "wrong token": (1, send_with_a_wrong_token),
    "clock set": (1, set_clock),
}
"""Every kind of fault, and how often it comes relative to the others."""
