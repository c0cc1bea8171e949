"""The administrator's options of the Kubernetes backend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

PodSecurity: TypeAlias = Literal["restricted", "baseline", "privileged"]
"""A level of Kubernetes' Pod Security Standards."""

CPU = "cpu"
"""The resource name for slots that are CPU devices of one thread."""


@dataclass(frozen=True, kw_only=True)
class KubernetesOptions:
    """Options of the Kubernetes backend.

    Example:
        >>> KubernetesOptions(namespace="training", checkpoint_claim="checkpoints").device
        'nvidia.com/gpu'
    """

    namespace: str | None = None
    """Namespace of all objects; None: that of the context, or of our own pod."""
    scheduler: str = "pipollux"
    """Label of the objects of this scheduler; two schedulers in a namespace need different ones."""
    device: str = "nvidia.com/gpu"
    """The resource that one slot stands for; `cpu`: slots are CPU devices."""
    node_selector: Mapping[str, str] = field(default_factory=dict)
    """Labels of the nodes for jobs; empty: all nodes with a device."""
    tolerations: tuple[Mapping[str, str], ...] = ()
    """Taints that our pods tolerate, besides one with the name of `device`."""
    checkpoint_folder: str = "/checkpoints"
    """Parent of the checkpoint folders of jobs without a `checkpoint_dir`."""
    checkpoint_claim: str | None = None
    """PersistentVolumeClaim mounted at `checkpoint_folder`."""
    checkpoint_host_path: str | None = None
    """Folder of the nodes mounted at `checkpoint_folder`; it must be the same on each."""
    gpu_type_label: str = "nvidia.com/gpu.product"
    """The node label with the type of its GPUs."""
    topology_labels: tuple[str, ...] = ("topology.kubernetes.io/zone",)
    """The node labels with their domains of the network, from the widest level to the narrowest."""
    preemptible_labels: Mapping[str, str] = field(
        default_factory=lambda: {
            "cloud.google.com/gke-spot": "true",
            "eks.amazonaws.com/capacityType": "SPOT",
            "karpenter.sh/capacity-type": "spot",
            "kubernetes.azure.com/scalesetpriority": "spot",
        }
    )
    """Nodes with one of these labels may be reclaimed at any time."""
    via: Literal["pod", "trainjob"] = "pod"
    """The objects of an attempt: a pod per replica, or one TrainJob."""
    runtime: str = "torch-distributed"
    """The ClusterTrainingRuntime of TrainJobs."""
    volcano_queue: str | None = None
    """The queue of TrainJobs whose runtime has a Volcano PodGroup."""
    pod_security: PodSecurity = "restricted"
    """The security level of jobs' pod templates, see `pod_security`."""
    service_accounts: tuple[str, ...] = ()
    """Service accounts that templates may name besides `default`."""
    priority_class: str | None = None
    """PriorityClass of pods whose template has none; None: the cluster's default."""
    python: str = "python"
    grace: float = 30.0
    """Seconds that a job has to save when it is stopped."""

    @property
    def all_tolerations(self) -> list[dict[str, str]]:
        """The taints that our pods tolerate."""
        device = {"key": self.device, "operator": "Exists"}
        return [*map(dict, self.tolerations), *([] if self.device == CPU else [device])]

    @property
    def has_volume(self) -> bool:
        """Whether a volume for checkpoints is mounted into every replica."""
        return bool(self.checkpoint_claim or self.checkpoint_host_path)
