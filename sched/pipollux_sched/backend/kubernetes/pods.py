"""The objects of a job: its pods, the secret with its token, its service.

A user's PodTemplateSpec is kept, except for the fields that the scheduler must set: node, command,
devices, environment, restart policy, host name, grace period.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from pipollux_protocol import environment as variables
from pipollux_sched.backend.base import Launch, ReplicaKey, ReplicaProgram
from pipollux_sched.backend.replica.command import agent_in_container
from pipollux_sched.backend.replica.variables import cpu_variables, gpu_variables, replica_variables

from . import names
from .api import Object
from .options import CPU, KubernetesOptions
from .pod_security import make_restricted
from .pod_state import MAIN_CONTAINER, main_container

TERMINATION_LOG = "/dev/termination-log"
TERMINATION_LOG_LIMIT = 4096
"""Most bytes of a termination message that a kubelet reads."""
GRACE_MARGIN = 10
"""Seconds that the kubelet waits longer than the scheduler, which then kills the pod."""
_SHARED_MEMORY_PATH = "/dev/shm"  # noqa: S108  # a container's own
_TOKEN = variables.TOKEN.name
CHECKPOINTS = "pipollux-checkpoints"
SHARED_MEMORY = "pipollux-shm"


@dataclass(frozen=True)
class Owner:
    """The custom resource that owns a job's objects."""

    name: str
    uid: str
    template: Mapping[str, Any] = field(default_factory=dict)
    """Its user's PodTemplateSpec."""

    @property
    def references(self) -> list[dict[str, Any]]:
        """The owner references of its objects: deleting it deletes them."""
        if not self.uid:
            return []
        return [
            {
                "apiVersion": names.API_VERSION,
                "kind": names.KIND,
                "name": self.name,
                "uid": self.uid,
                "controller": True,
                "blockOwnerDeletion": False,
            }
        ]


Owners: TypeAlias = Callable[[str], Owner]
"""Returns the owner of a job's objects; raises `ClusterUnavailableError` until it is known."""


def no_owners(_job: str) -> Owner:
    """Return the owner of jobs that have no custom resource."""
    return Owner("", "")


def make_pod(
    program: ReplicaProgram, launch: Launch, replica: int, owner: Owner, options: KubernetesOptions
) -> Object:
    """Return the pod of one replica."""
    key = launch.key(replica)
    name = names.pod_name(key)
    template: dict[str, Any] = deepcopy(dict(owner.template))
    metadata, spec = template.get("metadata") or {}, template.get("spec") or {}
    containers = spec.setdefault("containers", []) or [{}]
    spec["containers"] = containers
    _fill_container(main_container(containers), program, launch, replica, options)
    _fill_spec(spec, key, launch.assignments[replica].node, options)
    if options.pod_security == "restricted":
        make_restricted(spec)
    return {
        "metadata": {
            "name": name,
            "labels": {
                **(metadata.get("labels") or {}),
                **names.replica_labels(options.scheduler, key),
            },
            "annotations": metadata.get("annotations") or {},
            "finalizers": [*(metadata.get("finalizers") or ()), names.FINALIZER],
            "ownerReferences": owner.references,
        },
        "spec": spec,
    }


def make_secret(program: ReplicaProgram, owner: Owner, options: KubernetesOptions) -> Object:
    """Return the secret with a job's token, which the cluster collects with its owner."""
    token = program.environment.get(_TOKEN, "")
    return {
        "metadata": {
            "name": names.secret_name(program.job, token),
            "labels": names.job_labels(options.scheduler, program.job),
            "ownerReferences": owner.references,
        },
        "data": {_TOKEN: b64encode(token.encode()).decode()},
    }


def make_service(job: str, owner: Owner, options: KubernetesOptions) -> Object:
    """Return the headless service that gives a job's replicas their host names."""
    labels = names.job_labels(options.scheduler, job)
    return {
        "metadata": {
            "name": names.service_name(job),
            "labels": labels,
            "ownerReferences": owner.references,
        },
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": labels},
    }


def _fill_spec(
    spec: dict[str, Any], key: ReplicaKey, node: str, options: KubernetesOptions
) -> None:
    spec.pop("nodeName", None)  # the cluster's scheduler must account for the devices
    spec.update(
        restartPolicy="Never",
        nodeSelector={**(spec.get("nodeSelector") or {}), names.HOST_NAME_LABEL: node},
        hostname=names.pod_name(key),
        subdomain=names.service_name(key.job),
        terminationGracePeriodSeconds=int(options.grace) + GRACE_MARGIN,
    )
    spec.setdefault("automountServiceAccountToken", False)
    spec.setdefault("enableServiceLinks", False)
    if options.priority_class:
        spec.setdefault("priorityClassName", options.priority_class)
    spec["tolerations"] = [*(spec.get("tolerations") or ()), *options.all_tolerations]
    volumes = spec.setdefault("volumes", [])
    mounted = {
        mount["name"]
        for container in spec["containers"]
        for mount in container.get("volumeMounts") or ()
    }
    if SHARED_MEMORY in mounted:
        volumes.append({"name": SHARED_MEMORY, "emptyDir": {"medium": "Memory"}})
    if CHECKPOINTS in mounted:
        volumes.append({"name": CHECKPOINTS, **checkpoint_volume(options)})


def checkpoint_volume(options: KubernetesOptions) -> dict[str, Any]:
    """Return the source of the checkpoint volume."""
    if options.checkpoint_claim:
        return {"persistentVolumeClaim": {"claimName": options.checkpoint_claim}}
    path = options.checkpoint_host_path
    return {"hostPath": {"path": path, "type": "DirectoryOrCreate"}}


def _fill_container(
    container: dict[str, Any],
    program: ReplicaProgram,
    launch: Launch,
    replica: int,
    options: KubernetesOptions,
) -> None:
    container.setdefault("name", MAIN_CONTAINER)
    if program.image:
        container["image"] = program.image
    if program.directory is not None:
        container["workingDir"] = str(program.directory)
    container.pop("args", None)
    container.update(
        command=[
            literal(word)
            for word in agent_in_container(program, launch, replica, python=options.python)
        ],
        resources=resources(container.get("resources") or {}, program, launch, options),
        env=environment(container.get("env") or (), program, launch, replica, options),
        volumeMounts=mounts(container.get("volumeMounts") or (), options),
        terminationMessagePath=TERMINATION_LOG,
        terminationMessagePolicy="File",
    )


def resources(
    asked: Mapping[str, Any], program: ReplicaProgram, launch: Launch, options: KubernetesOptions
) -> dict[str, Any]:
    """Return the resources of a replica: the template's, the job's over them, its devices."""
    requests, limits = dict(asked.get("requests") or {}), dict(asked.get("limits") or {})
    stages = launch.num_stages
    cpus, memory = program.cpus_of(stages), program.memory_of(stages)
    if options.device == CPU:
        cpus = max(cpus, stages)
    else:
        requests[options.device] = limits[options.device] = str(stages)
    if cpus:
        requests[CPU] = str(cpus)
    if memory:
        requests["memory"] = str(memory)
    if program.memory_limit is not None:
        limits["memory"] = str(program.memory_limit)
        requests.setdefault("memory", "0")  # else it would be the limit
    return {**asked, "requests": requests, "limits": limits}


def environment(
    given: Iterable[Mapping[str, Any]],
    program: ReplicaProgram,
    launch: Launch,
    replica: int,
    options: KubernetesOptions,
) -> list[dict[str, Any]]:
    """Return the environment of a replica: the template's, then ours, which may refer to it."""
    if options.device == CPU:
        devices = cpu_variables(launch.num_stages)
    else:
        devices = gpu_variables(launch.num_stages)
    plain = {
        **replica_variables(program, launch, replica),
        **devices,
        **variables.RESULT_FILE.write(Path(TERMINATION_LOG)),
        **variables.RESULT_LIMIT.write(TERMINATION_LOG_LIMIT),
    }
    token = plain.pop(_TOKEN, "")
    ours: dict[str, dict[str, Any]] = {
        name: {"name": name, "value": literal(value)} for name, value in plain.items()
    }
    secret = {"name": names.secret_name(launch.job, token), "key": _TOKEN}
    ours[_TOKEN] = {"name": _TOKEN, "valueFrom": {"secretKeyRef": secret}}
    ours[variables.ADDRESS.name] = {
        "name": variables.ADDRESS.name,
        "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}},
    }
    return [dict(entry) for entry in given if entry.get("name") not in ours] + list(ours.values())


def literal(value: str) -> str:
    """Escape a value so that the kubelet does not expand $(NAME) in it."""
    return value.replace("$", "$$")


def mounts(given: Iterable[Mapping[str, Any]], options: KubernetesOptions) -> list[dict[str, Any]]:
    """Return the volume mounts; a user's own mount at one of our paths stays."""
    mounts = [dict(entry) for entry in given]
    taken = {entry.get("mountPath") for entry in mounts}
    if _SHARED_MEMORY_PATH not in taken:  # data loaders need room in shared memory
        mounts.append({"name": SHARED_MEMORY, "mountPath": _SHARED_MEMORY_PATH})
    if options.has_volume and options.checkpoint_folder not in taken:
        mounts.append({"name": CHECKPOINTS, "mountPath": options.checkpoint_folder})
    return mounts
