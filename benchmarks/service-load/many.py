"""A thousand jobs submitted at once to a real scheduler, and its CPU time while they wait.

    python benchmarks/service-load/many.py [--jobs 1000] [--seconds 120]

One job holds all slots, so that all others wait. They have one to four stages and come in one file.
Prints a table in Markdown: the duration of `pipollux submit` and of its request, the cost of both
for the scheduler, and its CPU time afterwards, when nothing happens.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parent))

from load import CLUSTER, JOB, cpu_seconds, serve, wait_until  # same folder

from pipollux_sched.lifecycle import Phase
from pipollux_sched.store import StateDir, Store

SETTLED = 15.0
"""Seconds until the effects of the submission are over."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=120.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        directory = StateDir(folder / "state")
        directory.create()
        write_files(folder, options.jobs)
        server = serve(folder, directory)
        try:
            submit(folder, directory, "holder.yaml")
            wait_until((folder / "holder").exists, "the job runs that holds all slots")
            time.sleep(SETTLED)
            print(f"| {options.jobs} jobs in one file, on {CLUSTER.strip()!r} | |\n|---|---|")
            measure_submission(folder, directory, server.pid, options.jobs)
            measure_waiting(server.pid, options.seconds)
        finally:
            server.terminate()
            server.wait(60)


def write_files(folder: Path, jobs: int) -> None:
    """Write the script, the job that holds everything, and the waiting jobs."""
    (folder / "job.py").write_text(JOB)
    script = folder / "job.py"
    (folder / "holder.yaml").write_text(
        f"jobs: [{{name: holder, script: {script}, num_stages: 4, preemptible: false}}]\n"
    )
    rows = (
        f"  - {{name: job-{n}, script: {script}, num_stages: {n % 4 + 1}}}" for n in range(jobs)
    )
    (folder / "jobs.yaml").write_text("\n".join(["jobs:", *rows]) + "\n")


def submit(folder: Path, directory: StateDir, file: str) -> float:
    """Submit a file with the command; return its CPU seconds."""
    pipollux = Path(sys.executable).with_name("pipollux")
    command = [pipollux, "submit", file, "--state-dir", str(directory.path)]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None  # noqa: S101  # it is a pipe
        process.stdout.read()
        spent = psutil.Process(process.pid).cpu_times()
    if process.returncode:
        raise RuntimeError(f"pipollux submit {file} ended with status {process.returncode}")
    return spent.user + spent.system


def measure_submission(folder: Path, directory: StateDir, pid: int, jobs: int) -> None:
    """Measure a submission until every job has its reason for waiting."""
    before, began = cpu_seconds(pid), time.perf_counter()
    command = submit(folder, directory, "jobs.yaml")
    print(f"| `pipollux submit` | {time.perf_counter() - began:.1f} s |")
    print(f"| the command's CPU | {command:.1f} s |")

    def queued() -> bool:
        with Store(directory.store) as store:
            return sum(job.phase is Phase.QUEUED for job in store.jobs()) == jobs

    wait_until(queued, "all jobs wait")
    print(f"| until all are queued with their reason | {time.perf_counter() - began:.1f} s |")
    time.sleep(SETTLED)
    print(f"| the scheduler's CPU for all that | {cpu_seconds(pid) - before:.1f} s |", flush=True)


def measure_waiting(pid: int, seconds: float) -> None:
    """Measure the scheduler's CPU time while nothing happens."""
    before, began = cpu_seconds(pid), time.perf_counter()
    time.sleep(seconds)
    share = (cpu_seconds(pid) - before) / (time.perf_counter() - began)
    print(f"| idle, over {seconds:.0f} s: share of a core | {100 * share:.1f} % |")


if __name__ == "__main__":
    main()
