"""A real Kubernetes control plane for tests, with real kubelets or without nodes."""

from __future__ import annotations

import base64
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2
from lightkube import Client
from lightkube.core.exceptions import ApiError
from lightkube.generic_resource import create_global_resource
from lightkube.resources.core_v1 import Node, Service, ServiceAccount
from lightkube.types import PatchType

from tests.hosts.harness.hosts import Hosts
from tests.kubernetes.cluster import GPU, Cluster, Definition

from . import installation
from .daemons import Daemons
from .keys import Keys
from .nodes import GRACE, Nodes, add_gpus

LOOPBACK = "127.0.0.1"
_Served = create_global_resource("apiregistration.k8s.io", "v1", "APIService", "apiservices")


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
        self._served: set[tuple[str, str]] = set()
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
        self._keys = Keys(self.folder / "keys")
        if self._count or self._spare:
            self._hosts = Hosts(self._count + self._spare)
            self.address = self._hosts.gateway
            services = _services(self._hosts.gateway)
            self._ports = dict(zip(_PORTED, (2379, 2380, 443, 8443, 10257, 10259), strict=True))
            # Containers reach the API server at the first address of services.
            first = self._serving = services.replace(".0/24", ".1")
            bridge = _device(self._hosts.gateway)
            subprocess.run(["ip", "address", "add", f"{first}/32", "dev", bridge], check=True)
        else:
            self.address = self._serving = LOOPBACK
            services = "10.96.0.0/24"
            self._ports = dict(zip(_PORTED, _free_ports(len(_PORTED)), strict=True))
        self.url = f"https://{self._serving}:{self._ports['api']}"
        self._issue_keys()
        self._start_etcd()
        self._start_api_server(services)
        self._start_managers()
        self._wait_for_account()
        self._start_extensions()
        if self._hosts is not None:
            nodes = self.folder / "nodes"
            nodes.mkdir()
            self._nodes = Nodes(self._hosts, nodes, self._keys, self.url, self._daemons)
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

    def _issue_keys(self) -> None:
        keys, addresses = self._keys, {f"IP:{x}" for x in (self.address, self._serving, LOOPBACK)}
        names = ["localhost", *(f"kubernetes{x}" for x in ("", ".default", ".default.svc"))]
        keys.issue("api", "/CN=kube-apiserver", [*addresses, *(f"DNS:{x}" for x in names)])
        keys.issue("proxy", "/CN=front-proxy-client", authority="front")
        keys.issue("admin", "/O=system:masters/CN=admin")
        keys.issue("manager", "/CN=system:kube-controller-manager")
        keys.issue("scheduler", "/CN=system:kube-scheduler")
        served = [*addresses, "DNS:extensions.kube-system.svc"]
        keys.issue("extensions", "/O=system:masters/CN=extensions", served)
        keys.kubeconfig("admin", self.url, self.kubeconfig)
        for name in ("manager", "scheduler", "extensions"):
            keys.kubeconfig(name, self.url, self.folder / f"{name}.kubeconfig")

    @property
    def _etcd(self) -> str:
        return f"http://{self.address}:{self._ports['etcd']}"

    def _start_etcd(self) -> None:
        peer = f"http://{self.address}:{self._ports['peer']}"
        self._daemons.start(
            "etcd",
            str(self._bin / "etcd"),
            "--name=it",
            f"--data-dir={self.folder}/etcd",
            f"--listen-client-urls={self._etcd}",
            f"--advertise-client-urls={self._etcd}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=it={peer}",
            "--log-level=error",
        )

        def is_healthy() -> bool:
            with suppress(httpx2.HTTPError):
                return httpx2.get(f"{self._etcd}/health", trust_env=False).status_code == 200
            return False

        self._daemons.wait(is_healthy, "etcd is healthy")

    def _start_api_server(self, services: str) -> None:
        keys = self._keys
        flags = {
            "etcd-servers": self._etcd,
            "bind-address": self._serving,
            "advertise-address": self.address,
            "secure-port": self._ports["api"],
            "insecure-port": 0,
            "tls-cert-file": keys.certificate("api"),
            "tls-private-key-file": keys.key("api"),
            "client-ca-file": keys.certificate("ca"),
            "authorization-mode": "Node,RBAC",
            "allow-privileged": "true",
            "service-cluster-ip-range": services,
            "service-account-issuer": "https://kubernetes.default.svc",
            "service-account-key-file": keys.accounts,
            "service-account-signing-key-file": keys.key("accounts"),
            "api-audiences": "https://kubernetes.default.svc",
            "requestheader-client-ca-file": keys.certificate("front"),
            "requestheader-allowed-names": "front-proxy-client",
            "requestheader-extra-headers-prefix": "X-Remote-Extra-",
            "requestheader-group-headers": "X-Remote-Group",
            "requestheader-username-headers": "X-Remote-User",
            "proxy-client-cert-file": keys.certificate("proxy"),
            "proxy-client-key-file": keys.key("proxy"),
            "kubelet-certificate-authority": keys.certificate("ca"),
            "kubelet-client-certificate": keys.certificate("admin"),
            "kubelet-client-key": keys.key("admin"),
            "kubelet-preferred-address-types": "InternalIP",
            "endpoint-reconciler-type": "none",
        }
        if not self._count:
            # Nodes that nobody runs would stay tainted for ever.
            flags["disable-admission-plugins"] = "TaintNodesByCondition"
        self._launch("kube-apiserver", flags)
        self._daemons.wait(self._is_served, "the API server is ready")

    def _is_served(self) -> bool:
        with suppress(httpx2.HTTPError):
            return self.ask("GET", "/readyz")[0] == 200
        return False

    def _start_managers(self) -> None:
        controllers = "*,-nodeipam,-cloud-node-lifecycle,-route,-service"
        if not self._count:
            controllers += ",-nodelifecycle"
        self._launch(
            "kube-controller-manager",
            {
                **self._manager_flags("manager"),
                "use-service-account-credentials": "true",
                "service-account-private-key-file": self._keys.key("accounts"),
                "root-ca-file": self._keys.certificate("ca"),
                "controllers": controllers,
                "node-monitor-grace-period": f"{GRACE}s",
            },
        )
        self._launch("kube-scheduler", self._manager_flags("scheduler"))

    def _manager_flags(self, name: str) -> dict[str, object]:
        kubeconfig = self.folder / f"{name}.kubeconfig"
        return {
            "kubeconfig": kubeconfig,
            "authentication-kubeconfig": kubeconfig,
            "authorization-kubeconfig": kubeconfig,
            "bind-address": self.address,
            "secure-port": self._ports[name],
            "port": 0,
            "leader-elect": "false",
        }

    def _launch(self, program: str, flags: Mapping[str, object]) -> None:
        words = [f"--{name}={value}" for name, value in flags.items()]
        self._daemons.start(program, str(self._bin / program), *words)

    def _wait_for_account(self) -> None:
        def is_there() -> bool:
            with suppress(ApiError, httpx2.HTTPError), self.client() as client:
                return bool(client.get(ServiceAccount, "default"))
            return False

        self._daemons.wait(is_there, "the default service account is there")

    # -- custom resources --------------------------------------------------------------------

    def _start_extensions(self) -> None:
        keys, kubeconfig = self._keys, self.folder / "extensions.kubeconfig"
        self._launch(
            "apiextensions-apiserver",
            {
                "etcd-servers": self._etcd,
                "etcd-prefix": "/extensions",
                "bind-address": self.address,
                "secure-port": self._ports["extensions"],
                "tls-cert-file": keys.certificate("extensions"),
                "tls-private-key-file": keys.key("extensions"),
                "kubeconfig": kubeconfig,
                "authentication-kubeconfig": kubeconfig,
                "authorization-kubeconfig": kubeconfig,
                "client-ca-file": keys.certificate("ca"),
                "enable-priority-and-fairness": "false",
                # They need kinds that an API server of this age does not have.
                "disable-admission-plugins": "ValidatingAdmissionPolicy,MutatingAdmissionPolicy,"
                "MutatingAdmissionWebhook,ValidatingAdmissionWebhook",
            },
        )
        service = {
            "metadata": {"name": "extensions", "namespace": "kube-system"},
            "spec": {
                "type": "ExternalName",
                "externalName": self.address,
                "ports": [{"port": self._ports["extensions"]}],
            },
        }
        with self.client() as client:
            client.create(Service.from_dict(service))
            self._serve_elsewhere(client, "apiextensions.k8s.io", "v1", 16700)
        self._daemons.wait(self._are_extensions_served, "CRDs are served by the newer server")

    def _are_extensions_served(self) -> bool:
        """Whether the newer server answers for CRDs: the old one names no singular."""
        with suppress(httpx2.HTTPError, ValueError, KeyError, TypeError):
            _, found = self.ask("GET", "/apis/apiextensions.k8s.io/v1")
            return any(resource["singularName"] for resource in found["resources"])
        return False

    def _serve_elsewhere(self, client: Client, group: str, version: str, priority: int) -> None:
        """Have the newer server answer for a group, instead of the old one."""
        certificate = Path(self._keys.certificate("ca")).read_bytes()
        name = f"{version}.{group}"
        spec = {
            "group": group,
            "version": version,
            "groupPriorityMinimum": priority,
            "versionPriority": 15,
            "caBundle": base64.b64encode(certificate).decode(),
            "service": {
                "name": "extensions",
                "namespace": "kube-system",
                "port": self._ports["extensions"],
            },
        }
        # Without this label the old server would take it for its own.
        labels = {"kube-aggregator.kubernetes.io/automanaged": "false"}
        thing = {"metadata": {"name": name, "labels": labels}, "spec": spec}

        def is_ours() -> bool:
            with suppress(ApiError):
                if not any(found.metadata.name == name for found in client.list(_Served)):
                    client.create(_Served(**thing))
                client.patch(_Served, name, thing, patch_type=PatchType.MERGE)
                return bool(client.get(_Served, name).spec.get("service"))
            return False

        self._daemons.wait(is_ours, f"{name} is served by the newer server")

    def _declare(self, definition: Mapping[str, Any]) -> None:
        group = definition["spec"]["group"]
        with self.client() as client:
            client.apply(Definition(**definition), force=True)
            for version in definition["spec"]["versions"]:
                if (group, version["name"]) not in self._served:
                    self._serve_elsewhere(client, group, version["name"], 1000)
                    self._served.add((group, version["name"]))
        self._await_definition(definition)

    # -- nodes -------------------------------------------------------------------------------

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


_PORTED = ("etcd", "peer", "api", "extensions", "manager", "scheduler")


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind((LOOPBACK, 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def _services(gateway: str) -> str:
    """Return the addresses of services beside those of a network of hosts."""
    first, second, third, _ = gateway.split(".")
    return f"{first}.{int(second) + 10}.{third}.0/24"


def _device(address: str) -> str:
    """Return the network device that has an address."""
    found = subprocess.run(
        ["ip", "-oneline", "address", "show", "to", f"{address}/32"],
        capture_output=True,
        text=True,
        check=True,
    )
    return found.stdout.split()[1]
