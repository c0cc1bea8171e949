"""A real scheduler with real jobs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
from workload import Work  # same folder

from pipollux_sched.lifecycle import Phase
from pipollux_sched.store import JobRecord, StateDir, Store

SERVE = Path(__file__).with_name("serve.py")
NODES = {"node-a": 4, "node-b": 4}
PATIENCE = 240.0
"""Seconds within which the scheduler and its jobs must recover."""


class World:
    """One scheduler, its state directory, and the jobs that were acknowledged; slots by node."""

    def __init__(self, folder: Path, nodes: Mapping[str, int] = NODES) -> None:
        self.folder = folder
        self.nodes = nodes
        self.directory = StateDir(folder / "state")
        self.cluster = folder / "cluster.yaml"
        self.clock = folder / "clock"
        self.clock.write_text("0")
        self.acknowledged: dict[str, Work] = {}
        """Work of every job whose submission was answered, by name."""
        nodes = [{"name": name, "slots": slots, "kind": "cpu"} for name, slots in nodes.items()]
        self.cluster.write_text(json.dumps({"nodes": nodes}))
        self.submission_seconds = 0.1
        """Duration of the last submission."""
        self.struck: float | None = None
        """Monotonic time of the present fault; None before it."""
        self._server: subprocess.Popen[bytes] | None = None
        self.serve()
        self.store = Store(self.directory.database)
        """Read independently of the scheduler, whether it runs or not."""

    # The scheduler

    def launch(self) -> None:
        """Start a scheduler."""
        with (self.folder / "serve.log").open("ab") as log:
            self._server = subprocess.Popen(
                self.command(),
                env={**os.environ, **self.environment()},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def command(self) -> list[str]:
        """Return the command of a scheduler."""
        return [sys.executable, str(SERVE), str(self.folder)]

    def environment(self) -> Mapping[str, str]:
        """Return additional variables of the scheduler."""
        return {}

    def serve(self) -> None:
        """Start a scheduler, and return when it answers."""
        self.launch()
        self.until("the scheduler answers", self._answers)

    def listens(self) -> bool:
        """Whether the last scheduler has printed its address."""
        assert self._server is not None
        assert self._server.poll() is None, "the scheduler has ended by itself; see serve.log"
        info = self.directory.read_server()
        return info is not None and info.pid == self._server.pid

    def strike(self) -> None:
        """Record that the present fault strikes now, if not recorded yet."""
        if self.struck is None:
            self.struck = time.monotonic()

    def kill(self) -> None:
        """Kill the scheduler, as the kernel does when memory runs out."""
        assert self._server is not None
        self.strike()
        self._server.kill()
        self._server.wait(10)

    def end(self) -> None:
        """End the scheduler as an admin does."""
        assert self._server is not None
        self._server.terminate()
        self._server.wait(90)

    def client(self, token: str | None = None) -> httpx.Client:
        """Return a client with the admin's, or another token."""
        info = self.directory.read_server()
        assert info is not None
        headers = {"Authorization": f"Bearer {token or info.token}"}
        return httpx.Client(base_url=info.url, headers=headers, timeout=20, trust_env=False)

    def set_node(self, node: str, condition: str) -> None:
        """Set a node ready, draining or dead."""
        self.strike()
        with self.client() as client:
            body = {"condition": condition, "reason": "a fault"}
            client.put(f"/nodes/{node}", json=body).raise_for_status()

    def _answers(self) -> bool:
        info = self.directory.read_server()
        if not self.listens() or info is None:
            return False
        try:
            return httpx.get(f"{info.url}/healthz", timeout=2, trust_env=False).is_success
        except httpx.HTTPError:
            return False

    # Jobs

    def submit(self, name: str, work: Work, **fields: Any) -> None:
        """Submit a job; it counts as acknowledged after this has returned."""
        spec = {
            "name": name,
            "script": str(work.script),
            "args": work.arguments,
            "max_restarts": 1000,
            "max_replicas": 2,
            **fields,
        }
        begun = time.monotonic()
        with self.client() as client:
            client.post("/jobs", json=spec).raise_for_status()
        self.acknowledged[name] = work
        self.submission_seconds = time.monotonic() - begun

    def jobs(self) -> dict[str, JobRecord]:
        """Jobs in the store."""
        return {job.name: job for job in self.store.jobs()}

    def under_way(self) -> list[JobRecord]:
        """Jobs that have not ended."""
        return [job for job in self.jobs().values() if not job.phase.ended]

    def training(self) -> list[JobRecord]:
        """Jobs that train at this moment."""
        return [job for job in self.under_way() if job.state.reason == "Training"]

    def checkpoints(self, job: JobRecord) -> Path:
        """Return the checkpoint folder of a job."""
        own = job.spec.get("checkpoint_dir")
        return Path(own) if own else self.directory.checkpoints(job.name)

    def processes(self, job: str | None = None) -> dict[int, Mapping[str, str]]:
        """Environment of every living process of a job, or of all, by process id."""
        found = {}
        for process in psutil.process_iter():
            try:
                environment = process.environ()
                dead = process.status() == psutil.STATUS_ZOMBIE
            except (psutil.Error, OSError):
                continue
            if (
                self.is_ours(environment)
                and not dead
                and job in (None, environment.get("PIPOLLUX_JOB_ID"))
            ):
                found[process.pid] = environment
        return found

    def is_ours(self, environment: Mapping[str, str]) -> bool:
        """Whether a process with this environment belongs to a job of the scheduler."""
        return environment.get("PIPOLLUX_STATE_DIR") == str(self.directory.path)

    def until(self, what: str, true: Callable[[], object], seconds: float = PATIENCE) -> float:
        """Wait for a condition; return the seconds waited."""
        begun = time.monotonic()
        while not true():
            if time.monotonic() - begun > seconds:
                raise AssertionError(f"after {seconds:.0f} s it is still not so that {what}")
            time.sleep(0.1)
        return time.monotonic() - begun

    def signal(self, pid: int, number: signal.Signals) -> None:
        """Send a signal to a process that may be gone."""
        self.strike()
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def backs_off(job: JobRecord) -> bool:
    """Whether a job has no processes, as it waits for its next try after a failure."""
    return job.phase is Phase.RESTARTING and not job.state.running_on and job.state.intent is None
