"""Prints, of the replicas of a job on this host, which connection each takes for which other one's.

They have so few ports that several connections have the same one nearly always.
"""

from __future__ import annotations

import json

from pipollux_hybrid import init_process_group
from pipollux_hybrid.job.connections import Ends, ends_of
from pipollux_hybrid.job.context import context
from tests.hybrid.replicas import run_replicas

REPLICAS = 6


def watched() -> dict[int, Ends]:
    """The ends of the connections that a replica watches, by the other one's rank."""
    init_process_group("gloo")
    watch = context().watch
    assert watch is not None
    found = {rank: ends_of(connection) for rank, connection in watch._connections.items()}
    context().control.barrier()  # nobody hangs up before all have looked
    return found


if __name__ == "__main__":
    print(json.dumps(run_replicas(watched, REPLICAS)))
