"""The changing training with a replica that dies by SIGKILL at a point of a change, or is frozen by
SIGSTOP if `$FREEZES` is set.

`$FAULT` names the point, `$FAULTY_RANK` the replica among those that begin; a joining replica dies
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
from pipollux_hybrid.resize import elastic_membership, joining_replica, transfer
from pipollux_hybrid.resize.elastic_membership import ElasticMembership
from tests.hybrid.resize import changing_training

POINTS: dict[str, tuple[Any, str, str]] = {
    # of those who train
    "before they meet": (ElasticMembership, "_hand_over", "before"),
    "when they have met": (ElasticMembership, "_meet", "after"),
    "when it sends": (transfer._Flow, "send", "after"),
    "before the vote": (ElasticMembership, "_hand_over", "after"),
    "after the vote": (elastic_membership, "switch", "before"),
    "in the new groups": (elastic_membership, "switch", "after"),
    "when it goes on": (elastic_membership, "go_on", "after"),
    "when it leaves": (ElasticMembership, "_leave", "before"),
    # of a joining replica
    "before it answers": (transfer, "_fault", "before"),
    "before it receives": (transfer, "_receive", "before"),
    "when it has received": (joining_replica, "take", "after"),
    "when it has joined": (joining_replica, "switch", "before"),
    "before it takes over": (joining_replica, "go_on", "before"),
    "when it trains": (joining_replica, "go_on", "after"),
}
"""The point: where a function is looked up, its name, and which end of it."""


def fail() -> None:
    if "FREEZES" not in os.environ:
        os.kill(os.getpid(), signal.SIGKILL)
    elif not list(changing_training.RESULTS.glob("frozen-*")):  # others get its rank later
        (changing_training.RESULTS / f"frozen-{os.getpid()}").touch()
        os.kill(os.getpid(), signal.SIGSTOP)


def install(point: str) -> None:
    owner, name, end = POINTS[point]
    original: Callable[..., Any] = getattr(owner, name)

    @functools.wraps(original)
    def dying(*args: Any, **keywords: Any) -> Any:
        result = None if end == "before" else original(*args, **keywords)
        here = str(pipollux.replica_rank()), str(context().env.stage)
        if here == tuple(map(os.environ.get, ("FAULTY_RANK", "FAULTY_STAGE"), here)):
            fail()
        return original(*args, **keywords) if end == "before" else result

    setattr(owner, name, dying)


if __name__ == "__main__":
    if "FAULT" in os.environ:
        install(os.environ["FAULT"])
    changing_training.main()
