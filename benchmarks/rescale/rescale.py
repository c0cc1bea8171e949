"""How long replicas pause while others join and leave, and how long a restart takes.

    .venv/bin/python benchmarks/rescale/rescale.py

A job grows from one replica to three and shrinks again, several times; then, as often, two replicas
are stopped and started again from their checkpoint. A pause is the time from the last step before a
change to the first one after it, on a surviving replica, minus a usual step. Then, as often, one of
three is killed, at any moment of its step, and another one joins: measured is the time from the
kill to the end of the first step of the surviving replicas. With `--processes K` only that is
measured, where each of K stages has a process, and one of a replica's is killed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Self

from pipollux_hybrid.resize.rendezvous_folder import RendezvousFolder

JOB = Path(__file__).with_name("job.py")
LIMIT = 300.0
LARGE = 40
"""Number of layers from which on fewer of the slow steps are awaited."""
TOLD = re.compile(r"(\d+) replicas? trains? from step \d+ on, after a pause of ([\d.]+) s")
CHANGES = {(1, 2): "1 to 2", (2, 3): "2 to 3", (3, 2): "3 to 2", (2, 1): "2 to 1"}


class DiedError(Exception):
    """Replicas have ended that should train."""


class Step(NamedTuple):
    """A step of a replica: when it ended, and among how many.

    With torchft the group may have more than the `replicas` whose gradients count.
    """

    time: float
    number: int
    rank: int
    replicas: int
    group: int


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the job did not come to where it should be")
        time.sleep(0.1)


def environment(folder: Path, layers: int, stages: int = 2, **more: str) -> dict[str, str]:
    return {
        **os.environ,
        "TIMES": str(folder),
        "LAYERS": str(layers),
        "STAGES": str(stages),
        "PIPOLLUX_PROGRESS": "0",
        "OMP_NUM_THREADS": "1",
        **more,
    }


def steps_of(path: Path) -> list[Step]:
    # The last line may be half written.
    rows = [line.split() for line in path.read_text().rpartition("\n")[0].splitlines()]
    return [Step(float(a), int(b), int(c), int(d), int((e or [d])[0])) for a, b, c, d, *e in rows]


def pauses(folder: Path) -> dict[str, list[float]]:
    """Return the longest pause of a surviving replica, for each change."""
    longest: dict[tuple[int, str], float] = {}
    for path in folder.iterdir():
        steps = steps_of(path)
        for i, (before, first) in enumerate(itertools.pairwise(steps), 1):
            name = CHANGES.get((before.group, first.group))
            if name is None:
                continue
            # While torchft sends a new replica its state, the others make a step without it.
            after = next(s for s in steps[i:] if s.replicas == first.group)
            # The duration of a step with the new number of replicas.
            later = itertools.takewhile(lambda s, now=first.group: s.group == now, steps[i:])
            usual = statistics.median(b.time - a.time for a, b in itertools.pairwise(later))
            usual *= after.number - before.number
            key = (after.number, name)
            longest[key] = max(longest.get(key, 0.0), after.time - before.time - usual)
    found = defaultdict(list)
    for (_, name), pause in sorted(longest.items()):
        found[name].append(pause)
    return found


def stumbles(folder: Path) -> dict[str, list[float]]:
    """Return the result of `pauses` for steps without a change, by number of replicas."""
    longest: dict[tuple[int, int], float] = {}
    for path in folder.iterdir():
        for replicas, same in itertools.groupby(steps_of(path), lambda step: step.group):
            steps = list(same)
            # The first one begins when the change ends.
            took = [(b.number, b.time - a.time) for a, b in itertools.pairwise(steps[1:])]
            if not took:
                continue
            usual = statistics.median(seconds for _, seconds in took)
            for number, seconds in took:
                key = (replicas, number)
                longest[key] = max(longest.get(key, 0.0), seconds - usual)
    found = defaultdict(list)
    for (replicas, _), seconds in sorted(longest.items()):
        found[f"no change, {replicas} of them"].append(seconds)
    return found


def told(log: Path) -> dict[str, list[float]]:
    """Return the pauses that the job reports: of replica 0, from the end of its step on."""
    found, before = defaultdict(list), 1
    for replicas, seconds in TOLD.findall(log.read_text()):
        name = CHANGES.get((before, int(replicas)))
        before = int(replicas)
        if name is not None:
            found[f"{name}, as the job tells it"].append(float(seconds))
    return found


class ElasticJob:
    """A job whose replicas are started one by one, in an empty folder.

    `tree` contains Pipollux's sources (None: the installed ones); `processes` is per replica.
    """

    def __init__(
        self,
        folder: Path,
        layers: int,
        tree: Path | None = None,
        stages: int = 2,
        processes: int = 1,
    ) -> None:
        self.times, self.log = folder / "times", folder / "log"
        self.times.mkdir()
        self.rendezvous = RendezvousFolder(folder / "rendezvous")
        meeting = str(self.rendezvous.folder)
        self._env = environment(self.times, layers, stages, PIPOLLUX_RENDEZVOUS=meeting)
        if tree is not None:
            rooms = (tree, tree / "hybrid", tree / "perfmodel")
            self._env["PYTHONPATH"] = os.pathsep.join(map(str, rooms))
        self._layers, self._processes = layers, processes
        self.running: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Start a replica."""
        port, command = free_port(), [sys.executable, str(JOB)]
        with self.log.open("ab") as log:
            for rank in range(self._processes):
                told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": self._processes}
                told |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
                told |= {"PROCESSES": self._processes}
                env = {**self._env, **{name: str(value) for name, value in told.items()}}
                self.running.append(subprocess.Popen(command, env=env, stderr=log))

    def settle(self, replicas: int) -> None:
        """Return after a number of replicas has trained for a while."""

        def count() -> int:
            running = sum(process.poll() is None for process in self.running)
            if running < replicas * self._processes:
                raise DiedError
            return sum(len(steps_of(path)) for path in self.times.iterdir())

        until(lambda: count() > 0 and len(self.replicas()) == replicas)
        counted = count()
        steps = 12 if self._layers > LARGE else 20
        until(lambda: count() > counted + steps * replicas * self._processes)

    def replicas(self) -> list[str]:
        """Return the ids of the training replicas, as any version of the sources reports them."""
        with suppress(OSError, ValueError):
            found: list[str] = json.loads((self.rendezvous.folder / "job.json").read_text())[
                "replicas"
            ]
            return found
        return []

    def leave(self) -> None:
        """Have the last replica leave."""
        self.rendezvous.ask_to_leave(self.replicas()[-1])

    def kill(self, rank: int, stage: int = 0) -> float:
        """Return the seconds from the kill to the end of a step of all surviving replicas.

        The process of one stage of replica `rank` is killed; its others must end by themselves.
        """
        lost = [x for x in self.running if steps_of(self.times / str(x.pid))[-1].rank == rank]
        time.sleep(random.random() / 10)  # noqa: S311  # at any moment of a step
        killed_at = time.time()
        lost[stage].kill()
        for process in lost:
            process.wait(LIMIT)
            self.running.remove(process)
        left = len(self.running) // self._processes
        self.settle(left)
        firsts = [
            next(
                step.time
                for step in steps_of(self.times / str(process.pid))
                if step.time > killed_at and step.replicas == left
            )
            for process in self.running
        ]
        return max(firsts) - killed_at

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.running:
            process.kill()
            process.wait()


def measure_deaths(layers: int, rounds: int, processes: int = 1) -> dict[str, list[float]]:
    """Return the seconds from a kill to the end of a step of all surviving replicas."""
    found = defaultdict(list)
    folder = tempfile.TemporaryDirectory()
    stages = max(processes, 2)
    with folder as name, ElasticJob(Path(name), layers, None, stages, processes) as job:
        job.start()
        job.settle(1)
        for number in range(rounds):
            while (replicas := len(job.running) // processes) < 3:
                job.start()
                job.settle(replicas + 1)
            rank, stage = number % 3, number % processes
            found["replica 0" if rank == 0 else "another one"].append(job.kill(rank, stage))
    return found


def measure_elastic(layers: int, rounds: int, tree: Path | None = None) -> dict[str, list[float]]:
    """Return the pauses of changes, and the same measure of steps without a change."""
    with tempfile.TemporaryDirectory() as name, ElasticJob(Path(name), layers, tree) as job:
        job.start()
        job.settle(1)
        for _ in range(rounds):
            for replicas in (2, 3):
                job.start()
                job.settle(replicas)
            for replicas in (2, 1):
                job.leave()
                job.settle(replicas)
        return {**pauses(job.times), **told(job.log), **stumbles(job.times)}


def measure_in_turn(layers: int, rounds: int, tree: Path) -> None:
    """Print the pauses of the installed version and of other sources, one round at a time."""
    found: dict[str, list[float]] = defaultdict(list)
    for _ in range(rounds):
        for name, sources in (("beside", tree), ("here", None)):
            for change, seconds in measure_elastic(layers, 1, sources).items():
                found[f"{change}, {name}"] += seconds
    for name, seconds in sorted(found.items()):
        show(name, seconds)


def measure_restarts(layers: int, rounds: int) -> list[float]:
    found = []
    with tempfile.TemporaryDirectory() as name:
        ends: list[float] = []
        for number in range(rounds + 1):
            times = Path(name, f"times-{number}")
            times.mkdir()
            env = environment(
                times, layers, PIPOLLUX_CHECKPOINT_DIR=name, PIPOLLUX_CHECKPOINT_INTERVAL="1000"
            )
            port = free_port()
            torchrun = [
                "-m",
                "torch.distributed.run",
                "--nproc-per-node=2",
                f"--master-port={port}",
            ]
            command = [sys.executable, *torchrun, "--master-addr=127.0.0.1", str(JOB)]
            process = subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL)
            until(lambda at=times: any(len(steps_of(path)) > 60 for path in at.iterdir()))
            process.send_signal(signal.SIGTERM)
            process.wait(LIMIT)
            steps = [step for path in times.iterdir() for step in steps_of(path)]
            first = max(step.time for step in steps if step.number == min(s.number for s in steps))
            if ends:
                found.append(first - ends[-1])
            ends.append(max(step.time for step in steps))
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def show(what: str, seconds: list[float]) -> None:
    print(
        f"| {what} | {statistics.median(seconds):.2f} s | {min(seconds):.2f} to {max(seconds):.2f} "
        f"| {len(seconds)} |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=8, help="12 MiB of state each")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--beside", type=Path, help="another tree of sources, measured in turn")
    parser.add_argument("--processes", type=int, default=1, help="of a replica; only deaths, then")
    args = parser.parse_args()
    print("| change | median | least, most | times |\n|---|---|---|---|")
    if args.beside is not None:
        measure_in_turn(args.layers, args.rounds, args.beside)
        return
    if args.processes > 1:
        for who, seconds in measure_deaths(args.layers, args.rounds, args.processes).items():
            show(f"kill -9 of a process of {who} of 3", seconds)
        return
    for name, seconds in measure_elastic(args.layers, args.rounds).items():
        show(f"{name}, elastic", seconds)
    restarts = measure_restarts(args.layers, args.rounds)
    show("restart of 2", restarts)
    for who, seconds in measure_deaths(args.layers, args.rounds).items():
        show(f"kill -9 of {who} of 3", seconds)
        print(f"{statistics.median(seconds) / statistics.median(restarts):.2f} of a restart")


if __name__ == "__main__":
    main()
