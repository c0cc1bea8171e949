"""A large cluster served by a real control plane (`kubernetes_full`): etcd and the API server.

The controller manager and its scheduler run, too. No kubelet runs: nodes and statuses of pods are
only written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
from kubernetes_full import GPUS, Full, Object, let_run, turn_readiness  # same folder
from kubernetes_site import NAMESPACE  # same folder

from pipollux_sched.backend.kubernetes import names
from tests.kubernetes.harness.control_plane import ControlPlane

AT_ONCE = 8
"""Concurrent requests while the cluster is filled."""
MERGE = "application/merge-patch+json"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
JOBS = f"/apis/{names.GROUP}/{names.VERSION}/namespaces/{NAMESPACE}/{names.PLURAL}"


class FullControlPlane(Full):
    """All objects are created by requests."""

    cluster: ControlPlane

    def make(self, folder: Path) -> ControlPlane:  # noqa: ARG002  # it has a folder of its own
        """Return a control plane without kubelets."""
        return ControlPlane()

    def fill(self) -> list[str]:
        """Create nodes, jobs and their pods, and set these running."""
        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(lambda node: self.cluster.add_node(node, GPUS), self.size.nodes))
            jobs = pool.map(lambda job: self._ask("POST", JOBS, job), self.jobs().values())
            uids = {job["metadata"]["name"]: job["metadata"]["uid"] for job in jobs}
            return list(pool.map(self._run, self.pods(uids)))

    def turn_readiness(self, pod: str) -> None:
        """Write the pod's status as a kubelet does."""
        found = self._ask("GET", f"{PODS}/{pod}")
        turn_readiness(found)
        self._write_status(pod, {"conditions": found["status"]["conditions"]})

    def length(self, pod: str) -> int:
        """Return the length as sent."""
        return len(json.dumps(self._ask("GET", f"{PODS}/{pod}"), separators=(",", ":")))

    def used(self) -> str:
        """Return the usage of the API server and etcd."""
        return ", ".join(
            f"{process.name()} {sum(process.cpu_times()[:2]):.0f} s, "
            f"{process.memory_info().rss / 2**20:.0f} MiB"
            for process in psutil.process_iter()
            if process.name() in ("kube-apiserver", "etcd")
        )

    def _run(self, pod: Object) -> str:
        name: str = self._ask("POST", PODS, pod)["metadata"]["name"]
        self._write_status(name, let_run(pod))
        return name

    def _write_status(self, pod: str, status: Mapping[str, Any]) -> None:
        self._ask("PATCH", f"{PODS}/{pod}/status", {"status": status}, MERGE)

    def _ask(self, method: str, path: str, body: Any = None, kind: str = "application/json") -> Any:
        code, said = self.cluster.ask(method, path, body, kind)
        assert code in (200, 201), said
        return said
