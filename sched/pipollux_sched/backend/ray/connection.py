"""The client of a Ray cluster, which `driver` runs in a process of its own, and its snapshots."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from pipollux_sched.backend.base import ClusterUnavailableError
from pipollux_sched.backend.client_process import ClientProcess
from pipollux_sched.backend.replica.last_words import last_lines

CONNECT_TIMEOUT = 60.0
"""Seconds in which the client must have connected and answered once."""
TIMEOUT = 20.0
"""Seconds in which the client must answer; then it is killed."""
RESTART_INTERVAL = 5.0
"""Seconds between two starts of the client."""
QUIT_PATIENCE = 3.0
"""Seconds that the client has to do what it was sent last."""
_DRIVER = Path(__file__).with_name("driver.py")


class RayNode(NamedTuple):
    """A live node of the cluster."""

    name: str
    """Its `--node-name`; by default, its address."""
    host: str
    total: Mapping[str, float]
    free: Mapping[str, float]
    """Resources that neither tasks, actors nor placement groups hold."""
    labels: Mapping[str, str]
    draining: bool


class Actor(NamedTuple):
    """The actor of a replica, and its placement group."""

    phase: str = "none"
    """`pending`, `running`, `ended` with the supervisor, `dead`; `none`: there is no such actor."""
    code: int | None = None
    """How the supervisor ended."""
    why: str = ""
    """Why it is dead."""
    node: str = ""
    """Id of the node that the group holds resources on; empty: none yet."""
    waits_for: str = ""
    """Why not, in Ray's words."""
    bundle: Mapping[str, float] | None = None
    """The resources of the group; None: there is no group."""


class Snapshot(NamedTuple):
    """The cluster at one time; the keys are ids of nodes and names of replicas."""

    begun: float = 0.0
    """When it was begun, by the monotonic clock: it shows the effect of messages sent before."""
    client: int = 0
    """The client that has made it."""
    nodes: Mapping[str, RayNode] = {}
    actors: Mapping[str, Actor] = {}
    results: Sequence[tuple[str, str, Any, str]] = ()
    """Results, each once, of `fence` of a replica and `check` of a node: which, its name, value and
    error."""


class RayClient:
    """Exchanges messages for snapshots; one thread calls `read`, any thread `send`.

    Args:
        log: the file of the client's output.
    """

    def __init__(self, address: str, namespace: str, log: Path) -> None:
        self._process = ClientProcess(_DRIVER, address, namespace, log=log)
        self._log = log
        self._messages: deque[tuple[Any, ...]] = deque()
        self._number, self._started_at = 0, -math.inf
        self._connected = False
        self.refusal = ""
        """Why the cluster does not answer; empty: it does."""

    def send(self, method: str, *arguments: Any) -> None:
        """Call a method of `Driver` before the next snapshot; lost without a client."""
        if self._process.runs:
            self._messages.append((method, *arguments))

    def read(self) -> Snapshot:
        """Return a snapshot, or raise `ClusterUnavailableError`."""
        begun, timeout, found = time.monotonic(), TIMEOUT, None
        try:
            if not self._process.runs:
                self._note_start(begun)
                timeout = CONNECT_TIMEOUT
            self._process.send(self._pop_messages(), timeout)
            found, why = self._process.receive(timeout)
        except TimeoutError as error:
            why = str(error)
        except (OSError, ValueError):
            why = self._last_words()
        if found is None:
            self._process.close()
            # Without either, it has ended since the last answer, and must not start again yet.
            self.refusal = _sentence(why) or self.refusal or self._last_words()
            raise ClusterUnavailableError(f"Ray does not answer: {self.refusal}")
        self._connected, self.refusal = True, ""
        nodes = {key: RayNode(*node) for key, node in found[0].items()}
        actors = {key: Actor(*actor) for key, actor in found[1].items()}
        return Snapshot(begun, self._number, nodes, actors, found[2])

    def close(self) -> None:
        """End the client, once it has done what was sent; at once if none has ever connected."""
        if self._process.runs:
            with suppress(OSError):
                self._process.send(self._pop_messages(), QUIT_PATIENCE)
        self._process.close(QUIT_PATIENCE if self._connected else 0.0)

    def _last_words(self) -> str:
        return f"its client has ended: {(last_lines(self._log, 1) or ['it printed nothing'])[0]}"

    def _note_start(self, now: float) -> None:
        if now < self._started_at + RESTART_INTERVAL:
            raise TimeoutError
        self._number, self._started_at = self._number + 1, now

    def _pop_messages(self) -> list[tuple[Any, ...]]:
        return [self._messages.popleft() for _ in range(len(self._messages))]


def _sentence(error: str) -> str:
    """Return the error of `ray.init` in one sentence."""
    lines = [line.strip() for line in error.splitlines() if line.strip()] or [""]
    if "Version mismatch" in lines[0]:
        versions = [line for line in lines if line.startswith(("Ray:", "Python:"))]
        theirs, ours = ", ".join(versions[:2]), ", ".join(versions[2:4])
        return (
            f"it runs {theirs}, and this scheduler {ours}; install the cluster's versions of both "
            "for the scheduler"
        )
    return lines[0]
