"""The network between the nodes of a job."""

from __future__ import annotations

from collections.abc import Sequence

from pipollux_sched.store import Store


def level_between(store: Store, nodes: Sequence[str]) -> int:
    """Return the network level at which nodes meet, 1 for one node; missing ones do not count."""
    # These import numpy, which commands that show a job do not wait for without need.
    from pipollux_policies import NodeInfo
    from pipollux_policies.allocations.allocation import network_level

    records = store.nodes()
    infos = {
        name: NodeInfo({}, topology=tuple((records[name].spec.get("topology") or {}).values()))
        for name in set(nodes) & set(records)
    }
    return network_level(nodes, infos)
