"""Pauses of elastic resizes, and of the recovery from a death, over gloo and over NCCL on one GPU.

    .venv/bin/python benchmarks/gpu/resize.py [--mib 1024] [--out resize.json]
    .venv/bin/python benchmarks/gpu/resize.py --device cpu --mib 16

A job of one replica trains; another one joins and leaves, several times; a third one joins and is
killed. The pauses are those that the job prints. With --device cpu the stand-in of the tests is in
NCCL's place, which shows that the script works, and nothing of NCCL.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import pipollux

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from tests.hybrid.resize.nccl_stand_in import STAND_IN, backend

RESIZED = re.compile(
    r"pipollux: (\d+) replicas? trains? from step \d+ on, after a pause of ([\d.]+)"
)
LOST = re.compile(r"was lost at step \d+; \d+ replicas? goe?s? on from step \d+, after ([\d.]+)")
LIMIT = 300.0
"""Seconds to wait for a single change."""
WIDTH = 2048
COPIES = 3
"""Parameters and AdamW's two moments."""


def job(mib: int, device: str) -> None:
    """Train until a signal; the states take ``mib`` MiB."""
    pipollux.init_process_group(backend(), timeout=LIMIT)
    torch.manual_seed(0)  # the same data on all replicas
    layers = max(mib * 2**20 // (COPIES * 4 * WIDTH * WIDTH), 1)
    module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-6)
    samples = TensorDataset(torch.randn(1, WIDTH).expand(10_000_000, WIDTH))
    loader = pipollux.AdaptiveDataLoader(samples, batch_size=12)
    model = pipollux.HybridParallel(module, optimizer, num_stages=1, devices=[device])
    for _ in pipollux.remaining_epochs_until(1):
        for (inputs,) in loader:
            optimizer.zero_grad()
            loss: Tensor = model(inputs).square().mean()
            loss.backward()
            optimizer.step()


class Job:
    """The processes of a job, and what they print."""

    def __init__(self, folder: Path, options: argparse.Namespace, name: str) -> None:
        self._folder, self._options = folder, options
        settings = {"BACKEND": name} if name != "stand-in" else dict(STAND_IN)
        self._environment = {
            **os.environ,
            "PIPOLLUX_ELASTIC_NCCL": "1",
            "PIPOLLUX_RENDEZVOUS": str(folder / "rendezvous"),
            "PIPOLLUX_PROGRESS": "0",
            "NCCL_SOCKET_IFNAME": "lo",
            "NCCL_IB_DISABLE": "1",
            **settings,
        }
        self.programs: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Start a replica."""
        number = len(self.programs)
        environment = {**self._environment, "NCCL_HOSTID": f"p{number}"}
        command = [sys.executable, __file__, "--job", "--mib", str(self._options.mib)]
        with (self._folder / f"{number}.err").open("wb") as err:
            self.programs.append(
                subprocess.Popen(
                    [*command, "--device", self._options.device], env=environment, stderr=err
                )
            )

    def said(self, what: re.Pattern[str]) -> list[tuple[str, ...]]:
        """Return what the replicas have printed of a kind, as groups of the pattern."""
        text = "".join(path.read_text() for path in sorted(self._folder.glob("*.err")))
        return [match.groups() for match in what.finditer(text)]

    def wait(self, what: Callable[[], bool], name: str) -> None:
        """Return once something is so."""
        end = time.monotonic() + LIMIT
        while not what():
            if time.monotonic() > end:
                errors = "".join(x.read_text()[-1500:] for x in self._folder.glob("*.err"))
                raise TimeoutError(f"{name}: not within {LIMIT:g} s; {errors}")
            time.sleep(0.02)

    def change(self, what: re.Pattern[str], act: Callable[[], None], name: str) -> float:
        """Act and return the seconds of the pause that follows."""
        before = len(self.said(what))
        act()
        self.wait(lambda: len(self.said(what)) > before, name)
        return float(self.said(what)[-1][-1])

    def leave(self) -> None:
        """Make replica 1 leave."""
        folder = self._environment["PIPOLLUX_RENDEZVOUS"]
        command = [sys.executable, "-m", "pipollux_hybrid.resize", folder]
        listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        (second,) = (x.split()[0] for x in listed.splitlines() if x.endswith("replica 1"))
        subprocess.run([*command, "leave", second], check=True, capture_output=True)

    def kill(self) -> None:
        """Kill the replica that joined last."""
        self.programs[-1].send_signal(signal.SIGKILL)

    def end(self) -> None:
        """End all replicas."""
        for program in self.programs:
            program.kill()
            program.wait()


def measure(options: argparse.Namespace, name: str) -> dict[str, object]:
    """Return the pauses of one backend in seconds."""
    joins, leaves = [], []
    with tempfile.TemporaryDirectory() as folder:
        job = Job(Path(folder), options, name)
        try:
            job.start()
            rendezvous = Path(folder) / "rendezvous"
            job.wait(lambda: any(rendezvous.glob("*.json")), "the job begins")
            for _ in range(options.rounds):
                joins.append(job.change(RESIZED, job.start, "a replica joins"))
                leaves.append(job.change(RESIZED, job.leave, "a replica leaves"))
            joins.append(job.change(RESIZED, job.start, "a replica joins"))
            dies = job.change(LOST, job.kill, "a replica dies")
        finally:
            job.end()
    return {
        "joins_s": joins,
        "leaves_s": leaves,
        "median_join_s": round(statistics.median(joins), 3),
        "after_a_death_s": dies,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=1024, help="of parameters and moments")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--backends", nargs="+")
    parser.add_argument("--out", type=Path, help="also write the results as JSON")
    parser.add_argument("--job", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        job(options.mib, options.device)
        return
    other = "stand-in" if options.device == "cpu" else "nccl"
    results = {}
    for name in options.backends or [other, "gloo"]:  # should time run out
        results[name] = measure(options, name)
        print(json.dumps({name: results[name]}), flush=True)
        if options.out:
            options.out.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
