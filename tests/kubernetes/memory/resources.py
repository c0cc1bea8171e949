"""The kinds of objects that the API server in memory knows by itself; others come as CRDs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Resource:
    """A kind of objects: where it is served, and what its objects are called."""

    group: str
    """"" for the core of the API."""
    version: str
    plural: str
    kind: str
    namespaced: bool = True
    status: bool = False
    """Whether objects have a ``/status``, which alone can change their status."""
    generation: bool = False
    """Whether ``metadata.generation`` counts the changes of what is wanted."""
    custom: bool = False
    """Whether it was declared by a CustomResourceDefinition."""
    definition: dict[str, Any] = field(default_factory=dict, compare=False, hash=False)
    """Of one declared: its version in the CustomResourceDefinition."""

    @property
    def qualified(self) -> str:
        """Its name with the group, such as "leases.coordination.k8s.io"."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    @property
    def api_version(self) -> str:
        """What its objects bear as ``apiVersion``."""
        return f"{self.group}/{self.version}" if self.group else self.version


def _core(plural: str, kind: str, **more: Any) -> Resource:
    return Resource("", "v1", plural, kind, **more)


NAMESPACES = _core("namespaces", "Namespace", namespaced=False, status=True)
NODES = _core("nodes", "Node", namespaced=False, status=True)
PODS = _core("pods", "Pod", status=True)
EVENTS = _core("events", "Event")
SERVICES = _core("services", "Service", status=True)
SERVICE_ACCOUNTS = _core("serviceaccounts", "ServiceAccount")
LEASES = Resource("coordination.k8s.io", "v1", "leases", "Lease")
DEFINITIONS = Resource(
    "apiextensions.k8s.io",
    "v1",
    "customresourcedefinitions",
    "CustomResourceDefinition",
    namespaced=False,
    status=True,
    generation=True,
)
_RBAC = "rbac.authorization.k8s.io"

BUILT_IN = (
    NAMESPACES,
    NODES,
    PODS,
    EVENTS,
    SERVICES,
    SERVICE_ACCOUNTS,
    LEASES,
    DEFINITIONS,
    _core("configmaps", "ConfigMap"),
    _core("endpoints", "Endpoints"),
    _core("persistentvolumeclaims", "PersistentVolumeClaim", status=True),
    _core("persistentvolumes", "PersistentVolume", namespaced=False, status=True),
    _core("secrets", "Secret"),
    Resource("apps", "v1", "deployments", "Deployment", status=True, generation=True),
    Resource("policy", "v1beta1", "poddisruptionbudgets", "PodDisruptionBudget", status=True),
    Resource("scheduling.k8s.io", "v1", "priorityclasses", "PriorityClass", namespaced=False),
    Resource(_RBAC, "v1", "clusterroles", "ClusterRole", namespaced=False),
    Resource(_RBAC, "v1", "clusterrolebindings", "ClusterRoleBinding", namespaced=False),
    Resource(_RBAC, "v1", "roles", "Role"),
    Resource(_RBAC, "v1", "rolebindings", "RoleBinding"),
)
