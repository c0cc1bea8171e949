"""Objects that tests of clusters create."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightkube.generic_resource import create_namespaced_resource

from .cluster import GPU, IMAGE

GROUP, VERSION = "tests.pipollux.dev", "v1alpha1"
Sample = create_namespaced_resource(GROUP, VERSION, "Sample", "samples")
"""The kind that `SAMPLES` declares: resizable, suspendable, with rules in CEL."""

SAMPLES: dict[str, Any] = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": f"samples.{GROUP}"},
    "spec": {
        "group": GROUP,
        "scope": "Namespaced",
        "names": {"kind": "Sample", "plural": "samples", "singular": "sample"},
        "versions": [
            {
                "name": VERSION,
                "served": True,
                "storage": True,
                "subresources": {"status": {}},
                "schema": {
                    "openAPIV3Schema": {
                        "type": "object",
                        "required": ["spec"],
                        "properties": {
                            "spec": {
                                "type": "object",
                                "required": ["stages"],
                                "x-kubernetes-validations": [
                                    {
                                        "rule": "!has(self.max) || self.min <= self.max",
                                        "message": "min must not exceed max",
                                    }
                                ],
                                "properties": {
                                    "stages": {"type": "integer", "minimum": 1, "maximum": 64},
                                    "min": {"type": "integer", "default": 1},
                                    "max": {"type": "integer"},
                                    "suspend": {"type": "boolean", "default": False},
                                    "policy": {"type": "string", "enum": ["keep", "remove"]},
                                    "script": {
                                        "type": "string",
                                        "pattern": "^[a-z./]+$",
                                        "maxLength": 40,
                                        "x-kubernetes-validations": [
                                            {"rule": "self == oldSelf", "message": "is immutable"}
                                        ],
                                    },
                                    "args": {"type": "array", "items": {"type": "string"}},
                                    "environment": {
                                        "type": "object",
                                        "additionalProperties": {"type": "string"},
                                    },
                                },
                            },
                            "status": {
                                "type": "object",
                                "properties": {
                                    "phase": {"type": "string"},
                                    "conditions": {
                                        "type": "array",
                                        "x-kubernetes-list-type": "map",
                                        "x-kubernetes-list-map-keys": ["type"],
                                        "items": {
                                            "type": "object",
                                            "required": ["type", "status"],
                                            "properties": {
                                                "type": {"type": "string"},
                                                "status": {"type": "string"},
                                                "reason": {"type": "string"},
                                            },
                                        },
                                    },
                                },
                            },
                        },
                    }
                },
            }
        ],
    },
}


def sample(name: str, **spec: Any) -> dict[str, Any]:
    """Return an object of the kind that `SAMPLES` declares."""
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": "Sample",
        "metadata": {"name": name},
        "spec": {"stages": 2, **spec},
    }


def pod(
    name: str,
    command: Sequence[str] = ("true",),
    *,
    gpus: int = 0,
    node: str | None = None,
    grace: int = 30,
    labels: Mapping[str, str] | None = None,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    **spec: Any,
) -> dict[str, Any]:
    """Return a pod of one container that is started once.

    Args:
        name: of the pod.
        command: what the container runs.
        gpus: how many it needs.
        node: where it must run.
        grace: seconds between SIGTERM and SIGKILL.
        labels: of the pod.
        environment: of the container.
        folder: of the node, mounted at the same path.
        spec: further fields of its spec.
    """
    container: dict[str, Any] = {
        "name": "main",
        "image": IMAGE,
        "imagePullPolicy": "Never",
        "command": list(command),
    }
    if environment:
        container["env"] = [{"name": k, "value": v} for k, v in environment.items()]
    if folder is not None:
        container["volumeMounts"] = [{"name": "folder", "mountPath": str(folder)}]
        spec["volumes"] = [{"name": "folder", "hostPath": {"path": str(folder)}}]
    if gpus:
        container["resources"] = {"limits": {GPU: str(gpus)}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": dict(labels or {})},
        "spec": {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": grace,
            "automountServiceAccountToken": False,
            "containers": [container],
            **({"nodeSelector": {"kubernetes.io/hostname": node}} if node else {}),
            **spec,
        },
    }
