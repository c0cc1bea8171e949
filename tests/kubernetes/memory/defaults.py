"""What the API server adds to objects of its own kinds, and what it does not let through."""

from __future__ import annotations

import itertools
import random
import re
from typing import Any

from .answers import Cause, Object, invalid
from .resources import BUILT_IN, DEFINITIONS, EVENTS, NAMESPACES, NODES, PODS, SERVICES, Resource

_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_LABEL_VALUE = re.compile(r"(([A-Za-z0-9][-A-Za-z0-9_.]{0,61})?[A-Za-z0-9])?")
_RULE = (
    "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or "
    "'.', and must start and end with an alphanumeric character (e.g. 'example.com', regex used "
    r"for validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')"
)
_LABEL_RULE = (
    "a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or "
    "'.', and must start and end with an alphanumeric character (e.g. 'MyValue',  or 'my_value',  "
    "or '12345', regex used for validation is '(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?')"
)
# What alone may change of a pod's spec.
_POD_MAY_CHANGE = ("activeDeadlineSeconds", "tolerations", "terminationGracePeriodSeconds")
NODE_INFO = (
    "architecture",
    "bootID",
    "containerRuntimeVersion",
    "kernelVersion",
    "kubeProxyVersion",
    "kubeletVersion",
    "machineID",
    "operatingSystem",
    "osImage",
    "systemUUID",
)
_ADDRESSES = itertools.count(1)


def random_suffix() -> str:
    """Return what follows `metadata.generateName`."""
    return "".join(random.choices("bcdfghjklmnpqrstvwxz2456789", k=5))  # noqa: S311  # no secret


def fill_in(resource: Resource, thing: Object) -> None:
    """Give a new object what the API server gives it where it says nothing."""
    if resource == PODS:
        _fill_in_pod(thing)
    elif resource == NODES:
        thing.setdefault("spec", {})
        thing.setdefault("status", {})
        complete(resource, thing)
    elif resource == EVENTS:
        for key in ("eventTime", "firstTimestamp", "lastTimestamp"):
            thing.setdefault(key, None)
        thing.setdefault("source", {})
        thing.setdefault("reportingComponent", "")
        thing.setdefault("reportingInstance", "")
    elif resource == NAMESPACES:
        thing.setdefault("spec", {})["finalizers"] = ["kubernetes"]
        thing["status"] = {"phase": "Active"}
    elif resource == SERVICES:
        _fill_in_service(thing)
    elif resource == DEFINITIONS:
        _fill_in_definition(thing)


def complete(resource: Resource, thing: Object) -> None:
    """Give an object what the API server gives it each time that it is written."""
    if resource == NODES:
        status = thing["status"]
        status.setdefault("daemonEndpoints", {"kubeletEndpoint": {"Port": 0}})
        status.setdefault("nodeInfo", dict.fromkeys(NODE_INFO, ""))
        if status.get("capacity"):
            status["allocatable"] = status["capacity"] | status.get("allocatable", {})


def _fill_in_pod(pod: Object) -> None:
    spec = pod.setdefault("spec", {})
    usual: Object = {
        "dnsPolicy": "ClusterFirst",
        "enableServiceLinks": True,
        "preemptionPolicy": "PreemptLowerPriority",
        "priority": 0,
        "restartPolicy": "Always",
        "schedulerName": "default-scheduler",
        "securityContext": {},
        "serviceAccountName": "default",
        "terminationGracePeriodSeconds": 30,
    }
    for key, value in usual.items():
        spec.setdefault(key, value)
    spec.setdefault("serviceAccount", spec["serviceAccountName"])
    for container in [*spec.get("initContainers", []), *spec.get("containers", [])]:
        latest = ":" not in container.get("image", "").rsplit("/", 1)[-1]
        latest = latest or container.get("image", "").endswith(":latest")
        container.setdefault("imagePullPolicy", "Always" if latest else "IfNotPresent")
        for key in ("env", "envFrom", "command", "args", "volumeMounts", "ports"):
            if not container.get(key, True):
                del container[key]
        container.setdefault("resources", {})
        container.setdefault("terminationMessagePath", "/dev/termination-log")
        container.setdefault("terminationMessagePolicy", "File")
        for port in container.get("ports", []):
            port.setdefault("protocol", "TCP")
        limits = container["resources"].get("limits", {})
        if limits:
            requests = container["resources"].setdefault("requests", {})
            for key, value in limits.items():
                requests.setdefault(key, value)
        for variable in container.get("env", []):
            if "fieldRef" in variable.get("valueFrom", {}):
                variable["valueFrom"]["fieldRef"].setdefault("apiVersion", "v1")
    for volume in spec.get("volumes", []):
        if "hostPath" in volume:
            volume["hostPath"].setdefault("type", "")
        if set(volume) == {"name"}:
            volume["emptyDir"] = {}
    tolerations = spec.setdefault("tolerations", [])
    for taint in ("not-ready", "unreachable"):
        key = f"node.kubernetes.io/{taint}"
        if not any(_tolerates(t, key) for t in tolerations):
            tolerations.append(
                {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300}
            )
    pod["status"] = {"phase": "Pending", "qosClass": _quality(spec)}


def _tolerates(toleration: Object, key: str) -> bool:
    return (
        toleration.get("key", key) == key and toleration.get("effect", "NoExecute") == "NoExecute"
    )


def _quality(spec: Object) -> str:
    """Return the class of service that kubelets see in what containers ask for."""
    asked = [x.get("resources", {}) for x in spec.get("containers", [])]
    told = [(r.get("requests", {}), r.get("limits", {})) for r in asked]
    names = ("cpu", "memory")
    if not any(name in part for pair in told for part in pair for name in names):
        return "BestEffort"
    sure = all(name in lim and req.get(name) == lim[name] for req, lim in told for name in names)
    return "Guaranteed" if sure else "Burstable"


def _fill_in_service(service: Object) -> None:
    spec = service.setdefault("spec", {})
    spec.setdefault("type", "ClusterIP")
    spec.setdefault("sessionAffinity", "None")
    if spec["type"] != "ExternalName":
        number = next(_ADDRESSES)
        spec.setdefault("clusterIP", f"10.96.{number // 250}.{number % 250 + 1}")
        spec.setdefault("clusterIPs", [spec["clusterIP"]])
    for port in spec.get("ports", []):
        port.setdefault("protocol", "TCP")
        port.setdefault("targetPort", port["port"])
    service["status"] = {"loadBalancer": {}}


def _fill_in_definition(definition: Object) -> None:
    spec = definition["spec"]
    names = spec["names"]
    names.setdefault("singular", names["kind"].lower())
    names.setdefault("listKind", names["kind"] + "List")
    spec.setdefault("conversion", {"strategy": "None"})
    stored = next((v["name"] for v in spec["versions"] if v.get("storage")), "")
    definition["status"] = {
        "acceptedNames": names,
        "storedVersions": [stored],
        "conditions": [
            {
                "type": "NamesAccepted",
                "status": "True",
                "reason": "NoConflicts",
                "message": "no conflicts found",
            },
            {
                "type": "Established",
                "status": "True",
                "reason": "InitialNamesAccepted",
                "message": "the initial names have been accepted",
            },
        ],
    }


def validate(resource: Resource, thing: Object, old: Object | None = None) -> None:
    """Refuse an object that breaks the rules of its kind.

    Raises:
        ApiError: 422, with every rule that it breaks.
    """
    causes = list(_metadata_causes(resource, thing))
    if resource == PODS:
        causes += _pod_causes(thing) if old is None else _pod_change_causes(thing, old)
    if resource == SERVICES and old is not None:
        causes += _service_change_causes(thing, old)
    if resource == DEFINITIONS and old is None:
        causes += _definition_causes(thing)
    if causes:
        raise invalid(resource, thing["metadata"].get("name", ""), causes)


def _metadata_causes(resource: Resource, thing: Object) -> Any:
    metadata = thing["metadata"]
    name = metadata.get("name", "")
    strict = resource in (NAMESPACES, SERVICES)
    if not (_LABEL if strict else _SUBDOMAIN).fullmatch(name):
        if not name:
            said = "Required value: name or generateName is required"
            yield Cause("metadata.name", "FieldValueRequired", said)
        elif resource in BUILT_IN or resource.custom:
            said = f'Invalid value: "{name}": {_RULE}'
            yield Cause("metadata.name", "FieldValueInvalid", said)
    for value in (metadata.get("labels") or {}).values():
        if len(value) > 63:
            said = f'Invalid value: "{value}": must be no more than 63 characters'
            yield Cause("metadata.labels", "FieldValueInvalid", said)
        elif not _LABEL_VALUE.fullmatch(value):
            said = f'Invalid value: "{value}": {_LABEL_RULE}'
            yield Cause("metadata.labels", "FieldValueInvalid", said)


def _pod_causes(pod: Object) -> Any:
    spec = pod["spec"]
    if not spec.get("containers"):
        yield Cause("spec.containers", "FieldValueRequired", "Required value")
    volumes = {volume["name"] for volume in spec.get("volumes", [])}
    for number, container in enumerate(spec.get("containers") or []):
        path = f"spec.containers[{number}]"
        if not container.get("name"):
            yield Cause(f"{path}.name", "FieldValueRequired", "Required value")
        if not container.get("image"):
            yield Cause(f"{path}.image", "FieldValueRequired", "Required value")
        for place, mount in enumerate(container.get("volumeMounts", [])):
            if mount["name"] not in volumes:
                where = f"{path}.volumeMounts[{place}].name"
                yield Cause(where, "FieldValueNotFound", f'Not found: "{mount["name"]}"')
    allowed = ("Always", "OnFailure", "Never")
    if spec["restartPolicy"] not in allowed:
        words = ", ".join(f'"{word}"' for word in allowed)
        said = f'Unsupported value: "{spec["restartPolicy"]}": supported values: {words}'
        yield Cause("spec.restartPolicy", "FieldValueNotSupported", said)


def _pod_change_causes(pod: Object, old: Object) -> Any:
    def fixed(thing: Object) -> Object:
        spec = {k: v for k, v in thing["spec"].items() if k not in _POD_MAY_CHANGE}
        for key in ("containers", "initContainers"):
            if key in spec:
                spec[key] = [{k: v for k, v in c.items() if k != "image"} for c in spec[key]]
        return spec

    if fixed(pod) != fixed(old):
        said = (
            "Forbidden: pod updates may not change fields other than "
            "`spec.containers[*].image`, `spec.initContainers[*].image`, "
            "`spec.activeDeadlineSeconds` or `spec.tolerations` (only additions to existing "
            "tolerations)"
        )
        yield Cause("spec", "FieldValueForbidden", said)


def _service_change_causes(service: Object, old: Object) -> Any:
    address = service["spec"].get("clusterIP", "")
    if old["spec"].get("clusterIP") != address:
        said = f'Invalid value: "{address}": field is immutable'
        yield Cause("spec.clusterIP", "FieldValueInvalid", said)


def _definition_causes(definition: Object) -> Any:
    spec, name = definition["spec"], definition["metadata"]["name"]
    if name != f"{spec['names']['plural']}.{spec['group']}":
        said = f'Invalid value: "{name}": must be spec.names.plural+"."+spec.group'
        yield Cause("metadata.name", "FieldValueInvalid", said)
