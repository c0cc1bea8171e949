"""From SIGTERM to the first step of the next run, in parts: two replicas under torchrun.

    .venv/bin/python benchmarks/restart/restart.py

A job is started, stopped in the middle of its epoch, and started again at once; the lower bound, in
turn with it, is a process that imports torch and ends.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

JOB = Path(__file__).with_name("job.py")
LIMIT = 120.0


def start(directory: Path, attempt: int, args: argparse.Namespace) -> subprocess.Popen[bytes]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = {
        **os.environ,
        "MARKS": str(directory),
        "LAYERS": str(args.layers),
        "PIPOLLUX_ATTEMPT": str(attempt),
        "PIPOLLUX_CHECKPOINT_DIR": str(directory / "checkpoints"),
        "PIPOLLUX_CHECKPOINT_INTERVAL": "1000",
        "PIPOLLUX_PROGRESS": "0",
        "OMP_NUM_THREADS": "1",
    }
    torchrun = ["-m", "torch.distributed.run", "--nnodes=1", "--master-addr=127.0.0.1"]
    torchrun += [f"--nproc-per-node={args.replicas}", f"--master-port={port}"]
    # torchrun prints much about the signal.
    return subprocess.Popen(
        [sys.executable, *torchrun, str(JOB)], env=env, stderr=subprocess.DEVNULL
    )


def marks(directory: Path, attempt: int, replicas: int) -> dict[str, float]:
    """The latest replica's time of each mark; empty until all have made a step."""
    found: dict[str, float] = {}
    for rank in range(replicas):
        file = directory / f"{attempt}-{rank}"
        lines = file.read_text().split("\n") if file.exists() else []
        ours = {key: float(value) for key, value in (line.split() for line in lines if line)}
        if "stepped" not in ours:
            return {}
        found = {key: max(value, found.get(key, 0.0)) for key, value in ours.items()}
    return found


def wait_for_steps(
    process: subprocess.Popen[bytes], directory: Path, attempt: int, replicas: int
) -> dict[str, float]:
    deadline = time.monotonic() + LIMIT
    while not (found := marks(directory, attempt, replicas)):
        if process.poll() is not None:
            raise SystemExit(f"attempt {attempt} ended with status {process.returncode}")
        if time.monotonic() > deadline:
            raise SystemExit(f"attempt {attempt} made no step within {LIMIT:.0f} s")
        time.sleep(0.005)
    return found


def stop(process: subprocess.Popen[bytes]) -> float:
    """Ask torchrun to stop the job; return the time."""
    asked = time.time()
    process.send_signal(signal.SIGTERM)
    process.wait(LIMIT)
    return asked


def one_restart(args: argparse.Namespace, parts: dict[str, list[float]]) -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        process = start(directory, 1, args)
        wait_for_steps(process, directory, 1, args.replicas)
        time.sleep(2.0)  # in the middle of steps, after the warm-up
        asked = stop(process)
        ended = time.time()
        before = marks(directory, 1, args.replicas)
        process = start(directory, 2, args)
        after = wait_for_steps(process, directory, 2, args.replicas)
        stop(process)
        left = float((directory / "1-end").read_text())
    edges = {
        "agreeing to stop": (asked, before["agreed"]),
        "saving": (before["agreed"], before["saved"]),
        "leaving Python": (before["saved"], left),
        "torchrun's end": (left, ended),
        "torchrun and Python start": (ended, after["started"]),
        "importing torch": (after["started"], after["torch"]),
        "importing Pipollux": (after["torch"], after["imported"]),
        "meeting the other replica": (after["imported"], after["joined"]),
        "the script's model and data": (after["joined"], after["built"]),
        "restoring": (after["built"], after["restored"]),
        "first step": (after["restored"], after["stepped"]),
        "in all": (asked, after["stepped"]),
    }
    for part, (first, last) in edges.items():
        parts[part].append(last - first)


def floor(parts: dict[str, list[float]]) -> None:
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    parts["floor: python -c 'import torch'"].append(time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description="Seconds of a restart, by part.")
    parser.add_argument("--restarts", type=int, default=5)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--layers", type=int, default=8, help="layers of 4 MiB each")
    args = parser.parse_args()
    parts: dict[str, list[float]] = defaultdict(list)
    for _ in range(args.restarts):
        one_restart(args, parts)
        floor(parts)
    for part, seconds in parts.items():
        print(
            f"{part:34} {statistics.median(seconds):6.2f} s "
            f"({min(seconds):.2f} to {max(seconds):.2f})"
        )


if __name__ == "__main__":
    main()
