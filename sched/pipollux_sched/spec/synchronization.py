"""What pushes and pulls cost a job whose replicas do not average gradients in every step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any


def synchronization(
    hints: Mapping[str, Any] | None,
    nodes: Sequence[str],
    level: Callable[[], int] = lambda: 1,
) -> str | None:
    """Return what pushes and pulls cost a job by its hints, in words.

    Args:
        hints: decoded JSON, which may be of another version.
        nodes: the node of each replica.
        level: returns the network level at which the nodes meet.

    Returns:
        None: not known, or the replicas average gradients in every step.
    """
    params = (hints or {}).get("perfParams")
    if not isinstance(params, Mapping) or not params.get("sync_every") or not nodes:
        return None
    # It imports numpy, which commands that show other jobs do not wait for.
    from pipollux_perfmodel import HintsError, SchedHints

    try:
        found = SchedHints.from_json_object(hints or {})
    except HintsError:
        return None
    cost = found.sync_cost(len(set(nodes)), len(nodes), level())
    return None if cost is None else str(cost)
