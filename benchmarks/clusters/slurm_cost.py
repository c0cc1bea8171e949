"""The cost of a scheduler on Slurm with many replicas, and the start time of a replica.

    python benchmarks/clusters/slurm_cost.py [--replicas 200] [--seconds 60] [--starts 8]
    python benchmarks/clusters/slurm_cost.py --read 10000

Replicas are steps of a real Slurm that send heartbeats and sleep. With `--read` there is no Slurm:
the engine reads the output that Slurm would print for that many steps. Prints Markdown.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

import psutil
from slurm_listings import listings  # same folder
from slurm_world import HERE, SlurmWorld  # same folder

from pipollux_sched.backend.slurm.output import STEP_FORMAT
from pipollux_sched.spec.job import JobSpec

PROGRAMS = ("squeue", "scontrol", "srun", "scancel", "sbatch")
OPTIONS = ("--nodes=3", "--interval=5", "--grace=5", "--heartbeat-timeout=120")
SETTINGS = {"SrunPortRange": "20000-29999"}
"""An srun listens on three ports, and the tests' range has only 800."""
JOB_REPLICAS = 10
PATIENCE = 300.0
CALLS = 10


class SleeperWorld(SlurmWorld):
    """A scheduler whose replicas sleep, and whose calls to Slurm are counted."""

    def __init__(self, folder: Path, slots: int) -> None:
        self.calls = folder / "calls"
        self._programs = folder / "programs"
        self._programs.mkdir(parents=True)
        for name in PROGRAMS:
            real = shutil.which(name)
            script = self._programs / name
            script.write_text(f'#!/bin/sh\necho {name} >> {self.calls}\nexec {real} "$@"\n')
            script.chmod(0o755)
        super().__init__(folder, slots=slots, options=OPTIONS, settings=SETTINGS)

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
        """Return the number of calls of each Slurm command."""
        return Counter(self.calls.read_text().split())

    def cpu_seconds(self) -> tuple[float, float]:
        """Return CPU time of the scheduler and of the commands that it has completed."""
        assert self._server is not None
        times = psutil.Process(self._server.pid).cpu_times()
        return times.user + times.system, times.children_user + times.children_system

    def controller_seconds(self) -> float:
        """Return the CPU time of slurmctld."""
        pid = int((self.slurm.folder / "slurmctld.pid").read_text())
        times = psutil.Process(pid).cpu_times()
        return float(times.user + times.system)

    def squeue(self) -> tuple[float, float]:
        """Return seconds and CPU seconds of one `squeue` of all steps."""
        begun, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
        self.slurm.call("squeue", "-h", "--me", "-s", "-o", STEP_FORMAT)
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime
        return time.monotonic() - begun, cpu

    def replica_mib(self, replicas: int) -> float:
        """Return the memory of a replica on the scheduler's machine: its srun.
        Memory shared by processes is divided among them.
        """
        assert self._server is not None
        processes = psutil.Process(self._server.pid).children(recursive=True)
        return sum(_own_share(process) for process in processes) / replicas / 2**20

    def launch_job(self, name: str, replicas: int) -> None:
        """Submit a job of sleepers."""
        script = HERE / "slurm_sleeper.py"
        fields = {"min_replicas": replicas, "max_replicas": replicas, "preemptible": False}
        spec = {"name": name, "script": str(script), "num_stages": 1, **fields}
        with self.api() as client:
            client.submit(JobSpec.model_validate(spec))

    def began(self, name: str) -> list[float]:
        """Return the start times of a job's replicas that have started."""
        files = self.directory.checkpoints(name).glob("began-*")
        return [float(file.read_text() or 0) for file in files]


def starts(world: SleeperWorld, number: int) -> tuple[list[float], list[float]]:
    """Return seconds from decision to first process, and of `srun true`, in turn."""
    ours, plain = [], []
    for index in range(number):
        name = f"single-{index}"
        world.launch_job(name, 1)
        world.until(f"{name} runs", lambda name=name: all([*world.began(name), 0][:1]), PATIENCE)
        attempt = world.store.attempts(name)[-1]
        ours.append(world.began(name)[0] - attempt.created_at)
        begun = time.monotonic()
        pool = world.pools()[0]
        world.slurm.call("srun", f"--jobid={pool}", "--exact", "-N1", "-n1", "--mem=0", "true")
        plain.append(time.monotonic() - begun)
    return ours, plain


def cost(world: SleeperWorld, replicas: int, seconds: float) -> list[str]:
    """Start many replicas, and return lines with their cost."""
    before, begun = sum(world.cpu_seconds()), time.monotonic()
    names = [f"many-{index}" for index in range(replicas // JOB_REPLICAS)]
    for name in names:
        world.launch_job(name, JOB_REPLICAS)
    total = len(names) * JOB_REPLICAS
    world.until(
        f"{total} replicas run", lambda: sum(len(world.began(x)) for x in names) >= total, PATIENCE
    )
    took, used = time.monotonic() - begun, sum(world.cpu_seconds()) - before
    time.sleep(15.0)  # until all starts are complete and listed
    own, of_commands = world.cpu_seconds()
    counted, begun, of_slurm = world.counted(), time.monotonic(), world.controller_seconds()
    time.sleep(seconds)
    minutes = (time.monotonic() - begun) / 60.0
    own_now, commands_now = world.cpu_seconds()
    of_slurm = world.controller_seconds() - of_slurm
    calls = world.counted() - counted
    a_minute = ", ".join(f"{name} {calls[name] / minutes:.0f}" for name in PROGRAMS if calls[name])
    assert sum(len(world.began(name)) for name in names) == total
    return [
        f"| start of {total} replicas | {took:.0f} s, {used:.1f} CPU s |",
        f"| CPU s a minute, scheduler | {(own_now - own) / minutes:.2f} |",
        f"| CPU s a minute, its calls to Slurm | {(commands_now - of_commands) / minutes:.2f} |",
        f"| CPU s a minute, slurmctld | {of_slurm / minutes:.2f} |",
        f"| calls a minute | {a_minute} |",
        f"| `squeue` of all steps | {_squeues(world)} |",
        f"| memory of a replica on the scheduler's machine | {world.replica_mib(total):.1f} MiB |",
    ]


def _squeues(world: SleeperWorld) -> str:
    taken = [world.squeue() for _ in range(CALLS)]
    seconds, cpu = (median(column) for column in zip(*taken, strict=True))
    return f"median {1000 * seconds:.0f} ms, {1000 * cpu:.0f} ms of CPU ({CALLS} calls)"


def _own_share(process: psutil.Process) -> int:
    try:
        return int(process.memory_full_info().pss)
    except psutil.Error:  # a command that has ended
        return 0


def ratios(ours: Sequence[float], plain: Sequence[float]) -> str:
    several = [a / b for a, b in zip(ours, plain, strict=True)]
    return (
        f"| decision to first process | {median(ours):.2f} s; `srun true` {median(plain):.2f} s; "
        f"ratio {median(several):.1f} ({min(several):.1f} to {max(several):.1f}, {len(ours)}) |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--replicas", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--starts", type=int, default=8)
    parser.add_argument("--read", type=int, metavar="STEPS")
    options = parser.parse_args()
    if options.read:
        listings(options.read)
        return
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
