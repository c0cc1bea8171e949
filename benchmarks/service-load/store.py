"""Speed of a full store: 1000 jobs, 10 000 hints, a million points.

    python benchmarks/service-load/store.py [--url postgresql://USER@HOST/EMPTY_DATABASE]

Fills a new store, times each query of it many times and `pipollux jobs` as a user runs it, and
deletes old events while a writer puts hints: the duration of both. Prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sqlalchemy import func, insert, select

from pipollux_sched.lifecycle import Allocate, Exited, Outcome, Recover, Started
from pipollux_sched.store import Point, StateDir, Store
from pipollux_sched.store.database import Database
from pipollux_sched.store.tables import EventRow, PointRow

JOBS, HINTS, POINTS = 1000, 10_000, 1_000_000
ATTEMPTS = 5
SPAN = 3000.0
"""Seconds over which all events happened, until now: nothing is old enough to be deleted yet."""
RATE = 200
"""Hints per second of the writer during the deletion."""
PATIENCE = 30.0
"""Seconds after which the deletion is stopped."""
HINT = {
    "initBatchSize": 32,
    "maxBatchSize": 1024,
    "gradParams": {"norm": 0.0123, "var": 0.0456},
    "perfParams": {
        "alpha_c": 0.1,
        "beta_c": 0.01,
        "alpha_n": 0.1,
        "beta_n": 0.01,
        "alpha_r": 0.1,
        "beta_r": 0.01,
        "gamma": 1.5,
    },
    "localBszBounds": [8, 128],
    "maxProfiledReplicas": 4,
    "numStages": 2,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--url", help="an empty database, instead of SQLite in a temporary folder")
    parser.add_argument("--points", type=int, default=POINTS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        directory = StateDir(Path(folder) / "state")
        directory.create()
        if options.url:
            directory.keep_store(options.url)
        began = time.perf_counter()
        fill(directory.store, options.points)
        print(f"Filled in {time.perf_counter() - began:.0f} s.\n", file=sys.stderr)
        print(f"| {JOBS} jobs, {HINTS} hints, {options.points} points | median ms | p99 ms |")
        print("|---|---|---|")
        ask_everything(directory)
        run_command(directory)
        forget(directory)


def fill(place: Path | str, num_points: int) -> None:
    """Fill the store: jobs and attempts as a scheduler does, the rest in bulk."""
    with Store(place, create=True) as store:
        for number in range(JOBS):
            name = f"job-{number:04d}"
            store.submit(name, spec(name), "token", max_restarts=ATTEMPTS + 1)
            for attempt in range(1, ATTEMPTS + 1):
                nodes = [f"node-{(number + n) % 64:02d}" for n in range(4)]
                store.transition(name, Allocate(nodes, "because it is free", num_stages=2))
                store.transition(name, Started(attempt, tuple(nodes)))
                if attempt < ATTEMPTS:
                    store.transition(name, Exited(attempt, Outcome.STOPPED, step=1))
                    store.transition(name, Recover())
    database = Database(place, create=False)
    now, step = time.time(), itertools.count()
    for kind, count in (("hints", HINTS), ("progress", num_points)):
        for begin in range(0, count, 20_000):
            numbers = range(begin, min(begin + 20_000, count))
            tell(database, kind, [now - SPAN * (1 - n / count) for n in numbers], step)
    database.close()


def tell(database: Database, kind: str, times: list[float], step: itertools.count[int]) -> None:
    """Insert events of a kind, of one job after another."""
    with database.write() as session:
        last = session.scalar(select(func.max(EventRow.id))) or 0
        steps = [next(step) for _ in times]
        names = [f"job-{n % JOBS:04d}" for n in steps]
        data: dict[str, Any] = {"hints": HINT} if kind == "hints" else {}
        fixed = {"type": kind, "attempt": ATTEMPTS, "data": data}
        rows = [{"time": at, "job": job, **fixed} for at, job in zip(times, names, strict=True)]
        session.execute(insert(EventRow), rows)
        if kind == "progress":
            query = select(EventRow.id, EventRow.job).where(EventRow.id > last)
            found = session.execute(query.order_by(EventRow.id)).all()
            points = [
                {"event": row.id, "job": row.job, **vars(point(n, at))}
                for row, n, at in zip(found, steps, times, strict=True)
            ]
            session.execute(insert(PointRow), points)


def spec(name: str) -> dict[str, Any]:
    """Return the specification of a job of some size."""
    environment = {f"VARIABLE_{n}": "value" for n in range(8)}
    resources = {"num_stages": 2, "stage_choices": [1, 2, 4], "max_replicas": 16}
    return {"name": name, "script": "/jobs/train.py", **resources, "environment": environment}


def point(step: int, at: float) -> Point:
    sizes = {"batch_size": 64, "atomic_bsz": 16, "accum_steps": 0, "num_replicas": 4}
    measured = {"predicted_step_time": 0.11, "goodput": 512.5, "efficiency": 0.83, "loss": 1.25}
    told = {"time": at, "step": step, "epoch": 3, "samples": 64 * step, "num_epochs": 10}
    return Point(**told, **sizes, **measured, step_time=0.12)


def ask_everything(directory: StateDir) -> None:
    """Time every query that is made while jobs run."""
    with Store(directory.store) as store:
        last, hint = store.last_event(), iter(itertools.cycle(range(JOBS)))

        def put() -> None:
            store.put_hints(f"job-{next(hint):04d}", ATTEMPTS, HINT)

        def report() -> None:
            at = time.time()
            points = [point(n, at) for n in range(10)]
            store.add_report(f"job-{next(hint):04d}", ATTEMPTS, points)

        questions: dict[str, Callable[[], object]] = {
            "jobs()": store.jobs,
            "last_points()": store.last_points,
            "num_attempts()": store.num_attempts,
            "attained_service()": store.attained_service,
            "hints()": store.hints,
            "events(after), the last 500": lambda: store.events(last - 500),
            "events(after, limit=500), from the middle": lambda: store.events(last // 2, limit=500),
            "events(job, types=[allocated])": lambda: store.events(
                job="job-0500", types=["allocated"]
            ),
            "events(job, limit=500)": lambda: store.events(job="job-0500", limit=500),
            "put_hints()": put,
            "add_report() of 10 points": report,
        }
        for name, question in questions.items():
            show(f"`{name}`", measure(question, 200 if question in (put, report) else 30))


def measure(question: Callable[[], object], times: int) -> list[float]:
    question()
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        question()
        taken.append(time.perf_counter() - began)
    return taken


def show(name: str, seconds: list[float]) -> None:
    worst = sorted(seconds)[int(0.99 * (len(seconds) - 1))]
    print(f"| {name} | {1000 * statistics.median(seconds):.1f} | {1000 * worst:.1f} |", flush=True)


def run_command(directory: StateDir) -> None:
    """Time `pipollux jobs`, and the start of Python and its imports within."""
    program = str(Path(sys.executable).with_name("pipollux"))
    imports = "import pipollux_sched.cli.app, pipollux_sched.store, rich.table"
    commands = {
        "`python -c pass`": [sys.executable, "-c", "pass"],
        "importing what `pipollux jobs` needs": [sys.executable, "-c", imports],
        "`pipollux jobs`": [program, "jobs", "--state-dir", str(directory.path)],
        "`pipollux jobs --output json`": [
            *(program, "jobs", "--output", "json", "--state-dir", str(directory.path))
        ],
    }
    for name, command in commands.items():

        def run(command: list[str] = command) -> None:
            subprocess.run(command, check=True, capture_output=True, timeout=60)

        show(name, measure(run, 10))


def forget(directory: StateDir) -> None:
    """Make everything two hours old, and time the deletion and a concurrent writer."""
    waits: list[float] = []
    ended = threading.Event()
    with Store(directory.store) as store:

        def write() -> None:
            names = itertools.cycle(range(JOBS))
            while not ended.wait(max(1 / RATE - (waits[-1] if waits else 0), 0)):
                began = time.perf_counter()
                store.put_hints(f"job-{next(names):04d}", ATTEMPTS, HINT)
                waits.append(time.perf_counter() - began)

        writer = threading.Thread(target=write)
        writer.start()
        later = time.time() + 2 * 3600
        began, deleted, calls = time.perf_counter(), 0, []
        while True:
            start = time.perf_counter()
            deleted += store.prune(later)
            calls.append(time.perf_counter() - start)
            if calls[-1] < 0.5 or time.perf_counter() - began > PATIENCE:
                break
        seconds = time.perf_counter() - began
        ended.set()
        writer.join()
        left = store.last_event(), len(store.events(job="job-0500", types=["progress"]))
    show(f"`prune()`, {len(calls)} times, {deleted} deleted in {seconds:.0f} s", calls)
    show(f"`put_hints()` meanwhile, {len(waits) / seconds:.0f} a second", waits)
    print(f"\nThe last event is {left[0]}; a job has {left[1]} points left.", file=sys.stderr)


if __name__ == "__main__":
    main()
