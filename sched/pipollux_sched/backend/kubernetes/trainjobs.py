"""Conversion of attempts to TrainJobs of Kubeflow Trainer, and of their states."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from pipollux_protocol.environment import REPLICA
from pipollux_sched.backend.base import BackendError, Launch, ReplicaProgram
from pipollux_sched.backend.replica.command import agent_in_container
from pipollux_sched.backend.replica.variables import processes_of_replica

from . import names
from .api import Object
from .options import KubernetesOptions
from .pod_security import make_restricted
from .pods import (
    CHECKPOINTS,
    GRACE_MARGIN,
    SHARED_MEMORY,
    Owner,
    checkpoint_volume,
    environment,
    literal,
    mounts,
    resources,
)

MANAGER = f"{names.GROUP}/scheduler"
"""Field manager of our runtime patches."""
CONTAINER = "node"
"""The container of a runtime that the Trainer fills in; also the name of its replicated job."""
QUEUE_ANNOTATION = "scheduling.volcano.sh/queue-name"
_INDEX = f"metadata.annotations['{names.INDEX_LABEL}']"


class TrainJobView(NamedTuple):
    """The relevant fields of one of our TrainJobs."""

    name: str
    job: str
    attempt: int
    num_nodes: int
    suspended: bool
    failure: str


def trainjob_name(job: str, attempt: int) -> str:
    """Return the name of the TrainJob of an attempt."""
    return f"{job}-a{attempt}"


def view_trainjob(trainjob: Object) -> TrainJobView | None:
    """Return the relevant fields of a TrainJob; None if its labels identify no attempt."""
    metadata, spec = trainjob["metadata"], trainjob.get("spec") or {}
    labels = metadata.get("labels") or {}
    key = names.key_of({**labels, names.REPLICA_LABEL: "0"})
    if key is None:
        return None
    conditions = (trainjob.get("status") or {}).get("conditions") or ()
    failures = [
        str(entry.get("message") or entry.get("reason"))
        for entry in conditions
        if entry["type"] == "Failed" and entry["status"] == "True"
    ]
    return TrainJobView(
        metadata["name"],
        key.job,
        key.attempt,
        int((spec.get("trainer") or {}).get("numNodes") or 1),
        bool(spec.get("suspend")),
        failures[0] if failures else "",
    )


def check_even(launch: Launch) -> None:
    """Reject an attempt with uneven nodes: all pods of a TrainJob come from one template."""
    counts = Counter(launch.nodes)
    if len(set(counts.values())) > 1:
        placed = ", ".join(f"{number} on {node}" for node, number in sorted(counts.items()))
        raise BackendError(
            f"job {launch.job!r} was given {placed}; a TrainJob places the same number on each "
            "node: run the scheduler with --via pod, or give the job other bounds"
        )


def make_trainjob(
    program: ReplicaProgram, launch: Launch, owner: Owner, options: KubernetesOptions
) -> Object:
    """Return the TrainJob of an attempt; its pods get their index from the Job controller."""
    labels = names.job_labels(options.scheduler, launch.job) | {
        names.ATTEMPT_LABEL: str(launch.attempt)
    }
    command = [literal(w) for w in agent_in_container(program, launch, 0, python=options.python)]
    command[command.index("--rdzv-conf=rank=0")] = f"--rdzv-conf=rank=$({REPLICA.name})"
    variables = environment((), program, launch, 0, options)
    number = {"name": REPLICA.name, "valueFrom": {"fieldRef": {"fieldPath": _INDEX}}}
    trainer = {
        "numNodes": len(launch.nodes),
        "numProcPerNode": processes_of_replica(program, launch),
        "command": command,
        "env": [entry for entry in variables if entry["name"] != number["name"]] + [number],
        "resourcesPerNode": resources({}, program, launch, options),
    }
    if program.image:
        trainer["image"] = program.image
    annotations = {QUEUE_ANNOTATION: options.volcano_queue} if options.volcano_queue else {}
    return {
        "metadata": {
            "name": trainjob_name(launch.job, launch.attempt),
            "labels": labels,
            "annotations": annotations,
            "ownerReferences": owner.references,
        },
        "spec": {
            "runtimeRef": {"name": options.runtime},
            "suspend": False,
            "trainer": trainer,
            "runtimePatches": [_patch(labels, launch, options)],
        },
    }


def _patch(labels: Mapping[str, str], launch: Launch, options: KubernetesOptions) -> dict[str, Any]:
    mounted = mounts((), options)
    volumes: list[dict[str, Any]] = [{"name": SHARED_MEMORY, "emptyDir": {"medium": "Memory"}}]
    if any(mount["name"] == CHECKPOINTS for mount in mounted):
        volumes.append({"name": CHECKPOINTS, **checkpoint_volume(options)})
    pod: dict[str, Any] = {
        "metadata": {"labels": dict(labels)},
        "spec": {
            "affinity": _affinity(labels, launch),
            "tolerations": options.all_tolerations,
            "terminationGracePeriodSeconds": int(options.grace) + GRACE_MARGIN,
            "volumes": volumes,
            "containers": [{"name": CONTAINER, "volumeMounts": mounted}],
        },
    }
    if options.pod_security == "restricted":
        make_restricted(pod["spec"])
    replicated = {"name": CONTAINER, "template": {"spec": {"template": pod}}}
    spec = {"template": {"spec": {"replicatedJobs": [replicated]}}}
    return {"manager": MANAGER, "trainingRuntimeSpec": spec}


def _affinity(labels: Mapping[str, str], launch: Launch) -> dict[str, Any]:
    nodes = sorted(set(launch.nodes))
    here = {"key": names.HOST_NAME_LABEL, "operator": "In", "values": nodes}
    apart = {"topologyKey": names.HOST_NAME_LABEL, "labelSelector": {"matchLabels": dict(labels)}}
    one_each = len(nodes) == len(launch.nodes)
    return {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [{"matchExpressions": [here]}]
            }
        },
        "podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [apart]}
        if one_each
        else {
            "preferredDuringSchedulingIgnoredDuringExecution": [
                {"weight": 100, "podAffinityTerm": apart}
            ]
        },
    }
