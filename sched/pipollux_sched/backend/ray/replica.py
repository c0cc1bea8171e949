"""One replica on a Ray cluster: its record, its files, its actor."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pipollux_agent import supervisor
from pipollux_protocol.exit_statuses import STOPPED
from pipollux_sched.backend.base import Ended, ReplicaKey, ReplicaState, Signal
from pipollux_sched.backend.replica.command import Step
from pipollux_sched.backend.replica.step_replica import (
    GONE,
    KILL_PATIENCE,
    StepReplica,
    end_in_files,
)
from pipollux_sched.backend.result import ReplicaResult
from pipollux_sched.store import StateDir

from .connection import Actor, Snapshot


@dataclass(frozen=True, kw_only=True)
class RayRecord(Step):
    """What starts a replica; its actor reads it on the node."""

    node: str
    node_id: str
    bundle: Mapping[str, float]


class RayReplica(StepReplica):
    """A replica whose supervisor is below an actor.

    Args:
        send: sends a message to the client.
        grace: seconds to save for processes that have lost their actor.
    """

    def __init__(
        self,
        key: ReplicaKey,
        record: RayRecord,
        state_dir: StateDir,
        send: Callable[..., object],
        grace: float,
    ) -> None:
        super().__init__(key, state_dir)
        self.record = record
        self.remaining: int | None = None
        """How many processes were left after a fence; None: unknown."""
        self._send, self._grace = send, grace
        self._fenced_at, self._fencing_client = 0.0, 0
        self._waiting = "It is being started."
        self._sent_at = 0.0

    def prepare(self) -> None:
        """Write its record durably, or raise OSError."""
        self._prepare_files()
        self._files.write_record(self.record)

    def start(self) -> None:
        """Send its start."""
        holder = supervisor.__file__, str(self._files.base), str(self._log)
        self._call("start", self.record.node_id, self.record.bundle, *holder)

    def signal(self, what: Signal) -> None:
        """Write a signal to its file, which its supervisor reads."""
        self._tell(what.value)
        self._call("wake")

    def look(self, snapshot: Snapshot) -> ReplicaState:
        """Return its state in a snapshot; send what it needs."""
        actor = snapshot.actors.get(self.name, Actor())
        if self.ended is None and self.record.node_id not in snapshot.nodes:
            self._lose(f"Ray has lost node {self.record.node}.")
        elif snapshot.begun > self._sent_at:  # else a message may be under way
            self._follow(actor, snapshot)
        return ReplicaState(self.name, "" if self.ended else self._waiting, self.ended)

    def _follow(self, actor: Actor, snapshot: Snapshot) -> None:
        if self.ended is not None:
            self._remove(actor)
            return
        has_begun = actor.phase in ("running", "ended") or self._files.has("begun")
        if not has_begun and (self._told or actor.phase != "dead"):
            self._await_start(actor)
        elif actor.phase in ("pending", "running"):
            self._waiting = ""
            self._insist(snapshot)
        else:
            self._await_end(actor, snapshot)

    def _await_start(self, actor: Actor) -> None:
        if self._told:
            if not self._remove(actor):
                was_asked = self._told == Signal.STOP.value
                status = STOPPED if was_asked else -signal.SIGKILL
                self.ended = Ended(status, ReplicaResult(asked=was_asked))
        elif actor.phase == "none" or actor.bundle is None:
            self.start()
        elif not actor.node:
            where = self.record.node
            self._waiting = f"Ray has not reserved its resources on {where}: {actor.waits_for}."
        else:
            self._waiting = "Ray starts its actor."

    def _await_end(self, actor: Actor, snapshot: Snapshot) -> None:
        """End it once no process of it is left, and its exit status has arrived or is late."""
        status = self._files.read_exit()
        if status is None and self.remaining != 0:
            self._fence(self._grace, snapshot)
        elif status is not None or self._is_late():
            lost = f"Ray ended actor {self.name}: {actor.why or 'it is gone'}"
            code = actor.code and (actor.code if actor.code < 128 else 128 - actor.code)
            left = Ended(code, self._files.read_result(), "" if code else lost)
            self.ended = end_in_files(self._files, "", lost) or left
            self._remove(actor)

    def _lose(self, why: str) -> None:
        """End it, without its node, after a while for its processes to see the signal."""
        self._tell(GONE)
        if self._files.read_exit() is not None or self._is_late():
            self.ended = end_in_files(self._files, why, "")

    def _insist(self, snapshot: Snapshot) -> None:
        """Do it for the supervisor if this has not killed the other processes after a while."""
        now, is_killed = time.monotonic(), self._told == Signal.KILL.value
        if is_killed and now >= max(self._told_at or 0.0, self._fenced_at) + KILL_PATIENCE:
            self._fenced_at = now
            self._fence(0.0, snapshot)

    def _fence(self, patience: float, snapshot: Snapshot) -> None:
        """Run `fence`, whose result is `remaining`, unless it runs already."""
        if self._fencing_client != snapshot.client:  # what a client runs ends with it
            self._fencing_client = snapshot.client
            base = str(self._files.base)
            self._call("fence", self.record.node_id, supervisor.__file__, base, patience)

    def note_fence(self, remaining: int | None) -> None:
        """Note the result of `fence`; None: it has failed."""
        self.remaining, self._fencing_client = remaining, 0

    def _remove(self, actor: Actor) -> bool:
        """Remove its actor and its resources; return whether there were any."""
        there = actor.phase != "none" or actor.bundle is not None
        if there:
            self._call("end")
        return there

    def _call(self, method: str, *arguments: object) -> None:
        self._send(method, self.name, *arguments)
        self._sent_at = time.monotonic()
