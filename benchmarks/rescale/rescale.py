"""How long replicas stand still while others join and leave, and how long a restart takes.

    .venv/bin/python benchmarks/rescale/rescale.py

A job grows from one replica to three and shrinks again, a number of times; then, as often, two
replicas are stopped and started again from their checkpoint. A pause is the time from the last step
before a change to the first one after it, on a replica that stays, less a usual step.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from pipollux_hybrid.live.meeting_folder import MeetingFolder

JOB = Path(__file__).with_name("job.py")
LIMIT = 300.0
CHANGES = {(1, 2): "1 to 2", (2, 3): "2 to 3", (3, 2): "3 to 2", (2, 1): "2 to 1"}


class Step(NamedTuple):
    """A step of a replica: when it ended, and among how many."""

    time: float
    number: int
    rank: int
    replicas: int


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the job did not come to where it should be")
        time.sleep(0.1)


def environment(folder: Path, layers: int, **more: str) -> dict[str, str]:
    return {
        **os.environ,
        "TIMES": str(folder),
        "LAYERS": str(layers),
        "PIPOLLUX_PROGRESS": "0",
        "OMP_NUM_THREADS": "1",
        **more,
    }


def steps_of(path: Path) -> list[Step]:
    rows = [line.split() for line in path.read_text().splitlines()]
    return [Step(float(a), int(b), int(c), int(d)) for a, b, c, d in (row for row in rows if row)]


def pauses(folder: Path) -> dict[str, list[float]]:
    """Return the longest pause of a replica that stayed, for each change."""
    longest: dict[tuple[int, str], float] = {}
    for path in folder.iterdir():
        steps = steps_of(path)
        for before, after in itertools.pairwise(steps):
            name = CHANGES.get((before.replicas, after.replicas))
            if name is None:
                continue
            near = [s for s in steps if abs(s.number - after.number) < 30]
            usual = statistics.median(b.time - a.time for a, b in itertools.pairwise(near))
            key = (after.number, name)
            longest[key] = max(longest.get(key, 0.0), after.time - before.time - usual)
    found = defaultdict(list)
    for (_, name), pause in sorted(longest.items()):
        found[name].append(pause)
    return found


def measure_live(layers: int, rounds: int) -> dict[str, list[float]]:
    with tempfile.TemporaryDirectory() as name:
        times, meeting = Path(name, "times"), Path(name, "rendezvous")
        times.mkdir()
        rendezvous = MeetingFolder(meeting)
        env = environment(times, layers, PIPOLLUX_RENDEZVOUS=str(meeting))
        running: list[subprocess.Popen[bytes]] = []

        def members() -> int:
            bulletin = rendezvous.bulletin()
            return len(bulletin.membership.replicas) if bulletin else 0

        def settle(replicas: int) -> None:
            until(lambda: members() == replicas)
            counted = sum(len(steps_of(path)) for path in times.iterdir())
            until(lambda: sum(len(steps_of(p)) for p in times.iterdir()) > counted + 40 * replicas)

        def start() -> None:
            with Path(name, "log").open("ab") as log:
                running.append(subprocess.Popen([sys.executable, str(JOB)], env=env, stderr=log))

        try:
            start()
            settle(1)
            for _ in range(rounds):
                for replicas in (2, 3):
                    start()
                    settle(replicas)
                for replicas in (2, 1):
                    bulletin = rendezvous.bulletin()
                    if bulletin is not None:
                        rendezvous.ask_to_leave(bulletin.membership.replicas[-1])
                    settle(replicas)
        finally:
            for process in running:
                process.kill()
                process.wait()
        return pauses(times)


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
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
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
    args = parser.parse_args()
    print("| change | median | least, most | times |\n|---|---|---|---|")
    for name, seconds in measure_live(args.layers, args.rounds).items():
        show(f"{name}, live", seconds)
    show("restart of 2", measure_restarts(args.layers, args.rounds))


if __name__ == "__main__":
    main()
