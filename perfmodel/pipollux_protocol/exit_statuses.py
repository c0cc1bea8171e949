"""Exit statuses of a job's processes, and of the agent that runs them."""

from __future__ import annotations

from typing import NamedTuple


class ExitStatus(NamedTuple):
    """An exit status and the reaction of the scheduler."""

    status: int
    meaning: str
    consequence: str


FAILURE = "failure: the scheduler restarts the job, at most `max_restarts` times"
DONE = 0
DAEMONISED = 70  # EX_SOFTWARE of sysexits.h
CHECKPOINT_LOST = 73  # EX_CANTCREAT
REPLACED = 75  # EX_TEMPFAIL
INTERRUPTED = 130  # 128 + SIGINT
KILLED = 137  # 128 + SIGKILL
STOPPED = 143  # 128 + SIGTERM

STATUSES = (
    ExitStatus(DONE, "the script ended", "the job is complete once all replicas have ended"),
    ExitStatus(
        DAEMONISED,
        "the script ended but left forked processes running; the agent terminated them",
        FAILURE,
    ),
    ExitStatus(
        CHECKPOINT_LOST,
        "the script ended or stopped without writing its last checkpoint",
        FAILURE,
    ),
    ExitStatus(
        REPLACED,
        "the scheduler has replaced this attempt with a newer one",
        "none",
    ),
    ExitStatus(
        INTERRUPTED,
        "as 143, after Ctrl-C",
        "none: occurs only in scripts started by hand",
    ),
    ExitStatus(
        KILLED, "the process was killed, often because it ran out of memory", "the replica is lost"
    ),
    ExitStatus(
        STOPPED,
        "the replicas stopped on request, after a common step, and saved a checkpoint",
        f"none if the scheduler requested the stop; otherwise {FAILURE}",
    ),
)
"""All defined statuses; any other status is a failure of the script."""
