"""Nodes as the scheduler sees them: their free devices for jobs, and whether they are ready."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from decimal import Decimal
from math import ceil, floor
from typing import Any, NamedTuple, TypeAlias

from lightkube.utils.quantity import parse_quantity

from pipollux_sched.backend.base import Node
from pipollux_sched.spec.cluster import NodeSpec, with_levels

from .api import Object
from .names import HOST_NAME_LABEL
from .options import CPU, KubernetesOptions

Amounts: TypeAlias = Mapping[str, Decimal]
_EVICTING = ("NoSchedule", "NoExecute")
_OWN_TAINTS = (
    "node.kubernetes.io/not-ready",
    "node.kubernetes.io/unreachable",
    "node.kubernetes.io/unschedulable",
)
"""Taints that repeat a node's conditions and its cordon."""


class ClusterNode(NamedTuple):
    """The relevant fields of a node."""

    name: str
    """Its host name label, by which pods select it."""
    object_name: str
    labels: Mapping[str, str]
    allocatable: Amounts
    cordoned: bool
    taints: tuple[Mapping[str, Any], ...]
    ready: bool
    reason: str


class Usage(NamedTuple):
    """The resources of another pod on its node."""

    node: str
    amounts: Amounts


def view_node(node: Object) -> ClusterNode:
    """Return the relevant fields of a node."""
    metadata, spec, status = node["metadata"], node.get("spec") or {}, node.get("status") or {}
    labels = metadata.get("labels") or {}
    conditions = {entry["type"]: entry for entry in status.get("conditions") or ()}
    ready = conditions.get("Ready", {})
    return ClusterNode(
        labels.get(HOST_NAME_LABEL, metadata["name"]),
        metadata["name"],
        labels,
        _amounts(status.get("allocatable") or {}),
        bool(spec.get("unschedulable")),
        tuple(spec.get("taints") or ()),
        ready.get("status") == "True",
        str(ready.get("message") or ready.get("reason") or "its kubelet has not reported yet"),
    )


def view_usage(pod: Object) -> Usage | None:
    """Return the resources of a pod on its node; None if it holds nothing."""
    spec, phase = pod.get("spec") or {}, (pod.get("status") or {}).get("phase")
    if not spec.get("nodeName") or phase in ("Succeeded", "Failed"):
        return None
    return Usage(spec["nodeName"], _requests(spec))


def usage_by_node(pods: Iterable[Usage]) -> dict[str, dict[str, Decimal]]:
    """Return the total resources of pods, by node."""
    found: dict[str, dict[str, Decimal]] = {}
    for pod in pods:
        held = found.setdefault(pod.node, {})
        for name, amount in pod.amounts.items():
            held[name] = held.get(name, Decimal()) + amount
    return found


def make_nodes(
    views: Iterable[ClusterNode],
    used: Mapping[str, Amounts],
    ours: Mapping[str, int],
    options: KubernetesOptions,
) -> dict[str, Node]:
    """Return the nodes that have devices, by name.

    `used` are resources of other pods, by node object; `ours` are slots that our replicas hold.
    """
    nodes = {}
    for view in views:
        node = _make_node(view, used.get(view.object_name, {}), ours.get(view.name, 0), options)
        if node is not None:
            nodes[view.name] = node
    specs = with_levels([node.spec for node in nodes.values()], options.topology_labels)
    return {spec.name: replace(nodes[spec.name], spec=spec) for spec in specs}


def _make_node(
    view: ClusterNode, used: Amounts, ours: int, options: KubernetesOptions
) -> Node | None:
    def whole(amounts: Amounts, resource: str) -> int:
        return floor(amounts.get(resource, Decimal()))

    def left(resource: str) -> int:
        return max(whole(view.allocatable, resource) - ceil(used.get(resource, Decimal())), 1)

    taken = ceil(used.get(options.device, Decimal()))
    # Temporarily unhealthy devices do not take the node from its running replicas.
    slots = max(whole(view.allocatable, options.device), ours + taken if ours else 0)
    if not slots:
        return None
    cpu_node = options.device == CPU
    spec = NodeSpec(
        name=view.name,
        slots=slots,
        kind="cpu" if cpu_node else "gpu",
        cpus=None if cpu_node else left(CPU),
        memory=left("memory") if "memory" in view.allocatable else None,
        preemptible=any(
            view.labels.get(label) == value for label, value in options.preemptible_labels.items()
        ),
        gpu_type=None if cpu_node else view.labels.get(options.gpu_type_label) or None,
        # The names that NVIDIA's device plugin and GPU Feature Discovery give to MIG slices.
        single_stage="/mig-" in options.device
        or "-MIG-" in view.labels.get(options.gpu_type_label, ""),
        topology={label: view.labels.get(label, "") for label in options.topology_labels},
    )
    taint = _hindrance(view, options)
    draining = view.cordoned or bool(taint)
    reason = "" if view.ready else view.reason
    if view.ready and draining:
        reason = "it is cordoned" if view.cordoned else f"it has the taint {taint}"
    return Node(spec, taken=min(taken, slots), ready=view.ready, draining=draining, reason=reason)


def _hindrance(view: ClusterNode, options: KubernetesOptions) -> str:
    """Return a taint that our pods do not tolerate; empty if there is none."""
    for taint in view.taints:
        if taint.get("effect") not in _EVICTING or taint.get("key") in _OWN_TAINTS:
            continue
        if not any(_tolerates(toleration, taint) for toleration in options.all_tolerations):
            return f"{taint.get('key')}={taint.get('value', '')}:{taint.get('effect')}"
    return ""


def _tolerates(toleration: Mapping[str, Any], taint: Mapping[str, Any]) -> bool:
    if toleration.get("effect") not in (None, "", taint.get("effect")):
        return False
    if toleration.get("operator") == "Exists":
        return toleration.get("key") in (None, "", taint.get("key"))
    same_value = (toleration.get("value") or "") == (taint.get("value") or "")
    return toleration.get("key") == taint.get("key") and same_value


def _requests(spec: Mapping[str, Any]) -> dict[str, Decimal]:
    """Return the resources that the cluster's scheduler counts for a pod."""
    total = _sum(map(_container_requests, spec.get("containers") or ()))
    before: list[Amounts] = []
    beside: dict[str, Decimal] = {}
    for container in spec.get("initContainers") or ():
        asked = _container_requests(container)
        if container.get("restartPolicy") == "Always":  # a sidecar, which keeps running
            beside = _sum([beside, asked])
            before.append(beside)
        else:
            before.append(_sum([beside, asked]))
    total = _sum([total, beside])
    for amounts in before:
        for name, amount in amounts.items():
            total[name] = max(total.get(name, Decimal()), amount)
    return _sum([total, _amounts(spec.get("overhead") or {})])


def _container_requests(container: Mapping[str, Any]) -> dict[str, Decimal]:
    resources = container.get("resources") or {}
    return _amounts({**(resources.get("limits") or {}), **(resources.get("requests") or {})})


def _sum(parts: Iterable[Amounts]) -> dict[str, Decimal]:
    total: dict[str, Decimal] = {}
    for part in parts:
        for name, amount in part.items():
            total[name] = total.get(name, Decimal()) + amount
    return total


def _amounts(given: Mapping[str, Any]) -> dict[str, Decimal]:
    return {name: parse_quantity(str(value)) or Decimal() for name, value in given.items()}
