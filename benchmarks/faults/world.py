"""A real scheduler with real jobs, and what must be true of them after every fault."""

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

from pipollux_sched.store import JobRecord, StateDir, Store

JOB = Path(__file__).with_name("counting_job.py")
SERVE = Path(__file__).with_name("serve.py")
NODES = {"node-a": 4, "node-b": 4}
PATIENCE = 120.0
"""Seconds in which everything must be as it should again."""


class World:
    """One scheduler, its state directory, and the jobs that were acknowledged.

    Args:
        folder: an empty folder for all of it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.directory = StateDir(folder / "state")
        self.clock = folder / "clock"
        self.clock.write_text("0")
        self.acknowledged: dict[str, int] = {}
        """Steps of every job whose submission was answered, by name."""
        nodes = [{"name": name, "slots": slots, "kind": "cpu"} for name, slots in NODES.items()]
        (folder / "cluster.yaml").write_text(json.dumps({"nodes": nodes}))
        self._server: subprocess.Popen[bytes] | None = None
        self.serve()

    # The scheduler

    def serve(self) -> None:
        """Start a scheduler, and return when it answers."""
        with (self.folder / "serve.log").open("ab") as log:
            self._server = subprocess.Popen(
                [sys.executable, str(SERVE), str(self.folder)],
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.until("the scheduler answers", self._answers)

    def kill(self) -> None:
        """Kill the scheduler, as a machine that runs out of memory does."""
        assert self._server is not None
        self._server.kill()
        self._server.wait(10)

    def end(self) -> None:
        """Let the scheduler end as an admin does."""
        assert self._server is not None
        self._server.terminate()
        self._server.wait(90)

    def client(self, token: str | None = None) -> httpx.Client:
        """Ask the scheduler as its admin, or with another token."""
        info = self.directory.read_server()
        assert info is not None
        headers = {"Authorization": f"Bearer {token or info.token}"}
        return httpx.Client(base_url=info.url, headers=headers, timeout=20, trust_env=False)

    def _answers(self) -> bool:
        assert self._server is not None
        assert self._server.poll() is None, "the scheduler has ended by itself; see serve.log"
        info = self.directory.read_server()
        if info is None or info.pid != self._server.pid:
            return False
        try:
            return httpx.get(f"{info.url}/healthz", timeout=2, trust_env=False).is_success
        except httpx.HTTPError:
            return False

    # Jobs

    def submit(self, name: str, steps: int, **fields: Any) -> None:
        """Submit a job; it counts as acknowledged once this has returned."""
        spec = {
            "name": name,
            "script": str(JOB),
            "args": ["--steps", str(steps)],
            "max_restarts": 1000,
            "max_replicas": 2,
            **fields,
        }
        with self.client() as client:
            client.post("/jobs", json=spec).raise_for_status()
        self.acknowledged[name] = steps

    def jobs(self) -> dict[str, JobRecord]:
        """What the store knows."""
        with Store(self.directory.database) as store:
            return {job.name: job for job in store.jobs()}

    def under_way(self) -> list[JobRecord]:
        """Jobs that have not ended."""
        return [job for job in self.jobs().values() if not job.phase.ended]

    def training(self) -> list[JobRecord]:
        """Jobs that train at this moment."""
        return [job for job in self.under_way() if job.state.reason == "Training"]

    def processes(self, job: str | None = None) -> dict[int, Mapping[str, str]]:
        """Every living process of a job, or of all: its environment by its id."""
        found = {}
        for process in psutil.process_iter():
            try:
                environment = process.environ()
                dead = process.status() == psutil.STATUS_ZOMBIE
            except (psutil.Error, OSError):
                continue
            ours = environment.get("PIPOLLUX_STATE_DIR") == str(self.directory.path)
            if ours and not dead and job in (None, environment.get("PIPOLLUX_JOB_ID")):
                found[process.pid] = environment
        return found

    def until(self, what: str, true: Callable[[], object], seconds: float = PATIENCE) -> float:
        """Wait until something is true; return the seconds that it took."""
        begun = time.monotonic()
        while not true():
            if time.monotonic() - begun > seconds:
                raise AssertionError(f"after {seconds:.0f} s it is still not so that {what}")
            time.sleep(0.05)
        return time.monotonic() - begun

    # What must be true

    def violations(self) -> list[str]:
        """Say what is not as it must be, at any moment; nothing if all is well."""
        jobs = self.jobs()
        found = [f"{name} was acknowledged and is gone" for name in self.acknowledged.keys() - jobs]
        found += [f"{path}: {path.read_text()}" for path in self._folders("violations")]
        held = dict.fromkeys(NODES, 0)
        for job in jobs.values():
            true = [entry.type for entry in job.state.conditions if entry.status]
            kinds = {entry.type for entry in job.state.conditions}
            if true != [job.phase] or len(kinds) < len(job.state.conditions):
                found.append(f"{job.name}: conditions {job.state.conditions}")
            stages = job.state.launched_stages or job.spec["num_stages"]
            for node in job.state.launched:
                held[node] += stages
        found += [
            f"{node} holds {held[node]} of {slots}"
            for node, slots in NODES.items()
            if held[node] > slots
        ]
        return found

    def wrong_counts(self) -> list[str]:
        """Say which complete jobs did not count each of their samples once."""
        found = []
        for name, steps in self.acknowledged.items():
            own = self.jobs()[name].spec.get("checkpoint_dir")
            folder = Path(own) if own else self.directory.checkpoints(name)
            saved = json.loads((folder / "checkpoint.json").read_text())
            counted = sorted(saved["counted"], key=lambda entry: entry[1])
            ends = [0, *(end for _, _, end in counted)]
            tiled = all(begin == end for (_, begin, _), end in zip(counted, ends, strict=False))
            generations = [generation for generation, _, _ in counted]
            if saved["step"] != steps or not tiled or ends[-1] != steps:
                found.append(f"{name}: {saved['step']} of {steps} steps, counted {counted}")
            if generations != sorted(set(generations)):
                found.append(f"{name}: generations out of order: {counted}")
        return found

    def signal(self, pid: int, number: signal.Signals) -> None:
        """Send a signal to a process that may be gone."""
        with suppress(ProcessLookupError):
            os.kill(pid, number)

    def _folders(self, name: str) -> list[Path]:
        kept = (self.directory.path / "jobs").glob(f"*/checkpoints/{name}")
        return [*kept, *(self.folder / "small").glob(f"*/{name}")]
