"""A cluster in memory whose messages get lost, are delayed, and arrive twice."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from pipollux_sched.backend import BackendError, Engine, Launch, Node, ReplicaKey, ReplicaProgram
from pipollux_sched.backend.base import (
    ClusterUnavailableError,
    Ended,
    Listing,
    ReplicaState,
    Signal,
)
from pipollux_sched.backend.result import ReplicaResult
from pipollux_sched.spec.job import JobSpec
from tests.sched.backends import cpu_nodes

NODES = {node.name: Node(node) for node in cpu_nodes(a=2, b=2, c=1)}


@dataclass
class Replica:
    """One replica as it really is."""

    node: str
    slots: tuple[int, ...]
    runs: bool = False
    told: set[Signal] = field(default_factory=set)
    ended: Ended | None = None


def never(_what: str) -> str:
    """No fault."""
    return ""


class Cluster(Engine):
    """Runs nothing.

    Args:
        fault: asked at each message; returns "" (all is well), "lost", "unanswered" (it arrives,
            but the answer does not), "late" (it arrives with the next `settle`), or "old" (the
            listing that the scheduler got last, once more).
    """

    name = "memory"

    def __init__(self, fault: Callable[[str], str] = never) -> None:
        self.fault = fault
        self.there: dict[ReplicaKey, Replica] = {}
        self.starts: list[ReplicaKey] = []
        self.forgotten: list[tuple[str, int]] = []
        self.nodes_now: Mapping[str, Node] = NODES
        self.ambiguous: set[ReplicaKey] = set()
        """Whose start was not answered at some time."""
        self._late: list[Callable[[], None]] = []
        self._version = 0
        self._got: Listing | None = None

    def check(self, spec: JobSpec) -> None:
        pass

    def nodes(self) -> Mapping[str, Node]:
        return self.nodes_now

    def checkpoints(self, program: ReplicaProgram) -> str:
        if program.job == "nowhere":
            raise BackendError("there is no folder that all nodes share")
        return str(program.checkpoints or f"/shared/{program.job}")

    def start(self, program: ReplicaProgram, launch: Launch, replica: int) -> None:
        if program.job == "broken" and replica == launch.num_first - 1:
            raise OSError("no such program")
        key, assignment = launch.key(replica), launch.assignments[replica]

        def arrive() -> None:
            if key not in self.there:
                self.starts.append(key)
                self.there[key] = Replica(assignment.node, assignment.slots)

        try:
            self._deliver("start", arrive)
        except ClusterUnavailableError:
            self.ambiguous.add(key)
            raise

    def signal(self, key: ReplicaKey, signal: Signal) -> None:
        def arrive() -> None:
            if key in self.there:
                self.there[key].told.add(signal)
                if signal is Signal.KILL:
                    self.end(key, -9)

        self._deliver("signal", arrive)

    def listing(self) -> Listing:
        fault = self.fault("listing")
        if fault in ("lost", "unanswered"):
            raise ClusterUnavailableError("the cluster in memory does not answer")
        if fault == "old" and self._got is not None:
            return self._got
        states = {
            key: ReplicaState(
                f"replica {key.replica}", "" if one.runs or one.ended else "It waits.", one.ended
            )
            for key, one in self.there.items()
        }
        self._version += 1
        self._got = Listing(self._version, states)
        return self._got

    def forget(self, job: str, attempt: int) -> None:
        self.forgotten.append((job, attempt))
        for key in [key for key in self.there if key[:2] == (job, attempt)]:
            del self.there[key]

    def recover(self, adopted: Collection[tuple[str, int]], grace: float) -> list[str]:  # noqa: ARG002  # nothing saves
        left = [key for key in self.there if key[:2] not in adopted]
        for key in left:
            del self.there[key]
        return list(map(str, left))

    # What happens in the world

    def meet(self) -> None:
        """Let a scheduler come that has no listing yet."""
        self._got = None

    def settle(self) -> None:
        """Let what is late arrive."""
        late, self._late = self._late, []
        for arrive in late:
            arrive()

    def run(self, key: ReplicaKey) -> None:
        """Let a replica that waits run."""
        self.there[key].runs = True

    def run_all(self) -> None:
        """Let all that wait run."""
        for one in self.there.values():
            one.runs = True

    def end(
        self,
        key: ReplicaKey,
        status: int | None = 0,
        step: int | None = None,
        lost: str = "",
        *,
        asked: bool = False,
    ) -> None:
        """Let a replica end, perhaps as somebody else has asked; how it ended stays as it is."""
        one = self.there[key]
        if one.ended is None:
            asked = asked or Signal.STOP in one.told
            result = ReplicaResult(asked=asked, stopped_step=step, left=status not in (None, -9))
            one.ended = Ended(status, result, lost)

    def obey(self) -> None:
        """Let all that were told to stop save at step 7 and end."""
        for key, one in self.there.items():
            if Signal.STOP in one.told:
                self.end(key, 143, 7)

    def alive(self) -> set[ReplicaKey]:
        """The replicas that have not ended."""
        return {key for key, one in self.there.items() if one.ended is None}

    def _deliver(self, what: str, arrive: Callable[[], None]) -> None:
        fault = self.fault(what)
        if fault == "late":
            self._late.append(arrive)
        elif fault != "lost" and (fault, what) != ("silent", "signal"):
            arrive()
        if fault in ("lost", "unanswered", "late"):
            raise ClusterUnavailableError("the cluster in memory does not answer")
