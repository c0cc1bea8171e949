"""Hints at 200 per second to a real scheduler, and its memory over an hour's worth of events.

    python benchmarks/service-load/load.py [--seconds 60] [--events 72000]

A store is filled with 1000 jobs and 10 000 hints; a scheduler serves it and runs four real jobs.
Hints and reports then come from one client per job, over HTTP with the jobs' own tokens. Prints a
table in Markdown.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import psutil

sys.path.insert(0, str(Path(__file__).parent))

from store import HINT, fill, point  # same folder

from pipollux_sched.lifecycle import Exited, Outcome
from pipollux_sched.store import JobRecord, StateDir, Store

RATE = 200
RUNNING = 4
PATIENCE = 120.0
JOB = """
import os, pathlib, signal, time
signal.signal(signal.SIGTERM, lambda *_: exit(0))
pathlib.Path(os.environ["PIPOLLUX_JOB_ID"]).touch()
time.sleep(86400)
"""
"""A script that prints that it runs, and sleeps."""
CLUSTER = "nodes:\n  - {name: node-a, slots: 4, kind: cpu}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--events", type=int, default=72_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        directory = StateDir(Path(folder) / "state")
        directory.create()
        fill(directory.store, 20_000)
        complete_all(directory)
        server = serve(Path(folder), directory)
        try:
            jobs = submit(Path(folder), directory)
            print("| | |\n|---|---|")
            before = cpu_seconds(server.pid)
            times = send_hints(directory, jobs, options.seconds)
            show_hints(times, cpu_seconds(server.pid) - before)
            show_memory(replay(directory, jobs, options.events, server.pid), options.events)
        finally:
            server.terminate()
            server.wait(60)


def complete_all(directory: StateDir) -> None:
    """Mark the jobs that fill the store as ended."""
    with Store(directory.store) as store:
        for job in store.jobs():
            store.transition(job.name, Exited(job.state.attempt, Outcome.COMPLETE))


def serve(folder: Path, directory: StateDir) -> subprocess.Popen[bytes]:
    """Start a scheduler, and wait until it answers."""
    (folder / "cluster.yaml").write_text(CLUSTER)
    command = ["serve", "--cluster", "cluster.yaml", "--state-dir", str(directory.path)]
    pipollux = Path(sys.executable).with_name("pipollux")
    server = subprocess.Popen([pipollux, *command], cwd=folder, stdout=subprocess.DEVNULL)
    wait_until(lambda: directory.read_server() is not None, "it serves")
    return server


def submit(folder: Path, directory: StateDir) -> list[JobRecord]:
    """Submit idle jobs; return them when they run."""
    (folder / "job.py").write_text(JOB)
    info = directory.read_server()
    assert info is not None  # noqa: S101  # `serve` has waited for it
    headers = {"Authorization": f"Bearer {info.token}"}
    names = [f"loaded-{number}" for number in range(RUNNING)]
    with httpx.Client(base_url=info.url, headers=headers, trust_env=False, timeout=30) as admin:
        for name in names:
            spec = {"name": name, "script": str(folder / "job.py"), "max_replicas": 1}
            admin.post("/jobs", json=spec).raise_for_status()

    def found() -> list[JobRecord]:
        with Store(directory.store) as store:
            jobs = [store.job(name) for name in names]
        return [job for job in jobs if job.state.running_on]

    # Wait for their agents: these import torch, which takes both cores for seconds.
    wait_until(lambda: all((folder / name).exists() for name in names), "the jobs run")
    return found()


def send_hints(directory: StateDir, jobs: list[JobRecord], seconds: float) -> list[float]:
    """Send hints at `RATE` per second, from a client per job; return the duration of each."""
    taken: list[list[float]] = [[] for _ in jobs]
    threads = [
        threading.Thread(target=_send_hints, args=(directory, job, seconds, times))
        for job, times in zip(jobs, taken, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [seconds for times in taken for seconds in times]


def _send_hints(directory: StateDir, job: JobRecord, seconds: float, times: list[float]) -> None:
    path = f"/jobs/{job.name}/hints?attempt={job.state.attempt}"
    pause = RUNNING / RATE
    with client(directory, job) as session:
        begun = due = time.perf_counter()
        while due < begun + seconds:
            time.sleep(max(due - time.perf_counter(), 0.0))
            # From its due time: a late answer must not hide the delay of the next request.
            session.put(path, json=HINT).raise_for_status()
            times.append(time.perf_counter() - due)
            due += pause


def replay(directory: StateDir, jobs: list[JobRecord], events: int, pid: int) -> list[float]:
    """Report progress as fast as it is answered; return the scheduler's MiB at each tenth."""
    server, memory, step = psutil.Process(pid), [], 0
    sessions = [client(directory, job) for job in jobs]
    for _ in range(10):
        for _ in range(events // 10 // 20):
            job, session = jobs[step % len(jobs)], sessions[step % len(jobs)]
            points = [_wire(step * 20 + n) for n in range(20)]
            body = {"attempt": job.state.attempt, "numEpochs": 10, "points": points}
            answer = session.post(f"/jobs/{job.name}/reports", json={**body, "timeline": None})
            if answer.status_code == 429:
                time.sleep(float(answer.headers["Retry-After"]))
            step += 1
        memory.append(server.memory_info().rss / 2**20)
    for session in sessions:
        session.close()
    return memory


def client(directory: StateDir, job: JobRecord) -> httpx.Client:
    """Return a client with a job's token."""
    info = directory.read_server()
    assert info is not None  # noqa: S101  # it serves
    headers = {"Authorization": f"Bearer {job.token}"}
    return httpx.Client(base_url=info.url, headers=headers, trust_env=False, timeout=30)


def _wire(step: int) -> dict[str, Any]:
    known = vars(point(step, time.time()))
    names = {
        name: name.partition("_")[0] + name.partition("_")[2].title().replace("_", "")
        for name in known
    }
    return {names[name]: value for name, value in known.items() if name != "num_epochs"}


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process."""
    spent = psutil.Process(pid).cpu_times()
    return spent.user + spent.system


def show_hints(times: list[float], cpu: float) -> None:
    """Print the duration of hints, and their cost for the scheduler."""
    ordered = sorted(1000 * seconds for seconds in times)
    p99 = ordered[int(0.99 * len(ordered))]
    print(f"| {len(ordered)} hints at {RATE}/s: median | {statistics.median(ordered):.1f} ms |")
    print(f"| p99 | {p99:.1f} ms |")
    print(f"| slowest | {ordered[-1]:.1f} ms |")
    print(f"| the scheduler's CPU, for each | {1000 * cpu / len(ordered):.2f} ms |", flush=True)


def show_memory(memory: list[float], events: int) -> None:
    shown = ", ".join(f"{mib:.0f}" for mib in memory)
    print(f"| memory at each tenth of {events} events | {shown} MiB |")


def wait_until(true: Any, what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not true():
        if time.monotonic() > deadline:
            raise TimeoutError(f"after {PATIENCE:.0f} s it is still not so that {what}")
        time.sleep(0.05)


if __name__ == "__main__":
    main()
