"""Node labels become levels of the network."""

from __future__ import annotations

from typing import Any

from pipollux_sched.backend.base import Node, network_level
from pipollux_sched.backend.kubernetes.node_state import make_nodes, view_node
from pipollux_sched.backend.kubernetes.options import KubernetesOptions

ZONE, RACK = "topology.kubernetes.io/zone", "cloud.example.com/rack"


def node(name: str, **labels: str) -> dict[str, Any]:
    keys = {"zone": ZONE, "rack": RACK}
    return {
        "metadata": {"name": name, "labels": {keys[key]: value for key, value in labels.items()}},
        "status": {
            "allocatable": {"nvidia.com/gpu": "4", "cpu": "8"},
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }


def nodes_of(*objects: dict[str, Any], labels: tuple[str, ...] | None = None) -> dict[str, Node]:
    named = {} if labels is None else {"topology_labels": labels}
    return make_nodes(map(view_node, objects), {}, {}, KubernetesOptions(**named))


def test_labels_are_levels_from_the_widest_to_the_narrowest() -> None:
    found = nodes_of(
        node("a", zone="z1", rack="r1"),
        node("b", zone="z1", rack="r1"),
        node("c", zone="z1"),
        node("d", zone="z2", rack="r1"),
        labels=(ZONE, RACK),
    )
    assert list(found["a"].spec.topology.items()) == [(ZONE, "z1"), (RACK, "r1")]
    assert found["c"].spec.topology == {ZONE: "z1", RACK: ""}
    pairs = (["a", "b"], ["a", "c"], ["a", "d"])
    assert [network_level(found, pair) for pair in pairs] == [1, 2, 3]


def test_the_zone_counts_by_default_if_any_node_has_one() -> None:
    found = nodes_of(node("a", zone="z1"), node("b", zone="z2"), node("c"))
    assert network_level(found, ["a", "b"]) == 2
    assert found["c"].spec.topology == {ZONE: ""}
    unlabelled = nodes_of(node("a"), node("b"))
    assert [one.spec.topology for one in unlabelled.values()] == [{}, {}]
    assert network_level(unlabelled, ["a", "b"]) == 1
