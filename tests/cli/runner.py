"""Running `pipollux` as a user does: in processes of its own, with a state directory of its own."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from pipollux_sched.store import Store
from tests import programs
from tests.programs import Forked, run_pipollux
from tests.sched.scripts import TOY

PIPOLLUX = str(programs.PIPOLLUX)
LIGHT = Path(__file__).with_name("light_pipollux.py")
"""The same, whose replicas do not import torch by themselves."""
CLUSTER = """
nodes:
  - {name: node-a, slots: 2, kind: cpu}
  - {name: node-b, slots: 2, kind: cpu}
"""
NO_FORECASTS = ("--forecasts", "0")
"""Their process takes seconds to start, which tests do not wait for."""
JOBS = f"""
jobs:
  - {{name: short, script: {TOY}, args: [--steps, "5"]}}
  - {{name: long, script: {TOY}, num_stages: 2}}
"""


class Cli:
    """Runs `pipollux` in a folder of its own, with a state directory of its own."""

    program = programs.PIPOLLUX
    """Make it `LIGHT` where replicas are toys."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state_dir = folder / "state"
        self.environment = {**os.environ, "PIPOLLUX_STATE_DIR": str(self.state_dir)}
        self.environment.pop("COLUMNS", None)
        (folder / "cluster.yaml").write_text(CLUSTER)
        (folder / "jobs.yaml").write_text(JOBS)
        self.servers: list[Forked] = []
        self.said: list[str] = []
        """What the last scheduler said before it served."""
        self._store: tuple[os.stat_result, Store] | None = None

    def __call__(self, *args: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        return run_pipollux(
            *args,
            environment=self.environment,
            folder=self.folder,
            stdin=stdin,
            program=self.program,
        )

    def serve(
        self,
        *args: str,
        cluster: str | None = "cluster.yaml",
        at: str = "http://127.0.0.1:",
        serving: str = "Serving 2 nodes with 4 slots at",
    ) -> Forked:
        """Start a scheduler, and return when it answers `at` a URL that begins so."""
        file = ["--cluster", cluster] if cluster else []
        serving = serving if cluster else "Serving 1 node with"
        command = ["serve", *file, *([] if "--forecasts" in args else NO_FORECASTS), *args]
        server = Forked(self.program, command, self.environment, self.folder)
        self.servers.append(server)

        def serves() -> bool:
            assert server.poll() is None, f"it does not serve: {server.output}{server.errors}"
            *told, _ = server.output.split("\n")  # the last one may be half a line
            self.said = [*server.errors.splitlines(), *told]
            begun = [line for line in told if line.startswith(serving)]
            return any(f" at {at}" in line for line in begun)

        wait_until(serves)
        return server

    def jobs(self) -> dict[str, dict[str, Any]]:
        """What the store knows; read here, as starting `pipollux` takes longer than the reading.

        It stays open, as tests read it again and again: opening one takes longer, too.
        """
        path = self.state_dir / "pipollux.db"
        if self._store is None or not os.path.samestat(self._store[0], path.stat()):
            self.close()
            self._store = path.stat(), Store(path)
        return {job.name: job.to_json_object() for job in self._store[1].jobs()}

    def close(self) -> None:
        """Close the store."""
        if self._store is not None:
            self._store[1].close()
            self._store = None

    def alive(self) -> list[psutil.Process]:
        """Every process of a job that is still there."""
        found = []
        for process in psutil.process_iter():
            try:
                environment = process.environ()
            except (psutil.Error, OSError):
                continue
            ours = environment.get("PIPOLLUX_STATE_DIR") == str(self.state_dir)
            started_for_a_job = ours and "PIPOLLUX_ATTEMPT" in environment
            if started_for_a_job and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        return found


def wait_until(what: Callable[[], bool], seconds: float = 240.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.1)


def one_sentence(result: subprocess.CompletedProcess[str], code: int) -> str:
    """What a failed command says: one line, no traceback."""
    assert result.returncode == code, (result.stdout, result.stderr)
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1, result.stderr
    return result.stderr
