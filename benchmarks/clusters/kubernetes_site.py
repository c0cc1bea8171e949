"""A cluster of Kubernetes, and `pipollux serve` on it as a process that its pods can reach."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from lightkube import Client

from pipollux_sched.backend.kubernetes.api import Job
from pipollux_sched.store import JobRecord, StateDir, Store
from tests.kubernetes.cluster import IMAGE, Cluster

CRD = ROOT / "deploy/kubernetes/crd.yaml"
NAMESPACE = "training"
PROGRAM = (sys.executable, "-c", "from pipollux_sched.cli import main; main()")
PATIENCE = 240.0
"""Seconds within which the cluster must recover."""


def end_in_order() -> None:
    """Make SIGTERM end this process like Ctrl-C, so that no child process stays behind."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


class Site:
    """A namespace of a started cluster with its own scheduler, with `options` of its command."""

    def __init__(self, cluster: Cluster, *options: str) -> None:
        self.cluster = cluster
        self.folder = cluster.shared
        self.directory = StateDir(cluster.kubeconfig.parent / "state")
        self.log = cluster.kubeconfig.parent / "serve.log"
        self._options = options
        self._port = free_port(cluster.address)
        self._server: subprocess.Popen[bytes] | None = None
        cluster.declare(CRD)
        cluster.create_namespace(NAMESPACE)
        self.api: Client = cluster.client(NAMESPACE)
        self.folder.chmod(0o777)
        self.serve()
        self.store = Store(self.directory.database)
        """Read independently of the scheduler, whether it runs or not."""

    # The scheduler

    def serve(self) -> None:
        """Start the scheduler, and return when it answers."""
        url = f"http://{self.cluster.address}:{self._port}"
        command = [
            *(*PROGRAM, "serve", "--backend", "kubernetes", "--state-dir", self.directory.path),
            *("--namespace", NAMESPACE, "--image-python", sys.executable),
            *("--host", self.cluster.address, "--port", str(self._port), "--advertise-url", url),
            *("--checkpoint-host-path", self.folder, "--checkpoint-folder", self.folder),
            *("--pod-security", "baseline"),  # the image is root's
            *self._options,
        ]
        with self.log.open("ab") as log:
            self._server = subprocess.Popen(
                list(map(str, command)),
                env={**os.environ, "KUBECONFIG": str(self.cluster.kubeconfig)},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.until("the scheduler answers", lambda: self._answers(url))

    def _answers(self, url: str) -> bool:
        assert self._server is not None
        assert self._server.poll() is None, f"the scheduler has ended: {self.log.read_text()}"
        try:
            return httpx.get(f"{url}/healthz", timeout=2, trust_env=False).is_success
        except httpx.HTTPError:
            return False

    @property
    def process(self) -> psutil.Process:
        """The scheduler's process."""
        assert self._server is not None
        return psutil.Process(self._server.pid)

    def kill(self) -> None:
        """Kill the scheduler, as the kernel does when memory runs out."""
        assert self._server is not None
        self._server.kill()
        self._server.wait(10)

    def close(self) -> None:
        """End the scheduler as an admin does, with everything it runs."""
        self.store.close()
        self.api.close()
        if self._server is not None and self._server.poll() is None:
            self._server.send_signal(signal.SIGTERM)
            try:
                self._server.wait(60)
            except subprocess.TimeoutExpired:
                self.kill()

    # Jobs

    def apply(self, name: str, script: Path, args: list[str], **spec: Any) -> None:
        """Create the resource of a job, as `kubectl apply` does."""
        fields = {"image": IMAGE, "script": str(script), "args": args, **spec}
        self.api.create(Job(metadata={"name": name}, spec=fields))

    def jobs(self) -> dict[str, JobRecord]:
        """Jobs in the store."""
        return {job.name: job for job in self.store.jobs()}

    def under_way(self) -> list[JobRecord]:
        """Jobs that have not ended."""
        return [job for job in self.jobs().values() if not job.phase.ended]

    def checkpoints(self, job: str) -> Path:
        """Return the checkpoint folder of a job."""
        (folder,) = (self.folder / job).iterdir()
        return folder

    def pods(self) -> list[str]:
        """Return the names of existing pods."""
        return sorted(self.cluster.pods(NAMESPACE))

    def until(self, what: str, true: Callable[[], object], seconds: float = PATIENCE) -> float:
        """Wait for a condition; return the seconds waited."""
        begun = time.monotonic()
        while not true():
            if time.monotonic() - begun > seconds:
                raise AssertionError(f"after {seconds:.0f} s it is still not so that {what}")
            time.sleep(0.1)
        return time.monotonic() - begun


def free_port(address: str) -> int:
    """Return an unused port of an address."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])
