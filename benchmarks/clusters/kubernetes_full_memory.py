"""A large cluster served by the API server of the tests (`kubernetes_full`)."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
from kubernetes_full import GPUS, Full, Object, let_run, turn_readiness  # same folder
from kubernetes_site import NAMESPACE  # same folder

from pipollux_sched.backend.kubernetes import names
from tests.kubernetes.memory import defaults, kinds
from tests.kubernetes.memory.cluster import MemoryCluster
from tests.kubernetes.memory.resources import PODS


class FullInMemory(Full):
    """All objects are put into the server's store."""

    cluster: MemoryCluster

    def make(self, folder: Path) -> MemoryCluster:
        """Return the cluster in memory, with all nodes."""
        return MemoryCluster(folder, self.size.nodes, GPUS, kubelets=False)

    def fill(self) -> list[str]:
        """Add jobs and their pods."""
        registry = self.cluster.registry
        resource = kinds.find(registry.store, names.GROUP, names.VERSION, names.PLURAL)
        uids = {}
        for name, job in self.jobs().items():
            made = registry.create(resource, NAMESPACE, job)
            uids[name] = made["metadata"]["uid"]
        created = []
        for pod in self.pods(uids):
            defaults.fill_in(PODS, pod)
            let_run(pod)
            _note_writers(pod)
            created.append(registry.store.create(PODS, pod)["metadata"]["name"])
        return created

    def turn_readiness(self, pod: str) -> None:
        """Change the pod in the store."""
        self.cluster.registry.store.change(PODS, NAMESPACE, pod, turn_readiness)

    def length(self, pod: str) -> int:
        """Return the length in the store."""
        return len(json.dumps(self.cluster.registry.store.get(PODS, NAMESPACE, pod)))

    def used(self) -> str:
        """Return the usage of this process."""
        process = psutil.Process()
        times = process.cpu_times()
        memory = process.memory_info().rss / 2**20
        return f"the API server of the tests {times.user + times.system:.0f} s, {memory:.0f} MiB"


def _note_writers(pod: Object) -> None:
    """Add the managed fields that servers record."""
    (container,) = pod["spec"]["containers"]
    written: Object = {f"f:{key}": {} for key in pod["spec"]}
    written |= {f'k:{{"name":"{entry["name"]}"}}': {".": {}} for entry in container["env"]}
    pod["metadata"]["managedFields"] = [
        {"manager": "pipollux", "operation": "Update", "apiVersion": "v1", "fieldsV1": written}
    ]
