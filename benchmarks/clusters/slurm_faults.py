"""Random faults of a Slurm cluster during one long workload, and their effect on the jobs.

    python benchmarks/clusters/slurm_faults.py [--faults 100] [--seed 0] [--jobs 3] [--out FILE]

The jobs and the invariants after every fault and at the end are those of benchmarks/faults; in a
fifth of the faults the scheduler is killed as well. Prints Markdown; at the first violation exits
with status 1, and keeps the folder.
"""

from __future__ import annotations

import argparse
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "faults"))

import process_faults as processes  # of benchmarks/faults
import scheduler_faults as scheduler
from faults import Run
from injections import Injection
from invariants import Invariants
from slurm_world import INTERVALS, SlurmWorld  # same folder
from world import World

from pipollux_sched.store import NodeCondition

LINK_SECONDS = 60.0
KILLED_TOO = 0.2
"""Share of the faults during which the scheduler is killed."""

SlurmFault = Callable[[SlurmWorld, random.Random], str | None]


class SlurmInvariants(Invariants):
    """Requires all nodes to be back, besides the invariants of one machine."""

    world: SlurmWorld

    def settled(self) -> bool:
        """Whether all hosts take jobs, and no decision is still being carried out."""
        nodes = self.world.store.nodes().values()
        ready = {node.name for node in nodes if node.condition is NodeCondition.READY}
        return ready >= set(self.world.nodes) and super().settled()


def kill_slurmd(world: SlurmWorld, rng: random.Random) -> str | None:
    """SIGKILL of a slurmd, and a new one after a while."""
    node = rng.choice(world.slurm.nodes)
    world.strike()
    world.slurm.kill_node(node)
    kill_perhaps(world, rng)
    time.sleep(rng.uniform(1.0, 15.0))
    world.slurm.start_node(node)
    return node


def pull_cable(world: SlurmWorld, rng: random.Random) -> str | None:
    """A host is unreachable for a minute; then it is back, with what it still runs."""
    host = rng.choice(world.hosts.names)
    world.strike()
    world.hosts.link_down(host)
    try:
        kill_perhaps(world, rng)
        time.sleep(LINK_SECONDS)
    finally:
        world.hosts.link_up(host)
    return host


def revoke_pool(world: SlurmWorld, rng: random.Random) -> str | None:
    pools = world.pools()
    if not pools:
        return None
    number = rng.choice(pools)
    before = world.store.last_event()
    world.strike()
    world.slurm.call("scancel", str(number))
    kill_perhaps(world, rng)
    world.until(
        "the scheduler knows that nodes are gone",
        lambda: world.store.events(before, types=["cluster"], limit=1),
    )
    return f"allocation {number}"


def restart_slurmctld(world: SlurmWorld, rng: random.Random) -> str | None:
    """Slurm's controller ends, in an orderly way or not, and another one takes its place."""
    how = rng.choice([signal.SIGTERM, signal.SIGKILL])
    world.strike()
    world.slurm.stop_controller(how)
    kill_perhaps(world, rng, start=False)
    time.sleep(rng.uniform(0.0, 10.0))
    world.slurm.start_controller()
    if not world.lives():
        world.serve()
    return f"slurmctld, {how.name}"


def drain_node(world: SlurmWorld, rng: random.Random) -> str | None:
    node = rng.choice(world.slurm.nodes)
    world.strike()
    world.slurm.drain(node)
    kill_perhaps(world, rng)
    time.sleep(rng.uniform(1.0, 10.0))
    world.slurm.resume(node)
    return node


def cancel_step(world: SlurmWorld, rng: random.Random) -> str | None:
    lines = world.slurm.call("squeue", "--noheader", "--steps", "--format=%i %j")
    steps = re.findall(r"^(\S+) (\S+\.a\d+\.r\d+)$", lines, re.MULTILINE)
    if not steps:
        return None
    number, name = rng.choice(steps)
    job = world.jobs()[name.partition(".")[0]]
    world.strike()
    world.slurm.call("scancel", number)
    kill_perhaps(world, rng)
    processes.noticed(world, job)
    return name


def with_a_kill(fault: Injection) -> SlurmFault:
    """Return a fault during which the scheduler is killed in a fifth of the cases."""

    def strike(world: SlurmWorld, rng: random.Random) -> str | None:
        hit = fault(world, rng)
        if hit is not None:
            kill_perhaps(world, rng)
        return hit

    return strike


def kill_perhaps(world: SlurmWorld, rng: random.Random, start: bool = True) -> None:
    """Kill the scheduler in a fifth of all cases; `start`: whether to start another one at once."""
    if rng.random() >= KILLED_TOO:
        return
    time.sleep(rng.uniform(0.0, 2.0))
    world.kill()
    world.num_kills += 1
    if start:
        world.serve()


FAULTS: Mapping[str, tuple[int, SlurmFault]] = {
    "slurmd killed, started again": (3, kill_slurmd),
    "link of a host down for 60 s": (1, pull_cable),
    "allocation revoked": (3, revoke_pool),
    "slurmctld restarted": (3, restart_slurmctld),
    "node drained by Slurm": (1, drain_node),
    "step cancelled": (2, cancel_step),
    "worker killed": (2, with_a_kill(processes.kill_worker)),
    "worker killed in a save": (2, with_a_kill(processes.kill_worker_in_a_save)),
    "agent killed": (2, with_a_kill(processes.kill_agent)),
    "worker frozen": (2, with_a_kill(processes.freeze_worker)),
    "scheduler killed": (2, scheduler.kill_scheduler),
}
"""Every kind of fault, and its relative frequency."""


def on_slurm(world: World, rng: random.Random, fault: SlurmFault) -> str | None:
    """Adapt a fault to a `World`."""
    assert isinstance(world, SlurmWorld)
    return fault(world, rng)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=600.0, help="no faults after so long")
    parser.add_argument("--only", action="append", choices=list(FAULTS), help="may be repeated")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="pipollux-slurm-faults-"))
    injections = {
        name: (weight, partial(on_slurm, fault=fault))
        for name, (weight, fault) in FAULTS.items()
        if not options.only or name in options.only
    }
    last = time.monotonic() + 60.0 * options.minutes
    try:
        with SlurmWorld(folder, options=("--nodes=3", *INTERVALS)) as world:
            checks = SlurmInvariants(world)
            run = Run(folder, options.seed, options.jobs, options.out, checks, injections)
            world.until("the nodes are there", lambda: len(world.store.nodes()) == 3)
            while run.total < options.faults and time.monotonic() < last:
                run.keep_busy()
                run.inject()
            run.finish()
            assert not world.steps(), f"steps are left: {world.steps()}"
            assert not world.pools(), f"allocations are left: {world.pools()}"
            print(run.report())
            print(f"\nThe scheduler was killed in the middle of {world.num_kills} of them.")
    except BaseException:  # also Ctrl-C
        print(f"what is left of it lies in {folder}", file=sys.stderr)
        raise
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
