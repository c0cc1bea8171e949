"""The scheduler of the cluster in memory: puts pods on nodes that have room for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from .answers import ApiError, Object
from .conditions import set_condition
from .quantities import requested, total
from .registry import Registry
from .resources import NODES, PODS

# Their order is that of the checks.
_SELECTOR = "node(s) didn't match Pod's node affinity"
_UNSCHEDULABLE = "node(s) were unschedulable"
_KEPT_AWAY = [
    "node(s) didn't match pod affinity/anti-affinity",
    "node(s) didn't match pod anti-affinity rules",
]


def place_pods(registry: Registry) -> None:
    """Put each pod that waits on a node, or say in its condition why none will have it."""
    with registry.store.lock:
        pods = registry.store.view(PODS)
        nodes = registry.store.view(NODES)
        running = [pod for pod in pods if pod["spec"].get("nodeName") and not _ended(pod)]
        for pod in sorted(pods, key=lambda x: int(x["metadata"]["resourceVersion"])):
            spec = pod["spec"]
            mine = spec["schedulerName"] == "default-scheduler"
            if spec.get("nodeName") or not mine or "deletionTimestamp" in pod["metadata"]:
                continue
            refusals = {node["metadata"]["name"]: _refusals(pod, node, running) for node in nodes}
            fitting = [name for name, why in refusals.items() if not why]
            metadata = pod["metadata"]
            if fitting:
                name = min(fitting, key=lambda n: (_load(n, running), n))
                try:
                    registry.bind(metadata["namespace"], metadata["name"], name)
                except ApiError:
                    continue
                running.append(pod | {"spec": spec | {"nodeName": name}})
            else:
                _say_why(registry, pod, refusals)


def _ended(pod: Object) -> bool:
    return pod["status"].get("phase") in ("Succeeded", "Failed")


def _load(node: str, running: list[Object]) -> int:
    return sum(pod["spec"]["nodeName"] == node for pod in running)


def _refusals(pod: Object, node: Object, running: list[Object]) -> list[str]:
    """Return why a node does not take a pod; nothing if it does."""
    spec, metadata = pod["spec"], node["metadata"]
    if node.get("spec", {}).get("unschedulable"):
        return [_UNSCHEDULABLE]
    for taint in node.get("spec", {}).get("taints", []):
        effect = taint["effect"]
        if effect != "PreferNoSchedule" and not any(
            _tolerates(toleration, taint) for toleration in spec.get("tolerations", [])
        ):
            value = taint.get("value", "")
            return [f"node(s) had taint {{{taint['key']}: {value}}}, that the pod didn't tolerate"]
    labels = metadata.get("labels", {})
    wanted = spec.get("nodeSelector", {})
    if any(labels.get(key) != value for key, value in wanted.items()):
        return [_SELECTOR]
    if not _has_affinity(spec, node):
        return [_SELECTOR]
    here = [other for other in running if other["spec"]["nodeName"] == metadata["name"]]
    used, room = total(requested(other) for other in here), total([node["status"]["allocatable"]])
    short = [
        "Too many pods" if name == "pods" else f"Insufficient {name}"
        for name, needed in requested(pod).items()
        if needed and used.get(name, 0.0) + needed > room.get(name, 0.0) + 1e-9
    ]
    return short or (_KEPT_AWAY if any(_keeps_away(spec, other) for other in here) else [])


def _tolerates(toleration: Mapping[str, str], taint: Mapping[str, str]) -> bool:
    if toleration.get("effect") not in (None, "", taint["effect"]):
        return False
    if toleration.get("operator", "Equal") == "Exists":
        return toleration.get("key") in (None, "", taint["key"])
    same = toleration.get("value", "") == taint.get("value", "")
    return toleration.get("key") == taint["key"] and same


def _has_affinity(spec: Object, node: Object) -> bool:
    affinity = spec.get("affinity", {}).get("nodeAffinity", {})
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution")
    if not required:
        return True
    labels, name = node["metadata"].get("labels", {}), node["metadata"]["name"]

    def holds(rule: Object, found: str | None) -> bool:
        values = rule.get("values", [])
        return {
            "In": found in values,
            "NotIn": found not in values,
            "Exists": found is not None,
            "DoesNotExist": found is None,
        }[rule["operator"]]

    return any(
        all(holds(rule, labels.get(rule["key"])) for rule in term.get("matchExpressions", []))
        and all(holds(rule, name) for rule in term.get("matchFields", []))
        for term in required["nodeSelectorTerms"]
    )


def _keeps_away(spec: Object, other: Object) -> bool:
    """Whether a pod must not be where another one is; the node is the only topology here."""
    rules = spec.get("affinity", {}).get("podAntiAffinity", {})
    labels = other["metadata"].get("labels", {}).items()
    return any(
        rule["labelSelector"]["matchLabels"].items() <= labels
        for rule in rules.get("requiredDuringSchedulingIgnoredDuringExecution", [])
    )


def _say_why(registry: Registry, pod: Object, refusals: Mapping[str, list[str]]) -> None:
    counts = Counter(why for reasons in refusals.values() for why in reasons)
    said = ", ".join(f"{count} {why}" for why, count in sorted(counts.items()))
    message = f"0/{len(refusals)} nodes are available: {said}."
    if not refusals:
        message = "no nodes available to schedule pods"

    def alter(found: Object) -> None:
        set_condition(found, "PodScheduled", "False", reason="Unschedulable", message=message)

    registry.store.change(PODS, pod["metadata"]["namespace"], pod["metadata"]["name"], alter)
