"""An elastic resize in progress, in words."""

from __future__ import annotations

from collections.abc import Iterator

from pipollux_sched.lifecycle import ChangeStage, JobState
from pipollux_utils.text import count


def change_under_way(state: JobState) -> str | None:
    """Return the target of an elastic resize, and what it waits for; None: there is none.

    Example: `from 1 to 2 replicas; replica 3 on node-b is on its way`.
    """
    change = state.membership.change
    if change is None:
        return None
    sizes = f"from {len(state.running_on)} to {count(len(change.nodes), 'replica')}"
    return "; ".join([sizes, *_joining(state), *_leavers(state)])


def _joining(state: JobState) -> Iterator[str]:
    change = state.membership.change
    for replica, node in state.membership.joining:
        if change is not None and change.stage is ChangeStage.FORMING:
            where = "is about to join"
        elif change is not None and replica in change.waiting_to_join:
            where = "waits to join"
        else:
            where = "is on its way"
        yield f"replica {replica} on {node} {where}"


def _leavers(state: JobState) -> Iterator[str]:
    places = dict(zip(state.membership.replicas, state.running_on, strict=True))
    for replica in state.membership.leavers:
        yield f"replica {replica} on {places[replica]} is to leave"
