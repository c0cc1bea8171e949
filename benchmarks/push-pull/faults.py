"""Progress of training while replicas and servers are killed, beside the same training in peace.

Two jobs train at the same time, on the same machine, the same number of samples: a step takes
``--step`` seconds, as on a device, so that neither needs much of the CPU. In one of them a replica
or a server is killed every ``minutes / faults``, at times and places drawn from ``--seed``, and is
started again at once. Each sample counts once in both, so the ratio of their times is the
efficiency under faults.

    python benchmarks/push-pull/faults.py [--minutes 45] [--faults 60] [--replicas 2]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

BATCH = 8


def train(options: Mapping[str, object], samples: int, step: float) -> None:
    """Train a replica through all samples, and print when it takes its first step."""
    import torch
    from torch import nn
    from torch.utils.data import TensorDataset

    import pipollux

    torch.set_num_threads(1)
    pipollux.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 256), nn.Linear(256, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    chosen = pipollux.PushPull(**options)  # type: ignore[arg-type]  # as the command line has them
    wrapped = pipollux.HybridParallel(model, optimizer, synchronization=chosen)
    data = TensorDataset(torch.randn(samples, 32), torch.randn(samples, 1))
    loader = pipollux.AdaptiveDataLoader(data, batch_size=BATCH, shuffle=True)
    trained = 0
    for _ in pipollux.remaining_epochs_until(1):
        for inputs, targets in loader:
            began = time.monotonic()
            optimizer.zero_grad()
            nn.functional.mse_loss(wrapped(inputs), targets).backward()
            optimizer.step()
            if not trained:
                print("FIRST", time.monotonic(), flush=True)
            trained += len(inputs)
            time.sleep(max(step - (time.monotonic() - began), 0.0))
    print("LAST", time.monotonic(), flush=True)


@dataclass
class Job:
    """The processes of a job; one that dies is started again."""

    name: str
    folder: Path
    given: argparse.Namespace
    options: Mapping[str, object]
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    starts: dict[str, int] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    files: list[IO[bytes]] = field(default_factory=list)

    def start(self) -> None:
        """Start two servers and the replicas."""
        self.folder.mkdir()
        addresses = ",".join(f"127.0.0.1:{port}" for port in _free_ports(2))
        self.environment = {**os.environ, "OMP_NUM_THREADS": "1", "PIPOLLUX_SERVERS": addresses}
        self.environment |= {"PIPOLLUX_TOKEN": secrets.token_hex(8), "PIPOLLUX_PROGRESS": "0"}
        self.environment |= {"PIPOLLUX_HINTS_INTERVAL": "100000"}
        names = [f"server {index}" for index in range(2)]
        names += [f"replica {index}" for index in range(self.given.replicas)]
        for name in names:
            self.start_one(name)

    def start_one(self, name: str) -> None:
        """Start a replica or a server."""
        kind, _, index = name.partition(" ")
        environment = dict(self.environment)
        if kind == "server":
            command = ["-m", "pipollux.server", "--index", index]
            command += ["--directory", str(self.folder / "servers"), "--save-every", "10"]
        else:
            environment["PIPOLLUX_REPLICA"] = index
            samples = int(self.given.minutes * 60 / self.given.step) * self.given.replicas * BATCH
            command = [__file__, "--train", json.dumps([self.options, samples, self.given.step])]
        self.starts[name] = self.starts.get(name, 0) + 1
        output = (self.folder / f"{name}, start {self.starts[name]}").open("wb")
        self.files.append(output)
        self.running[name] = subprocess.Popen(
            [sys.executable, *command], env=environment, stdout=output, stderr=subprocess.STDOUT
        )

    def restart_dead(self) -> bool:
        """Start what has died again; return whether a replica still trains."""
        training = False
        for name, process in list(self.running.items()):
            code = process.poll()
            if code is not None and code != 0:
                if code != -signal.SIGKILL:
                    print(f"{self.name}: {name} ended with {code}", flush=True)
                self.start_one(name)
            training |= name.startswith("replica") and code != 0
        return training

    def seconds(self) -> float:
        """Return how long the training took, from the first step of any replica."""
        found: dict[str, list[float]] = {"FIRST": [], "LAST": []}
        for path in self.folder.glob("replica*"):
            for line in path.read_text().splitlines():
                word, _, value = line.partition(" ")
                if word in found:
                    found[word].append(float(value))
        return max(found["LAST"]) - min(found["FIRST"])

    def stop(self) -> None:
        """Kill everything."""
        for process in self.running.values():
            process.kill()
            process.wait()
        for output in self.files:
            output.close()


def _free_ports(count: int) -> list[int]:
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def disturb(job: Job, ended: threading.Event) -> dict[str, int]:
    """Kill a process of the job now and then until it ends; return how many of each kind."""
    given, killed = job.given, {"replica": 0, "server": 0}
    drawn = random.Random(given.seed)  # noqa: S311  # the same faults in each run
    pause = given.minutes * 60 / given.faults
    while not ended.wait(drawn.uniform(0.5, 1.5) * pause):
        kind = "server" if drawn.random() < given.servers_share else "replica"
        chosen = drawn.choice([name for name in job.running if name.startswith(kind)])
        if job.running[chosen].poll() is None:
            job.running[chosen].kill()
            killed[kind] += 1
    return killed


def main() -> None:
    """Run both jobs, and print the efficiency under faults."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=45.0, help="of undisturbed training")
    parser.add_argument("--faults", type=int, default=60, help="in that time")
    parser.add_argument("--servers-share", type=float, default=0.2, help="of the faults")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--step", type=float, default=0.1, help="seconds")
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--fragments", type=int, default=1)
    parser.add_argument("--max-staleness", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.train is not None:
        train(*json.loads(given.train))
        return
    options = {"sync_every": given.every, "fragments": given.fragments}
    options["max_staleness"] = given.max_staleness
    with tempfile.TemporaryDirectory() as folder:
        calm = Job("undisturbed", Path(folder) / "calm", given, options)
        hit = Job("with faults", Path(folder) / "hit", given, options)
        ended, killed = threading.Event(), {}
        killer = threading.Thread(target=lambda: killed.update(disturb(hit, ended)))
        try:
            for job in (calm, hit):
                job.start()
            killer.start()
            training = [calm, hit]
            while training:
                training = [job for job in training if job.restart_dead()]
                if hit not in training:
                    ended.set()
                time.sleep(0.05)
            took = calm.seconds(), hit.seconds()
        finally:
            ended.set()
            killer.join()
            for job in (calm, hit):
                job.stop()
    restarts = sum(hit.starts.values()) - len(hit.starts)
    print(f"undisturbed {took[0]:.1f} s; with faults {took[1]:.1f} s; killed {killed}")
    print(f"restarts {restarts}; efficiency {took[0] / took[1]:.3f}", flush=True)


if __name__ == "__main__":
    main()
