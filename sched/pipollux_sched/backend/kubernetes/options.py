"""What an administrator decides about the Kubernetes backend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

__all__ = ["CPU", "KubernetesOptions", "PodSecurity"]

PodSecurity: TypeAlias = Literal["restricted", "baseline", "privileged"]
"""A level of Kubernetes' Pod Security Standards."""

CPU = "cpu"
"""The resource whose slots are CPU devices of one thread."""


@dataclass(frozen=True, kw_only=True)
class KubernetesOptions:
    """Options of the Kubernetes backend.

    Example:
        >>> KubernetesOptions(namespace="training", checkpoint_claim="checkpoints").device
        'nvidia.com/gpu'
    """

    namespace: str | None = None
    """Where jobs, pods, services and secrets are; None: that of the context, or of our own pod."""
    scheduler: str = "pipollux"
    """Label of what this scheduler looks after; two schedulers of a namespace need two."""
    device: str = "nvidia.com/gpu"
    """The resource that a slot is one of; `cpu`: slots are CPU devices."""
    node_selector: Mapping[str, str] = field(default_factory=dict)
    """Labels of the nodes that jobs may use; none: all nodes with a device."""
    tolerations: tuple[Mapping[str, str], ...] = ()
    """Taints that our pods tolerate, besides one of the name of `device`."""
    checkpoint_folder: str = "/checkpoints"
    """Where jobs without a `checkpoint_dir` save, in a folder of their own."""
    checkpoint_claim: str | None = None
    """PersistentVolumeClaim mounted at `checkpoint_folder`."""
    checkpoint_host_path: str | None = None
    """Folder of the nodes mounted at `checkpoint_folder`, the same on each."""
    gpu_type_label: str = "nvidia.com/gpu.product"
    """The node label that says which type of GPU a node has."""
    preemptible_labels: Mapping[str, str] = field(
        default_factory=lambda: {
            "cloud.google.com/gke-spot": "true",
            "eks.amazonaws.com/capacityType": "SPOT",
            "karpenter.sh/capacity-type": "spot",
            "kubernetes.azure.com/scalesetpriority": "spot",
        }
    )
    """Nodes with one of these labels may be taken away at any time."""
    via: Literal["pod", "trainjob"] = "pod"
    """What an attempt is made as: a pod for each replica, or one TrainJob."""
    runtime: str = "torch-distributed"
    """The ClusterTrainingRuntime of TrainJobs."""
    volcano_queue: str | None = None
    """The queue of TrainJobs whose runtime has a Volcano PodGroup."""
    pod_security: PodSecurity = "restricted"
    """What the pod templates of jobs may ask for, see `pod_security`."""
    service_accounts: tuple[str, ...] = ()
    """Service accounts that templates may name besides `default`."""
    priority_class: str | None = None
    """PriorityClass of our pods whose template names none; None: the cluster's default."""
    python: str = "python"
    """The interpreter in images."""
    grace: float = 30.0
    """Seconds that a job has to save when it is stopped."""

    @property
    def has_volume(self) -> bool:
        """Whether a volume for checkpoints is mounted into every replica."""
        return bool(self.checkpoint_claim or self.checkpoint_host_path)
