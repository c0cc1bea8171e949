"""What the scheduler costs on Slurm with many replicas, and how long a replica takes to start.

    python benchmarks/clusters/slurm_cost.py [--replicas 200] [--seconds 60] [--starts 8]

Replicas are steps of a real Slurm that beat and sleep. Prints Markdown.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

import psutil
from slurm_world import HERE, SlurmWorld  # lies beside

from pipollux_sched.spec.job import JobSpec

PROGRAMS = ("squeue", "scontrol", "srun", "scancel", "sbatch")
OPTIONS = ("--nodes=3", "--interval=5", "--grace=5", "--heartbeat-timeout=120")
JOB_REPLICAS = 10
PATIENCE = 300.0


class SleeperWorld(SlurmWorld):
    """A scheduler whose replicas sleep, and whose calls to Slurm are counted.

    Args:
        folder: see `SlurmWorld`.
        slots: of each of the three hosts.
    """

    def __init__(self, folder: Path, slots: int) -> None:
        self.calls = folder / "calls"
        self._programs = folder / "programs"
        self._programs.mkdir(parents=True)
        for name in PROGRAMS:
            real = shutil.which(name)
            script = self._programs / name
            script.write_text(f'#!/bin/sh\necho {name} >> {self.calls}\nexec {real} "$@"\n')
            script.chmod(0o755)
        super().__init__(folder, slots=slots, options=OPTIONS)

    def command(self) -> list[str]:
        """Return the command of a scheduler: see `World`."""
        program, *arguments = super().command()
        python = str(Path(program).with_name("python"))
        return [python, str(HERE / "slurm_serve_sleepers.py"), *arguments]

    def environment(self) -> Mapping[str, str]:
        """Return variables of the scheduler: see `World`."""
        path = f"{self._programs}:{os.environ['PATH']}"
        return {**super().environment(), "PATH": path}

    def counted(self) -> Counter[str]:
        """Return how often each of Slurm's commands has been called."""
        return Counter(self.calls.read_text().split())

    def cpu_seconds(self) -> tuple[float, float]:
        """Return CPU time of the scheduler, and of the commands that it has run to their end."""
        assert self._server is not None
        times = psutil.Process(self._server.pid).cpu_times()
        return times.user + times.system, times.children_user + times.children_system

    def launch_job(self, name: str, replicas: int) -> None:
        """Submit a job of sleepers."""
        script = HERE / "slurm_sleeper.py"
        fields = {"min_replicas": replicas, "max_replicas": replicas, "preemptible": False}
        spec = {"name": name, "script": str(script), "num_stages": 1, **fields}
        with self.api() as client:
            client.submit(JobSpec.model_validate(spec))

    def began(self, name: str) -> list[float]:
        """Return when the replicas of a job began that have."""
        files = self.directory.checkpoints(name).glob("began-*")
        return [float(file.read_text() or 0) for file in files]


def starts(world: SleeperWorld, number: int) -> tuple[list[float], list[float]]:
    """Return seconds from decision to first process, and of `srun true`, taken in turn."""
    ours, plain = [], []
    for index in range(number):
        name = f"single-{index}"
        world.launch_job(name, 1)
        world.until(f"{name} runs", lambda name=name: all([*world.began(name), 0][:1]), PATIENCE)
        generation = world.store.generations(name)[-1]
        ours.append(world.began(name)[0] - generation.created_at)
        begun = time.monotonic()
        pool = world.pools()[0]
        world.slurm.call("srun", f"--jobid={pool}", "--exact", "-N1", "-n1", "--mem=0", "true")
        plain.append(time.monotonic() - begun)
    return ours, plain


def cost(world: SleeperWorld, replicas: int, seconds: float) -> list[str]:
    """Start many replicas, and return lines of what they cost."""
    before, begun = sum(world.cpu_seconds()), time.monotonic()
    names = [f"many-{index}" for index in range(replicas // JOB_REPLICAS)]
    for name in names:
        world.launch_job(name, JOB_REPLICAS)
    total = len(names) * JOB_REPLICAS
    world.until(
        f"{total} replicas run", lambda: sum(len(world.began(x)) for x in names) >= total, PATIENCE
    )
    took, used = time.monotonic() - begun, sum(world.cpu_seconds()) - before
    time.sleep(15.0)  # until nothing is starting any more, and a look has shown it
    own, of_commands = world.cpu_seconds()
    counted, begun = world.counted(), time.monotonic()
    time.sleep(seconds)
    minutes = (time.monotonic() - begun) / 60.0
    own_now, commands_now = world.cpu_seconds()
    calls = world.counted() - counted
    a_minute = ", ".join(f"{name} {calls[name] / minutes:.0f}" for name in PROGRAMS if calls[name])
    assert sum(len(world.began(name)) for name in names) == total
    return [
        f"| start of {total} replicas | {took:.0f} s, {used:.1f} CPU s |",
        f"| CPU s a minute, scheduler | {(own_now - own) / minutes:.2f} |",
        f"| CPU s a minute, its calls to Slurm | {(commands_now - of_commands) / minutes:.2f} |",
        f"| calls a minute | {a_minute} |",
    ]


def ratios(ours: Sequence[float], plain: Sequence[float]) -> str:
    """Return a line that compares starts."""
    several = [a / b for a, b in zip(ours, plain, strict=True)]
    return (
        f"| decision to first process | {median(ours):.2f} s; `srun true` {median(plain):.2f} s; "
        f"ratio {median(several):.1f} ({min(several):.1f} to {max(several):.1f}, {len(ours)}) |"
    )


def main() -> None:
    """Run it all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--replicas", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--starts", type=int, default=8)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="pipollux-slurm-cost-"))
    slots = -(-(options.replicas + options.starts) // 3) + JOB_REPLICAS
    with SleeperWorld(folder, slots) as world:
        world.until("the nodes are there", lambda: len(world.store.nodes()) == 3)
        lines = ["| | |", "|---|---|", ratios(*starts(world, options.starts))]
        lines += cost(world, options.replicas, options.seconds)
        print("\n".join(lines), f"\nLoad of the machine meanwhile: {os.getloadavg()[0]:.1f}.")
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
