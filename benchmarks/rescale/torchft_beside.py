"""How long replicas pause with torchft, beside Pipollux with one stage, in turn.

    .venv/bin/python benchmarks/rescale/torchft_beside.py TORCHFT_PYTHON

TORCHFT_PYTHON is an interpreter which has torchft 0.2.0. In each round each of the jobs grows from
one replica to three, shrinks to one, grows again, and one of the three is killed. `rescale.py`
defines a pause. Prints a table for the README at the end.
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
from collections import defaultdict
from pathlib import Path
from typing import TextIO

from rescale import CHANGES, DiedError, ElasticJob, environment, pauses, steps_of  # same folder

JOB = Path(__file__).with_name("torchft_job.py")
KILL = "kill -9 of one of 3"
KILL_MANAGED = "the same without torchft's DDP"
FAST = ("--heartbeat_timeout_ms=1000", "--join_timeout_ms=1000", "--quorum_tick_ms=10")
"""Ten of its heartbeats, one per 100 ms: a replica that is briefly slower stays."""
DEFAULT_TIMEOUTS, FAST_TIMEOUTS = "60 60", "5 10"
"""Seconds, of its process group and of its manager; the shorter ones are those of its example."""


class TorchftJob(ElasticJob):
    """Replicas of `torchft_job.py`, and their lighthouse.

    Args:
        folder: an empty one.
        layers: of the model.
        python: the interpreter which has torchft.
        settings: of the lighthouse, besides necessary ones; (): the defaults.
        gradients: "ddp" for torchft's DistributedDataParallel, "managed" for its all-reduce.
    """

    def __init__(
        self, folder: Path, layers: int, python: Path, settings: tuple[str, ...], gradients: str
    ) -> None:
        self.times, self.log = folder / "times", folder / "log"
        self.times.mkdir()
        self._layers, self._processes, self._python = layers, 1, python
        self.running: list[subprocess.Popen[bytes]] = []
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._env = environment(
            self.times,
            layers,
            TORCHFT_LIGHTHOUSE=f"http://localhost:{port}",
            TORCHFT_GRADIENTS=gradients,
            TORCHFT_TIMEOUTS=FAST_TIMEOUTS if settings else DEFAULT_TIMEOUTS,
        )
        self._env.pop("PYTHONPATH", None)
        self._started = 0
        lighthouse = [str(python.with_name("torchft_lighthouse")), f"--bind=[::]:{port}"]
        self._lighthouse = self._run([*lighthouse, "--min_replicas=1", *settings], "lighthouse")

    def _run(self, command: list[str], name: str) -> subprocess.Popen[bytes]:
        with self.log.with_name(name).open("ab") as log:
            return subprocess.Popen(command, env=self._env, stdout=log, stderr=log)

    def start(self) -> None:
        """Start a replica."""
        self._env["NUMBER"] = str(self._started)
        self.running.append(self._run([str(self._python), str(JOB)], f"log-{self._started}"))
        self._started += 1

    def replicas(self) -> list[str]:
        """Return the training processes, once they agree on their number."""
        living = [str(process.pid) for process in self.running if process.poll() is None]
        paths = [self.times / name for name in living]
        lasts = [steps_of(path)[-1:] for path in paths if path.exists()]
        agreed = [last for last in lasts if last and last[0].replicas == len(living)]
        return living if len(agreed) == len(living) else []

    def leave(self) -> None:
        """End the last replica, which shuts torchft's manager down."""
        leaver = self.running.pop()
        leaver.send_signal(signal.SIGTERM)
        leaver.wait()

    def tracebacks(self) -> list[str]:
        """Return the ends of the logs of failed replicas."""
        texts = [path.read_text(errors="replace") for path in self.log.parent.glob("log-*")]
        ends = [text.rstrip().splitlines()[-10:] for text in texts]
        return [
            "\n".join(end) for end in ends if end and end[-1].partition(":")[0].endswith("Error")
        ]

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self._lighthouse.kill()
        self._lighthouse.wait()


class Column:
    """Measurements of one kind of job: seconds, and how often a kill ended others, too."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.deaths: dict[str, int] = defaultdict(int)

    def measure(self, job: ElasticJob, sizes: tuple[int, ...], kill: str, rank: int) -> None:
        """Bring a job to these numbers of replicas, one after another, then kill one."""
        with job:
            job.start()
            job.settle(1)
            what = kill
            try:
                for before, replicas in itertools.pairwise((1, *sizes)):
                    what = CHANGES[before, replicas]
                    (job.start if replicas > before else job.leave)()
                    job.settle(replicas)
                if kill == KILL:
                    for change, seconds in pauses(job.times).items():
                        self.seconds[change] += seconds
                what = kill
                job.running = [process for process in job.running if process.poll() is None]
                self.seconds[kill].append(job.kill(rank))
            except DiedError:
                self.deaths[what] += 1
                if isinstance(job, TorchftJob):
                    print(*job.tracebacks()[:1], file=sys.stderr)

    def cell(self, row: str) -> str:
        """Return the median and the spread, or that no replica survived."""
        seconds, deaths = self.seconds[row], self.deaths[row]
        died = f"the others die ({deaths} of {deaths + len(seconds)})"
        if not seconds:
            return died if deaths else ""
        spread = f"{statistics.median(seconds):.2f} ({min(seconds):.2f} to {max(seconds):.2f})"
        return f"{spread}, {died}" if deaths else spread

    def times(self, row: str) -> int:
        """Return the number of tries."""
        return len(self.seconds[row]) + self.deaths[row]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("python", type=Path, help="an interpreter which has torchft")
    parser.add_argument("--layers", type=int, default=8, help="12 MiB of state each")
    parser.add_argument("--rounds", type=int, default=4)
    args = parser.parse_args()
    settings = {"torchft, defaults": (), "torchft, fast": FAST}
    columns = {"ours": Column(), **{name: Column() for name in settings}}
    loads = []

    def measure(name: str, kill: str, rank: int) -> None:
        loads.append(os.getloadavg()[0])
        print(f"{name}, {kill}, load {loads[-1]:.1f}", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            if name in settings:
                gradients = "ddp" if kill == KILL else "managed"
                job: ElasticJob = TorchftJob(
                    Path(folder), args.layers, args.python, settings[name], gradients
                )
            else:
                job = ElasticJob(Path(folder), args.layers, stages=1)
            sizes = (2, 3, 2, 1, 2, 3) if kill == KILL else (2, 3)
            columns[name].measure(job, sizes, kill, rank)

    for number in range(args.rounds):
        for name in columns:
            measure(name, KILL, number % 3)
        for name in settings:
            measure(name, KILL_MANAGED, number % 3)
        last = number + 1 == args.rounds
        show(columns, sys.stdout if last else sys.stderr)
    print(f"\nLoad {min(loads):.1f} to {max(loads):.1f} with these jobs' own; {args.layers} layers")


def show(columns: dict[str, Column], file: TextIO) -> None:
    lines = [f"| seconds | {' | '.join(columns)} | times |", f"|---|{'---|' * len(columns)}---|"]
    for row in (*CHANGES.values(), KILL, KILL_MANAGED):
        cells = " | ".join(column.cell(row) for column in columns.values())
        times = sorted({column.times(row) for column in columns.values()} - {0})
        lines.append(f"| {row} | {cells} | {'/'.join(map(str, times))} |")
    print(*lines, sep="\n", file=file, flush=True)


if __name__ == "__main__":
    main()
