"""Seconds from a decision to the first process of a replica on this machine, beside a bare start.

    python benchmarks/clusters/local_cost.py [--starts 8]

A job is submitted to a scheduler of the local backend; the decision is when its attempt was stored,
the first process is torchrun's agent. In turn with it, `true` is started directly. Prints Markdown.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "faults"))

from process_faults import agents  # of benchmarks/faults
from workload import COUNTING, Work
from world import World


def start(world: World, name: str) -> float:
    """Return the seconds from the decision on a job to the start of its agent."""
    world.submit(name, Work.drawn(COUNTING, random.Random(0)))
    world.until(f"{name} has an agent", lambda: agents(world, name))
    began = time.time() - _age(agents(world, name)[0])
    (attempt,) = world.store.attempts(name)
    with world.client() as client:
        client.delete(f"/jobs/{name}").raise_for_status()
    world.until(f"nothing of {name} is left", lambda: not world.processes(name))
    return began - attempt.created_at


def _age(pid: int) -> float:
    """Return the seconds since a process was started, by the kernel's clock."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")


def bare() -> float:
    """Return the seconds that `true` takes."""
    begun = time.monotonic()
    subprocess.run(["true"], check=True)
    return time.monotonic() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--starts", type=int, default=8)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="pipollux-local-cost-"))
    world = World(folder)
    try:
        pairs = [(start(world, f"job-{index}"), bare()) for index in range(options.starts)]
    finally:
        world.end()
    print("| | median | least | most |\n|---|---|---|---|")
    for what, times in zip(("a replica", "`true`"), zip(*pairs, strict=True), strict=True):
        shown = " | ".join(f"{1000 * f(times):.0f} ms" for f in (median, min, max))
        print(f"| {what} | {shown} |")
    print(f"\nLoad of the machine meanwhile: {os.getloadavg()[0]:.1f}.")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
