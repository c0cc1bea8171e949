"""A scheduler under the heartbeats, hints and reports of 10 000 replicas, and its page meanwhile.

    python benchmarks/service-load/heartbeats.py [--jobs 4000] [--seconds 60] [--shares 8,4,2,1]
    python benchmarks/service-load/heartbeats.py --parts each --shares= --serve "--interval 3600"
    python benchmarks/service-load/heartbeats.py --parts= --shares 1 --seconds 150
        --heartbeat-interval 50 --hints-interval 120

A real `pipollux serve` with 1250 nodes of 8 slots and 4000 jobs of 1, 2 or 6 replicas, 10 000 in
all, which are only listed (`listed.py`). Another process sends their requests (`replica_load.py`):
first of one kind, as fast as they are answered, then all of an eighth, a quarter, a half and all of
the jobs, at their usual times. Replicas of a scheduler with `--heartbeat-timeout 300` send a
heartbeat every 50 s. With `--serve "--store postgresql://USER@HOST/EMPTY_DATABASE"` the store is
that database. Prints tables in Markdown.
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil
from sqlalchemy import create_engine, text

sys.path.insert(0, str(Path(__file__).parent))

from load import JOB, cpu_seconds, wait_until  # same folder
from store import HINT  # same folder

from pipollux_perfmodel import Layer, LayerProfile, SchedHints
from pipollux_perfmodel.hints.step_rows import StepRow, StepRows
from pipollux_sched.lifecycle import Phase
from pipollux_sched.store import StateDir, Store

NODES, SLOTS = 1250, 8
KINDS = (("report", "a report of one point"), ("hints", "hints"), ("heartbeat", "a heartbeat"))
WIDTHS = (1, 1, 2, 6)
"""Replicas of four jobs: 10 000 for 4000 jobs."""
SETTLED = 20.0
CLIENTS, FLOODING = 32, 200
"""Clients that send as fast as they are answered, and the jobs that they send for."""
ASKED = 2
"""Requests for each page."""
PATIENCE = 600.0


class Served(NamedTuple):
    """A running scheduler."""

    directory: StateDir
    process: subprocess.Popen[bytes]
    admin: httpx.Client

    @property
    def cpu(self) -> float:
        """Its CPU seconds so far."""
        return cpu_seconds(self.process.pid)

    @property
    def mib(self) -> float:
        """Its memory."""
        return float(psutil.Process(self.process.pid).memory_info().rss / 2**20)

    @property
    def store_bytes(self) -> int:
        """Size of the store's files, or of its database."""
        where = str(self.directory.store)
        if where.startswith("postgresql"):
            with create_engine(where).connect() as connection:
                return int(connection.scalar(text("SELECT pg_database_size(current_database())")))
        return sum(path.stat().st_size for path in self.directory.path.glob("pipollux.db*"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--jobs", type=int, default=4000)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--flat-out", type=float, default=10.0, help="seconds of each kind")
    parser.add_argument("--shares", default="8,4,2,1", help="of the jobs: an eighth, …")
    parser.add_argument("--parts", default="idle,page,each", help="what is measured besides")
    parser.add_argument("--heartbeat-interval", type=float, default=10.0)
    parser.add_argument("--hints-interval", type=float, default=30.0)
    parser.add_argument("--serve", default="", help="further options of `pipollux serve`")
    options = parser.parse_args()
    intervals = {
        "heartbeat_interval": options.heartbeat_interval,
        "hints_interval": options.hints_interval,
    }
    with tempfile.TemporaryDirectory() as name:
        served = serve(Path(name), options.serve.split())
        try:
            jobs = submit(Path(name), served, options.jobs)
            hints = make_hints()
            begin_training(served, jobs)
            if "idle" in options.parts:
                measure_idle(served)
            if "page" in options.parts:
                measure_page(served)
            if "each" in options.parts:
                measure_each(served, jobs[:FLOODING], hints, options.flat_out)
            for share in map(int, options.shares.split(",") if options.shares else ()):
                measure_live(served, jobs[::share], hints, options.seconds, intervals)
        finally:
            served.process.kill()  # listed jobs have nothing to save
            served.process.wait(60)


def serve(folder: Path, options: Sequence[str]) -> Served:
    """Start a scheduler, and wait until it answers."""
    rows = (f"  - {{name: node-{n:04}, slots: {SLOTS}, kind: cpu}}" for n in range(NODES))
    (folder / "cluster.yaml").write_text("\n".join(["nodes:", *rows]) + "\n")
    directory = StateDir(folder / "state")
    # Without heartbeats between two measurements no replica may count as lost.
    place = ["--cluster", "cluster.yaml", "--state-dir", str(directory.path)]
    place += ["--heartbeat-timeout", "3600"]
    command = [sys.executable, str(Path(__file__).with_name("listed.py")), "serve", *place]
    process = subprocess.Popen([*command, *options], cwd=folder, stdout=subprocess.DEVNULL)
    wait_until(lambda: directory.read_server() is not None, "it serves")
    info = directory.read_server()
    assert info is not None  # noqa: S101  # just waited for
    headers = {"Authorization": f"Bearer {info.token}"}
    admin = httpx.Client(base_url=info.url, headers=headers, trust_env=False, timeout=PATIENCE)
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    print(f"\nIt may open {files} files.\n", flush=True)
    return Served(directory, process, admin)


def submit(
    folder: Path, served: Served, number: int, widths: Sequence[int] = WIDTHS, growth: int = 1
) -> list[list[Any]]:
    """Submit the jobs at once, and wait until all run; return their replicas' data.

    `widths` are their initial replicas, in turn; `growth` is the factor to their maximum.
    """
    (folder / "job.py").write_text(JOB)
    script = str(folder / "job.py")
    specs = [
        {"name": f"job-{n:04}", "script": script, "min_replicas": width, "max_replicas": most}
        for n, width in zip(range(number), itertools.cycle(widths), strict=False)
        for most in (width * growth,)
    ]
    before, began = served.cpu, time.perf_counter()
    served.admin.post("/jobs/batch", json={"jobs": specs}).raise_for_status()
    answered, spent = time.perf_counter() - began, served.cpu - before
    deadline = began + PATIENCE
    while time.perf_counter() < deadline:
        time.sleep(3.0)
        phases = served.admin.get("/overview?limit=0").json()["phases"]
        if phases.get(Phase.RUNNING.value, 0) >= number:
            break
    seconds = time.perf_counter() - began
    with Store(served.directory.store) as store:
        found = [job for job in store.jobs(unfinished=True) if job.state.running_on]
    wide = sum(len(job.state.running_on) for job in found)
    print(f"| {number} jobs submitted in one request | |\n|---|---|")
    print(f"| until it is answered | {answered:.1f} s, {spent:.1f} s of CPU |")
    print(f"| until {len(found)} run, {wide} replicas | {seconds:.1f} s |")
    print(f"| the scheduler's CPU for all that | {served.cpu - before:.1f} s |")
    print(f"| its memory | {served.mib:.0f} MiB |")
    print(f"| the store | {served.store_bytes / 2**20:.1f} MiB |", flush=True)
    return [[j.name, j.token, j.state.attempt, len(j.state.running_on)] for j in found]


def begin_training(served: Served, jobs: list[list[Any]]) -> None:
    """Report the first step of every job, so that none is pinned as a starting one."""
    begin = served.cpu
    found = load(served, jobs, PATIENCE, flat_out="report", clients=CLIENTS, times=1)
    show_statuses("first reports", found["report"])
    print(f"| the scheduler's CPU for those | {served.cpu - begin:.1f} s |", flush=True)


def measure_idle(served: Served) -> None:
    """Print the scheduler's share of a core without requests, including its decisions."""
    time.sleep(SETTLED)
    before, began = served.cpu, time.perf_counter()
    time.sleep(2 * SETTLED)
    share = (served.cpu - before) / (time.perf_counter() - began)
    print(f"| idle: share of a core | {100 * share:.0f} % |", flush=True)


def measure_each(
    served: Served, jobs: list[list[Any]], hints: dict[str, Any], seconds: float
) -> None:
    """Send requests of each kind as fast as they are answered."""
    # The first heartbeat of each replica is stored at once, others are not.
    load(served, jobs, PATIENCE, flat_out="heartbeat", clients=CLIENTS, times=max(WIDTHS))
    print(f"\n| {CLIENTS} clients, each kind for {seconds:.0f} s | a second | CPU of each |")
    print("|---|---|---|")
    for kind, words in KINDS:
        before = served.cpu
        found = load(served, jobs, seconds, flat_out=kind, clients=CLIENTS, hints=hints)[kind]
        count, spent = len(found["milliseconds"]), served.cpu - before
        rate = count / seconds
        print(f"| {words} | {rate:.0f} | {1000 * spent / max(count, 1):.2f} ms |", flush=True)


def measure_live(
    served: Served,
    jobs: list[list[Any]],
    hints: dict[str, Any],
    seconds: float,
    intervals: Mapping[str, float],
) -> None:
    """Send all requests of some jobs at their usual times."""
    replicas = sum(job[3] for job in jobs)
    before, stored = served.cpu, served.store_bytes
    began = time.perf_counter()
    found = load(served, jobs, seconds, hints=hints, **intervals)
    wall = time.perf_counter() - began
    print(f"\n| {len(jobs)} jobs, {replicas} replicas, {seconds:.0f} s | a second | median | p99 |")
    print("|---|---|---|---|")
    for kind, words in KINDS:
        times = sorted(found[kind]["milliseconds"])
        if times:
            middle, slow = statistics.median(times), times[int(0.99 * (len(times) - 1))]
            rate = len(times) / seconds
            print(f"| {words.removeprefix('a ')} | {rate:.0f} | {middle:.0f} ms | {slow:.0f} ms |")
        show_refused(found[kind])
    print(f"| the scheduler's CPU: share of a core | {(served.cpu - before) / wall:.2f} | | |")
    print(f"| its memory | {served.mib:.0f} MiB | | |")
    growth = (served.store_bytes - stored) / 2**20 * 3600 / seconds
    print(f"| the store grows, an hour | {growth:.0f} MiB | | |")
    print(f"| longest between two heartbeats of a replica | {found['longest_gap']:.0f} s | | |")
    sys.stdout.flush()


def measure_page(served: Served) -> None:
    """Measure requests of the page and of other readers at that size."""
    now = time.time()
    asked = (
        ("`/overview`, a page of 50 jobs", "/overview?limit=50"),
        ("`/overview` with 100 events", "/overview?limit=50&events=100"),
        ("`/nodes`", "/nodes"),
        ("`/usage`, an hour in 100 parts", f"/usage?since={now - 3600}&parts=100"),
        ("`/attempts`, an hour", f"/attempts?since={now - 3600}"),
        ("`/jobs`, all", "/jobs"),
        ("`/jobs/NAME`", "/jobs/job-0000"),
        ("`/jobs/NAME/explanation`", "/jobs/job-0000/explanation"),
        ("`/plan`", "/plan"),
        ("`/metrics`", "/metrics"),
    )
    print("\n| request | KiB | ms | scheduler's CPU ms |\n|---|---|---|---|")
    for words, path in asked:
        served.admin.get(path)
        before, began = served.cpu, time.perf_counter()
        answers = [served.admin.get(path) for _ in range(ASKED)]
        wall, spent = (time.perf_counter() - began) / ASKED, (served.cpu - before) / ASKED
        size = len(answers[0].content) / 1024
        status = "" if answers[0].is_success else f" ({answers[0].status_code})"
        print(f"| {words}{status} | {size:.0f} | {1000 * wall:.0f} | {1000 * spent:.0f} |")
    sys.stdout.flush()


def load(
    served: Served,
    jobs: list[list[Any]],
    seconds: float,
    script: str = "replica_load.py",
    **plan: Any,
) -> Any:
    """Send from another process, for at most some seconds; return its measurements."""
    told = {
        "url": str(served.admin.base_url),
        "seconds": seconds,
        "jobs": jobs,
        "heartbeat_interval": 10.0,
        "hints_interval": 30.0,
        "step_time": 0.5,
        **plan,
    }
    command = [sys.executable, str(Path(__file__).with_name(script))]
    sent = json.dumps(told).encode()
    done = subprocess.run(
        command, input=sent, check=True, stdout=subprocess.PIPE, timeout=seconds + PATIENCE
    )
    return json.loads(done.stdout)


def show_statuses(words: str, found: dict[str, Any]) -> None:
    told = ", ".join(f"{count} times {status}" for status, count in found["statuses"].items())
    print(f"| {words} | {told} |", flush=True)


def show_refused(found: dict[str, Any]) -> None:
    refused = {status: n for status, n in found["statuses"].items() if not status.startswith("2")}
    if refused:
        told = ", ".join(f"{count} times {status}" for status, count in refused.items())
        print(f"| … not accepted | {told} | | |")


def make_hints() -> dict[str, Any]:
    """Return hints of the size that a job with 14 profiled layers sends."""
    layer = Layer(1.2e-4, 1.2e-3, 1.2e-4, 2.4e-3, parameter_bytes=2.8e7, activation_bytes=1.5e6)
    rows = [
        StepRow(
            num_stages=1,
            num_nodes=1,
            num_replicas=replicas,
            atomic_bsz=16,
            num_microbatches=1,
            accum_step_time=0.4012345,
            optim_step_time=0.4512345,
        )
        for replicas in range(1, 9)
    ]
    hints = SchedHints.from_json_object(HINT | {"numStages": 1, "maxProfiledReplicas": 6})
    told = {
        "layers": LayerProfile.from_layers([layer] * 14),
        "remaining_samples": 1.5e6,
        "trained_samples": 2.5e5,
        "step_profile": StepRows(num_layers=14, num_parameters=98_000_000, rows=tuple(rows)),
    }
    made: dict[str, Any] = hints.model_copy(update=told).to_json_object()
    print(f"Hints are {len(json.dumps(made))} bytes.", flush=True)
    return made


if __name__ == "__main__":
    main()
