"""What the objects of Kubernetes' nodes say of their slots."""

from __future__ import annotations

from decimal import Decimal

import pytest

from pipollux_sched.backend.kubernetes.node_state import ClusterNode, make_nodes
from pipollux_sched.backend.kubernetes.options import KubernetesOptions


@pytest.mark.parametrize(
    ("device", "product", "slices"),
    [
        ("nvidia.com/gpu", "NVIDIA-A100-SXM4-40GB", False),
        ("nvidia.com/gpu", "NVIDIA-A100-SXM4-40GB-MIG-1g.5gb", True),
        ("nvidia.com/mig-1g.5gb", "NVIDIA-A100-SXM4-40GB", True),
        ("cpu", "", False),
    ],
)
def test_mig_slices_hold_single_stages(device: str, product: str, slices: bool) -> None:
    options = KubernetesOptions(device=device)
    labels = {options.gpu_type_label: product}
    view = ClusterNode("n", "n", labels, {device: Decimal(7)}, False, (), True, "")
    (node,) = make_nodes([view], {}, {}, options).values()
    assert (node.spec.slots, node.spec.single_stage) == (7, slices)
