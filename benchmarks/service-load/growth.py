"""A scheduler whose thousands of jobs all are resized to more replicas at once.

    python benchmarks/service-load/growth.py [--jobs 4000] [--width 1] [--seconds 240]

A real `pipollux serve` with 1250 nodes of 8 slots, and jobs of `--width` replicas that may have
twice as many, which are only listed (`listed.py`). Another process sends their requests
(`live_load.py`). After their hints a decision doubles each. Half of 4000 jobs have room where they
are, and are resized; the others are moved, and of those only the starts are measured: their new
replicas send nothing. Prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sqlalchemy import create_engine, text

sys.path.insert(0, str(Path(__file__).parent))

import listed  # same folder
from heartbeats import (  # same folder
    Served,
    begin_training,
    load,
    make_hints,
    serve,
    show_refused,
    submit,
)

EVENTS = (
    ("changes that came about", "changed"),
    ("jobs that are stopped to be moved", "stopping"),
    ("… that have stopped", "stopped"),
    ("… that have started again", "started"),
)
START_SECONDS = 8.0
"""Mean duration until a joining replica runs."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--jobs", type=int, default=4000)
    parser.add_argument("--width", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--heartbeat-interval", type=float, default=10.0)
    parser.add_argument("--serve", default="--interval 90", help="options of `pipollux serve`")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        served = serve(Path(name), options.serve.split())
        try:
            jobs = submit(Path(name), served, options.jobs, widths=(options.width,), growth=2)
            hints = widened(make_hints(), options.width)
            begin_training(served, jobs)
            before, began = served.cpu, time.perf_counter()
            found = load(
                *(served, jobs, options.seconds, "elastic_load.py"),
                hints=hints,
                heartbeat_interval=options.heartbeat_interval,
                started=str(served.directory.path / listed.STARTED),
                start_seconds=START_SECONDS,
            )
            wall = time.perf_counter() - began
            print(f"\n| {len(jobs)} jobs grow, {options.seconds:.0f} s | |\n|---|---|")
            print(f"| joining replicas started, after the first | {spread(found['started'])} |")
            print(f"| changes told, after that | {spread(found['changed'])} |")
            times = sorted(found["heartbeat"]["milliseconds"])
            middle, slow = statistics.median(times), times[int(0.99 * (len(times) - 1))]
            print(
                f"| heartbeats a second, median, p99 | {len(times) / options.seconds:.0f}, ", end=""
            )
            print(f"{middle:.0f} ms, {slow:.0f} ms |")
            for kind in ("heartbeat", "report", "hints"):
                show_refused(found[kind])
            print(f"| longest between two heartbeats of a replica | {found['longest_gap']:.0f} s |")
            print(f"| the scheduler's CPU: share of a core | {(served.cpu - before) / wall:.2f} |")
            print(f"| its memory | {served.mib:.0f} MiB |")
            for words, kind in EVENTS:
                print(f"| {words}, in the store | {spread(times_of(served, kind))} |")
        finally:
            served.process.kill()  # listed jobs have nothing to save
            served.process.wait(60)


def widened(hints: dict[str, Any], width: int) -> dict[str, Any]:
    """Return hints of a job that trains well on a multiple of its replicas."""
    gradients = {"norm": hints["gradParams"]["norm"], "var": width * hints["gradParams"]["var"]}
    sizes = {name: width * hints[name] for name in ("initBatchSize", "maxBatchSize")}
    most = max(width, hints["maxProfiledReplicas"])
    return {**hints, **sizes, "gradParams": gradients, "maxProfiledReplicas": most}


def times_of(served: Served, kind: str) -> list[float]:
    """Return when events of a kind arrived, counted from the decision, without earlier ones."""
    query = text("SELECT time FROM events WHERE type = :kind")
    with create_engine(f"sqlite:///{served.directory.store}").connect() as connection:
        decided = connection.scalar(text("SELECT min(time) FROM events WHERE type = 'changing'"))
        found = connection.scalars(query, {"kind": kind}).all()
    return [float(at) - decided for at in found if decided is not None and at >= decided]


def spread(seconds: Sequence[float]) -> str:
    """Return their number, and when the first, the middle and the last one arrived."""
    if not seconds:
        return "none"
    first, middle, last = min(seconds), statistics.median(seconds), max(seconds)
    return f"{len(seconds)}: {first:.1f}, {middle:.1f} and {last:.1f} s"


if __name__ == "__main__":
    main()
