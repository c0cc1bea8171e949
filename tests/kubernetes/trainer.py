"""A stand-in for the controllers of Kubeflow Trainer 2.3, JobSet 0.12 and Job: TrainJob to pods.

It belongs to the tests: the real ones need newer clusters than can be had here. Names, labels and
conditions are those of the real controllers, as far as the engine looks at them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from lightkube import Client
from lightkube.core.exceptions import ApiError
from lightkube.core.resource import ApiInfo
from lightkube.generic_resource import GenericNamespacedStatus
from lightkube.resources.core_v1 import Pod
from lightkube.types import PatchType

from pipollux_sched.backend.kubernetes.api import TrainJob
from pipollux_sched.backend.kubernetes.names import INDEX_LABEL

from .cluster import Cluster

DEFINITION = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": "trainjobs.trainer.kubeflow.org"},
    "spec": {
        "group": "trainer.kubeflow.org",
        "scope": "Namespaced",
        "names": {"kind": "TrainJob", "plural": "trainjobs", "singular": "trainjob"},
        "versions": [
            {
                "name": "v1alpha1",
                "served": True,
                "storage": True,
                "subresources": {"status": {}},
                "schema": {
                    "openAPIV3Schema": {
                        "type": "object",
                        "x-kubernetes-preserve-unknown-fields": True,
                    }
                },
            }
        ],
    },
}
"""Of TrainJobs, without the rules of the real one."""
TRAINJOB_LABEL = "jobset.sigs.k8s.io/jobset-name"


class TrainJobStatus(GenericNamespacedStatus):
    """The status of a TrainJob."""

    _api_info = ApiInfo(
        TrainJob._api_info.resource, "trainjobs", ["patch"], TrainJob._api_info.resource, "status"
    )


class Trainer(threading.Thread):
    """Makes pods from the TrainJobs of a namespace until it is closed.

    Args:
        cluster: where they are.
        client: of the namespace.
        runtime: the name of the only runtime that there is.
    """

    def __init__(
        self, cluster: Cluster, client: Client, runtime: str = "torch-distributed"
    ) -> None:
        super().__init__(name="trainer")
        self._client, self._runtime = client, runtime
        self._ending = threading.Event()
        cluster.declare(DEFINITION)

    def run(self) -> None:
        """Look after all TrainJobs again and again."""
        while not self._ending.wait(0.1):
            try:
                for trainjob in self._client.list(TrainJob):
                    self._look_after(dict(trainjob))
            except ApiError:  # the definition is not served yet, or something was deleted meanwhile
                continue

    def close(self) -> None:
        self._ending.set()
        self.join()

    def _look_after(self, trainjob: dict[str, Any]) -> None:
        name, spec = trainjob["metadata"]["name"], trainjob["spec"]
        if "deletionTimestamp" in trainjob["metadata"]:
            return
        if spec["runtimeRef"]["name"] != self._runtime:
            why = f"ClusterTrainingRuntime {spec['runtimeRef']['name']} not found"
            self._set_condition(trainjob, "Failed", "TrainingRuntimeNotSupported", why)
            return
        pods = {
            pod.metadata.labels[INDEX_LABEL]: pod
            for pod in self._client.list(Pod, labels={TRAINJOB_LABEL: name})
        }
        if spec.get("suspend"):
            for pod in pods.values():
                if pod.metadata.deletionTimestamp is None:
                    self._client.delete(Pod, pod.metadata.name)
            self._set_condition(trainjob, "Suspended", "Suspended", "TrainJob is suspended")
            return
        for index in range(spec["trainer"]["numNodes"]):
            if str(index) not in pods:
                self._client.create(Pod.from_dict(_pod(trainjob, index)))

    def _set_condition(self, trainjob: Mapping[str, Any], kind: str, reason: str, why: str) -> None:
        condition = {
            "type": kind,
            "status": "True",
            "reason": reason,
            "message": why,
            "lastTransitionTime": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        known = (trainjob.get("status") or {}).get("conditions") or []
        if any(entry["type"] == kind for entry in known):
            return
        self._client.patch(
            TrainJobStatus,
            trainjob["metadata"]["name"],
            {"status": {"conditions": [*known, condition]}},
            patch_type=PatchType.MERGE,
        )


def _pod(trainjob: Mapping[str, Any], index: int) -> dict[str, Any]:
    """Return the pod of one index: the runtime's template, the patches, the trainer."""
    spec, metadata = trainjob["spec"], trainjob["metadata"]
    (patch,) = spec["runtimePatches"]
    (job,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    template = deepcopy(job["template"]["spec"]["template"])
    trainer, pod = spec["trainer"], template["spec"]
    (container,) = pod["containers"]
    assert container["name"] == job["name"] == "node"
    assert not container.get("env")  # the Trainer refuses it
    container |= {key: trainer[key] for key in ("image", "command", "env")}
    container |= {"resources": trainer["resourcesPerNode"], "imagePullPolicy": "Never"}
    field = f"metadata.annotations['{INDEX_LABEL}']"
    rank = {"name": "PET_NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": field}}}
    container["env"] = [*container["env"], rank]
    name = f"{metadata['name']}-node-0-{index}"
    owner = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "name": metadata["name"],
        "uid": metadata["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }
    labels = {TRAINJOB_LABEL: metadata["name"], INDEX_LABEL: str(index)}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": f"{name}-{metadata['uid'][:5]}",
            "labels": {**template["metadata"]["labels"], **labels},
            "annotations": {INDEX_LABEL: str(index)},
            "ownerReferences": [owner],
        },
        "spec": {**pod, "restartPolicy": "Never", "hostname": name, "subdomain": metadata["name"]},
    }
