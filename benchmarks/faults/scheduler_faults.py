"""Faults of the scheduler: it is killed, at moments of every kind, or started twice.

Like all faults, each is a function of the world and a random generator that returns its target, or
None if there was none.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

import httpx
from process_faults import agents, noticed, workers  # same folder
from workload import COUNTING, Work
from world import World

from pipollux_sched.lifecycle import Intent
from pipollux_sched.store import JobRecord

MOST_UNDER_WAY = 10
"""Maximum jobs under way, including those that wait after a failure."""

HEARD_WITHIN = 3.0
"""Seconds within which each training replica has sent a heartbeat."""


def kill_scheduler(world: World, _: random.Random) -> str | None:
    world.kill()
    world.serve()
    return "the scheduler"


def kill_scheduler_as_it_starts(world: World, rng: random.Random) -> str | None:
    """SIGKILL of the scheduler, then of the next while it starts, and of the one after that.

    The second one is killed shortly after it has printed its address, while it adopts replicas.
    """
    world.kill()
    world.launch()
    time.sleep(rng.uniform(0.3, 3.0))
    world.kill()
    world.launch()
    world.until("the scheduler listens", world.listens)
    time.sleep(rng.uniform(0.0, 0.4))
    world.kill()
    world.serve()
    return "three schedulers"


def kill_scheduler_in_a_move(world: World, rng: random.Random) -> str | None:
    """SIGKILL of the scheduler while a job saves, to be started elsewhere."""
    jobs = [job for job in world.training() if job.spec["preemptible"]]
    if not jobs:
        return None
    job = rng.choice(jobs)
    node = job.state.running_on[0]
    if not being_moved(world, job.name, node):
        return None
    time.sleep(rng.uniform(0.0, 1.5))
    moved = world.jobs()[job.name].state.intent is Intent.MOVE
    world.kill()
    world.serve()
    world.set_node(node, "ready")
    return f"{job.name}, {'stopping' if moved else 'starting'}"


def kill_scheduler_in_a_resize(world: World, _: random.Random) -> str | None:
    """SIGKILL of the scheduler while replicas are about to join or leave."""
    job = _changing(world)
    if job is None:
        return None
    world.kill()
    world.serve()
    change = job.state.membership.change
    return f"{job.name}, {change.stage if change else 'changed'}"


def kill_joining_replica(world: World, rng: random.Random) -> str | None:
    deadline = time.monotonic() + 5.0
    while time.monotonic() < deadline:
        job = _changing(world)
        joining = {str(replica) for replica, _ in job.state.membership.joining} if job else set()
        found = [
            pid
            for pid, environment in world.processes(job.name if job else "").items()
            if environment.get("PIPOLLUX_REPLICA") in joining and "RANK" in environment
        ]
        if job is not None and found:
            world.signal(rng.choice(found), signal.SIGKILL)
            return job.name
        time.sleep(0.05)  # its process starts soon
    return None


def _changing(world: World) -> JobRecord | None:
    """Return a job that is being resized, as soon as there is one."""
    deadline = time.monotonic() + 5.0
    while time.monotonic() < deadline:
        for job in world.under_way():
            if job.state.membership.change is not None:
                return job
        time.sleep(0.02)
    return None


def being_moved(world: World, job: str, node: str) -> bool:
    """Drain a node, and wait until a job leaves it; otherwise the node is ready again."""
    world.set_node(node, "draining")

    def leaves() -> bool:
        now = world.jobs()[job]
        return bool(now.state.intent) or now.phase.ended or node not in now.state.running_on

    try:
        world.until(f"{job} is being moved", leaves, 10.0)
    except AssertionError:
        world.set_node(node, "ready")
        return False
    return True


def kill_scheduler_in_a_submission(world: World, rng: random.Random) -> str | None:
    """SIGKILL of the scheduler while a submission is on its way."""
    if len(world.under_way()) >= MOST_UNDER_WAY:
        return None
    name = f"raced-{len(world.acknowledged)}-{rng.randrange(10**6)}"
    work = Work(COUNTING, rng.randrange(20, 60))

    def submit() -> None:
        with suppress(httpx.HTTPError):
            world.submit(name, work, num_stages=1)

    thread = threading.Thread(target=submit)
    thread.start()
    time.sleep(rng.uniform(0.0, 1.2 * world.submission_seconds))
    world.kill()
    thread.join(30)
    world.serve()
    known = name in world.jobs()
    if known:  # accepted, perhaps without an answer: it must run
        world.acknowledged[name] = work
    return f"{name}, {'taken in' if known else 'not taken in'}"


def kill_scheduler_and_agent(world: World, rng: random.Random) -> str | None:
    """SIGKILL of the scheduler and of a torchrun agent, whose exit status is then unknown."""
    jobs = world.training()
    if not jobs:
        return None
    job = rng.choice(jobs)
    pids = agents(world, job.name)
    if not pids:
        return None
    world.kill()
    world.signal(rng.choice(pids), signal.SIGKILL)
    world.serve()
    return noticed(world, job)


def kill_scheduler_and_freeze_worker(world: World, rng: random.Random) -> str | None:
    """SIGSTOP of a training process, and SIGKILL of the scheduler that would have noticed."""
    jobs = world.training()
    if not jobs:
        return None
    job = rng.choice(jobs)
    pids = workers(world, job.name)
    if not pids:
        return None
    time.sleep(HEARD_WITHIN)
    world.signal(rng.choice(pids), signal.SIGSTOP)
    world.kill()
    world.serve()
    return noticed(world, job)


def serve_twice(world: World, _: random.Random) -> str | None:
    """A second `pipollux serve` on the same state directory, which must exit with an error."""
    directory = str(world.directory.path)
    program = [sys.executable, "-c", "from pipollux_sched.cli import main; main()", "serve"]
    ended = subprocess.run(
        [*program, "--cluster", str(world.cluster), "--state-dir", directory],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    said = ended.stderr.strip().splitlines()
    assert (ended.returncode, ended.stdout, len(said)) == (1, "", 1), ended
    assert f"another scheduler already serves {directory}" in said[0], ended
    assert world.listens(), "the second scheduler has taken the first one's place"
    return "the state directory"
