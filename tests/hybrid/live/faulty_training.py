"""The changing training with a replica that dies by SIGKILL at a point of a change.

`$FAULT` names the point, `$FAULTY_RANK` the replica among those that begin; a newcomer dies
whatever its rank. Where each stage has a process it is that of `$FAULTY_STAGE`, or all.
"""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable
from typing import Any

import pipollux
from pipollux_hybrid.job.context import context
from pipollux_hybrid.live import live_membership, newcomer, transfer
from pipollux_hybrid.live.live_membership import LiveMembership
from tests.hybrid.live import changing_training

POINTS: dict[str, tuple[Any, str, str]] = {
    # of those who train
    "before they meet": (LiveMembership, "_hand_over", "before"),
    "when they have met": (LiveMembership, "_meet", "after"),
    "when it sends": (transfer._Flow, "send", "after"),
    "before the vote": (LiveMembership, "_hand_over", "after"),
    "after the vote": (live_membership, "switch", "before"),
    "in the new groups": (live_membership, "switch", "after"),
    "when it goes on": (live_membership, "go_on", "after"),
    "when it leaves": (LiveMembership, "_leave", "before"),
    # of a newcomer
    "before it answers": (transfer, "_fault", "before"),
    "before it receives": (transfer, "_receive", "before"),
    "when it has received": (newcomer, "take", "after"),
    "when it has joined": (newcomer, "switch", "before"),
    "before it takes over": (newcomer, "go_on", "before"),
    "when it trains": (newcomer, "go_on", "after"),
}
"""The point: where a function is looked up, its name, and which end of it."""


def install(point: str) -> None:
    owner, name, end = POINTS[point]
    original: Callable[..., Any] = getattr(owner, name)

    @functools.wraps(original)
    def dying(*args: Any, **keywords: Any) -> Any:
        result = None if end == "before" else original(*args, **keywords)
        here = str(pipollux.replica_rank()), str(context().env.stage)
        if here == tuple(map(os.environ.get, ("FAULTY_RANK", "FAULTY_STAGE"), here)):
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **keywords) if end == "before" else result

    setattr(owner, name, dying)


if __name__ == "__main__":
    if "FAULT" in os.environ:
        install(os.environ["FAULT"])
    changing_training.main()
