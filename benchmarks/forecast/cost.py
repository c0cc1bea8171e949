"""CPU time of forecasts in the background of a scheduler with many jobs.

    python benchmarks/forecast/cost.py [--jobs 1000] [--seconds 900]

Fills a store with running and queued jobs on 64 nodes of 8 GPUs, and runs the scheduler's own
forecast loop on it, with its process. Prints Markdown.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pipollux_sched.forecasting.loop import SHARE, ForecastLoop
from pipollux_sched.forecasting.process import ForecastProcess, Forecasts
from pipollux_sched.lifecycle import Allocate, Started
from pipollux_sched.spec.job import JobSpec
from pipollux_sched.store import Point, StateDir, Store

NODES, SLOTS = 64, 8
PERF = {"alpha_n": 0.058, "beta_n": 0.009, "alpha_r": 0.019, "beta_r": 0.003, "gamma": 1.8}


def main() -> None:
    """Run the loop, and print what it cost."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=900.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        directory = StateDir(Path(folder))
        directory.create()
        with Store(directory.database, create=True) as store:
            fill(store, options.jobs)
            print(measure(store, directory, options.seconds, options.jobs))


def fill(store: Store, num_jobs: int) -> None:
    """Fill every node with jobs of one replica, and queue the others."""
    rng = np.random.default_rng(0)
    nodes = {f"node-{n:02}": {"slots": SLOTS, "kind": "gpu"} for n in range(NODES)}
    store.set_nodes((name, SLOTS, "gpu", {"name": name, **node}) for name, node in nodes.items())
    store.add_event("cluster", {"nodes": nodes, "policy": "ExactPolicy", "interval": 60.0})
    slots = [name for name in nodes for _ in range(SLOTS)]
    for number in range(num_jobs):
        name = f"job-{number}"
        spec = JobSpec(name=name, script="train.py", max_replicas=8)
        store.submit(name, spec.model_dump(mode="json"), "token", 3)
        if number >= len(slots):
            continue
        store.transition(name, Allocate([slots[number]], "it is free"))
        store.transition(name, Started(1, ("4711",)))
        store.add_report(name, 1, [point()])
        store.put_hints(name, 1, hints(rng))


def point() -> Point:
    sizes = {"batch_size": 32, "atomic_bsz": 32, "accum_steps": 0, "num_replicas": 1}
    return Point(
        time=time.time(), step=1, epoch=0, samples=32, loss=2.0, step_time=0.1,
        predicted_step_time=0.1, goodput=300.0, efficiency=1.0, **sizes,
    )  # fmt: skip


def hints(rng: np.random.Generator) -> dict[str, object]:
    return {
        "initBatchSize": 32,
        "maxBatchSize": 1024,
        "localBszBounds": [8, 128],
        "maxProfiledReplicas": 2,
        "gradientAccumulation": True,
        "gradParams": {"norm": 0.0021, "var": float(rng.lognormal(-3.3, 0.5))},
        "perfParams": {
            "alpha_c": float(rng.lognormal(-3.9, 0.3)),
            "beta_c": float(rng.lognormal(-5.4, 0.3)),
            **PERF,
        },
        "trainedSamples": 1000.0,
        "remainingSamples": float(rng.lognormal(13.5, 1.0)),
    }


class Counted(ForecastProcess):
    """Keeps what each pass cost."""

    passes: list[tuple[float, int]]

    def ask(self, new: Sequence[JobSpec] = ()) -> Forecasts:
        """Ask, and keep the cost."""
        found = super().ask(new)
        self.passes = [*getattr(self, "passes", []), (found.cpu_seconds, len(found.by_job))]
        return found


def measure(store: Store, directory: StateDir, seconds: float, num_jobs: int) -> str:
    """Run the loop for some time, and return a row for the table."""
    ending = threading.Event()
    process = Counted(directory.store)
    loop = ForecastLoop(store, process, ending=ending, shortest_pause=1.0)
    cpu, began = time.process_time(), time.monotonic()
    thread = threading.Thread(target=loop.run)
    thread.start()
    ending.wait(seconds)
    ending.set()
    process.close()
    thread.join()
    passed = time.monotonic() - began
    own, children = time.process_time() - cpu, os.times()
    worker = children.children_user + children.children_system
    each = [used for used, _ in process.passes]
    share = (own + worker) / passed
    return (
        "| jobs | CPU time of a forecast | of the thread | next forecast after | share of a core "
        "|\n"
        "|---|---|---|---|---|\n"
        f"| {num_jobs} | {np.median(each):.1f} s | {own / len(each):.2f} s "
        f"| {np.median(each) / SHARE / 60:.0f} min | {share:.2%} in {passed:.0f} s, "
        f"{len(each)} forecasts |"
    )


if __name__ == "__main__":
    main()
