"""The connection to the client of a Ray cluster, which `driver` runs in a process of its own."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from pipollux_agent import supervisor
from pipollux_sched.backend.base import POLL_INTERVAL, BackendError, ClusterUnavailableError
from pipollux_sched.backend.replica.last_words import last_lines

CONNECT_TIMEOUT = 60.0
"""Seconds in which the client must have connected and answered once."""
TIMEOUT = 20.0
"""Seconds in which the client must answer; then it is killed."""
SLOW = 3.0
"""Seconds without an answer after which nothing more is sent."""
RESTART_INTERVAL = 5.0
"""Seconds between two starts of the client."""
LOG_LIMIT = 2**20
"""Bytes above which the output of earlier clients is removed."""
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


class Group(NamedTuple):
    """The placement group of a replica."""

    node: str
    """Id of the node that it holds resources on; empty: none yet."""
    why: str
    """Why not, in Ray's words."""
    bundle: Mapping[str, float]


class Actor(NamedTuple):
    """The actor of a replica."""

    phase: str = "none"
    """`pending`, `running`, `ended` with its launcher, `dead`; `none`: there is no such actor."""
    code: int | None = None
    """How its launcher ended."""
    why: str = ""


class Snapshot(NamedTuple):
    """The cluster at one time; the keys are ids of nodes and names of replicas."""

    number: int
    client: int
    """The client that has made it."""
    done: int
    """The number of messages that had arrived: see `RayConnection.send`."""
    nodes: Mapping[str, RayNode]
    groups: Mapping[str, Group]
    actors: Mapping[str, Actor]
    fenced: Mapping[str, int | None]
    """How many processes of a replica are left after its fence; None: unknown."""
    checked: Mapping[str, str | None]
    """What a node does not see; empty: nothing; None: unknown."""


class RayConnection:
    """Sends messages to the client, and reads its snapshots; no call waits for Ray.

    Args:
        log: the file of its output.
        interval: seconds between two snapshots.
    """

    def __init__(self, address: str, namespace: str, log: Path, interval: float) -> None:
        self._arguments, self._log, self._interval = (address, namespace), log, interval
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._sent = self._lost = self._before = self._number = self._client = 0
        self._asked_at: float | None = None
        self._started_at = self._answered_at = 0.0
        self._refused = ""
        self._is_closed = False
        self.snapshot: Snapshot | None = None
        """The last one, perhaps of an earlier client."""

    def connect(self) -> Snapshot:
        """Wait for the first snapshot, or raise `BackendError`."""
        self._start()
        deadline = time.monotonic() + CONNECT_TIMEOUT
        while self.snapshot is None:
            with suppress(ClusterUnavailableError):
                self.latest()
            if self._process is None or time.monotonic() > deadline:
                why = self._refused or f"it does not answer within {CONNECT_TIMEOUT:g} s"
                raise BackendError(f"no Ray cluster can be used at '{self._arguments[0]}': {why}")
            time.sleep(POLL_INTERVAL)
        return self.snapshot

    def latest(self) -> Snapshot:
        """Return the newest snapshot, or raise `ClusterUnavailableError`."""
        now = time.monotonic()
        if (
            self._process is None
            and not self._is_closed
            and now >= self._started_at + RESTART_INTERVAL
        ):
            self._start()
        try:
            self._receive()
            if self._asked_at is None and now >= self._answered_at + self._interval:
                self._asked_at = now
                self.send("look")
        except (EOFError, OSError):
            self._give_up(self._refused or "its client has ended: " + self._last_line())
        first = self._number == self._before or self.snapshot is None
        waited = 0.0 if self._asked_at is None else now - self._asked_at
        if waited > (CONNECT_TIMEOUT if first else TIMEOUT):
            self._give_up(f"it has not answered for {waited:.0f} s")
        if first or self.snapshot is None or waited > SLOW or self._process is None:
            raise ClusterUnavailableError(f"Ray does not answer: {self._refused or 'it is slow'}")
        return self.snapshot

    def send(self, method: str, *arguments: Any) -> int:
        """Send a message: see `Driver`; return the number of those sent, for `Snapshot.done`.

        A message is lost if the client ends; `OSError`: it has ended.
        """
        self._sent += 1
        if self._connection is not None:
            self._connection.send((method, *arguments))
        return self._sent

    def close(self) -> None:
        """End the client for good, once it has done what was sent."""
        self._is_closed = True
        if self._process is not None:
            with suppress(OSError, subprocess.TimeoutExpired):
                self.send("quit")
                self._process.wait(SLOW)
        self._end()

    def _end(self) -> None:
        if self._connection is not None:
            self._connection.close()
        if self._process is not None and self._process.stdin is not None:
            self._process.kill()
            self._process.stdin.close()
            self._process.wait()
        self._process = self._connection = None

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        is_large = self._log.exists() and self._log.stat().st_size > LOG_LIMIT
        mode = "wb" if is_large else "ab"
        with theirs, open(self._log, mode, opener=supervisor.private) as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(_DRIVER), str(theirs.fileno()), *self._arguments],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._connection = Connection(ours.detach())
        self._client += 1
        self._started_at = self._answered_at = time.monotonic()
        self._before, self._lost, self._asked_at = self._number, self._sent, None

    def _receive(self) -> None:
        while self._connection is not None and self._connection.poll(0):
            kind, *content = self._connection.recv()
            if kind == "failed":
                self._give_up(_sentence(content[0]))
                return
            self._asked_at, self._answered_at = None, time.monotonic()
            done, found = content
            if found is not None:
                self._number += 1
                self._refused = ""
                self.snapshot = self._snapshot(self._lost + done, found)

    def _snapshot(self, done: int, found: Mapping[str, Any]) -> Snapshot:
        return Snapshot(
            number=self._number,
            client=self._client,
            done=done,
            nodes={key: RayNode(*node) for key, node in found["nodes"].items()},
            groups={key: Group(*group) for key, group in found["groups"].items()},
            actors={key: Actor(*actor) for key, actor in found["actors"].items()},
            fenced={key: left for key, (left, _) in found["fenced"].items()},
            checked={key: lost for key, (lost, _) in found["checked"].items()},
        )

    def _give_up(self, why: str) -> None:
        self._refused = why
        self._end()

    def _last_line(self) -> str:
        return (last_lines(self._log, 1) or ["it printed nothing"])[0]


def _sentence(error: str) -> str:
    """Return the error of `ray.init` in one sentence."""
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    if "Version mismatch" in lines[0]:
        versions = [line for line in lines if line.startswith(("Ray:", "Python:"))]
        theirs, ours = ", ".join(versions[:2]), ", ".join(versions[2:4])
        return (
            f"it runs {theirs}, and this scheduler {ours}; install the cluster's versions of both "
            "for the scheduler"
        )
    return lines[0]
