"""One replica as a step of Slurm: its srun on this machine, its step on its node."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from pipollux_agent import supervisor
from pipollux_sched.backend.base import Ended, ReplicaKey, ReplicaState, Signal
from pipollux_sched.backend.replica.last_words import last_lines
from pipollux_sched.backend.replica.replica_process import SessionProcess
from pipollux_sched.backend.replica.step_replica import (
    EXIT_PATIENCE,
    GONE,
    KILL_PATIENCE,
    StepReplica,
    end_in_files,
)
from pipollux_sched.store import StateDir
from pipollux_sched.store.log_files import read_tail

from .commands import is_away
from .nodes import is_silent, why_down
from .output import StepLine
from .record import ReplicaFiles, ReplicaRecord
from .snapshot import SlurmSnapshot

GONE_PATIENCE = 10.0
"""Seconds for srun to end after its node or allocation is gone, or its replica was killed."""
COMPLETING_PATIENCE = 40.0
"""The same while Slurm still lists the step, which may be saving: its `KillWait`, by default 30 s,
and some more."""
LISTED_PATIENCE = 15.0
"""Seconds for which Slurm may list a step with an exit status: a controller that has forgotten the
end lists it forever."""
SETTLE_TIME = 30.0
"""Seconds after a start, a signal or an end for which snapshots are taken sooner."""
_SLURM_LINE = re.compile(r"(?:srun|slurmstepd\S*): (?:error: |\S)")
_TAKEN = re.compile(
    r"Node failure on|DUE TO|CANCELLED AT|Force Terminated|task \d+: Killed"
    r"|Invalid job id|Expired or invalid job|[Jj]ob/step already completing|nodes are busy"
    r"|has been revoked|Job credential (?:expired|revoked)|Memory required by task is not available"
)
_TOO_LARGE = re.compile(r"Out Of Memory|oom.kill", re.IGNORECASE)
_TASK_EXIT = re.compile(r"^srun: error: \S+: task \d+: Exited with exit code (\d+)$")
_LINES = 40
"""Lines at the end of srun's output that are searched for Slurm's messages, and kept."""


class ReplicaStep(StepReplica):
    """A replica whose supervisor is the task of a step.

    Its output goes to `log`, with Slurm's messages at the end.
    """

    kind = ReplicaFiles
    _files: ReplicaFiles

    def __init__(
        self,
        key: ReplicaKey,
        record: ReplicaRecord,
        state_dir: StateDir,
        srun: SessionProcess,
    ) -> None:
        super().__init__(key, state_dir)
        self.record = record
        self._srun = srun
        self._began_at = time.monotonic()
        self._gone_at: float | None = None
        self._fenced_at: float | None = None
        self._seen = False
        self._adopted = False

    @classmethod
    def start(
        cls,
        key: ReplicaKey,
        record: ReplicaRecord,
        state_dir: StateDir,
        *,
        command: Sequence[str],
        environment: Mapping[str, str],
    ) -> ReplicaStep:
        """Start its srun; the record is written first, so that no step is without one.

        If the scheduler is killed before the process is recorded, the next one may end the step as
        `GONE`. OSError: it cannot be started; ValueError: an argument contains an invalid
        character.
        """
        made = cls(key, record, state_dir, SessionProcess(0, None))
        files = made._files
        made._prepare_files()
        files.write_record(record)
        try:
            made._srun = SessionProcess.start(
                command, output=files.srun, environment=environment, directory=None
            )
        except BaseException:  # leave no record of a step that was never started
            files.record.unlink(missing_ok=True)
            raise
        made.record = replace(record, pid=made._srun.pid, birth=made._srun.birth)
        with suppress(OSError):  # as if the scheduler had been killed here
            files.write_record(made.record)
        return made

    @classmethod
    def find(cls, key: ReplicaKey, record: ReplicaRecord, state_dir: StateDir) -> ReplicaStep:
        """Return a replica that an earlier scheduler has started."""
        found = cls(key, record, state_dir, SessionProcess(record.pid, record.birth))
        found._adopted = True
        return found

    def step(self, snapshot: SlurmSnapshot) -> StepLine | None:
        """Return its step, if Slurm lists it."""
        return snapshot.steps.get((self.record.pool, self.name))

    def look(self, snapshot: SlurmSnapshot) -> ReplicaState:
        """Return its state according to a snapshot and its srun."""
        step = self.step(snapshot)
        handle = step.step if step is not None else f"allocation {self.record.pool}"
        if self.ended is None:
            self._see(snapshot, step)
        if self.ended is not None:
            return ReplicaState(handle, ended=self.ended)
        self._seen = self._seen or step is not None
        return ReplicaState(handle, waiting="" if self._seen else self._waiting())

    @property
    def unsettled(self) -> bool:
        """Whether the next snapshot is needed soon: the step is starting or ending."""
        if self.ended is not None:
            return False
        if self._seen and self._told_at is None and self._over_at is None:
            return False
        recent = time.monotonic() - SETTLE_TIME
        moments = (self._began_at, self._told_at, self._over_at)
        return any(moment is not None and moment > recent for moment in moments)

    def tell(self, what: Signal, snapshot: SlurmSnapshot) -> Sequence[str] | None:
        """Record a signal, and return the command that sends it to its step, if it has one.

        The signal is in a file, and the command makes the step read it at once. A step that has not
        begun reads it at its start, and one on a node whose slurmd is dead polls it.
        """
        before = self._told_at
        self._tell(what.value)
        step = self.step(snapshot)
        if step is not None:
            since = 0.0 if self._told_at is None else time.monotonic() - self._told_at
            insist = what is Signal.KILL and since > KILL_PATIENCE
            return signal_command(step.step, insist=insist)
        if before is not None and before < snapshot.begun and not self._seen:
            self._srun.signal(signal.SIGTERM)  # a waiting srun gives up
        return None

    def _waiting(self) -> str:
        messages = slurm_messages(self._files.srun)
        said = f" It says: {messages[-1]}" if messages else ""
        return f"Slurm has not yet begun its step.{said}"

    def _see(self, snapshot: SlurmSnapshot, step: StepLine | None) -> None:
        runs = self._srun.runs
        now = time.monotonic()
        if snapshot.number and why_gone(self.record, snapshot):
            self._gone_at = self._gone_at or now
        allocation = snapshot.jobs.get(self.record.pool)
        ends = allocation is not None and allocation.state != "RUNNING"
        completes = ends and step is not None
        patience = COMPLETING_PATIENCE if completes else GONE_PATIENCE
        gone = self._gone_at is not None and self._gone_at < now - patience
        if runs and not gone:
            return
        self._over_at = self._over_at or now
        if snapshot.begun <= self._over_at:
            return
        if step is not None and not gone and self._may_run(snapshot, now):
            return  # its srun was killed; the step itself runs
        self._srun.kill(1.0)  # which does not affect its step
        if (self._seen or self._adopted) and self._files.read_exit() is None:
            self._fence(now)
            if now < (self._fenced_at or 0.0) + EXIT_PATIENCE:
                return
        _append_messages(self._log, self._files.srun)
        self.ended = how_ended(self.record, self._files, self._srun.code, snapshot)

    def _may_run(self, snapshot: SlurmSnapshot, now: float) -> bool:
        """Return whether a step that is listed without an srun may still have processes."""
        over_at = self._over_at or now
        if self._files.read_exit() is not None:
            return now < over_at + LISTED_PATIENCE
        if self._told != "kill" or is_silent(snapshot.nodes.get(self.record.node)):
            return True
        return now < max(self._told_at or now, over_at) + COMPLETING_PATIENCE

    def _fence(self, now: float) -> None:
        """Signal the processes of a step that seems to be over to end, as some may still run."""
        if self._fenced_at is None:
            self._fenced_at = now
            self._tell(GONE)  # if this fails, the step could not write there either


def signal_command(step: str, *, insist: bool = False) -> list[str]:
    """Return the command that makes a step read its signal: see `pipollux_agent.supervisor`.

    With `insist`, Slurm itself kills the step.

    Example:
        >>> signal_command("12.3")
        ['scancel', '--signal=CONT', '12.3']
    """
    return ["scancel", f"--signal={'KILL' if insist else 'CONT'}", step]


def how_ended(
    record: ReplicaRecord, files: ReplicaFiles, code: int | None, snapshot: SlurmSnapshot
) -> Ended:
    """Return how a replica ended whose srun and step are over.

    `code` is the exit status of its srun, which is 0 when a node fails, and None for that of an
    earlier scheduler; the `snapshot` was taken after its end.
    """
    gone = why_gone(record, snapshot)
    if files.read_signal() == GONE and files.read_exit() is not None:
        gone = gone or f"Slurm did not know of the step on node {record.node} any more."
    known = end_in_files(files, gone, "Slurm or an admin stopped the step.")
    if known is not None:
        return known
    result = files.read_result()
    messages = slurm_messages(files.srun)
    text = "\n".join(messages)
    if code is None and messages:
        exits = [int(found[1]) for found in map(_TASK_EXIT.match, messages) if found]
        code = exits[-1] if exits else 1  # srun's own, for an error
    if _TOO_LARGE.search(text):
        return Ended(code or -signal.SIGKILL, result)
    if not code or is_away(text) or _TAKEN.search(text):
        said = messages[-1] if messages else "its step left no exit status"
        return Ended(None, result, f"Slurm ended it: {said}")
    return Ended(code, result)


def _append_messages(log: Path, output: Path) -> None:
    """Append the output of a srun that has ended to the log of its step, except exit statuses.

    Nothing is appended a second time, by a later scheduler.
    """
    lines = [line for line in last_lines(output, _LINES) if not _TASK_EXIT.match(line)]
    text = "".join(f"{line}\n" for line in lines).encode()
    end = read_tail(log, len(text) + 1)
    if text and not end.endswith(text):
        with suppress(OSError), open(log, "ab", opener=supervisor.private) as file:
            file.write(text if end[-1:] in (b"", b"\n") else b"\n" + text)


def why_gone(record: ReplicaRecord, snapshot: SlurmSnapshot) -> str:
    """Return why a replica's node is no longer allocated, in one sentence; empty if it is."""
    job = snapshot.jobs.get(record.pool)
    if job is None:
        return f"Slurm's allocation {record.pool} with node {record.node} has ended."
    if job.state != "RUNNING":
        reason = f", {job.reason}" if job.reason else ""
        return (
            f"Slurm's allocation {record.pool} with node {record.node} has ended: "
            f"{job.state}{reason}."
        )
    allocation = snapshot.allocations.get(record.pool)
    if allocation is not None and record.node not in allocation.shares:
        return f"Slurm took node {record.node} out of allocation {record.pool}."
    down = why_down(snapshot.nodes.get(record.node))
    return f"Slurm says that node {record.node} is {down}." if down else ""


def slurm_messages(output: Path) -> list[str]:
    """Return Slurm's messages at the end of the output of a srun."""
    return [line for line in last_lines(output, _LINES) if _SLURM_LINE.match(line)]
