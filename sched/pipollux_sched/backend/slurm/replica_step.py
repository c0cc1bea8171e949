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
from pipollux_sched.backend.replica.step_files import step_name
from pipollux_sched.store.log_files import read_tail

from .commands import is_away
from .nodes import is_silent, why_down
from .output import StepLine
from .record import ReplicaFiles, ReplicaRecord
from .snapshot import SlurmSnapshot

EXIT_PATIENCE = 6.0
"""Seconds until an exit status written on a node is visible here, and for the end of a step that
Slurm no longer reaches: see `GONE`."""
GONE_PATIENCE = 10.0
"""Seconds for srun to end after its node or allocation is gone, or its replica was killed."""
COMPLETING_PATIENCE = 40.0
"""The same while Slurm still lists the step, which may be saving: its `KillWait`, by default 30 s,
and some more."""
LISTED_PATIENCE = 15.0
"""Seconds for which Slurm may list a step with an exit status: a controller that has forgotten the
end lists it forever."""
GONE = "gone"
"""Signal to a step, by a file alone, when Slurm reports its node or allocation as gone: its
processes may still run, for example if only slurmd is dead, while others replace them."""
KILL_PATIENCE = 5.0
"""Seconds for the first process of a step to kill the others, before Slurm kills all."""
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


class ReplicaStep:
    """A replica that this scheduler or an earlier one has started, until it is forgotten.

    Its output goes to `log`, with Slurm's messages at the end.
    """

    def __init__(
        self,
        key: ReplicaKey,
        record: ReplicaRecord,
        files: ReplicaFiles,
        log: Path,
        srun: SessionProcess,
    ) -> None:
        self.key = key
        self.record = record
        self.name = step_name(key)
        self.ended: Ended | None = None
        self._files = files
        self._log = log
        self._srun = srun
        self._began_at = time.monotonic()
        self._told = self._written = files.read_signal()
        self._told_at: float | None = time.monotonic() if self._told else None
        self._over_at: float | None = None
        self._gone_at: float | None = None
        self._fenced_at: float | None = None
        self._seen = False
        self._adopted = False

    @classmethod
    def start(
        cls,
        key: ReplicaKey,
        record: ReplicaRecord,
        files: ReplicaFiles,
        log: Path,
        *,
        command: Sequence[str],
        environment: Mapping[str, str],
    ) -> ReplicaStep:
        """Start its srun; the record is written first, so that no step is without one.

        If the scheduler is killed before the process is recorded, the next one may end the step as
        `GONE`. OSError: it cannot be started; ValueError: an argument contains an invalid
        character.
        """
        for folder in (log.parent, files.base.parent):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for stale in (files.record, files.exit, files.result, files.srun):
            stale.unlink(missing_ok=True)
        files.prepare_signal()
        with open(log, "ab", opener=supervisor.private):
            pass  # created here, for readers; written on the node
        record.write(files)
        try:
            srun = SessionProcess.start(
                command, output=files.srun, environment=environment, directory=None
            )
        except BaseException:  # leave no record of a step that was never started
            files.record.unlink(missing_ok=True)
            raise
        record = replace(record, pid=srun.pid, birth=srun.birth)
        with suppress(OSError):  # as if the scheduler had been killed here
            record.write(files)
        return cls(key, record, files, log, srun)

    @classmethod
    def find(
        cls, key: ReplicaKey, record: ReplicaRecord, files: ReplicaFiles, log: Path
    ) -> ReplicaStep:
        """Return a replica that an earlier scheduler has started."""
        found = cls(key, record, files, log, SessionProcess(record.pid, record.birth))
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
        if self._told not in ("kill", GONE, what.value):
            self._told, self._told_at = what.value, time.monotonic()
        self._write_signal()
        step = self.step(snapshot)
        if step is not None:
            since = 0.0 if self._told_at is None else time.monotonic() - self._told_at
            insist = what is Signal.KILL and since > KILL_PATIENCE
            return signal_command(step.step, insist=insist)
        if before is not None and before < snapshot.begun and not self._seen:
            self._srun.signal(signal.SIGTERM)  # a waiting srun gives up
        return None

    def _write_signal(self) -> None:
        if self._written != self._told:
            with suppress(OSError):  # the caller repeats the signal
                self._files.write_signal(self._told)
                self._written = self._told

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
        if self._fenced_at is not None:
            return
        self._fenced_at = now
        if self._told != "kill":
            self._told = GONE
        self._write_signal()  # if this fails, the step could not write there either


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
    status, result, told = files.read_exit(), files.read_result(), files.read_signal()
    if status == 0:
        return Ended(0, result)
    gone = why_gone(record, snapshot)
    if told == "gone" and status is not None:
        gone = gone or f"Slurm did not know of the step on node {record.node} any more."
    if gone:
        return Ended(status, result, gone)
    if status is not None:
        stopped = result.asked and not told
        return Ended(status, result, "Slurm or an admin stopped the step." * stopped)
    if told == "kill":
        return Ended(-signal.SIGKILL, result)
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
