"""Specifications of clusters: `cluster.yaml`, and nodes that engines find."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from pipollux_perfmodel.timing.params import MAX_LEVELS
from pipollux_sched.utils.yaml_file import read_yaml_file
from pipollux_utils.validation import problem_at

from .model import Bytes, Count, GpuType, List, Spec, check_names, load_model
from .names import schema_bounds

_NODE_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_NODE_NAME_LENGTH = 253
"""Largest length of a full host name."""
_LABEL_LENGTH = 317
"""Largest length of a key of a label of Kubernetes: a DNS name, a slash and 63 characters."""


def _check_node_name(name: str) -> str:
    if len(name) > _NODE_NAME_LENGTH or not _NODE_NAME.fullmatch(name):
        raise ValueError(
            f"'{name[:80]}' is not the name of a node; use up to {_NODE_NAME_LENGTH} letters, "
            "digits, '-', '_' and '.', with a letter or digit at both ends"
        )
    return name


def _check_level(name: str) -> str:
    if not name.strip():
        raise ValueError("an empty text is not the name of a level; give one such as rack")
    if any(char.isspace() for char in name):
        raise ValueError(f"'{name[:80]}' is not the name of a level; use no spaces, as in rack-row")
    return _check_domain(name)


def _check_domain(name: str) -> str:
    if len(name) > _LABEL_LENGTH or not name.isprintable():
        raise ValueError(
            f"'{name[:20]}' is not a name for the network; use up to {_LABEL_LENGTH} printable "
            "characters"
        )
    return name


NodeName = Annotated[str, AfterValidator(_check_node_name)]
LevelName = Annotated[str, AfterValidator(_check_level), schema_bounds(_LABEL_LENGTH)]
DomainName = Annotated[str, AfterValidator(_check_domain), schema_bounds(_LABEL_LENGTH)]


class NodeSpec(Spec):
    """One node of the cluster."""

    name: NodeName = Field(description="a name, as in name: node-a")
    """Unique in the cluster; with Slurm and Kubernetes, the name of the node there."""
    slots: Count
    """Devices: a slot is one GPU, or one CPU thread on a node of kind `cpu`."""
    kind: Literal["gpu", "cpu"] = "gpu"
    """Kind of device."""
    cpus: Count | None = Field(default=None, description="a whole number of at least 1")
    """CPUs that jobs may request in total; none: unlimited."""
    memory: Bytes | None = Field(default=None, description="a size such as 256GiB")
    """Main memory that jobs may request in total; none: unlimited."""
    preemptible: bool = Field(default=False, description="true or false")
    """Whether the node may disappear at any time. The scheduler fills such nodes last."""
    gpu_type: GpuType | None = Field(default=None, description="a text such as a100")
    """GPU type that jobs with a `gpu_type` are matched against; none: unknown."""
    draining: bool = Field(default=False, description="true or false")
    """Whether the node is drained: it gets no new replicas, and preemptible jobs leave it."""
    cpu_slots: int = Field(default=0, ge=0, description="a whole number of at least 0")
    """Of a node with GPUs: CPU slots beside them, which form a further node, NAME-cpu, for jobs
    with `device: cpu`. Its CPUs and its part of the memory are taken from `cpus` and `memory`."""
    beside: NodeName | None = Field(default=None, description="the name of a node with GPUs")
    """Of a node with CPU slots: the node with GPUs on the same machine; `cpu_slots` sets it. Only
    jobs with `device: cpu` run here."""
    single_stage: bool = Field(default=False, description="true or false")
    """Whether replicas with several stages cannot run on the node: its slots are MIG slices, and a
    process sees one of them. The local backend finds this out itself."""
    topology: dict[LevelName, DomainName] = Field(
        default={}, description="a mapping such as {zone: a, rack: r1}"
    )
    """Its domain at each of the cluster's `levels`; a missing one: unknown."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.beside is not None and (self.kind != "cpu" or self.beside == self.name):
            raise problem_at(
                ("beside",),
                f"'{self.beside}' is for a node with kind: cpu, and names another node; leave it "
                "out, or give cpu_slots to the node with GPUs instead",
            )
        if self.cpu_slots and self.kind == "cpu":
            raise problem_at(
                ("cpu_slots",), f"{self.cpu_slots} are for a node with kind: gpu; raise slots"
            )
        if self.cpu_slots and self.cpus is not None and self.cpu_slots >= self.cpus:
            raise problem_at(
                ("cpu_slots",),
                f"{self.cpu_slots} leave none of cpus = {self.cpus} to jobs on the GPUs; lower the "
                "one or raise the other",
            )
        if self.cpu_slots and self.memory is not None and self.cpus is None:
            raise problem_at(
                ("cpus",), "is missing; it says which part of memory belongs to the cpu_slots"
            )
        return self

    def parts(self) -> tuple[Self, ...]:
        """Return the node, and the one of its CPU slots if it has any.

        Example:
            >>> gpus, cpus = NodeSpec(name="a", slots=8, cpus=64, cpu_slots=16).parts()
            >>> gpus.cpus, cpus.name, cpus.slots
            (48, 'a-cpu', 16)
        """
        if not self.cpu_slots:
            return (self,)
        cpus, memory, slots = self.cpus, self.memory, self.cpu_slots
        share = memory and cpus and max(memory * slots // cpus, 1)
        whole = {
            "cpu_slots": 0,
            "cpus": cpus and cpus - slots,
            "memory": share and memory and max(memory - share, 1),
        }
        beside = {
            "name": f"{self.name}-cpu",
            "slots": slots,
            "kind": "cpu",
            "beside": self.name,
            "cpus": slots,
            "memory": share,
            "gpu_type": None,
            "single_stage": False,
            "cpu_slots": 0,
        }
        return self.model_copy(update=whole), self.model_copy(update=beside)


class ClusterSpec(Spec):
    """The nodes of a cluster."""

    nodes: List[NodeSpec] = Field(description="a list of nodes")
    """The nodes; at least one. Those of `cpu_slots` are added."""
    levels: List[LevelName] = Field(
        default=(),
        max_length=MAX_LEVELS - 1,
        description=f"a list of at most {MAX_LEVELS - 1} names, as in [zone, rack]",
    )
    """Levels of the network between the nodes, from the widest to the narrowest. Domains of equal
    name in different wider domains differ. None: all nodes are equally close."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = [node.name for node in self.nodes]
        check_names("nodes", names)
        for index, node in enumerate(self.nodes):
            if node.cpu_slots and node.parts()[1].name in names:
                raise problem_at(
                    ("nodes", index, "cpu_slots"),
                    f"they form a node '{node.parts()[1].name}', which there is already; "
                    "rename one of them",
                )
        twice = [level for level, times in Counter(self.levels).items() if times > 1]
        if twice:
            raise problem_at(("levels",), f"names '{twice[0]}' twice; name each level once")
        for number, node in enumerate(self.nodes):
            # Engines write it for an unknown domain; in a file the level is left out.
            for level in (level for level, domain in node.topology.items() if not domain.strip()):
                raise problem_at(
                    ("nodes", number, "topology", level),
                    "is empty; give the name of a domain, or leave the level out",
                )
            for level in sorted(node.topology.keys() - set(self.levels)):
                known = f"those are {', '.join(self.levels)}" if self.levels else "there are none"
                raise problem_at(
                    ("nodes", number, "topology", level),
                    f"is not one of the cluster's levels; {known}, so give it in levels, as in "
                    "levels: [zone, rack]",
                )
        parts = tuple(part for node in self.nodes for part in node.parts())
        object.__setattr__(self, "nodes", parts)
        return self

    @property
    def placed_nodes(self) -> tuple[NodeSpec, ...]:
        """The nodes, with an entry in their topology for every level that any node has."""
        return tuple(with_levels(self.nodes, self.levels))


def with_levels(nodes: Sequence[NodeSpec], levels: Iterable[str]) -> list[NodeSpec]:
    """Return all nodes of a cluster with the same levels in their topology, the widest first; empty
    texts where a node has no domain. Levels at which no node has a domain are left out.
    """
    used = [level for level in levels if any(node.topology.get(level) for node in nodes)]
    return [
        node.model_copy(
            update={"topology": {level: node.topology.get(level, "") for level in used}}
        )
        for node in nodes
    ]


def load_cluster(path: str | Path) -> ClusterSpec:
    """Return the cluster in a `cluster.yaml`; raise `SpecError` if it is invalid."""
    return load_model(read_yaml_file(path, "nodes:"), ClusterSpec)
