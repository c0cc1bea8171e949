"""How a replica ended: by itself, by a signal, or because Slurm took its node."""

from __future__ import annotations

import re
import signal
from pathlib import Path

from pipollux_sched.backend.base import Ended
from pipollux_sched.backend.replica.last_words import last_lines

from .commands import is_away
from .nodes import why_down
from .record import ReplicaFiles, ReplicaRecord
from .snapshot import SlurmSnapshot

_SLURM_LINE = re.compile(r"(?:srun|slurmstepd\S*): (?:error: |\S)")
_TAKEN = re.compile(
    r"Node failure on|DUE TO|CANCELLED AT|Force Terminated|task \d+: Killed"
    r"|Invalid job id|Expired or invalid job|[Jj]ob/step already completing|nodes are busy"
    r"|has been revoked|Job credential (?:expired|revoked)|Memory required by task is not available"
)
_TOO_LARGE = re.compile(r"Out Of Memory|oom.kill", re.IGNORECASE)
_LINES = 40
"""Lines at the end of a log that are searched for Slurm's messages."""


def how_ended(
    record: ReplicaRecord, files: ReplicaFiles, log: Path, code: int, snapshot: SlurmSnapshot
) -> Ended:
    """Return how a replica ended whose srun and step are over.

    Args:
        record: where it was started.
        files: its files.
        log: its output, with Slurm's messages.
        code: exit status of its srun, which is 0 when a node fails.
        snapshot: taken after its end.
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
