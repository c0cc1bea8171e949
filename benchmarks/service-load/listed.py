"""`pipollux` on nodes whose replicas are only listed: none of them is a process.

    python benchmarks/service-load/listed.py serve --cluster cluster.yaml

Everything else is the scheduler's own: store, REST, life cycle, allocator, watchdog. Every listing
is a new object, as those of all engines are. Used by `heartbeats.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping

from pipollux_sched.backend import registry
from pipollux_sched.backend.base import (
    Ended,
    Engine,
    Launch,
    Listing,
    Node,
    ReplicaKey,
    ReplicaProgram,
    ReplicaState,
    Signal,
)
from pipollux_sched.backend.local.cluster_file import VirtualNodes
from pipollux_sched.backend.local.engine import check_local
from pipollux_sched.backend.registry import EngineOptions
from pipollux_sched.cli import main
from pipollux_sched.spec.job import JobSpec
from pipollux_sched.store import StateDir

STARTED = "started"
"""File in the state directory with a line for each replica to start."""


class ListedEngine(Engine):
    """Lists the replicas of its nodes as running from their start until their signal to end."""

    name = "listed"
    grows = True

    def __init__(self, nodes: VirtualNodes, state_dir: StateDir) -> None:
        self._nodes, self._state_dir = nodes, state_dir
        self._replicas: dict[ReplicaKey, ReplicaState] = {}
        self._version = 0
        self._started = (state_dir.path / STARTED).open("a", buffering=1)

    def check(self, spec: JobSpec) -> None:
        """Refuse what the local engine refuses."""
        check_local(spec)

    def nodes(self) -> Mapping[str, Node]:
        """Return the nodes of the file."""
        return self._nodes.nodes()

    def checkpoints(self, program: ReplicaProgram) -> str:
        """Return the unused checkpoint folder."""
        return program.checkpoints_in(self._state_dir)

    def start(self, program: ReplicaProgram, launch: Launch, replica: int) -> None:  # noqa: ARG002  # nothing is run
        """List a replica as running."""
        self._started.write(f"{launch.job} {launch.attempt} {replica}\n")
        self._replicas[launch.key(replica)] = ReplicaState(f"listed-{len(self._replicas)}")

    def signal(self, key: ReplicaKey, signal: Signal) -> None:  # noqa: ARG002  # any ends it
        """List a replica as killed: no process could save."""
        if key in self._replicas:
            self._replicas[key] = self._replicas[key]._replace(ended=Ended(status=-9))

    def listing(self) -> Listing:
        """Return the replicas."""
        self._version += 1
        return Listing(self._version, dict(self._replicas))

    def forget(self, job: str, attempt: int) -> None:
        """Remove an attempt from the list."""
        for key in [key for key in self._replicas if key[:2] == (job, attempt)]:
            del self._replicas[key]

    def close(self) -> None:
        """Close the file."""
        self._started.close()

    def recover(self, adopted: Collection[tuple[str, int]], grace: float) -> list[str]:  # noqa: ARG002  # nothing is left
        """Find nothing: no process outlives a scheduler."""
        return []


def make(options: EngineOptions) -> Engine:
    """Return the engine, in place of the local one."""
    assert options.cluster is not None  # noqa: S101  # `serve` has read the file
    return ListedEngine(VirtualNodes(options.cluster), options.state_dir)


if __name__ == "__main__":
    registry.ENGINES = {**registry.ENGINES, registry.DEFAULT_BACKEND: make}
    sys.argv[0] = "pipollux"
    sys.exit(main())
