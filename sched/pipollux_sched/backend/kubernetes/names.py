"""Names, labels and kinds of our objects in a cluster.

A job `char-lm` has, in one namespace: the resource `char-lm`, the service `char-lm-replicas`, and
the secret `pipollux-token-char-lm-…`, and for each attempt the pods `char-lm-a7-r0`, ….
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256

from pipollux_sched.backend.base import ReplicaKey

GROUP = "pipollux.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "PipolluxJob"
PLURAL = "pipolluxjobs"

SCHEDULER_LABEL = f"{GROUP}/scheduler"
"""The scheduler that manages an object: `KubernetesOptions.scheduler`."""
JOB_LABEL = f"{GROUP}/job"
ATTEMPT_LABEL = f"{GROUP}/attempt"
REPLICA_LABEL = f"{GROUP}/replica"

HOST_NAME_LABEL = "kubernetes.io/hostname"
"""The label by which a pod selects one node."""

INDEX_LABEL = "batch.kubernetes.io/job-completion-index"
"""Index of the replica in pods that another controller creates."""

FINALIZER = f"{GROUP}/replica"
"""Keeps a pod readable until its exit status was read: see `pod_state`."""

SECRET_PREFIX = f"{GROUP.partition('.')[0]}-token-"
"""Prefix of our secrets; templates that name one are rejected."""

MOST_CHARACTERS = 48
"""Most characters of a job's name: pods and host names append attempt and replica, up to 63."""


def pod_name(key: ReplicaKey) -> str:
    """Return the name of the pod of a replica."""
    return f"{key.job}-a{key.attempt}-r{key.replica}"


def secret_name(job: str, token: str) -> str:
    """Return the name of a job's secret, which a later job of the same name does not share."""
    return f"{SECRET_PREFIX}{job}-{sha256(token.encode()).hexdigest()[:10]}"


def service_name(job: str) -> str:
    """Return the name of the headless service of a job's replicas."""
    return f"{job}-replicas"


def job_labels(scheduler: str, job: str) -> dict[str, str]:
    """Return the labels of a job's objects."""
    return {SCHEDULER_LABEL: scheduler, JOB_LABEL: job}


def replica_labels(scheduler: str, key: ReplicaKey) -> dict[str, str]:
    """Return the labels of a pod."""
    return job_labels(scheduler, key.job) | {
        ATTEMPT_LABEL: str(key.attempt),
        REPLICA_LABEL: str(key.replica),
    }


def key_of(labels: Mapping[str, str]) -> ReplicaKey | None:
    """Return the replica of a pod by its labels; None if they identify none."""
    try:
        replica = labels[REPLICA_LABEL] if REPLICA_LABEL in labels else labels[INDEX_LABEL]
        return ReplicaKey(labels[JOB_LABEL], int(labels[ATTEMPT_LABEL]), int(replica))
    except (KeyError, ValueError):
        return None
