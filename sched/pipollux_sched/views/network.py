"""What pushes and pulls cost a job whose replicas do not average gradients in every step."""

from __future__ import annotations

from collections.abc import Sequence

from pipollux_sched.store import Store


def synchronization_of(store: Store, job: str, nodes: Sequence[str]) -> str | None:
    """Return what pushes and pulls cost a job on its nodes; None: unknown, or all-reduces."""
    hints = store.hints().get(job) or {}
    if not (hints.get("perfParams") or {}).get("sync_every") or not nodes:
        return None
    # These import numpy, which commands that show a job do not wait for without need.
    from pipollux_perfmodel import SchedHints
    from pipollux_policies import NodeInfo
    from pipollux_policies.allocations.allocation import network_level

    records = store.nodes()
    infos = {
        name: NodeInfo({}, topology=tuple((records[name].spec.get("topology") or {}).values()))
        for name in set(nodes) & set(records)
    }
    level = network_level(nodes, infos)
    cost = SchedHints.from_json_object(hints).sync_cost(len(set(nodes)), len(nodes), level)
    return None if cost is None else str(cost)
