"""The network between nodes, by Slurm's topology plugins.

`scontrol show topology` lists switches (topology/tree) or blocks (topology/block):

    SwitchName=s0 Level=0 LinkSpeed=1 Nodes=n[1-2]
    SwitchName=top Level=1 LinkSpeed=1 Nodes=n[1-4] Switches=s[0-1]

    BlockName=b0 BlockIndex=0 Nodes=n[1-2] BlockSize=2
    AggregatedBlock=b[0-1] BlockIndex=2 Nodes=n[1-4] BlockSize=4

Leaf switches and blocks are the lowest level. A node below a switch without switches of a level in
between has no domain there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from .output import assignments


class _Domain(NamedTuple):
    level: int
    name: str
    hosts: str


def read_topology(
    text: str, host_names: Callable[[str], Sequence[str]]
) -> dict[str, dict[str, str]]:
    r"""Return each node's domain by level, the widest first; empty without a topology plugin.

    Example:
        >>> text = "SwitchName=s0 Level=0 Nodes=n1,n2\nSwitchName=top Level=1 Nodes=n1,n2,n3"
        >>> read_topology(text, lambda hosts: hosts.split(","))["n3"]
        {'switch-1': 'top', 'switch': ''}
    """
    lines = [assignments(line) for line in text.splitlines()]
    switches = [_switch(fields) for fields in lines if "SwitchName" in fields]
    kind, domains = ("switch", switches) if switches else ("block", _blocks(lines))
    ranks = sorted({domain.level for domain in domains}, reverse=True)
    names = {rank: kind if rank == ranks[-1] else f"{kind}-{rank}" for rank in ranks}
    found: dict[str, dict[str, str]] = {}
    for domain in domains:
        for node in host_names(domain.hosts):
            of_node = found.setdefault(node, dict.fromkeys(names.values(), ""))
            of_node[names[domain.level]] = domain.name
    return found


def _switch(fields: Mapping[str, str]) -> _Domain:
    return _Domain(int(fields.get("Level", "0")), fields["SwitchName"], _hosts(fields))


def _blocks(lines: Sequence[Mapping[str, str]]) -> list[_Domain]:
    """Return blocks, and aggregated blocks by size: a level for each."""
    joined = [fields for fields in lines if "AggregatedBlock" in fields]
    sizes = sorted({int(fields.get("BlockSize", "0")) for fields in joined})
    return [
        *(
            _Domain(0, fields["BlockName"], _hosts(fields))
            for fields in lines
            if "BlockName" in fields
        ),
        *(
            _Domain(
                1 + sizes.index(int(fields.get("BlockSize", "0"))),
                fields["AggregatedBlock"],
                _hosts(fields),
            )
            for fields in joined
        ),
    ]


def _hosts(fields: Mapping[str, str]) -> str:
    hosts = fields.get("Nodes", "")
    return "" if hosts == "(null)" else hosts
