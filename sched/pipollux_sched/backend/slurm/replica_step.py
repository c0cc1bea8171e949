"""One replica as a step of Slurm: its srun on this machine, its step on its node."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from pipollux_sched.backend.base import Ended, ReplicaKey, ReplicaState, Signal
from pipollux_sched.backend.replica.last_words import last_lines
from pipollux_sched.backend.replica.replica_process import ReplicaProcess

from .commands import is_away
from .nodes import is_silent, why_down
from .output import StepLine
from .record import ReplicaFiles, ReplicaRecord, step_name
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
_LINES = 40
"""Lines at the end of a log that are searched for Slurm's messages."""


class ReplicaStep:
    """A replica that this scheduler or an earlier one has started, until it is forgotten.

    `process` is its srun; the output goes to `log`.
    """

    def __init__(
        self,
        key: ReplicaKey,
        record: ReplicaRecord,
        files: ReplicaFiles,
        log: Path,
        process: ReplicaProcess,
    ) -> None:
        self.key = key
        self.record = record
        self.name = step_name(key)
        self.ended: Ended | None = None
        self._files = files
        self._log = log
        self._process = process
        self._began_at = time.monotonic()
        self._told = files.read_signal()
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

        OSError: it cannot be started; ValueError: an argument contains an invalid character.
        """
        for folder in (log.parent, files.base.parent):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for stale in (files.signal, files.exit, files.result, files.srun):
            stale.unlink(missing_ok=True)
        record.write(files)
        try:
            process = ReplicaProcess.start(
                command, status=files.srun, log=log, environment=environment, directory=None
            )
        except BaseException:  # leave no record of a step that was never started
            files.record.unlink(missing_ok=True)
            raise
        return cls(key, record, files, log, process)

    @classmethod
    def find(
        cls, key: ReplicaKey, record: ReplicaRecord, files: ReplicaFiles, log: Path
    ) -> ReplicaStep:
        """Return a replica that an earlier scheduler has started."""
        found = cls(key, record, files, log, ReplicaProcess(files.srun))
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
        waiting = "" if self._seen else "Slurm has not yet begun its step."
        return ReplicaState(handle, waiting=waiting)

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

        The signal is also written into a file: for a step that has not begun, and for one on a node
        whose slurmd is dead.
        """
        before = self._told_at
        if self._told not in ("kill", GONE, what.value):
            with suppress(OSError):  # the signal itself may arrive
                self._files.write_signal(what.value)
            self._told, self._told_at = what.value, time.monotonic()
        step = self.step(snapshot)
        if step is not None:
            since = 0.0 if self._told_at is None else time.monotonic() - self._told_at
            return signal_command(step.step, what, insist=since > KILL_PATIENCE)
        if before is not None and before < snapshot.begun and not self._seen:
            self._process.signal(signal.SIGTERM)  # a waiting srun gives up
        return None

    def _see(self, snapshot: SlurmSnapshot, step: StepLine | None) -> None:
        code = self._process.poll()
        now = time.monotonic()
        if snapshot.number and why_gone(self.record, snapshot):
            self._gone_at = self._gone_at or now
        allocation = snapshot.jobs.get(self.record.pool)
        ends = allocation is not None and allocation.state != "RUNNING"
        completes = ends and step is not None
        patience = COMPLETING_PATIENCE if completes else GONE_PATIENCE
        gone = self._gone_at is not None and self._gone_at < now - patience
        if code is None and not gone:
            return
        self._over_at = self._over_at or now
        if snapshot.begun <= self._over_at:
            return
        if step is not None and not gone and self._may_run(snapshot, now):
            return  # its srun was killed; the step itself runs
        if code is None:
            self._process.kill(1.0)  # which does not affect its step
            code = -signal.SIGKILL
        if (self._seen or self._adopted) and self._files.read_exit() is None:
            self._fence(now)
            if now < (self._fenced_at or 0.0) + EXIT_PATIENCE:
                return
        self.ended = how_ended(self.record, self._files, self._log, code, snapshot)

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
            with suppress(OSError):  # then the step could not write there either
                self._files.write_signal(GONE)
            self._told = GONE


def signal_command(step: str, what: Signal, *, insist: bool = False) -> list[str]:
    """Return the command that signals the first process of a step: see `pipollux_agent.supervisor`.

    With `insist`, Slurm itself kills a step that did not end.

    Example:
        >>> signal_command("12.3", Signal.STOP)
        ['scancel', '--signal=URG', '12.3']
    """
    name = "URG" if what is Signal.STOP else "KILL" if insist else "WINCH"
    return ["scancel", f"--signal={name}", step]


def how_ended(
    record: ReplicaRecord, files: ReplicaFiles, log: Path, code: int, snapshot: SlurmSnapshot
) -> Ended:
    """Return how a replica ended whose srun and step are over.

    `code` is the exit status of its srun, which is 0 when a node fails; the `snapshot` was taken
    after its end.
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
    words = slurm_words(log)
    if _TOO_LARGE.search(words):
        return Ended(code or -signal.SIGKILL, result)
    if code == 0 or is_away(words) or _TAKEN.search(words):
        said = words.splitlines()[-1] if words else "its step left no exit status"
        return Ended(None, result, f"Slurm ended it: {said}")
    return Ended(code, result)


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


def slurm_words(log: Path) -> str:
    """Return Slurm's messages at the end of a log."""
    return "\n".join(line for line in last_lines(log, _LINES) if _SLURM_LINE.match(line))
