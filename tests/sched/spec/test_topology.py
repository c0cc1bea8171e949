"""Levels of the network in cluster files, and the levels of allocations."""

from pathlib import Path

import pytest

from pipollux_policies import NodeInfo
from pipollux_policies.jobs.topology import build_topology
from pipollux_sched.allocator.job_infos import node_info
from pipollux_sched.backend.base import Launch, Node, SlotAssignment, network_level
from pipollux_sched.backend.slurm.topology import read_topology
from pipollux_sched.controller.network_levels import NetworkLevels
from pipollux_sched.spec.cluster import load_cluster
from pipollux_sched.spec.job import SpecError

CLUSTER = """\
levels: [zone, rack]
nodes:
- {name: a1, slots: 4, topology: {zone: a, rack: r1}}
- {name: a2, slots: 4, topology: {zone: a, rack: r1}}
- {name: a3, slots: 4, topology: {zone: a, rack: r2}}
- {name: a4, slots: 4, topology: {zone: a}}
- {name: b1, slots: 4, topology: {rack: r1, zone: b}}
- {name: x1, slots: 4, topology: {rack: r9}}
- {name: x2, slots: 4, topology: {rack: r9}}
- {name: y, slots: 4}
"""


def cluster(tmp_path: Path, text: str = CLUSTER):
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    return {spec.name: Node(spec) for spec in load_cluster(path).placed_nodes}


@pytest.mark.parametrize(
    ("names", "level"),
    [
        (["a1"], 1),
        (["a1", "a2"], 1),
        (["a1", "a3"], 2),
        (["a1", "a2", "a4"], 2),
        (["a1", "b1"], 3),  # equal rack names in different zones
        (["x1", "x2"], 1),  # a rack without a zone
        (["x1", "a1"], 3),
        (["y", "a1"], 3),
        (["y", "x1"], 3),
    ],
)
def test_an_allocation_has_the_lowest_level_that_contains_its_nodes(tmp_path, names, level):
    nodes = cluster(tmp_path)
    assert network_level(nodes, names) == level
    every = build_topology([node_info(node.spec) for node in nodes.values()])
    assert every.level([list(nodes).index(name) for name in names]) == level


def test_levels_that_no_node_has_do_not_count(tmp_path):
    nodes = cluster(tmp_path, "levels: [zone, rack]\nnodes: [{name: a, slots: 1}]\n")
    assert nodes["a"].spec.topology == {}
    nodes = cluster(
        tmp_path, "levels: [zone, rack]\nnodes: [{name: a, slots: 1, topology: {rack: r}}]\n"
    )
    assert nodes["a"].spec.topology == {"rack": "r"}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (
            "levels: [zone]\nnodes:\n- name: a\n  slots: 1\n  topology: {rack: r}\n",
            "nodes[0].topology.rack: is not one of the cluster's levels; those are zone",
        ),
        (
            "nodes:\n- name: a\n  slots: 1\n  topology: {rack: r}\n",
            "there are none, so give it in levels, as in levels: [zone, rack]",
        ),
        ("levels: [rack, rack]\nnodes: [{name: a, slots: 1}]\n", "names 'rack' twice"),
        ("levels: ['']\nnodes: [{name: a, slots: 1}]\n", "is not the name of a level"),
        ("levels: [a b]\nnodes: [{name: a, slots: 1}]\n", "levels[0]: 'a b' is not the name of"),
        (
            "levels: [rack]\nnodes: [{name: a, slots: 1, topology: {rack: ''}}]\n",
            "topology.rack: is empty; give the name of a domain, or leave the level out",
        ),
        ("levels: [a, b, c, d, e, f, g, h]\nnodes: [{name: a, slots: 1}]\n", "at most 7 names"),
        (
            "levels: [rack]\nnodes: [{name: a, slots: 1, topology: {rack: 3}}]\n",
            "must be a text",
        ),
    ],
)
def test_a_wrong_topology_is_refused_in_one_sentence(tmp_path, text, complaint):
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    with pytest.raises(SpecError) as caught:
        load_cluster(path)
    assert complaint in str(caught.value)


def test_a_node_that_changes_its_rack_changes_the_level(tmp_path):
    levels = NetworkLevels()
    levels.update(cluster(tmp_path))
    assert levels.of(("a1", "a1", "a2")) == 1
    moved = CLUSTER.replace(
        "name: a2, slots: 4, topology: {zone: a, rack: r1}",
        "name: a2, slots: 4, topology: {zone: a, rack: r2}",
    )
    assert moved != CLUSTER
    levels.update(cluster(tmp_path, moved))
    assert levels.of(("a1", "a1", "a2")) == 2
    levels.update(cluster(tmp_path, "nodes: [{name: a1, slots: 4}, {name: a2, slots: 4}]\n"))
    assert levels.of(("a1", "a2")) is None


def test_a_launch_stores_its_level_and_old_ones_have_the_lowest(tmp_path):
    launch = Launch(
        job="j",
        attempt=1,
        assignments={0: SlotAssignment("a1", (0,)), 1: SlotAssignment("a3", (0,))},
        num_first=2,
        scheduler_url="",
        checkpoints="",
    ).at_level(cluster(tmp_path))
    assert launch.network_level == 2
    data = launch.to_json_object()
    assert Launch.from_json_object("j", 1, data) == launch
    del data["network_level"]
    assert Launch.from_json_object("j", 1, data).network_level == 1


def test_switches_of_different_depth():
    text = (
        "SwitchName=s0 Level=0 LinkSpeed=1 Nodes=n1,n2\n"
        "SwitchName=s1 Level=0 LinkSpeed=1 Nodes=n3\n"
        "SwitchName=mid Level=1 LinkSpeed=1 Nodes=n1,n2,n3 Switches=s[0-1]\n"
        "SwitchName=s2 Level=0 LinkSpeed=1 Nodes=n4,n5\n"
        "SwitchName=top Level=2 LinkSpeed=1 Nodes=n1,n2,n3,n4,n5 Switches=mid,s2\n"
    )
    found = read_topology(text, lambda hosts: hosts.split(","))
    assert found["n1"] == {"switch-2": "top", "switch-1": "mid", "switch": "s0"}
    assert found["n4"] == {"switch-2": "top", "switch-1": "", "switch": "s2"}
    infos = [NodeInfo({}, topology=tuple(found[f"n{n}"].values())) for n in range(1, 6)]
    topology = build_topology(infos)
    levels = [topology.level(pair) for pair in ((0, 1), (0, 2), (3, 4), (0, 3))]
    assert levels == [1, 2, 1, 3]


def test_blocks_and_their_aggregation():
    text = (
        "BlockName=b0 BlockIndex=0 Nodes=n1,n2 BlockSize=2\n"
        "BlockName=b1 BlockIndex=1 Nodes=n3,n4 BlockSize=2\n"
        "AggregatedBlock=b[0-1] BlockIndex=2 Nodes=n1,n2,n3,n4 BlockSize=4\n"
    )
    found = read_topology(text, lambda hosts: hosts.split(","))
    assert found["n3"] == {"block-1": "b[0-1]", "block": "b1"}
    assert read_topology("", lambda hosts: [hosts]) == {}
    assert read_topology("No topology information available", lambda hosts: [hosts]) == {}
