"""All conversations with an API server.

The answers of a real one are in `recorded/`, and the one in memory must give the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tests.kubernetes.cluster import Cluster

from .conversation import Conversation
from .custom_resources import about_custom_resources, about_owners
from .objects import about_leases, about_nodes
from .pods import NODE, about_containers, about_placement, about_pods
from .watches import about_watches

CONVERSATIONS: Mapping[str, Callable[[Conversation], None]] = {
    "pods": about_pods,
    "placement": about_placement,
    "nodes": about_nodes,
    "leases": about_leases,
    "custom-resources": about_custom_resources,
    "watches": about_watches,
    "owners": about_owners,
}
WITH_KUBELETS: Mapping[str, Callable[[Conversation], None]] = {"containers": about_containers}
"""These take a cluster with kubelets."""


def hold(cluster: Cluster, name: str) -> Mapping[str, Any]:
    """Hold a conversation with a cluster, and return the answers."""
    namespace = f"recorded-{name}"
    cluster.create_namespace(namespace)
    talk = Conversation(cluster, namespace)
    if name in WITH_KUBELETS:
        WITH_KUBELETS[name](talk)
    else:
        cluster.add_node(NODE)
        CONVERSATIONS[name](talk)
        cluster.delete_node(NODE)
    cluster.delete_namespace(namespace)
    return talk.answers
