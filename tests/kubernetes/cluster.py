"""What tests can do with a cluster, be it a real control plane or the one in memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import httpx2
import yaml
from lightkube import Client, KubeConfig
from lightkube.core.exceptions import ApiError
from lightkube.generic_resource import create_global_resource
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.core_v1 import Namespace, Node, Pod, ServiceAccount

from tests import waiting

GPU = "nvidia.com/gpu"
IMAGE = "docker.io/pipollux/test:1"
"""The image of containers in tests: Python, torch, the packages of this checkout."""
T = TypeVar("T")

Definition = create_global_resource(
    "apiextensions.k8s.io", "v1", "CustomResourceDefinition", "customresourcedefinitions"
)


def until(condition: Callable[[], T | None], what: str) -> T:
    """Return what a function returns as soon as that is true.

    While the API server refuses or does not answer, it counts as not yet true.
    """
    return waiting.until(condition, what, ignored=(ApiError, httpx2.HTTPError))


class Cluster(ABC):
    """A Kubernetes cluster that is there for one test."""

    kubeconfig: Path
    """How clients reach it."""

    shared: Path
    """A folder that containers can mount (`hostPath`), at the same path."""
    address: str
    """Where containers reach what listens on this machine, such as a scheduler."""

    _asking: Client | None = None

    @property
    @abstractmethod
    def is_real(self) -> bool:
        """Whether it is Kubernetes itself."""

    @abstractmethod
    def start(self) -> None:
        """Start it; return when it serves and its nodes are ready."""

    @abstractmethod
    def stop(self) -> None:
        """End it; leave nothing behind but its folder."""

    @abstractmethod
    def stop_api_server(self) -> None:
        """Take the API server away: nothing answers, every stream ends; pods go on."""

    @abstractmethod
    def start_api_server(self) -> None:
        """Bring it back at the same address."""

    @abstractmethod
    def expire_watches(self) -> None:
        """End all watches, and let none go back to what was before now: 410 Gone."""

    @abstractmethod
    def lose_node(self, name: str) -> None:
        """Let a machine lose its power: its processes end and nobody says so."""

    @abstractmethod
    def delete_node(self, name: str) -> None:
        """Take a node out of the cluster, and end its machine, as an autoscaler does."""

    @abstractmethod
    def add_node(self, name: str, gpus: int = 4) -> None:
        """Add a node; return when it is ready."""

    def __enter__(self) -> Cluster:
        try:
            self.start()
        except BaseException:  # also Ctrl-C: nothing stays behind
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._asking is not None:
            self._asking.close()
        self.stop()

    def client(self, namespace: str = "default") -> Client:
        """Return a client of it; close it when done."""
        config = KubeConfig.from_file(self.kubeconfig).get()
        assert config is not None
        return Client(config, namespace=namespace, field_manager="test", trust_env=False)

    def create_namespace(self, name: str) -> None:
        """Create a namespace; return when pods can be created in it."""
        with self.client() as client:
            client.create(Namespace(metadata=ObjectMeta(name=name)))
            until(lambda: client.get(ServiceAccount, "default", namespace=name), "an account")

    def delete_namespace(self, name: str) -> None:
        """Delete a namespace; return when it is gone, with its pods at once."""
        with self.client() as client:
            for pod in list(client.list(Pod, namespace=name)):
                if pod.metadata.finalizers:  # whoever would remove them has ended
                    nobody = {"metadata": {"finalizers": None}}
                    client.patch(Pod, pod.metadata.name, nobody, namespace=name)
            client.deletecollection(Pod, namespace=name, grace_period=0)
            client.delete(Namespace, name)
            until(lambda: not _has(client, Namespace, name), f"namespace {name} is gone")

    def declare(self, *definitions: Path | Mapping[str, Any]) -> None:
        """Create CustomResourceDefinitions; return when they are served.

        Args:
            definitions: each, or a YAML file of some. One that is there is brought up to date.
        """
        for definition in definitions:
            if isinstance(definition, Path):
                self.declare(*yaml.safe_load_all(definition.read_text()))
            else:
                self._declare(definition)

    def _declare(self, definition: Mapping[str, Any]) -> None:
        with self.client() as client:
            client.apply(Definition(**definition), force=True)
        self._await_definition(definition)

    def _await_definition(self, document: Mapping[str, Any]) -> None:
        """Return when the kind of a CustomResourceDefinition is served."""
        group, names = document["spec"]["group"], document["spec"]["names"]
        for version in document["spec"]["versions"]:
            url = f"/apis/{group}/{version['name']}/{names['plural']}"
            until(lambda url=url: self.ask("GET", url)[0] == 200, f"{url} is served")

    def ask(
        self, method: str, path: str, body: Any = None, content_type: str = "application/json"
    ) -> tuple[int, Any]:
        """Send a request as it stands; return the HTTP status and the body."""
        if self._asking is None:
            self._asking = self.client()
        answer = self._asking._client._client.request(  # its HTTP client, with keys and address
            method, path, json=body, headers={"Content-Type": content_type}
        )
        kind = answer.headers.get("Content-Type", "")
        return answer.status_code, answer.json() if "json" in kind else answer.text

    def cordon(self, name: str, *, cordoned: bool = True) -> None:
        """Let no new pod onto a node, or again."""
        with self.client() as client:
            client.patch(Node, name, {"spec": {"unschedulable": cordoned or None}})

    def evict(self, namespace: str, name: str) -> None:
        """Evict a pod, as a drain does."""
        eviction = {
            "apiVersion": "policy/v1beta1",
            "kind": "Eviction",
            "metadata": {"name": name, "namespace": namespace},
        }
        path = f"/api/v1/namespaces/{namespace}/pods/{name}/eviction"
        code, said = self.ask("POST", path, eviction)
        assert code == 201, said

    def pods(self, namespace: str, **labels: str) -> dict[str, Pod]:
        """Return the pods of a namespace by name."""
        with self.client(namespace) as client:
            return {pod.metadata.name: pod for pod in client.list(Pod, labels=labels or None)}


def _has(client: Client, resource: Any, name: str) -> bool:
    return any(thing.metadata.name == name for thing in client.list(resource))
