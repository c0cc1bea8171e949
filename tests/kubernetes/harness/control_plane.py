"""A real Kubernetes control plane for tests, with real kubelets or without nodes."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2
from lightkube.core.exceptions import ApiError
from lightkube.resources.core_v1 import Node, ServiceAccount

from tests.hosts.harness.hosts import Hosts
from tests.kubernetes.cluster import GPU, Cluster, Definition

from . import installation
from .addresses import beside_hosts, on_loopback
from .daemons import Daemons
from .extensions import Extensions
from .keys import Keys
from .nodes import Nodes, add_gpus
from .servers import Servers


class ControlPlane(Cluster):
    """etcd, the API server, the controller manager, the scheduler, and kubelets if wanted.

    CustomResourceDefinitions are served by a newer server of their own behind the same address, as
    rules in CEL need it. With nodes, everything listens on the network of the hosts, and the API
    server at the address that containers know it by; without, on this machine's loopback alone.

    Args:
        nodes: how many kubelets; they are called n1, n2, …
        gpus: GPUs of each.
        spare: further hosts, on which `add_node` can start kubelets.

    Example::

        with ControlPlane(nodes=2) as cluster:
            cluster.declare(Path("crd.yaml"))
            print(cluster.kubectl("get", "nodes"))
    """

    def __init__(self, nodes: int = 0, gpus: int = 4, spare: int = 0) -> None:
        self._count, self._gpus, self._spare = nodes, gpus, spare
        # Sockets lie in it, whose paths may have 107 characters.
        self.folder = Path(tempfile.mkdtemp(prefix="k8s-", dir="/tmp"))
        self.kubeconfig = self.folder / "kubeconfig"
        self.shared = self.folder / "shared"
        self.shared.mkdir()
        self._hosts: Hosts | None = None
        self._nodes: Nodes | None = None
        self._lost: set[str] = set()
        self._daemons = Daemons(self.folder / "daemons")
        self._bin = installation.folder() / "bin"

    @property
    def is_real(self) -> bool:
        """Yes."""
        return True

    @property
    def hosts(self) -> Hosts:
        """The machines of its nodes."""
        assert self._hosts is not None, "there are no nodes"
        return self._hosts

    def start(self) -> None:
        """Start it, with its nodes."""
        if self._count or self._spare:
            self._hosts = Hosts(self._count + self._spare)
            where = beside_hosts(self._hosts.gateway)
        else:
            where = on_loopback()
        self.address, self.url = where.machine, where.url
        keys, daemons = Keys(self.folder / "keys"), self._daemons
        servers = Servers(
            self.folder, where, keys, daemons, has_nodes=self._count > 0, is_served=self._is_served
        )
        servers.start()
        self._wait_for_account()
        self._extensions = Extensions(self, servers, where, keys, daemons)
        self._extensions.start()
        if self._hosts is not None:
            nodes = self.folder / "nodes"
            nodes.mkdir()
            self._nodes = Nodes(self._hosts, nodes, keys, self.url, daemons)
            for name in self._hosts.names[: self._count]:
                self._nodes.start(name)
            for name in self._hosts.names[: self._count]:
                self._await_node(name, self._gpus)

    def stop(self) -> None:
        """End everything, and remove its folder."""
        for name in ("kube-scheduler", "kube-controller-manager"):
            self._daemons.stop(name)
        if self._nodes is not None:
            self._nodes.close()
        self._daemons.close()
        if self._hosts is not None:
            self._hosts.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def kubectl(self, *arguments: str, text: str | None = None) -> str:
        """Run kubectl, and return what it printed.

        Args:
            arguments: of the command.
            text: its standard input.
        """
        command = [self._bin / "kubectl", f"--kubeconfig={self.kubeconfig}", *arguments]
        answer = subprocess.run(command, input=text, capture_output=True, text=True)
        assert answer.returncode == 0, f"kubectl {' '.join(arguments)}: {answer.stderr}"
        return answer.stdout

    def stop_api_server(self) -> None:
        """End the API server; all else goes on."""
        self._daemons.stop("kube-apiserver")

    def start_api_server(self) -> None:
        """Start it again."""
        self._daemons.start_again("kube-apiserver")
        self._daemons.wait(self._is_served, "the API server is ready")

    def expire_watches(self) -> None:
        """Restart the API server, which then knows nothing of what was before."""
        self.stop_api_server()
        self.start_api_server()

    def lose_node(self, name: str) -> None:
        """Let a node's machine lose its power."""
        assert self._nodes is not None
        self._lost.add(name)
        self._nodes.kill(name)

    def delete_node(self, name: str) -> None:
        """End a node's machine, and delete the node."""
        if self._nodes is not None:
            self._lost.add(name)
            self._nodes.kill(name)
        with self.client() as client:
            client.delete(Node, name)

    def add_node(self, name: str, gpus: int = 4) -> None:
        """Start a node: one of the spare hosts, or one that was lost or deleted.

        Where there are no kubelets it is a node of which only the API server knows.
        """
        if self._nodes is None:
            self._declare_node(name, gpus)
            return
        self._lost.discard(name)
        self._nodes.start(name)
        self._await_node(name, gpus)

    def restore(self) -> None:
        """Make the nodes what they were at the start; the API server, too."""
        if not self._daemons.is_running("kube-apiserver"):
            self.start_api_server()
        first = self.hosts.names[: self._count]
        with self.client() as client:
            there = {node.metadata.name for node in client.list(Node)}
            for name in there & (self._lost | set(self.hosts.names) - set(first)):
                self.delete_node(name)
        for name in first:
            if name not in self._lost:
                self.cordon(name, cordoned=False)
        for name in self._lost & set(first):
            self.add_node(name, self._gpus)

    def _is_served(self) -> bool:
        with suppress(httpx2.HTTPError):
            return self.ask("GET", "/readyz")[0] == 200
        return False

    def _wait_for_account(self) -> None:
        def is_there() -> bool:
            with suppress(ApiError, httpx2.HTTPError), self.client() as client:
                return bool(client.get(ServiceAccount, "default"))
            return False

        self._daemons.wait(is_there, "the default service account is there")

    def _declare(self, definition: Mapping[str, Any]) -> None:
        versions = [version["name"] for version in definition["spec"]["versions"]]
        with self.client() as client:
            client.apply(Definition(**definition), force=True)
        self._extensions.serve(definition["spec"]["group"], versions)
        self._await_definition(definition)

    def _await_node(self, name: str, gpus: int) -> None:
        """Return when a node is ready and has its GPUs."""

        def is_there() -> bool:
            with suppress(httpx2.HTTPError):
                return add_gpus(self.ask, name, gpus)
            return False

        def is_ready() -> bool:
            with suppress(httpx2.HTTPError), self.client() as client:
                status = client.get(Node, name).status
                ready = any(c.type == "Ready" and c.status == "True" for c in status.conditions)
                return ready and status.allocatable.get(GPU) == str(gpus)
            return False

        self._daemons.wait(is_there, f"node {name} is there")
        self._daemons.wait(is_ready, f"node {name} is ready")

    def _declare_node(self, name: str, gpus: int) -> None:
        amounts = {"cpu": "64", "memory": "64Gi", "pods": "250", GPU: str(gpus)}
        status = {
            "capacity": amounts,
            "allocatable": amounts,
            "conditions": [{"type": "Ready", "status": "True", "reason": "Said"}],
            "addresses": [{"type": "Hostname", "address": name}],
        }
        labels = {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux"}
        node = {"metadata": {"name": name, "labels": labels}}
        with self.client() as client:
            client.create(Node.from_dict(node))
        code, said = self.ask(
            "PATCH",
            f"/api/v1/nodes/{name}/status",
            {"status": status},
            "application/merge-patch+json",
        )
        assert code == 200, said
