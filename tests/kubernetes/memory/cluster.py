"""A Kubernetes cluster in memory: an API server, a scheduler, controllers and kubelets."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import yaml

from tests.kubernetes.cluster import GPU, IMAGE, Cluster

from .answers import ApiError, Object
from .conditions import set_condition
from .controllers import Controllers
from .defaults import NODE_INFO
from .deletion import delete
from .failures import Failures
from .http import Front
from .kubelet import Kubelet
from .placement import place_pods
from .pod_logs import read_log
from .registry import Registry
from .requests import LogStream
from .resources import NAMESPACES, NODES, PODS
from .store import Change, now

_NODE_INFO = {
    **dict.fromkeys(NODE_INFO, ""),
    "architecture": "amd64",
    "containerRuntimeVersion": "memory://1",
    "kubeletVersion": "v1.20.2",
    "operatingSystem": "linux",
}
UNREACHABLE = "node.kubernetes.io/unreachable"


class MemoryCluster(Cluster):
    """A cluster of this process: its API server speaks HTTP, its containers are processes.

    What it does not have: DNS, services that forward, container images, network and file system of
    each container. All containers share the ports and files of this machine.

    Args:
        folder: for the kubeconfig, logs and volumes.
        nodes: names of the nodes to begin with.
        gpus: GPUs of each.
        images: the entry point of each image that can be pulled.
        environment: of all containers.
        orphan_seconds: how long pods stay whose node was deleted.
        kubelets: whether anybody runs the pods of its nodes.
    """

    def __init__(
        self,
        folder: Path,
        nodes: Sequence[str] = ("n1", "n2"),
        gpus: int = 4,
        images: Mapping[str, Sequence[str]] | None = None,
        environment: Mapping[str, str] | None = None,
        orphan_seconds: float = 0.5,
        kubelets: bool = True,
    ) -> None:
        self.folder = folder
        self.shared = folder / "shared"
        self.address = "127.0.0.1"
        self.kubeconfig = folder / "kubeconfig"
        self.registry = Registry()
        self.front = Front(self.registry, self._logs)
        self._images = {IMAGE: ["python"]} if images is None else images
        self._environment = dict(environment or {})
        self._first = [(name, gpus) for name in nodes]
        self._kubelets: dict[str, Kubelet] = {}
        self._lost: list[Kubelet] = []
        self._controllers = Controllers(self.registry, orphan_seconds)
        self._has_kubelets = kubelets
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="memory-cluster")

    @property
    def is_real(self) -> bool:
        """No."""
        return False

    @property
    def failures(self) -> Failures:
        """What is to happen to requests."""
        return self.front.failures

    def start(self) -> None:
        """Start it with its first nodes."""
        for name in ("default", "kube-system"):
            self.registry.create(NAMESPACES, "", {"metadata": {"name": name}})
            self._controllers.make_service_account(name)
        self.front.start()
        self.shared.mkdir(parents=True)
        self.kubeconfig.write_text(yaml.safe_dump(_kubeconfig(self.front.url)))
        for name, gpus in self._first:
            self.add_node(name, gpus)
        self._thread.start()

    def stop(self) -> None:
        """End the API server, the kubelets and every process of a pod."""
        self._ending.set()
        self.front.stop()
        if self._thread.ident is not None:
            self._thread.join()
        for kubelet in [*self._kubelets.values(), *self._lost]:
            kubelet.lose()
        for kubelet in [*self._kubelets.values(), *self._lost]:
            kubelet.join()
        assert not self.front.errors, "\n".join(self.front.errors)

    def stop_api_server(self) -> None:
        """Let nothing answer; pods go on."""
        self.front.stop()

    def start_api_server(self) -> None:
        """Answer again, with what was known; watches cannot go back to before."""
        self.registry.store.forget_changes()
        self.front.start()

    def expire_watches(self) -> None:
        """End all watches, and let none go back to before now."""
        self.front.stop()
        self.start_api_server()

    def add_node(self, name: str, gpus: int = 4) -> None:
        """Add a node of 64 CPUs."""
        number = len(self._kubelets) + len(self._lost) + 1
        kubelet = Kubelet(name, number, self.front, self.folder, self._images, self._environment)
        amounts = {"cpu": "64", "memory": "64Gi", "pods": "250", "ephemeral-storage": "64Gi"}
        amounts |= {GPU: str(gpus)} if gpus else {}
        node: Object = {
            "metadata": {
                "name": name,
                "labels": {
                    "kubernetes.io/hostname": name,
                    "kubernetes.io/os": "linux",
                    "kubernetes.io/arch": "amd64",
                },
            },
            "status": {
                "capacity": amounts,
                "allocatable": dict(amounts),
                "addresses": [
                    {"type": "InternalIP", "address": kubelet.address},
                    {"type": "Hostname", "address": name},
                ],
                "nodeInfo": dict(_NODE_INFO),
            },
        }
        set_condition(node, "Ready", "True", reason="KubeletReady", message="kubelet is ready")
        with self.registry.store.lock:
            if self._has_kubelets:
                self._kubelets[name] = kubelet
            self.registry.create(NODES, "", node)

    def delete_node(self, name: str) -> None:
        """End a machine, and delete its node; its pods follow a little later."""
        self._end_machine(name)
        delete(self.registry.store, NODES, "", name, {})

    def lose_node(self, name: str) -> None:
        """End a machine; its pods leave the node when they tolerate that no longer."""
        self._end_machine(name)

        def alter(node: Object) -> None:
            said = {
                "reason": "NodeStatusUnknown",
                "message": "Kubelet stopped posting node status.",
            }
            set_condition(node, "Ready", "Unknown", **said)
            node["spec"]["taints"] = [
                {"key": UNREACHABLE, "effect": effect, "timeAdded": now()}
                for effect in ("NoSchedule", "NoExecute")
            ]

        with self.registry.store.lock:
            self.registry.store.change(NODES, "", name, alter)
            for pod in self.registry.store.view(PODS):
                if pod["spec"].get("nodeName") == name:
                    metadata = pod["metadata"]
                    self.registry.store.change(
                        PODS,
                        metadata["namespace"],
                        metadata["name"],
                        lambda found: set_condition(found, "Ready", "False"),
                    )

    def _end_machine(self, name: str) -> None:
        with self.registry.store.lock:
            kubelet = self._kubelets.pop(name, None)
            if kubelet is None:
                return
            self._lost.append(kubelet)
        kubelet.lose()
        kubelet.join()

    def fail_pod(self, namespace: str, name: str, reason: str, message: str) -> None:
        """Let a kubelet end a pod, as under pressure: its status is Failed with a reason."""
        pod = self.registry.store.get(PODS, namespace, name)
        kubelet = self._kubelets[pod["spec"]["nodeName"]]
        kubelet.workers[pod["metadata"]["uid"]].fail(reason, message)

    def _logs(self, wanted: LogStream, listens: Callable[[], bool]) -> Iterator[bytes]:
        pod = self.registry.store.get(PODS, wanted.namespace, wanted.pod)
        kubelet = self._kubelets.get(pod["spec"].get("nodeName", ""))
        if kubelet is None:
            where = pod["spec"].get("nodeName", "")
            raise ApiError(500, "InternalError", f'Get "https://{where}:10250": connection refused')
        return read_log(kubelet, pod, wanted, listens)

    def _follow(self) -> None:
        """Let controllers, the scheduler and kubelets act on what happens, while it is served."""
        store = self.registry.store
        version = 0
        while not self._ending.is_set():
            if not self.front.serving.wait(0.1):
                continue
            with store.lock:
                try:
                    changes = store.since(version)
                    if not changes:
                        store.changed.wait(0.2)
                        changes = store.since(version)
                except ApiError:  # it begins anew
                    changes = [
                        Change(0, resource, "ADDED", thing, None)
                        for resource, thing in store.everything()
                    ]
                version = store.version
            self._controllers.follow(changes)
            if any(_concerns_placement(change) for change in changes):
                place_pods(self.registry)
            for change in changes:
                if change.resource == PODS:
                    self._tell_kubelet(change)

    def _tell_kubelet(self, change: Change) -> None:
        with self.registry.store.lock:
            kubelet = self._kubelets.get(change.new["spec"].get("nodeName", ""))
        if kubelet is not None:
            kubelet.tell(change.new, gone=change.type == "DELETED")


def _concerns_placement(change: Change) -> bool:
    if change.resource == NODES:
        return True
    if change.resource != PODS:
        return False
    ended = change.new["status"].get("phase") in ("Succeeded", "Failed")
    return change.type != "MODIFIED" or ended or not change.new["spec"].get("nodeName")


def _kubeconfig(url: str) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "memory",
        "clusters": [{"name": "memory", "cluster": {"server": url}}],
        "users": [{"name": "memory", "user": {"token": "memory"}}],
        "contexts": [{"name": "memory", "context": {"cluster": "memory", "user": "memory"}}],
    }
