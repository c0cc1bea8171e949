"""The server of custom resources: a newer one than the API server, which hands them on to it."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import httpx2
from lightkube import Client
from lightkube.core.exceptions import ApiError
from lightkube.generic_resource import create_global_resource
from lightkube.resources.core_v1 import Service
from lightkube.types import PatchType

from tests.kubernetes.cluster import Cluster

from .addresses import Addresses
from .daemons import Daemons
from .keys import Keys
from .servers import Servers

_Served = create_global_resource("apiregistration.k8s.io", "v1", "APIService", "apiservices")


class Extensions:
    """Serves CustomResourceDefinitions and what they define, with rules in CEL.

    Args:
        cluster: whose API server hands on to it.
        servers: of that cluster.
        addresses: where it listens.
        keys: of the control plane.
        daemons: waits.
    """

    def __init__(
        self, cluster: Cluster, servers: Servers, addresses: Addresses, keys: Keys, daemons: Daemons
    ) -> None:
        self._cluster, self._servers, self._addresses = cluster, servers, addresses
        self._keys, self._daemons = keys, daemons
        self._served: set[tuple[str, str]] = set()

    def start(self) -> None:
        """Start it; return when the API server hands on to it."""
        keys, kubeconfig = self._keys, self._servers.kubeconfig("extensions")
        self._servers.launch(
            "apiextensions-apiserver",
            {
                "etcd-servers": self._addresses.etcd,
                "etcd-prefix": "/extensions",
                "bind-address": self._addresses.machine,
                "secure-port": self._addresses.ports["extensions"],
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
                "externalName": self._addresses.machine,
                "ports": [{"port": self._addresses.ports["extensions"]}],
            },
        }
        with self._cluster.client() as client:
            client.create(Service.from_dict(service))
            self._serve_elsewhere(client, "apiextensions.k8s.io", "v1", 16700)
        self._daemons.wait(self._is_served, "CRDs are served by the newer server")

    def serve(self, group: str, versions: Iterable[str]) -> None:
        """Have it answer for versions of a group, if it does not yet."""
        with self._cluster.client() as client:
            for version in versions:
                if (group, version) not in self._served:
                    self._serve_elsewhere(client, group, version, 1000)
                    self._served.add((group, version))

    def _serve_elsewhere(self, client: Client, group: str, version: str, priority: int) -> None:
        """Have this server answer for a group, instead of the API server."""
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
                "port": self._addresses.ports["extensions"],
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

    def _is_served(self) -> bool:
        """Whether the newer server answers for CRDs: the old one names no singular."""
        with suppress(httpx2.HTTPError, ValueError, KeyError, TypeError):
            _, found = self._cluster.ask("GET", "/apis/apiextensions.k8s.io/v1")
            return any(resource["singularName"] for resource in found["resources"])
        return False
