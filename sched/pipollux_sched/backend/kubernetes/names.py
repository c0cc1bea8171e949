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
"""The scheduler that looks after an object: `KubernetesOptions.scheduler`."""
JOB_LABEL = f"{GROUP}/job"
ATTEMPT_LABEL = f"{GROUP}/attempt"
REPLICA_LABEL = f"{GROUP}/replica"

HOST_NAME_LABEL = "kubernetes.io/hostname"
"""The label by which a pod selects one node."""

INDEX_LABEL = "batch.kubernetes.io/job-completion-index"
"""Where another controller makes the pods of an attempt: which of its replicas."""

FINALIZER = f"{GROUP}/replica"
"""Keeps a pod readable until its exit status was taken: see `pod_state`."""

SECRET_PREFIX = f"{GROUP.partition('.')[0]}-token-"
"""Of our secrets; a template that names one is refused."""

MOST_CHARACTERS = 48
"""Of a job's name: pods and their host names add attempt and replica, and have at most 63."""


def pod_name(key: ReplicaKey) -> str:
    """Return the name of the pod of a replica."""
    return f"{key.job}-a{key.attempt}-r{key.replica}"


def secret_name(job: str, token: str) -> str:
    """Return the name of the secret with the token of a job.

    It differs for a later job of the same name, whose secret is made while the cluster still
    collects the earlier one.
    """
    return f"{SECRET_PREFIX}{job}-{sha256(token.encode()).hexdigest()[:10]}"


def service_name(job: str) -> str:
    """Return the name of the headless service of a job's replicas."""
    return f"{job}-replicas"


def job_labels(scheduler: str, job: str) -> dict[str, str]:
    """Return the labels of what belongs to a job."""
    return {SCHEDULER_LABEL: scheduler, JOB_LABEL: job}


def replica_labels(scheduler: str, key: ReplicaKey) -> dict[str, str]:
    """Return the labels of a pod."""
    return job_labels(scheduler, key.job) | {
        ATTEMPT_LABEL: str(key.attempt),
        REPLICA_LABEL: str(key.replica),
    }


def key_of(labels: Mapping[str, str]) -> ReplicaKey | None:
    """Return the replica that a pod's labels name; None if they name none."""
    try:
        replica = labels[REPLICA_LABEL] if REPLICA_LABEL in labels else labels[INDEX_LABEL]
        return ReplicaKey(labels[JOB_LABEL], int(labels[ATTEMPT_LABEL]), int(replica))
    except (KeyError, ValueError):
        return None
