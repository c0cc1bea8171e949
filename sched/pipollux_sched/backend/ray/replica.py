"""One replica on a Ray cluster: its record, its files, its actor."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipollux_agent import supervisor
from pipollux_protocol.exit_statuses import STOPPED
from pipollux_sched.backend.base import Ended, ReplicaKey, ReplicaState, Signal
from pipollux_sched.backend.replica.replica_process import replicas_in
from pipollux_sched.backend.replica.step_files import StepFiles, step_name
from pipollux_sched.backend.result import ReplicaResult
from pipollux_sched.store import StateDir
from pipollux_utils.atomic_write import PRIVATE, write_aside

from .connection import Actor, Snapshot

EXIT_PATIENCE = 6.0
"""Seconds until an exit status written on a node is visible here, and for the end of processes on a
node that Ray no longer reaches, by the file of their signal."""
INSIST_INTERVAL = 5.0
"""Seconds for the supervisor to kill the others, before and between attempts to do it for it."""
GONE = "gone"
"""Signal to a replica, by a file alone, whose node Ray has lost: its processes may still run."""
LAUNCHER = Path(__file__).with_name("launcher.py")

Send = Callable[..., int]


@dataclass(frozen=True, kw_only=True)
class RayRecord:
    """What starts a replica; its launcher reads it on the node."""

    node: str
    node_id: str
    bundle: Mapping[str, float]
    gpus: int
    command: list[str]
    """The supervisor, with the agent."""
    environment: Mapping[str, str]
    directory: str

    def write(self, path: Path) -> None:
        """Write it durably, or raise OSError."""
        write_aside(path, json.dumps(asdict(self)).encode(), PRIVATE)

    @classmethod
    def read(cls, path: Path) -> RayRecord | None:
        """Read it; None if it does not exist or is of another version."""
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None


def find_records(state_dir: StateDir) -> Iterator[tuple[ReplicaKey, RayRecord]]:
    """Yield the replicas that this scheduler or an earlier one has started and not forgotten."""
    for key in replicas_in(state_dir):
        record = RayRecord.read(StepFiles.of(state_dir, key).record)
        if record is not None:
            yield key, record


class RayReplica:
    """A replica that has a record, until it is forgotten.

    Args:
        send: sends a message to the client, and returns its number.
        grace: seconds to save for processes that have lost their actor.
    """

    def __init__(
        self, key: ReplicaKey, record: RayRecord, state_dir: StateDir, send: Send, grace: float
    ) -> None:
        self.record, self.name = record, step_name(key)
        self.ended: Ended | None = None
        self._files, self._log = StepFiles.of(state_dir, key), state_dir.log(*key)
        self._send, self._grace = send, grace
        self._told = self._files.read_signal()
        self._told_at = time.monotonic() if self._told else None
        self._insisted_at = 0.0
        self._over_at: float | None = None
        self._fencing_client, self._is_fenced = 0, False
        self._waiting = "It is being started."
        self._last = 0

    @property
    def state(self) -> ReplicaState:
        """Its state at the last snapshot."""
        return ReplicaState(self.name, "" if self.ended else self._waiting, self.ended)

    def prepare(self) -> None:
        """Create its files, or raise OSError."""
        for folder in (self._log.parent, self._files.base.parent):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for stale in (self._files.record, self._begun, self._files.exit, self._files.result):
            stale.unlink(missing_ok=True)
        self._files.prepare_signal()
        with open(self._log, "ab", opener=supervisor.private):
            pass  # created here, for readers; written on the node
        self.record.write(self._files.record)

    def start(self) -> None:
        """Send its start."""
        words = [sys.executable, "-I", "-S", str(LAUNCHER), str(self._files.base), str(self._log)]
        self._tell("start", self.record.node_id, dict(self.record.bundle), words)

    def signal(self, what: Signal) -> None:
        """Write a signal to its file, which its supervisor reads."""
        if self._told not in ("kill", GONE, what.value):
            self._told_at = time.monotonic()
            self._write_signal(what.value)
        self._tell("wake")

    def look(self, snapshot: Snapshot) -> None:
        """Note its state in a newer snapshot, and send what it needs."""
        actor = snapshot.actors.get(self.name, Actor())
        if self.ended is not None:
            if actor.phase != "none" or self.name in snapshot.groups:
                self._tell("end")
            return
        if self.name in snapshot.fenced:
            self._fencing_client = 0
            self._is_fenced = snapshot.fenced[self.name] == 0
        if self.record.node_id not in snapshot.nodes:
            self._lose(f"Ray has lost node {self.record.node}.")
        elif snapshot.done < self._last:
            return  # a message was under way
        elif (
            actor.phase in ("none", "pending", "dead" if self._told else "") and not self._has_begun
        ):
            self._await_start(actor, snapshot)
        elif actor.phase in ("none", "ended", "dead"):
            self._await_end(actor, snapshot)
        else:
            self._waiting = ""
            self._insist(snapshot)

    def _await_start(self, actor: Actor, snapshot: Snapshot) -> None:
        if not self._told:
            group = snapshot.groups.get(self.name)
            if group is None or actor.phase == "none":
                self.start()
            elif not group.node:
                where = self.record.node
                self._waiting = f"Ray has not reserved its resources on {where}: {group.why}."
            else:
                self._waiting = "Ray starts its actor."
        elif actor.phase != "none" or self.name in snapshot.groups:
            self._tell("end")
        elif self._told == Signal.STOP.value:
            self.ended = Ended(STOPPED, ReplicaResult(asked=True))
        else:
            self.ended = Ended(-signal.SIGKILL)

    def _await_end(self, actor: Actor, snapshot: Snapshot) -> None:
        """End it once no process of it is left, and its exit status has arrived or is late."""
        now = time.monotonic()
        status = self._files.read_exit()
        if status is None and not self._is_fenced:
            self._fence(self._grace, snapshot)
            return
        self._over_at = self._over_at or now
        if status is not None or now >= self._over_at + EXIT_PATIENCE:
            self._end(self._how_ended(status, actor))

    def _lose(self, why: str) -> None:
        """End it, without its node, after a while for its processes to see the signal."""
        now = time.monotonic()
        if self._over_at is None:
            self._over_at = now
            self._write_signal(GONE)
        status = self._files.read_exit()
        if status is not None or now >= self._over_at + EXIT_PATIENCE:
            self._end(Ended(status, self._files.read_result(), "" if status == 0 else why))

    def _how_ended(self, status: int | None, actor: Actor) -> Ended:
        result = self._files.read_result()
        lost = f"Ray ended actor {self.name}: {actor.why or 'it is gone'}"
        if status is not None:
            stopped = status != 0 and result.asked and not self._told
            return Ended(status, result, lost if stopped else "")
        if self._told == Signal.KILL.value:
            return Ended(-signal.SIGKILL, result)
        if actor.phase == "ended" and actor.code:
            return Ended(actor.code if actor.code < 128 else 128 - actor.code, result)
        return Ended(None, result, lost)

    def _insist(self, snapshot: Snapshot) -> None:
        if self._told != Signal.KILL.value or self._told_at is None:
            return
        now = time.monotonic()
        if now >= max(self._told_at, self._insisted_at) + INSIST_INTERVAL:
            self._insisted_at = now
            self._fence(0.0, snapshot)

    def _fence(self, patience: float, snapshot: Snapshot) -> None:
        if self._fencing_client != snapshot.client:  # what a client runs ends with it
            self._fencing_client = snapshot.client
            base = str(self._files.base)
            self._tell("fence", self.record.node_id, supervisor.__file__, base, patience)

    def _end(self, ended: Ended) -> None:
        self.ended = ended
        self._tell("end")

    def _tell(self, method: str, *arguments: Any) -> None:
        with suppress(OSError):  # the client has ended; the next snapshot is another one's
            self._last = self._send(method, self.name, *arguments)

    def _write_signal(self, what: str) -> None:
        with suppress(OSError):  # the caller repeats the signal
            self._files.write_signal(what)
            self._told = what

    @property
    def _has_begun(self) -> bool:
        with suppress(OSError):
            os.listdir(self._begun.parent)  # over NFS, a new file becomes visible only after this
        return self._begun.exists()

    @property
    def _begun(self) -> Path:
        """The file that its launcher creates."""
        return self._files.base.with_name(f"{self._files.base.name}.begun")
