"""The programs of a control plane, and with which options they are started."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import httpx2

from . import installation
from .addresses import LOOPBACK, Addresses
from .daemons import Daemons
from .keys import Keys
from .nodes import GRACE


class Servers:
    """etcd, the API server, the controller manager and the scheduler.

    Args:
        folder: for their state and their kubeconfigs.
        addresses: where they listen.
        keys: of the control plane; they are issued here.
        daemons: starts and ends programs.
        has_nodes: whether there will be kubelets.
        is_served: asks the API server whether it is ready.
    """

    def __init__(
        self,
        folder: Path,
        addresses: Addresses,
        keys: Keys,
        daemons: Daemons,
        *,
        has_nodes: bool,
        is_served: Callable[[], bool],
    ) -> None:
        self._folder, self._addresses = folder, addresses
        self._keys, self._daemons = keys, daemons
        self._has_nodes, self._is_served = has_nodes, is_served
        self._bin = installation.folder() / "bin"
        self._issue_keys()

    def start(self) -> None:
        """Start them; return when the API server is ready."""
        self._start_etcd()
        self._start_api_server()
        self._start_managers()

    def kubeconfig(self, name: str) -> Path:
        """Return the kubeconfig of one of them, or of the `admin`."""
        return self._folder / ("kubeconfig" if name == "admin" else f"{name}.kubeconfig")

    def launch(self, program: str, flags: Mapping[str, object]) -> None:
        """Start a program with options."""
        words = [f"--{name}={value}" for name, value in flags.items()]
        self._daemons.start(program, str(self._bin / program), *words)

    def _issue_keys(self) -> None:
        keys, where = self._keys, self._addresses
        addresses = {f"IP:{address}" for address in (where.machine, where.api, LOOPBACK)}
        names = ["localhost", *(f"kubernetes{x}" for x in ("", ".default", ".default.svc"))]
        keys.issue("api", "/CN=kube-apiserver", [*addresses, *(f"DNS:{x}" for x in names)])
        keys.issue("proxy", "/CN=front-proxy-client", authority="front")
        keys.issue("admin", "/O=system:masters/CN=admin")
        keys.issue("manager", "/CN=system:kube-controller-manager")
        keys.issue("scheduler", "/CN=system:kube-scheduler")
        served = [*addresses, "DNS:extensions.kube-system.svc"]
        keys.issue("extensions", "/O=system:masters/CN=extensions", served)
        for name in ("admin", "manager", "scheduler", "extensions"):
            keys.kubeconfig(name, where.url, self.kubeconfig(name))

    def _start_etcd(self) -> None:
        self._daemons.start(
            "etcd",
            str(self._bin / "etcd"),
            "--name=it",
            f"--data-dir={self._folder}/etcd",
            f"--listen-client-urls={self._addresses.etcd}",
            f"--advertise-client-urls={self._addresses.etcd}",
            f"--listen-peer-urls={self._addresses.peer}",
            f"--initial-advertise-peer-urls={self._addresses.peer}",
            f"--initial-cluster=it={self._addresses.peer}",
            "--log-level=error",
        )

        def is_healthy() -> bool:
            with suppress(httpx2.HTTPError):
                answer = httpx2.get(f"{self._addresses.etcd}/health", trust_env=False)
                return answer.status_code == 200
            return False

        self._daemons.wait(is_healthy, "etcd is healthy")

    def _start_api_server(self) -> None:
        keys = self._keys
        flags = {
            "etcd-servers": self._addresses.etcd,
            "bind-address": self._addresses.api,
            "advertise-address": self._addresses.machine,
            "secure-port": self._addresses.ports["api"],
            "insecure-port": 0,
            "tls-cert-file": keys.certificate("api"),
            "tls-private-key-file": keys.key("api"),
            "client-ca-file": keys.certificate("ca"),
            "authorization-mode": "Node,RBAC",
            "allow-privileged": "true",
            "service-cluster-ip-range": self._addresses.services,
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
        if not self._has_nodes:
            # Nodes that nobody runs would stay tainted for ever.
            flags["disable-admission-plugins"] = "TaintNodesByCondition"
        self.launch("kube-apiserver", flags)
        self._daemons.wait(self._is_served, "the API server is ready")

    def _start_managers(self) -> None:
        controllers = "*,-nodeipam,-cloud-node-lifecycle,-route,-service"
        if not self._has_nodes:
            controllers += ",-nodelifecycle"
        self.launch(
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
        self.launch("kube-scheduler", self._manager_flags("scheduler"))

    def _manager_flags(self, name: str) -> dict[str, object]:
        kubeconfig = self.kubeconfig(name)
        return {
            "kubeconfig": kubeconfig,
            "authentication-kubeconfig": kubeconfig,
            "authorization-kubeconfig": kubeconfig,
            "bind-address": self._addresses.machine,
            "secure-port": self._addresses.ports[name],
            "port": 0,
            "leader-elect": "false",
        }
